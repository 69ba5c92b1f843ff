"""Decode forwards recorded once as CUDA graphs: the host launches one graph, not every kernel.

A graph reads its inputs where they lay when it was recorded, so it serves every decode step with
its number of rows. Other batches are padded up to the next recorded size with rows that see no keys
and write none.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention import PagedContext
from hone.models.decoder import alias_module, hidden_states

__all__ = ["DecodeGraphs"]

_SPACING = 32
"""Distance of the recorded sizes. A padded row costs matrix products only, and these take the
same time up to a few dozen rows."""


class DecodeGraphs:
    """Records a decode forward the first time its number of rows is met, then replays it."""

    def __init__(self, model: PreTrainedModel, *, max_rows: int, compile: bool) -> None:
        """`compile` fuses the kernels of each decoder layer by torch.compile before recording."""
        self._model = alias_module(model)
        if compile:
            for layer in cast(nn.ModuleList, self._model.base_model.layers):
                layer.compile(dynamic=True)
        self._max_rows = max_rows
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def num_rows(self, num_seqs: int) -> int:
        """The size that serves `num_seqs` sequences: a power of two or a multiple of 32."""
        size = 1 << (num_seqs - 1).bit_length()
        if size > _SPACING:
            size = -(-num_seqs // _SPACING) * _SPACING
        return min(size, self._max_rows)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext
    ) -> Tensor:
        """Hidden states [B, D], valid until the next call. Arguments as in the forward.

        All tensors must lie where they lay in the first call with this many rows, and
        `context.max_context_len` must bound the lengths of all later steps.
        """
        size = len(input_ids)
        if size not in self._recorded:
            self._recorded[size] = self._record(input_ids, position_ids, context)
        graph, hidden = self._recorded[size]
        graph.replay()
        return hidden

    def clear(self) -> None:
        """Forget all graphs; they must not outlive the KV cache that they were recorded with."""
        self._recorded.clear()
        self._pool = torch.cuda.graph_pool_handle()  # one without graphs cannot be used again

    def _record(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # Kernels are compiled and libraries initialised outside: neither can be recorded.
        hidden_states(self._model, input_ids, position_ids, context)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = hidden_states(self._model, input_ids, position_ids, context)
        return graph, hidden
