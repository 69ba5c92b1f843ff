"""Export of a model as a standard Hugging Face folder, and of adapters as a PEFT folder.

Every process gets the whole weights one after the other. Only their names and sizes decide the
file of each, so the files do not depend on the number of processes. Process r of n writes every
n-th file, in the background while the next tensors are gathered. No process holds the whole model.

A decoder of a vision-language model is written as the whole model that it was loaded from: with its
tower, which every process has, under the names of that checkpoint's tensors, and with the files of
the image processor. Tensors of the checkpoint that no model here has, such as a head which predicts
further tokens, are copied from its files.

`rehearse_export` does everything except the weights, before training starts. Adapters are small:
rank 0 holds and writes them.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from hone.checkpoint.atomic import (
    CheckpointError,
    FileRecord,
    clean_leftovers,
    partial_name,
    publish_folder,
    require_replaceable,
    together,
    write_tensors,
)
from hone.distributed.mesh import Axis, Mesh
from hone.errors import UserError
from hone.models.adapted import merged_weights
from hone.models.contents import features_of, whole_of
from hone.models.manifest import checksum_of
from hone.models.settings import LoraConfig
from hone.models.weight_files import UnreadTensors, unread_of
from hone.observe.disk import writing

__all__ = ["export_adapter", "export_hf", "rehearse_export"]

_FILE_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
"""File names of a PEFT folder: tensors, configuration."""


def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, Tensor]],
    *,
    mesh: Mesh,
    step: int | None = None,
    file_bytes: int = _FILE_BYTES,
) -> Path:
    """Write config, generation config, weights in `dtype`, tokenizer and chat template.

    `weights` yields whole tensors under the names of the model's `state_dict()`, the same on every
    process; iterating it may be collective. `model` may be a stage of a pipeline. Only the first of
    tied tensors is written. A process holds at most two files of `file_bytes` and one tensor in
    host memory. `step` goes into the folder's manifest, and the checksum of a tower.

    The folder appears whole or not at all; a former export there is replaced.
    `AutoModelForCausalLM.from_pretrained(folder)` loads it without this package. Collective: every
    process returns when the folder is there.

    Raises CheckpointError, on all processes, when it cannot be written, and ValueError when
    `folder` holds something else.
    """
    folder = Path(folder)
    copies: set[str] = mesh.broadcast(_tied_copies(model))
    tower = _tower_weights(model)
    metadata = {"step": step} | ({"tower": checksum_of(tower)} if tower else {})
    with ExitStack() as publishing:
        publication = together(
            mesh,
            lambda: (
                publishing.enter_context(publish_folder(folder, metadata=metadata))
                if mesh.is_first
                else None
            ),
        )
        buffers = {name for names in mesh.gather_stages(_buffers(model)) for name in names}
        files = _Files(model, partial_name(folder), dtype, file_bytes, mesh.world, buffers=buffers)
        publishing.callback(files.writer.shutdown)
        for name, tensor in chain(weights, tower.items()):
            if name not in copies:
                files.add(name, tensor)
        together(mesh, lambda: files.copy(unread_of(model)))
        if publication is not None:
            publication.num_bytes = files.num_bytes
        together(mesh, files.finish)
        written = sorted(file for of_rank in mesh.gather(files.written) for file in of_rank)

        def complete() -> None:
            if publication is not None:
                publication.files |= _name_files(publication.folder, written, files.num_bytes)
                _write_surroundings(model, tokenizer, publication.folder, dtype)

        together(mesh, complete)
    mesh.gather(None)  # a barrier: the folder is published on all processes
    return folder


def export_adapter(
    model: PreTrainedModel,
    cfg: LoraConfig,
    folder: Path,
    named: Iterable[tuple[str, Tensor]],
    *,
    mesh: Mesh,
    step: int,
) -> None:
    """Write adapters in PEFT's format; `named` yields their tensors on every process.

    The folder appears whole or not at all; former adapters there are replaced. `step` goes into its
    manifest. Collective. Raises the errors of `export_hf`.
    """
    from hone.models.adapters import peft_adapter

    if mesh.is_first:
        tensors, document = peft_adapter(model, cfg, named)
    else:
        deque(named, maxlen=0)  # iterating is collective
        tensors, document = {}, {}

    def write() -> None:
        if not mesh.is_first:
            return
        weights, config = _ADAPTER_FILES
        with publish_folder(folder, metadata={"step": step}, ours=_ADAPTER_FILES) as publication:
            path = publication.folder / weights
            publication.files[weights] = write_tensors(path, tensors, {"format": "pt"})
            (publication.folder / config).write_text(json.dumps(document, indent=2))

    together(mesh, write)


def rehearse_export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    dtype: torch.dtype,
    *,
    mesh: Mesh,
    adapter: Path | None = None,
) -> int:
    """Do all of `export_hf` except the weights, delete the result, and return the size that the
    weights will have, in bytes. `model` may have adapters, which an export merges, and which
    `export_adapter` will write to `adapter`. Collective.

    Raises on all processes: UserError where transformers cannot write the model, ValueError where a
    folder exists and was not exported, DiskError or CheckpointError where it cannot be written.
    """
    folder = Path(folder)
    partial = partial_name(folder)

    def rehearse() -> int:
        with _refusing("the names of its tensors"):
            tensors = dict(_without_values(model)) | _tower_weights(model)
            num_bytes = _bytes_of(tensors, dtype, {*_buffers(model)})
            _as_in_files(model, tensors)
        if mesh.pipeline.rank == 0:
            num_bytes += sum(tensor.nbytes for _, tensor in unread_of(model).read())
        if mesh.is_first:
            require_replaceable(folder)
            if adapter is not None:
                require_replaceable(adapter, ours=_ADAPTER_FILES)
            try:
                with writing(partial, "run.dir"):
                    clean_leftovers(folder)
                    partial.mkdir(parents=True)
                    _write_surroundings(model, tokenizer, partial, dtype)
            finally:
                clean_leftovers(folder)
        return num_bytes

    return sum(mesh.gather_stages(together(mesh, rehearse)))


def _without_values(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights that `export_hf` will get, on the meta device, where tensors have no memory."""
    copies = _tied_copies(model)
    on_meta = (
        (name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        for name, tensor in model.state_dict().items()
        if name not in copies
    )
    return merged_weights(model, on_meta)


def _tower_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a decoder's tower, by name in the whole model; empty for a text model."""
    features = features_of(model)
    if features is None or whole_of(model) is None:
        return {}
    return {f"model.{name}": x for name, x in features.tower.modules.state_dict().items()}


def _as_in_files(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of files. A model may have several tensors of its files as one, such
    as those of experts."""
    tensors = revert_weight_conversion(model, tensors)
    whole = whole_of(model)
    return tensors if whole is None else {whole.key(name): x for name, x in tensors.items()}


def _bytes_of(tensors: Mapping[str, Tensor], dtype: torch.dtype, buffers: set[str]) -> int:
    return sum(
        tensor.numel() * _dtype_in_file(name, tensor, dtype, buffers).itemsize
        for name, tensor in tensors.items()
    )


def _dtype_in_file(name: str, tensor: Tensor, dtype: torch.dtype, buffers: set[str]) -> torch.dtype:
    """The dtype of a tensor in the exported file. Buffers keep the dtype of their model family."""
    is_cast = tensor.is_floating_point() and name not in buffers
    return dtype if is_cast else tensor.dtype


class _WrittenFile(NamedTuple):
    number: int
    record: FileRecord
    names: list[str]
    """Names of the tensors in the file."""


class _Files:
    """Assigns tensors to files, and writes the files of this process."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        dtype: torch.dtype,
        file_bytes: int,
        world: Axis,
        *,
        buffers: set[str],
    ) -> None:
        self.num_bytes = 0
        """Size of the tensors in all files."""
        self.written: list[_WrittenFile] = []
        """Files that this process has written."""
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._model, self._folder, self._dtype, self._buffers = model, folder, dtype, buffers
        self._file_bytes, self._world = file_bytes, world
        self._number = self._size = 0
        """Number of the last file, and its size in bytes."""
        self._held: dict[str, Tensor] = {}
        """Tensors of the last file, by name in the model."""
        self._copied: dict[str, Tensor] = {}
        """Further ones, by name in files."""
        self._writing: Future[_WrittenFile] | None = None
        self._problem: CheckpointError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into the last file, or into a new one where that is full."""
        self._place(name, tensor, _dtype_in_file(name, tensor, self._dtype, self._buffers))

    def copy(self, unread: UnreadTensors) -> None:
        """Put tensors of other files into these, as they are. Raises CheckpointError where a file
        cannot be read."""
        try:
            for name, tensor in unread.read():
                self._place(name, tensor, tensor.dtype, is_as_in_files=True)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the model was loaded from files of which one cannot be read any more ({error}), "
                "and the exported one has parts that are only there. Put the file back and run the "
                "command again"
            ) from error

    def _place(
        self, name: str, tensor: Tensor, dtype: torch.dtype, *, is_as_in_files: bool = False
    ) -> None:
        num_bytes = tensor.numel() * dtype.itemsize
        if self._size and self._size + num_bytes > self._file_bytes:
            self._write_held()
            self._number += 1
            self._size = 0
        self._size += num_bytes
        self.num_bytes += num_bytes
        if self._is_own and self._problem is None:
            held = self._copied if is_as_in_files else self._held
            # Rounded on its device first: a cast during the copy would round on the host.
            held[name] = tensor.detach().to(dtype).to("cpu", copy=True)

    def finish(self) -> None:
        """Wait until this process's files are on disk. Raises CheckpointError where one could not
        be written; not before, since all processes must take part in gathering later tensors."""
        self._write_held()
        self._wait()
        if self._problem is not None:
            raise self._problem

    @property
    def _is_own(self) -> bool:
        """Whether this process writes the last file."""
        return self._number % self._world.size == self._world.rank

    def _write_held(self) -> None:
        if self._is_own:
            self._wait()
        if self._is_own and self._problem is None:
            held, copied = self._held, self._copied
            self._held, self._copied = {}, {}
            self._writing = self.writer.submit(self._write, self._number, held, copied)

    def _write(
        self, number: int, tensors: dict[str, Tensor], copied: dict[str, Tensor]
    ) -> _WrittenFile:
        tensors = _as_in_files(self._model, tensors) | copied
        record = write_tensors(self._folder / _part_name(number), tensors, {"format": "pt"})
        return _WrittenFile(number, record, [*tensors])

    def _wait(self) -> None:
        if self._writing is not None:
            try:
                self.written.append(self._writing.result())
            except CheckpointError as error:
                self._problem = error
            self._writing = None


def _part_name(number: int) -> str:
    return f"{number}.part"


def _name_files(folder: Path, written: list[_WrittenFile], num_bytes: int) -> dict[str, FileRecord]:
    """Rename the files, whose number is known now, and write the index."""
    if len(written) == 1:
        (folder / _part_name(0)).rename(folder / "model.safetensors")
        return {"model.safetensors": written[0].record}
    recorded: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    for number, record, names in written:
        name = f"model-{number + 1:05d}-of-{len(written):05d}.safetensors"
        (folder / _part_name(number)).rename(folder / name)
        recorded[name] = record
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))
    return recorded


def _buffers(model: PreTrainedModel) -> list[str]:
    return [name for name, _ in model.named_buffers()]


def _tied_copies(model: PreTrainedModel) -> set[str]:
    """Names under which a tied parameter appears again."""
    seen: set[Tensor] = set()
    copies: set[str] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor in seen:
            copies.add(name)
        seen.add(tensor)
    return copies


def _write_surroundings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, partial: Path, dtype: torch.dtype
) -> None:
    """Write everything but the weights. Raises OSError, and UserError where transformers cannot
    write a file."""
    whole = whole_of(model)
    config = copy.deepcopy(model.config) if whole is None else whole.config_for(model)
    config.dtype = dtype
    config.architectures = [type(model).__name__ if whole is None else whole.class_name_for(model)]
    if model.is_remote_code():
        with _refusing("the files that define it (model.trust_remote_code)"):
            custom_object_save(model, partial, cast(Any, config))
    with _refusing("its config.json"):
        config.save_pretrained(partial)
    if model.can_generate():
        with _refusing("its generation_config.json"):
            # Not `save_pretrained`: it rejects settings with which models are published, such as a
            # temperature with `do_sample` false.
            model.generation_config.to_json_file(partial / "generation_config.json")
    with _refusing("its tokenizer"):
        tokenizer.save_pretrained(partial)
    for name, content in ({} if whole is None else whole.files_beside(tokenizer)).items():
        (partial / name).write_bytes(content)


@contextmanager
def _refusing(what: str) -> Generator[None]:
    """Turn every error of transformers in the block, except OSError, into a UserError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # transformers has no base class for these errors
        raise UserError(
            f"the trained model could not be exported in the form of model.path: transformers does "
            f"not write {what} ({type(error).__name__}: {error}). Correct that in a copy of the "
            "folder, and set model.path to the copy"
        ) from error
