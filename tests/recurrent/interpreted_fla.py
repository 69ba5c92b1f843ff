"""Runs the kernels of `fla-core` in Triton's interpreter, as a pass on a GPU calls them; prints as
JSON how outputs, states and gradients compare with plain torch in float64.

A process of its own, as `tests.recurrent.interpreted_chunks`.
"""

from __future__ import annotations

import builtins
import gc
import json
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch
import triton.language as tl
from fla.ops.common import chunk_delta_h
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from hone.attention.recurrent import convolution, fla_convolution, fla_rule, kernels
from hone.attention.recurrent.delta_rule import Tokens
from hone.segments import Segment, SegmentPlan, plan_segments

LIMIT = 1e-5
"""Of distances relative to the norm of what is right; inputs are float32."""
CUTS: dict[str, list[tuple[int, int | None]]] = {
    "rows": [(70, None), (1, None), (64, None)],
    "a group": [(66, None), (5, 0), (65, 0), (1, 0)],
    "three levels": [(70, None), (2, None), (3, 1), (40, 0), (66, 0), (1, 1), (5, 2)],
}
"""Tokens of each segment, and the number of its parent."""
SHAPE = {"key heads": 1, "heads": 2, "keys": 16, "values": 32, "channels": 20}


def plan_of(cut: str, *, stored: bool) -> SegmentPlan:
    """With `stored` each second segment of the first level begins with stored states."""
    starts = accumulate((size for size, _ in CUTS[cut]), initial=0)
    segments = [Segment(start, *part) for start, part in zip(starts, CUTS[cut], strict=False)]
    if stored:
        roots = [number for number, segment in enumerate(segments) if segment.parent is None]
        for number in roots[::2]:
            segments[number] = replace(segments[number], read=number)
    return plan_segments(segments, torch.as_tensor)


def distances(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(float((x.double() - y).norm() / y.norm().clamp(min=1e-9)) for x, y in pairs)


def first_of_level(plan: SegmentPlan, *shape: int) -> Tensor | None:
    """What is stored for the segments of the first level: zeros where they read nothing."""
    if plan.reads is None:
        return None
    found = torch.zeros(len(plan.levels[0].lengths), *shape)
    segments, _ = plan.reads
    found[segments] = torch.randn(len(segments), *shape)
    return found


def of_rule(plan: SegmentPlan, *, gives_final: bool) -> float:
    """The largest distance among outputs, final states, and gradients of all inputs."""
    torch.manual_seed(0)
    size, (key_heads, heads, keys, values, _) = sum(plan.lengths), SHAPE.values()
    tokens = Tokens(
        q=torch.randn(size, key_heads, keys),
        k=torch.randn(size, key_heads, keys),
        v=torch.randn(size, heads, values),
        g=-torch.rand(size, heads),
        beta=torch.rand(size, heads),
    )
    stored = first_of_level(plan, heads, keys, values)
    states = [] if stored is None else [stored]
    upstream = torch.randn(size, heads, values), torch.randn(len(plan.lengths), heads, keys, values)
    number = 2 if gives_final else 1

    def work(rule: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (*tokens, *states)]
        initial = leaves[5] if states else None
        outputs = rule(Tokens(*leaves[:5]), plan, initial, gives_final=gives_final)[:number]
        own = [x.to(y.dtype) for x, y in zip(upstream, outputs, strict=False)]
        return [*outputs, *torch.autograd.grad(outputs, leaves, own)]

    found = work(fla_rule.gated_delta_rule, torch.float32)
    return distances(found, work(kernels.gated_delta_rule, torch.float64))


def of_convolution(plan: SegmentPlan, *, gives_final: bool) -> float:
    """The largest distance among outputs, last inputs, and gradients of inputs and weights."""
    torch.manual_seed(0)
    size, channels = sum(plan.lengths), SHAPE["channels"]
    inputs = [torch.randn(size, channels), torch.randn(4, channels).T]  # no row of it is contiguous
    before = first_of_level(plan, 3, channels)
    upstream = torch.randn(size, channels)
    number = 2 if gives_final else 1

    def by_kernels(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        found = kernels.inputs_before(x.detach(), 3, plan, before)
        return fla_convolution.convolve(x, weight, plan, found, gives_final=gives_final)

    def in_torch(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs before segments are those that a walk over levels finds."""
        ended: list[Tensor] = []
        outputs: list[Tensor] = []
        initial = before
        parts = x.split([sum(level.lengths) for level in plan.levels])
        for level, part in zip(plan.levels, parts, strict=True):
            if level.parents is not None:
                initial = torch.cat(ended)[level.parents]
            output, last = convolution.convolve(part, weight, level.lengths, initial)
            outputs.append(output)
            ended.append(last)
        return torch.cat(outputs), torch.cat(ended)

    def work(call: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        outputs = call(*leaves)[:number]
        return [*outputs, *torch.autograd.grad(outputs[0], leaves, upstream.to(dtype))]

    return distances(work(by_kernels, torch.float32), work(in_torch, torch.float64))


def keep_one_variant() -> set[str]:
    """Leave one launch to each kernel: which is the fastest cannot be measured here. Returns a set
    into which go the names of kernels with several that are called."""
    called: set[str] = set()

    def watch(kernel: Autotuner) -> None:
        run = kernel.run

        def watched(*args: Any, **kwargs: Any) -> Any:
            called.add(kernel.base_fn.__name__)
            return run(*args, **kwargs)

        kernel.run = watched

    for kernel in gc.get_objects():
        if isinstance(kernel, Autotuner) and len(kernel.configs) > 1:
            kernel.configs = kernel.configs[:1]
            watch(kernel)
    return called


def tensor_range(*bounds: Any) -> Generator[Any]:
    """Numbers of a kernel's loop as it has them when it is compiled, not those of Python."""
    for number in builtins.range(*bounds):
        yield tl.full((), number, tl.int32)


def main() -> None:
    searched = keep_one_variant()
    chunk_delta_h.range = tensor_range  # pyright: ignore[reportAttributeAccessIssue]
    found: dict[str, float] = {}
    for cut in CUTS:
        for stored, gives_final in product((False, True), repeat=2):
            plan = plan_of(cut, stored=stored)
            for check in (of_rule, of_convolution):
                name = f"{check.__name__}, {cut}, {stored=}, {gives_final=}"
                found[name] = check(plan, gives_final=gives_final)
    wrong = {name: error for name, error in found.items() if not error < LIMIT}
    json.dump({"cases": len(found), "wrong": wrong, "searched": sorted(searched)}, sys.stdout)


if __name__ == "__main__":
    main()
