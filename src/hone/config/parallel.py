"""How training is spread over several processes, one a device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.config.base import Section

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    """Sizes of the axes: `data x ring x ulysses x tensor` processes, data filling up the rest."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over processes: 0 nothing, 1 optimizer states and master weights, 2 also
    gradients, 3 also the weights that compute. Higher stages need less memory and talk more."""

    fsdp_size: int = Field(default=-1, ge=-1)
    """Processes that share one set of shards; -1: all. Fewer replicate the shards (hybrid
    sharding), which keeps most traffic inside a node."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share every layer's matrices, and the tokens between layers."""

    ulysses_size: int = Field(default=1, ge=1)
    """Processes that share a sequence's tokens, and in attention its heads (all-to-all)."""

    ring_size: int = Field(default=1, ge=1)
    """Processes that share a sequence's tokens and pass keys and values round in attention."""

    reference_ulysses_size: int | None = Field(default=None, ge=1)
    """As `ulysses_size`, for the reference model; unset: the same."""

    reference_ring_size: int | None = Field(default=None, ge=1)
    """As `ring_size`, for the reference model; unset: the same."""

    forward_prefetch: bool = False
    """Gather the next layer's weights while one computes, in forward too (stage 3)."""

    balance_data: bool = True
    """Deal rows to processes by their cost; otherwise in the order of their groups."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a process that waits for others gives up and names whom it missed."""
