"""Export a model as a standard Hugging Face folder, for any other tool to load.

A model whose parameters are spread over processes is written tensor by tensor: each is gathered,
taken to the first process's host memory, and written once a file is full. No process ever holds the
whole model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.checkpoint.atomic import CheckpointError, publish_folder
from hone.distributed.mesh import Mesh
from hone.models.manifest import export_weights, memory_of

__all__ = ["export_hf", "export_hf_streamed"]

_FILE_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"


def export_hf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    dtype: torch.dtype,
    *,
    masters: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write config, generation config, weights in `dtype`, tokenizer and chat template.

    `masters` are finer copies of the model's parameters, by name, and are written in their place.
    The folder appears whole or not at all; a former export there is replaced. Tied weights are
    saved once. `AutoModelForCausalLM.from_pretrained(folder)` loads it without this package.

    Raises CheckpointError when it cannot be written, ValueError when `folder` holds something else.
    """
    weights = _cast(model, dtype, masters or {})
    num_bytes = sum({memory_of(t): t.nbytes for t in weights.values()}.values())
    config = model.config
    model.config = copy.deepcopy(config)  # save_pretrained writes the model's own dtype into it
    try:
        with publish_folder(Path(folder), num_bytes=num_bytes) as partial:
            model.save_pretrained(partial, state_dict=weights)
            model.config.dtype = dtype
            model.config.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    finally:
        model.config = config
    return Path(folder)


def export_hf_streamed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, Tensor]],
    *,
    mesh: Mesh,
    file_bytes: int = _FILE_BYTES,
) -> Path:
    """As `export_hf`, of a model that is spread over the processes of `mesh`.

    `weights` yields whole tensors by name; iterating it is collective, and at most one tensor and
    `file_bytes` on the first process's host exist beside it. Every process calls this and returns
    when the folder is there. Raises as `export_hf`, on all.
    """
    folder = Path(folder)
    copies = _tied_copies(model)
    problem: OSError | SafetensorError | ValueError | None = None
    with ExitStack() as publishing:
        partial: Path | None = None
        if mesh.is_first:
            try:
                partial = publishing.enter_context(publish_folder(folder))
            except (OSError, ValueError) as error:
                problem = error
        _agree_on(problem, mesh)
        untied = ((n, tensor) for n, tensor in weights if n not in copies)
        batches = _batches(untied, dtype, file_bytes, keep=mesh.is_first)
        problem = _write_batches(batches, partial)
        if partial is not None and problem is None:
            try:
                _write_surroundings(model, tokenizer, partial, dtype)
            except OSError as error:
                problem = error
        _agree_on(problem, mesh)
    mesh.gather(None)  # published by now
    return folder


def _tied_copies(model: PreTrainedModel) -> set[str]:
    """Names under which a parameter appears a second time."""
    seen: set[Tensor] = set()
    copies: set[str] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor in seen:
            copies.add(name)
        seen.add(tensor)
    return copies


def _batches(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, file_bytes: int, *, keep: bool
) -> Iterator[dict[str, Tensor]]:
    """The tensors of one file after the other, on the CPU in `dtype`. Without `keep` they are
    gathered all the same, and dropped."""
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if not keep:
            continue
        target = dtype if tensor.is_floating_point() else tensor.dtype
        host = tensor.detach().to("cpu", target, copy=True).contiguous()
        if batch and size + host.nbytes > file_bytes:
            yield batch
            batch, size = {}, 0
        batch[name] = host
        size += host.nbytes
    if batch:
        yield batch


def _write_batches(
    batches: Iterator[dict[str, Tensor]], partial: Path | None
) -> OSError | SafetensorError | ValueError | None:
    """Write each batch as a file and the index that says which holds what. After an error the rest
    is still gathered, since the others gather too; the error is returned."""
    problem: OSError | SafetensorError | ValueError | None = None
    names: list[list[str]] = []
    total = 0
    for number, batch in enumerate(batches):
        if partial is None or problem is not None:
            continue
        try:
            save_file(batch, partial / f"{number}.part", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            problem = error
        names.append([*batch])
        total += sum(tensor.nbytes for tensor in batch.values())
    if partial is None or problem is not None:
        return problem
    if len(names) == 1:
        (partial / "0.part").rename(partial / "model.safetensors")
        return None
    weight_map: dict[str, str] = {}
    for number, held in enumerate(names):
        file = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        (partial / f"{number}.part").rename(partial / file)
        weight_map |= dict.fromkeys(held, file)
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / _INDEX).write_text(json.dumps(index, indent=2))
    return None


def _write_surroundings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, partial: Path, dtype: torch.dtype
) -> None:
    """Everything but the weights."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(partial)
    if model.can_generate():
        model.generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)


def _agree_on(problem: OSError | SafetensorError | ValueError | None, mesh: Mesh) -> None:
    """Raise everywhere what the first process ran into."""
    found = mesh.gather(None if problem is None else str(problem))[0]
    if problem is not None:
        raise problem
    if found is not None:
        raise CheckpointError(f"process 0: {found}")


def _cast(
    model: PreTrainedModel, dtype: torch.dtype, masters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights in `dtype`, from the masters where there are; names that share memory share it
    still."""
    sources = {memory_of(p): masters.get(name, p) for name, p in model.named_parameters()}
    casts: dict[object, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in export_weights(model):
        target = dtype if tensor.is_floating_point() else tensor.dtype
        memory = memory_of(tensor)
        if memory not in casts:
            casts[memory] = sources.get(memory, tensor).detach().to(target)
        weights[name] = casts[memory]
    return weights
