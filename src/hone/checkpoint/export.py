"""Export a model as a standard Hugging Face folder, for any other tool to load."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.checkpoint.atomic import publish_folder
from hone.models.manifest import export_weights, memory_of

__all__ = ["export_hf"]


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
