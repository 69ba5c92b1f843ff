"""Rows of a tensor that ranks divide: the first row of a rank, and the gathering of all rows."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["first_row", "gather_rows"]

# Renamed in torch 2.13, where the old name warns.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


def first_row(num_rows: int, rank: int, size: int) -> int:
    """Index of a rank's first row where DTensor splits `num_rows` over `size` ranks."""
    return min(rank * -(-num_rows // size), num_rows)


def gather_rows(x: Tensor, ranks: tuple[DeviceMesh, int] | dist.ProcessGroup) -> Tensor:
    """Gather the rows x [N, ...] of all ranks, one rank after the other: [size * N, ...]. Without
    gradient."""
    return collectives.wait_tensor(_all_gather(x.contiguous(), 0, ranks))
