"""Slow and obvious twins: attention one query at a time in float64, and a cache filled by hand."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hone.attention import PagedContext, SharedPrefix


def attend_one(q: Tensor, keys: Tensor, values: Tensor, *, scale, window=None, softcap=None):
    """One query [Hq, D], the newest token, on keys and values [K, Hkv, D]: float64 [Hq, D]."""
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    group = q.shape[0] // keys.shape[1]
    rows = []
    for head, query in enumerate(q.double()):
        scores = keys[:, head // group].double() @ query * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append(torch.softmax(scores, 0) @ values[:, head // group].double())
    return torch.stack(rows)


def attend_packed(q, k, v, lengths: Sequence[int], **options) -> Tensor:
    """Causal attention within each packed sequence, float64 [T, Hq, D]."""
    rows = []
    for start, length in zip(accumulate((0, *lengths)), lengths, strict=False):
        for t in range(start, start + length):
            seen = slice(start, t + 1)
            rows.append(attend_one(q[t], k[seen], v[seen], **options))
    return torch.stack(rows)


def through_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """What x [K, H, D] is once stored as float8_e4m3fn with scales [H]: float32."""
    scales = scales[:, None].float()
    return (x.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales


class Pages:
    """Random keys and values of sequences in a paged cache, their blocks in random order.

    The last `query_lens[i]` of the `key_lens[i]` tokens of sequence i are the newest ones: they
    have queries, and their keys are not in the cache yet. `groups` are pairs of the sequences that
    begin with the same keys and the number of these keys, whole blocks. With `fp8` the cache is
    float8_e4m3fn, and what is expected are the keys and values read back from it.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        *,
        groups: Sequence[tuple[Sequence[int], int]] = (),
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device, dtype)

        kv_shape = (num_kv_heads, head_dim)
        self.query_lens, self.key_lens = tuple(query_lens), tuple(key_lens)
        self.q = normal(sum(query_lens), num_heads, head_dim)
        self.keys = [normal(n, *kv_shape) for n in key_lens]
        self.values = [normal(n, *kv_shape) for n in key_lens]
        for rows in (self.keys, self.values):
            for members, length in groups:
                for i in members[1:]:
                    rows[i][:length] = rows[members[0]][:length]
        self.k, self.v = (
            torch.cat([x[n - m :] for x, n, m in zip(rows, key_lens, query_lens, strict=True)])
            for rows in (self.keys, self.values)
        )
        num_blocks = [-(-n // block_size) for n in key_lens]
        # Unwritten slots hold large numbers, so that reading one shows.
        self.kv_cache = 50 * normal(2, sum(num_blocks) + 3, block_size, *kv_shape)
        self.scales = None
        if fp8:
            self.scales = torch.rand(2, num_kv_heads, generator=draw).to(device) * 0.02 + 0.002
            self.kv_cache = self.kv_cache.to(torch.float8_e4m3fn)
            for s, rows in zip(self.scales, (self.keys, self.values), strict=True):
                rows[:] = [through_fp8(x, s) for x in rows]
        free = list(range(sum(num_blocks) + 3))
        random.Random(seed).shuffle(free)
        tables = torch.full((len(key_lens), max(num_blocks) + 1), free.pop(), dtype=torch.int32)
        heads = {i: (members[0], n // block_size) for members, n in groups for i in members[1:]}
        slots = []
        for i, (n, m) in enumerate(zip(key_lens, query_lens, strict=True)):
            table = [free.pop() for _ in range(num_blocks[i])]
            if i in heads:
                first, count = heads[i]
                table[:count] = tables[first, :count].tolist()
            tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
            where = [table[t // block_size] * block_size + t % block_size for t in range(n)]
            for t in range(n - m):
                block, offset = divmod(where[t], block_size)
                for j, rows in enumerate((self.keys, self.values)):
                    row = (
                        rows[i][t] if self.scales is None else rows[i][t] / self.scales[j, :, None]
                    )
                    self.kv_cache[j, block, offset] = row.to(self.kv_cache.dtype)
            slots += where[n - m :]
        self.context = PagedContext(
            kv_caches=[self.kv_cache],
            block_tables=tables.to(device),
            slot_mapping=torch.tensor(slots, device=device),
            cu_seqlens_q=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32).to(device),
            context_lens=torch.tensor(key_lens, dtype=torch.int32).to(device),
            max_seqlen_q=max(query_lens),
            max_context_len=max(key_lens),
            query_lens=self.query_lens,
            key_lens=self.key_lens,
            kv_scales=None if self.scales is None else self.scales.unsqueeze(0),
        )
        self._groups = groups

    def decode_context(self, *, num_groups: int = 0, members: int = 0) -> PagedContext:
        """The context of a decode step; with `members`, the groups as a `SharedPrefix`."""
        shared = None
        if members:
            rows = torch.full((num_groups, members), -1, dtype=torch.int32)
            lens = torch.zeros(num_groups, dtype=torch.int32)
            starts = torch.zeros(len(self.key_lens), dtype=torch.int32)
            # Every second place, so that unused ones lie in between.
            for place, (group, length) in zip(range(0, num_groups, 2), self._groups, strict=True):
                rows[place, : len(group)] = torch.tensor(group, dtype=torch.int32)
                lens[place] = length
                starts[list(group)] = length
            device = self.q.device
            shared = SharedPrefix(
                rows=rows.to(device), lens=lens.to(device), starts=starts.to(device)
            )
        return dataclasses.replace(self.context, query_lens=(), key_lens=(), shared=shared)

    def expected(self, **options) -> Tensor:
        """What the newest tokens must attend to, float64 [T, Hq, D]."""
        rows, t = [], 0
        for i, (n, m) in enumerate(zip(self.key_lens, self.query_lens, strict=True)):
            for seen in range(n - m + 1, n + 1):
                keys, values = self.keys[i][:seen], self.values[i][:seen]
                rows.append(attend_one(self.q[t], keys, values, **options))
                t += 1
        return torch.stack(rows)
