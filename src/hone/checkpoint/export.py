"""Export a model as a standard Hugging Face folder, and adapters as PEFT's, for any other tool to
load.

Weights come one after the other, on every process, and are dealt out to files by their names and
sizes alone: the files are the same whatever processes write them. Process r of n writes each n-th
file, in the background while the next tensors are gathered. No process holds the whole model.

`rehearse_export` does all of it but for the weights, before anything is trained. Adapters are few:
the first process holds and writes them.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
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
from hone.config.model import LoraConfig
from hone.distributed.mesh import Axis, Mesh
from hone.errors import UserError
from hone.models.adapters import merged_weights, peft_adapter
from hone.observe.disk import writing

__all__ = ["export_adapter", "export_hf", "rehearse_export"]

_FILE_BYTES = 2 << 30
_INDEX = "model.safetensors.index.json"
_ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
"""In PEFT's folders: tensors, configuration."""


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
    process; iterating it may be collective. `model` may be a stage of a pipeline. Of tied ones the
    first is written. A process holds at most two files of `file_bytes` and one tensor in host
    memory. `step` goes into the folder's manifest.

    The folder appears whole or not at all; a former export there is replaced.
    `AutoModelForCausalLM.from_pretrained(folder)` loads it without this package. Collective: every
    process returns when the folder is there.

    Raises CheckpointError, on all processes, when it cannot be written, and ValueError when
    `folder` holds something else.
    """
    folder = Path(folder)
    copies: set[str] = mesh.broadcast(_tied_copies(model))
    with ExitStack() as publishing:
        publication = together(
            mesh,
            lambda: (
                publishing.enter_context(publish_folder(folder, metadata={"step": step}))
                if mesh.is_first
                else None
            ),
        )
        buffers = {name for own in mesh.gather_stages(_buffers(model)) for name in own}
        files = _Files(model, partial_name(folder), dtype, file_bytes, mesh.world, buffers=buffers)
        publishing.callback(files.writer.shutdown)
        for name, tensor in weights:
            if name not in copies:
                files.add(name, tensor)
        if publication is not None:
            publication.num_bytes = files.num_bytes
        together(mesh, files.finish)
        written = sorted(file for own in mesh.gather(files.written) for file in own)

        def complete() -> None:
            if publication is not None:
                publication.files |= _name_files(publication.folder, written, files.num_bytes)
                _write_surroundings(model, tokenizer, publication.folder, dtype)

        together(mesh, complete)
    mesh.gather(None)  # published by now
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
    """Write adapters as `peft_adapter` has them; `named` yields their tensors on every process.

    The folder appears whole or not at all; former adapters there are replaced. `step` goes into its
    manifest. Collective. Raises as `export_hf`.
    """
    if mesh.is_first:
        tensors, document = peft_adapter(model, cfg, named)
    else:
        deque(named, maxlen=0)  # gathered by all
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
    """Do all that `export_hf` does but for the weights, and delete it; the bytes that the weights
    will have. `model` may have adapters, which are merged in an export, and which `export_adapter`
    will write to `adapter`. Collective.

    Raises on all processes: UserError for what transformers does not write, ValueError where a
    folder holds something else, DiskError or CheckpointError where it cannot be written.
    """
    folder = Path(folder)
    partial = partial_name(folder)

    def rehearse() -> int:
        with _refusing("the names of its tensors"):
            tensors = dict(_without_values(model))
            num_bytes = _bytes_of(tensors, dtype, {*_buffers(model)})
            revert_weight_conversion(model, tensors)
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
    """What `export_hf` will be given of a model, on the meta device, where tensors have a shape
    and no memory."""
    copies = _tied_copies(model)
    own = (
        (name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        for name, tensor in model.state_dict().items()
        if name not in copies
    )
    return merged_weights(model, own)


def _bytes_of(tensors: Mapping[str, Tensor], dtype: torch.dtype, buffers: set[str]) -> int:
    return sum(
        tensor.numel() * _dtype_in_file(name, tensor, dtype, buffers).itemsize
        for name, tensor in tensors.items()
    )


def _dtype_in_file(name: str, tensor: Tensor, dtype: torch.dtype, buffers: set[str]) -> torch.dtype:
    """A buffer is of the format that its family needs it in."""
    is_cast = tensor.is_floating_point() and name not in buffers
    return dtype if is_cast else tensor.dtype


class _WrittenFile(NamedTuple):
    number: int
    record: FileRecord
    names: list[str]
    """Of the tensors in it."""


class _Files:
    """Tensors dealt out to files, of which this process writes its share."""

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
        """Of all files."""
        self.written: list[_WrittenFile] = []
        """By this process."""
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._model, self._folder, self._dtype, self._buffers = model, folder, dtype, buffers
        self._file_bytes, self._world = file_bytes, world
        self._number = self._size = 0
        """Of the last file, and its bytes."""
        self._held: dict[str, Tensor] = {}
        self._writing: Future[_WrittenFile] | None = None
        self._problem: CheckpointError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into the last file, or into a new one where that is full."""
        dtype = _dtype_in_file(name, tensor, self._dtype, self._buffers)
        num_bytes = tensor.numel() * dtype.itemsize
        if self._size and self._size + num_bytes > self._file_bytes:
            self._write_held()
            self._number += 1
            self._size = 0
        self._size += num_bytes
        self.num_bytes += num_bytes
        if self._is_own and self._problem is None:
            # Rounded where it lies: a copy between devices would round on the host.
            self._held[name] = tensor.detach().to(dtype).to("cpu", copy=True)

    def finish(self) -> None:
        """Wait until this process's files are on disk. Only now raises CheckpointError where one
        could not be written: other processes have gathered the tensors after it too."""
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
            held, self._held = self._held, {}
            self._writing = self.writer.submit(self._write, self._number, held)

    def _write(self, number: int, tensors: dict[str, Tensor]) -> _WrittenFile:
        # A model may keep several tensors of its files as one, such as those of experts.
        tensors = revert_weight_conversion(self._model, tensors)
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
    """Rename the files now that it is known how many there are, and write the index."""
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
    """Names under which a parameter appears a second time."""
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
    """Everything but the weights. Raises OSError, and UserError for what transformers does not
    write."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        with _refusing("the files that define it (model.trust_remote_code)"):
            custom_object_save(model, partial, cast(Any, config))
    with _refusing("its config.json"):
        config.save_pretrained(partial)
    if model.can_generate():
        with _refusing("its generation_config.json"):
            # Not `save_pretrained`, which refuses files that it loads and that models are published
            # with, such as a temperature where `do_sample` is false.
            model.generation_config.to_json_file(partial / "generation_config.json")
    with _refusing("its tokenizer"):
        tokenizer.save_pretrained(partial)


@contextmanager
def _refusing(what: str) -> Generator[None]:
    """Turn whatever transformers raises in the block, but for an OSError, into a UserError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of any kind: it has no base class for what it refuses
        raise UserError(
            f"the trained model cannot be written as model.path is made: transformers does not "
            f"write {what} ({type(error).__name__}: {error}). Mend that in a copy of the folder, "
            "and name the copy"
        ) from error
