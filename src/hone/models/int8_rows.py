"""Engine weights as int8 with a scale per row: half the memory, half the reading."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.families.spec import ROW_TAIL_BYTES as TAIL
from hone.models.decoder import decoder_layers

__all__ = ["is_packed", "pack_layers", "pack_rows", "packed_like", "unpack_rows"]

_LARGEST = 127
_SMALLEST_SCALE = 1e-30
"""Scale of a row of zeros."""
_AT_ONCE = 1 << 25
"""Values that are rounded at a time: they exist in float32 as well, and the experts of a layer are
more than a thousand million."""


def is_packed(weight: Tensor) -> bool:
    """Whether `weight` was packed by `pack_rows`."""
    return weight.dtype is torch.int8


def pack_rows(weight: Tensor) -> Tensor:
    """Pack finite weights [N, ..., K] into codes and scales: int8 [N, ..., K + 16]. K must be a
    multiple of 16."""
    width = weight.shape[-1]
    assert width % TAIL == 0, f"rows of {width} values: a rule of `hone check` asks for multiples"
    packed = weight.new_empty((*weight.shape[:-1], width + TAIL), dtype=torch.int8)
    if packed.is_meta:
        return packed
    each = max(_AT_ONCE // prod(weight.shape[1:]), 1)
    for part, target in zip(weight.split(each), packed.split(each), strict=True):
        scales = torch.linalg.vector_norm(part, float("inf"), -1, keepdim=True).float() / _LARGEST
        scales.clamp_(min=_SMALLEST_SCALE)
        target[..., :width] = (part / scales).round_()
        target[..., width : width + 4] = scales.view(torch.int8)
        target[..., width + 4 :] = 0
    return packed


def unpack_rows(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack codes and scales to weights [..., K], rounded to `dtype`."""
    width = packed.shape[-1] - TAIL
    scales = packed[..., width : width + 4].view(torch.float32)
    return (packed[..., :width] * scales).to(dtype)


def packed_like(weight: Tensor, target: Tensor | None) -> Tensor:
    """`weight` in the form of the engine's tensor `target`, packed if that is packed."""
    is_wanted = target is not None and is_packed(target) and not is_packed(weight)
    return pack_rows(weight) if is_wanted else weight


@torch.no_grad()
def pack_layers(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Pack the matrices of the decoder layers of `model` in place, one after the other, on `device`
    if given. A model on the meta device gets only the shapes. Afterwards the model can only sample
    through fused layers: its linear layers do not know this form."""
    for module, name, weight in _matrices(model):
        packed = pack_rows(weight.detach() if device is None else weight.detach().to(device))
        module.register_parameter(name, nn.Parameter(packed, requires_grad=False))


def _matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Module, name and weight of linear layers and of stacked experts."""
    for module in decoder_layers(model).modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_linear = isinstance(module, nn.Linear) and parameter.ndim == 2
            if is_linear or (parameter.ndim == 3 and not isinstance(module, nn.Conv1d)):
                yield module, name, parameter
