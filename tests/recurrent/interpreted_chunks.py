"""Runs the kernel of gradients inside of chunks in Triton's interpreter; prints as JSON how it
compares with autograd of the formulas in its module's text, in float64.

A process of its own, as in `tests.models.interpreted_layer_kernels`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import log
from unittest.mock import patch

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch
from torch import Tensor

from hone.attention.recurrent import chunk_gradients as module
from hone.attention.recurrent.chunk_gradients import ChunkInputs, Tuning, chunk_gradients
from hone.segments import CHUNK, Segment, plan_segments

LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3}
"""Of distances relative to the norm of what is right."""
CASES = {
    # key heads, value heads, sizes of keys and of values, lengths, launch
    "one head": ((1, 1, 16, 16), [CHUNK, 1, 5], Tuning(16, 16, 1)),
    "two heads a key, odd sizes": ((1, 2, 12, 24), [70, 3], Tuning(16, 16, 1)),
    "parts of keys and values": ((2, 2, 32, 32), [2 * CHUNK + 9], Tuning(16, 16, 1)),
}


class Draw:
    """Random inputs of one case, in float64."""

    def __init__(self, case: str) -> None:
        (self.num_key_heads, num_heads, key_dim, value_dim), lengths, self.tuning = CASES[case]
        torch.manual_seed(0)
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        segments = [Segment(*x) for x in zip(starts, lengths, strict=True)]
        self.plan = plan_segments(segments, torch.as_tensor)
        self.bounds = [
            (start + first, min(start + first + CHUNK, start + length))
            for start, length in zip(starts, lengths, strict=True)
            for first in range(0, length, CHUNK)
        ]
        shape = sum(lengths), num_heads

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, dtype=torch.float64)

        keys = shape[0], self.num_key_heads, key_dim
        self.q, self.k = (torch.nn.functional.normalize(normal(*keys), dim=-1) for _ in range(2))
        self.w = normal(*shape, key_dim)
        self.u, self.do = (normal(*shape, value_dim) for _ in range(2))
        states = len(self.bounds), num_heads, key_dim, value_dim
        self.h, self.dh = normal(*states), normal(*states)
        decays = -torch.rand(shape, dtype=torch.float64)
        self.total = torch.cat([decays[a:b].cumsum(0) for a, b in self.bounds])
        self.scale = key_dim**-0.5

    def expected(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Gradients of queries, keys, w and decays; new values and their gradients."""
        repeats = self.u.shape[1] // self.num_key_heads
        leaves = [x.repeat_interleave(repeats, 1) for x in (self.q, self.k)]
        leaves = [x.clone().requires_grad_() for x in (*leaves, self.w, self.total)]
        found: list[Tensor] = []
        loss = torch.zeros((), dtype=torch.float64)
        for number, (a, b) in enumerate(self.bounds):
            q, k, w = (x[a:b].transpose(0, 1) for x in leaves[:3])
            total = leaves[3][a:b].T
            values = self.u[a:b].transpose(0, 1) - w @ self.h[number]
            values.retain_grad()
            found.append(values)
            pairs = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
            from_state = total.exp()[..., None] * (q @ self.h[number])
            output = self.scale * (from_state + (q @ k.mT * pairs) @ values)
            end = total[:, -1:]
            last = end[..., None].exp() * self.h[number]
            last = last + (k * (end - total).exp()[..., None]).mT @ values
            loss = loss + (output * self.do[a:b].transpose(0, 1)).sum()
            loss = loss + (last * self.dh[number]).sum()
        loss.backward()

        def whole(parts: list[Tensor]) -> Tensor:
            return torch.cat([x.transpose(0, 1) for x in parts]).contiguous()

        values = whole([x.detach() for x in found])
        d_values = whole([x.grad for x in found])
        return [x.grad for x in leaves], values, d_values

    def found(self, values: Tensor, d_values: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        tokens = (x.to(dtype) for x in (self.q, self.k, values, self.do, d_values))
        log2_decays = (self.total / log(2)).float()
        states = (self.h.to(dtype), self.dh.to(dtype))
        return chunk_gradients(
            ChunkInputs(*tokens, log2_decays, *states),
            self.plan.cu_seqlens,
            self.plan.chunks,
            self.scale,
            tuning=self.tuning,
        )


def compare(case: str, dtype: torch.dtype, change: Callable[[Draw], None] | None = None) -> float:
    """The largest distance of the four gradients."""
    draw = Draw(case)
    expected, values, d_values = draw.expected()
    if change is not None:
        change(draw)
    found = draw.found(values, d_values, dtype)
    return max(
        float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)
    )


def shift_state(draw: Draw) -> None:
    draw.h = draw.h.roll(1, 0)


def one_chunk_late(draw: Draw) -> None:
    draw.plan.chunks[-1, 1] -= 1


def main() -> None:
    wrong = {
        f"{case}, {dtype}": error
        for case in CASES
        for dtype, limit in LIMITS.items()
        if not (error := compare(case, dtype)) < limit
    }
    case = "parts of keys and values"
    missed = {
        change.__name__: error
        for change in (shift_state, one_chunk_late)
        if (error := compare(case, torch.float32, change)) < 0.01
    }
    with patch.object(module, "CHUNK", CHUNK // 2):
        if (error := compare(case, torch.float32)) < 0.01:
            missed["half a chunk"] = error
    json.dump({"cases": len(CASES) * len(LIMITS), "wrong": wrong, "missed": missed}, sys.stdout)


if __name__ == "__main__":
    main()
