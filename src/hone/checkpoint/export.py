"""Export a model as a standard Hugging Face folder, for any other tool to load."""

from __future__ import annotations

import copy
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
) -> Path:
    """Write config, generation config, weights in `dtype`, tokenizer and chat template.

    The folder appears whole or not at all; a former export there is replaced. Tied weights are
    saved once. `AutoModelForCausalLM.from_pretrained(folder)` loads it without this package.

    Raises CheckpointError when it cannot be written, ValueError when `folder` holds something else.
    """
    weights = _cast(model, dtype)
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


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in `dtype`; names that share memory share it still."""
    casts: dict[object, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in export_weights(model):
        target = dtype if tensor.is_floating_point() else tensor.dtype
        weights[name] = casts.setdefault(memory_of(tensor), tensor.to(target))
    return weights
