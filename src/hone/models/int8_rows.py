"""Weights of an engine as 8-bit integers, a scale for each row: half the memory, half the reading.

A row of K inputs becomes K codes c = round(w / s) from -127 to 127 and its scale s, the largest
|w| / 127, in float32, so that w is c s up to s / 2. Codes and scale lie together,

    [ c_0 ... c_(K-1) | s, 4 bytes | 12 bytes of zeros ]

in one int8 tensor [..., K + 16]: it has the name of the weight, is cut among ranks, merged,
delivered and proven as the weight is, and every row begins at a multiple of 16 bytes.

On a GPU products multiply codes as they are (`hone.models.int8_kernels`), so that what they round
is the weight: by 0.4 % of a row's largest value at most, where 8-bit floats (e4m3) round each value
by up to 6 % of it. Of rows of random weights
that is an eighth of the squared error of FP8 in the same bytes, and less where rows have outliers
that are not far out.

Matrices of decoder layers are kept so; norms, biases, routers, embedding and head are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.families.shape import ROW_TAIL_BYTES as TAIL
from hone.models.decoder import decoder_layers

__all__ = ["is_packed", "pack_layers", "pack_rows", "packed_like", "unpack_rows"]

_LARGEST = 127
_SMALLEST_SCALE = 1e-30
"""Of a row of zeros."""
_AT_ONCE = 1 << 25
"""Values that are rounded at a time: they are there in float32 as well, and the experts of a layer
are more than a thousand million."""


def is_packed(weight: Tensor) -> bool:
    """Whether `weight` is what `pack_rows` makes."""
    return weight.dtype is torch.int8


def pack_rows(weight: Tensor) -> Tensor:
    """Weights [N, ..., K], of finite floats, as codes and scales: int8 [N, ..., K + 16]. K is a
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
    """The weights [..., K] that codes and scales stand for, rounded to `dtype`."""
    width = packed.shape[-1] - TAIL
    scales = packed[..., width : width + 4].view(torch.float32)
    return (packed[..., :width] * scales).to(dtype)


def packed_like(weight: Tensor, target: Tensor | None) -> Tensor:
    """`weight` in the form of the engine's tensor `target`: packed where that is."""
    is_wanted = target is not None and is_packed(target) and not is_packed(weight)
    return pack_rows(weight) if is_wanted else weight


@torch.no_grad()
def pack_layers(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Pack the matrices of the decoder layers of `model` in place, one after the other, on
    `device` where one is given. A model on the meta device gets their shapes.

    It then samples through fused layers and is of no other use: its linear layers do not know this
    form.
    """
    for module, name, weight in _matrices(model):
        packed = pack_rows(weight.detach() if device is None else weight.detach().to(device))
        module.register_parameter(name, nn.Parameter(packed, requires_grad=False))


def _matrices(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Module, name and weight of linear layers and of stacked experts."""
    for module in decoder_layers(model).modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            is_linear = isinstance(module, nn.Linear) and parameter.ndim == 2
            if is_linear or parameter.ndim == 3:
                yield module, name, parameter
