"""Decode steps recorded once as CUDA graphs: the host launches one graph, not every kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

__all__ = ["DecodeGraphs"]

_SPACING = 32


class DecodeGraphs:
    """Records a computation the first time its key is met, then replays it.

    A computation reads its inputs at the addresses they had when it was recorded, and its output is
    valid until the next call.
    """

    def __init__(self) -> None:
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def bucket_of(num_rows: int, max_rows: int) -> int:
        """The recorded size that serves `num_rows`: a power of two or a multiple of 32.

        A padded row costs matrix products only, and these take the same time up to a few dozen
        rows.
        """
        size = 1 << (num_rows - 1).bit_length()
        if size > _SPACING:
            size = -(-num_rows // _SPACING) * _SPACING
        return min(size, max_rows)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recorded

    def record(self, key: Hashable, compute: Callable[[], Tensor]) -> None:
        """Run `compute` once, so that kernels are compiled and libraries ready, and record it.

        With the inputs of that run, it must not change any state that is in use.
        """
        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()
        self._recorded[key] = graph, output

    def replay(self, key: Hashable) -> Tensor:
        """Launch what was recorded under `key`; returns its output."""
        graph, output = self._recorded[key]
        graph.replay()
        return output
