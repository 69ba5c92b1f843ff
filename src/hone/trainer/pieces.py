"""Pieces of parameters: the units in which gradients are measured, and moved between device and
host; and the dtype in which gradients are added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["BUCKET_BYTES", "Operand", "Piece", "accumulation_dtype", "norm_of_pieces", "pieces_of"]

BUCKET_BYTES = 128 << 20
"""Device memory of one of the two buckets that a step streams through, 256 MiB in all: copies are
long enough to run at the bus's rate."""
_PIECE_ELEMENTS = BUCKET_BYTES // 4
"""Largest number of elements of a piece, in which gradients are copied and their norms taken."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`: float32, or wider where `dtype` is wider."""
    return torch.promote_types(dtype, torch.float32)


class Piece(NamedTuple):
    """Elements `start` to `stop` of this process's flattened part of a parameter."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Operand:
    """The flat tensors of a piece that one update reads and writes."""

    piece: Piece
    master: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Flat views of a local tensor, piece by piece."""
    return tensor.reshape(-1).split(_PIECE_ELEMENTS)


def norm_of_pieces(tensors: Iterable[Tensor]) -> Tensor:
    """2-norm of local tensors, a scalar: the norm of their pieces' norms, an order of operations
    that all kinds of gradients share."""
    return nn.utils.get_total_norm([piece for tensor in tensors for piece in pieces_of(tensor)])
