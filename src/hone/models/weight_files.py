"""The safetensors files of a Hugging Face folder or repository, read by region.

Only files that hold a model's tensors under the names and in the shapes of its modules are read
here. Everything else that transformers loads (`.bin` files, formats that it converts) it has to
load itself, whole.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)

from hone.errors import UserError
from hone.models.deferred import Weight

__all__ = [
    "STACKED",
    "FileWeights",
    "OtherFormatError",
    "UnreadTensors",
    "damaged",
    "find_unread",
    "find_weights",
    "has_stacked_experts",
    "keep_unread",
    "lacking",
    "locate",
    "misshapen",
    "require_finite",
    "unread_of",
    "without_place",
]

logger = logging.getLogger(__name__)

_FORMATS = ("F64", "F32", "F16", "BF16")
_ROWS = 4096
"""Rows that are compared at a time if two tensors should be equal."""
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<name>\w+_proj)\.weight")
_EXPERT_TENSORS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked tensors of a module's experts, with the tensors of each expert in files."""
STACKED = tuple(f".experts.{name}" for name in _EXPERT_TENSORS)
"""What the names of such tensors in a model end with."""
_ONCE_SAVED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that are in old files and that modules now compute."""
_UNREAD_ATTRIBUTE = "_hone_unread"


class OtherFormatError(Exception):
    """Raised if the files do not map directly to the tensors of the modules; the message says
    why."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor in one file."""

    file: Path
    key: str
    shape: torch.Size
    format: str

    def read(self, region: tuple[slice, ...]) -> Tensor:
        # The file is memory-mapped: the result is a view, and only its part is read.
        with safe_open(self.file, framework="pt") as file:
            return file.get_slice(self.key)[region] if region else file.get_tensor(self.key)


@dataclass(frozen=True, slots=True)
class _ExpertsEntry:
    """Tensors of a layer's experts, which the module stores as one, [E, ...], with the tensors of
    each expert stacked."""

    experts: tuple[tuple[_Entry, ...], ...]

    @property
    def shape(self) -> torch.Size:
        rows = sum(entry.shape[0] for entry in self.experts[0])
        return torch.Size((len(self.experts), rows, *self.experts[0][0].shape[1:]))

    @property
    def format(self) -> str:
        return self.experts[0][0].format

    def read(self, region: tuple[slice, ...]) -> Tensor:
        chosen, *rest = region or (slice(None),)
        whole = (torch.cat([x.read(()) for x in parts]) for parts in self.experts[chosen])
        return torch.stack([each[tuple(rest)] for each in whole])


@dataclass(frozen=True, slots=True)
class UnreadTensors:
    """Tensors of a checkpoint for which its model has no place, as transformers declares: a head
    that predicts further tokens, or the tower of a model that is read as text. No engine gets them,
    and nothing trains them. An export of the model writes them again as they are in the files."""

    entries: Mapping[str, _Entry]

    def __bool__(self) -> bool:
        return bool(self.entries)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by their names in the files, which are mapped into memory. Raises OSError
        where a file is gone."""
        for name, entry in self.entries.items():
            yield name, entry.read(())


@dataclass(frozen=True, slots=True)
class FileWeights:
    """Weight source of the files of `path`, and of buffers that are in no file. Reading raises
    UserError if a value is not finite."""

    path: str
    entries: Mapping[str, _Entry | _ExpertsEntry]
    buffers: Mapping[str, Tensor]
    unread: UnreadTensors = field(default_factory=lambda: UnreadTensors({}))

    @property
    def are_as_in_model(self) -> bool:
        """Whether the files have each tensor as the model has it: experts stacked too."""
        return all(isinstance(entry, _Entry) for entry in self.entries.values())

    @property
    def keys(self) -> dict[str, str]:
        """Names in the files, by name of a tensor that is in one file as it is."""
        return {
            name: entry.key for name, entry in self.entries.items() if isinstance(entry, _Entry)
        }

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        for name, entry in self.entries.items():
            take(Weight(name, entry.shape, partial(self._read, name, entry)))
        for name, buffer in self.buffers.items():
            take(Weight.of(name, buffer))

    def _read(self, name: str, entry: _Entry | _ExpertsEntry, region: tuple[slice, ...]) -> Tensor:
        part = entry.read(region)
        require_finite(self.path, name, part)
        return part


def find_weights(
    path: str,
    model: PreTrainedModel,
    buffers: Mapping[str, Tensor],
    *,
    renamed: Callable[[str], str] | None = None,
) -> FileWeights:
    """Locate the parameters and persistent buffers of `model` in the files of `path`. `buffers` are
    all other buffers. `renamed` gives the model's name for one of the files.

    Files of a Hugging Face hub repository are downloaded if missing; processes of one host wait for
    each other's downloads. Raises OtherFormatError if only transformers can load them. Raises
    UserError if a weight is missing, has another shape, is damaged, or has no place in the model.
    """
    _refuse_special_cases(path, model)
    entries = _with_experts(path, _entries(path))
    tied: dict[Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tied.setdefault(tensor, []).append(name)
    names = {name for group in tied.values() for name in group}
    found: dict[str, _Entry | _ExpertsEntry] = {}
    others: list[str] = []
    for file_key, entry in entries.items():
        key = file_key if renamed is None else renamed(file_key)
        # A backbone that was saved by itself lacks the prefix.
        name = key if key in names else f"{model.base_model_prefix}.{key}"
        if name not in names:
            others.append(file_key)
        elif name in found:
            raise OtherFormatError(f"they hold {name} twice")
        else:
            found[name] = entry
    chosen: dict[str, _Entry | _ExpertsEntry] = {}
    absent: list[str] = []
    for tensor, group in tied.items():
        given = [found[name] for name in group if name in found]
        if not given:
            absent += group
            continue
        if not all(_equal(given[0], other) for other in given[1:]):
            raise OtherFormatError(f"values of {' and '.join(group)}, which are tied, differ")
        _check(path, group[0], given[0], tensor.shape)
        chosen[group[0]] = given[0]
    unread = _declared_unread(model, others)
    others = [name for name in others if name not in unread]
    if absent and others:
        raise OtherFormatError(f"they name {others[0]}, but not {absent[0]}")
    if absent:
        raise lacking(path, absent)
    if others:
        raise without_place(path, others)
    return FileWeights(path, chosen, buffers, _unread(path, model, (entries[x] for x in unread)))


def keep_unread(model: nn.Module, unread: UnreadTensors) -> None:
    """Let exports of `model` write these tensors too."""
    setattr(model, _UNREAD_ATTRIBUTE, unread)


def unread_of(model: nn.Module) -> UnreadTensors:
    """The tensors that exports of `model` write in addition to its own."""
    return getattr(model, _UNREAD_ATTRIBUTE, None) or UnreadTensors({})


def find_unread(path: str, model: PreTrainedModel) -> UnreadTensors:
    """Which tensors of the safetensors files of `path` a loaded `model` does not have because its
    transformers class declares that it ignores them. Logs them."""
    try:
        entries = _entries(path)
    # Only transformers reads the content of a pickle, and it does not report it.
    except OtherFormatError:
        return UnreadTensors({})
    names = model.state_dict().keys()
    prefix = model.base_model_prefix
    others = [x for x in entries if not {x, f"{prefix}.{x}"} & names]
    return _unread(path, model, (entries[x] for x in _declared_unread(model, others)))


def has_stacked_experts(path: str, model: PreTrainedModel) -> bool:
    """Whether the safetensors files of `path` have experts of `model` stacked."""
    try:
        entries = _entries(path)
    except OtherFormatError:
        return False
    stacked = [name for name in entries if name.endswith(STACKED)]
    return len(stacked) > len(_declared_unread(model, stacked))


def _declared_unread(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """The tensors of `names` without a place in `model` that its transformers class declares as
    ignored, and buffers that modules now compute."""
    declared: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [*declared, *_ONCE_SAVED]
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def _unread(
    path: str, model: PreTrainedModel, entries: Iterable[_Entry | _ExpertsEntry]
) -> UnreadTensors:
    """These tensors as the files have them, without buffers that modules now compute. Logs them."""
    each = [
        part
        for entry in entries
        for part in (
            [entry] if isinstance(entry, _Entry) else [x for own in entry.experts for x in own]
        )
        if not any(re.search(pattern, part.key) for pattern in _ONCE_SAVED)
    ]
    unread = UnreadTensors({entry.key: entry for entry in each})
    if unread:
        logger.info(
            "%s holds %d tensors that are not read, among them %s: %s does not have these parts, "
            "and exports keep them",
            path,
            len(unread.entries),
            ", ".join(sorted(unread.entries)[:3]),
            type(model).__name__,
        )
    return unread


def lacking(path: str, absent: list[str]) -> UserError:
    """The error for a checkpoint without these weights."""
    return UserError(
        f"model.path={path!r} lacks {len(absent)} weights, among them {sorted(absent)[:3]}: "
        "the checkpoint does not belong to its config.json"
    )


def misshapen(path: str, name: str, got: Sequence[int], wanted: Sequence[int]) -> UserError:
    """The error for a checkpoint with a weight of another shape."""
    return UserError(
        f"model.path={path!r}: {name} has the shape {list(got)} and should have {list(wanted)}: "
        "the checkpoint does not belong to its config.json"
    )


def without_place(path: str, names: Iterable[str]) -> UserError:
    """The error for a checkpoint with weights that the model does not have."""
    names = sorted(names)
    return UserError(
        f"model.path={path!r} holds {len(names)} weights for which the model of its config.json "
        f"has no place, among them {names[:3]}: without them it would be another model. Get the "
        "config.json that belongs to these weights, or the weights that belong to it"
    )


def require_finite(path: str, name: str, tensor: Tensor) -> None:
    """Raise UserError if a value of the weight `name` of `path`, or of a part of it, is NaN or
    infinite: the model would give NaN for every token."""
    if not tensor.numel() or all(bool(x.isfinite()) for x in torch.aminmax(tensor)):
        return
    number = int(tensor.isfinite().logical_not().sum())
    raise UserError(
        f"model.path={path!r}: {number} of {tensor.numel()} values of {name} are NaN or infinite. "
        "The file is damaged, or the training that wrote it had diverged: get it again, or name an "
        "earlier model of that training"
    )


def damaged(path: str, error: SafetensorError) -> UserError:
    """The error for a safetensors file, or a folder with one, that cannot be read."""
    return UserError(
        f"{path} holds no safetensors that can be read ({error}): an incomplete download, or a "
        "pointer of Git LFS; download it again"
    )


def _refuse_special_cases(path: str, model: PreTrainedModel) -> None:
    """Raise OtherFormatError if transformers would do more than read tensors."""
    if not type(model).__module__.startswith(("transformers.", "hone.")):
        raise OtherFormatError(f"{type(model).__name__} is code of the checkpoint's own")
    if named := getattr(model.config, "transformers_weights", None):
        raise OtherFormatError(f"config.json has them in {named}")
    if locate(path, ADAPTER_CONFIG_NAME) is not None:
        raise OtherFormatError(f"there is an adapter with them ({ADAPTER_CONFIG_NAME})")


def _entries(path: str) -> dict[str, _Entry]:
    """All tensors in the files, by key."""
    single = locate(path, SAFE_WEIGHTS_NAME)
    if single is not None:
        files = [single]
    else:
        index = locate(path, SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            raise OtherFormatError("there is no safetensors file among them")
        names: set[str] = set(json.loads(index.read_text())["weight_map"].values())
        located = {name: locate(path, name) for name in sorted(names)}
        files = [file for file in located.values() if file is not None]
        if gone := [name for name, file in located.items() if file is None]:
            raise OtherFormatError(f"{gone[0]}, which the index names, is not there")
    return {key: entry for file in files for key, entry in _entries_of(file)}


def _entries_of(path: Path) -> Iterator[tuple[str, _Entry]]:
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                stored = file.get_slice(key)
                shape = torch.Size(stored.get_shape())
                yield key, _Entry(path, key, shape, stored.get_dtype())
    except SafetensorError as error:
        raise damaged(str(path), error) from error


def _with_experts(path: str, entries: Mapping[str, _Entry]) -> dict[str, _Entry | _ExpertsEntry]:
    """The entries with the tensors of each expert, `mlp.experts.<e>.gate_proj.weight` and so on,
    combined as in transformers' modules."""
    found: dict[str, _Entry | _ExpertsEntry] = {}
    experts: dict[str, dict[int, dict[str, _Entry]]] = {}
    for key, entry in entries.items():
        match = _EXPERT.fullmatch(key)
        if match is None:
            found[key] = entry
        else:
            experts.setdefault(match["layer"], {}).setdefault(int(match["expert"]), {})[
                match["name"]
            ] = entry
    for layer, held in experts.items():
        each = [held.get(index, {}) for index in range(len(held))]
        for name, parts in _EXPERT_TENSORS.items():
            if absent := [
                f"{layer}.{index}.{part}.weight"
                for index, own in enumerate(each)
                for part in parts
                if part not in own
            ]:
                raise lacking(path, absent)
            stacked = tuple(tuple(own[part] for part in parts) for own in each)
            shapes = {tuple((x.shape, x.format) for x in own) for own in stacked}
            if len(shapes) > 1:
                raise OtherFormatError(f"experts of {layer} differ in shape")
            found[f"{layer}.{name}"] = _ExpertsEntry(stacked)
    return found


def locate(path: str, name: str) -> Path | None:
    """Path of a file of a folder or of a hub repository, downloaded. None if there is none."""
    try:
        found = cached_file(path, name)
    except OSError:  # transformers will meet the same error when it loads the model, and report it
        return None
    return None if found is None else Path(found)


def _check(path: str, name: str, entry: _Entry | _ExpertsEntry, shape: torch.Size) -> None:
    if entry.format not in _FORMATS:
        raise OtherFormatError(f"{name} is of the format {entry.format}")
    if entry.shape != shape:
        raise misshapen(path, name, entry.shape, shape)


def _equal(one: _Entry | _ExpertsEntry, other: _Entry | _ExpertsEntry) -> bool:
    """Whether two matrices have the same bits, with few rows of them in memory."""
    if (one.shape, one.format) != (other.shape, other.format):
        return False
    rest = tuple(slice(0, size) for size in one.shape[1:])
    rows = [slice(i, min(i + _ROWS, one.shape[0])) for i in range(0, one.shape[0], _ROWS)]
    return all(torch.equal(one.read((own, *rest)), other.read((own, *rest))) for own in rows)
