"""Decode steps of a gated delta net with random parameters and states, for kernels and timings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.attention import PagedContext
from hone.attention.recurrent.delta_net import DeltaNet, mix_heads
from hone.attention.recurrent.mixing import DeltaHeads


def draw_net(
    heads: DeltaHeads,
    dtype: torch.dtype,
    *,
    taps: int = 4,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> DeltaNet:
    """Decays of all sizes, from almost none on."""
    draw = torch.Generator(device).manual_seed(seed)
    num_heads = heads.num_value_heads
    num_channels = 2 * heads.num_key_heads * heads.key_dim + num_heads * heads.value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=draw)

    return DeltaNet(
        layer_idx=0,
        heads=heads,
        conv=(normal(num_channels, 1, taps) / 2).to(dtype),
        log_rate=normal(num_heads).to(dtype),
        step_bias=(3 * normal(num_heads) - 3).to(dtype),
        norm=normal(heads.value_dim).to(dtype),
        eps=1e-6,
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """One token of each sequence, and the stored states of more rows than sequences."""

    net: DeltaNet
    projected: Tensor
    tails: Tensor
    states: Tensor
    rows: Tensor

    @classmethod
    def draw(cls, net: DeltaNet, rows: Sequence[int], num_rows: int, *, seed: int = 1) -> Step:
        heads, dtype, device = net.heads, net.conv.dtype, net.conv.device
        draw = torch.Generator(device).manual_seed(seed)
        num_channels, _, taps = net.conv.shape
        num_heads, value_dim = heads.num_value_heads, heads.value_dim
        width = num_channels + num_heads * value_dim + 2 * num_heads

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=draw)

        return cls(
            net=net,
            projected=normal(len(rows), width).to(dtype),
            tails=normal(num_rows, taps - 1, num_channels).to(dtype),
            states=normal(num_rows, num_heads, heads.key_dim, value_dim),
            rows=torch.tensor(rows, device=device),
        )

    @property
    def context(self) -> PagedContext:
        batch, device = len(self.rows), self.rows.device
        return PagedContext(
            kv_caches=[self.states],
            block_tables=torch.zeros(batch, 1, dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(batch, dtype=torch.int64, device=device),
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
            context_lens=torch.ones(batch, dtype=torch.int32, device=device),
            max_seqlen_q=1,
            max_context_len=1,
            states=[(self.tails, self.states)],
            state_rows=self.rows,
        )

    def copy(self, dtype: torch.dtype | None = None) -> Step:
        """The same step with states of its own, computed in `dtype` if given."""

        def own(x: Tensor) -> Tensor:
            return x.clone() if dtype is None else x.to(dtype, copy=True)

        net = self.net
        return Step(
            net=DeltaNet(
                layer_idx=0,
                heads=net.heads,
                conv=own(net.conv),
                log_rate=own(net.log_rate),
                step_bias=own(net.step_bias),
                norm=own(net.norm),
                eps=net.eps,
            ),
            projected=own(self.projected),
            tails=own(self.tails),
            states=self.states.clone(),
            rows=self.rows.clone(),
        )

    def reference(self) -> Tensor:
        """The outputs in plain torch, [B, H * V]; updates the states."""
        return mix_heads(self.projected, self.net, self.context)
