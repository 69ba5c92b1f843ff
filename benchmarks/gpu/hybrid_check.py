"""Training of hybrid models on one GPU: the kernels of `fla-core` against plain torch.

    python -m benchmarks.gpu.hybrid_check [SECTION ...] [--seconds N]

Sections:

    rule         the gated delta rule over packed segments and levels, bfloat16 against float64
    convolution  the causal convolution over the same
    waits        that forward and backward of a layer's recurrence wait for no device
    passes       log-probabilities and gradients of a tiny model and of one shaped as 0.8B
    chunks       the kernel of gradients inside of chunks, by its launch parameters
    layer        forward and backward of 16,384 tokens: rule and convolution, both ways
    speed        forward and backward of 0.8B, 2B and 9B, shared prompts and not

Errors are relative to the norm. Weights are random.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu import hybrid_decode_check
from benchmarks.gpu.models import build, compiled_policy, random_model
from benchmarks.gpu.prefixes_check import Pass, group_rows
from benchmarks.gpu.sections import Run, release
from benchmarks.gpu.timing import device_ms, wall_ms
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.attention.recurrent import kernels
from hone.attention.recurrent.delta_rule import Tokens
from hone.attention.recurrent.launches import use_found_launches
from hone.attention.recurrent.mixing import DeltaHeads, DeltaInputs, mix
from hone.families.registry import inputs_of
from hone.models.contents import follow_inputs
from hone.segments import Segment, SegmentPlan, plan_segments
from hone.trainer.collating import collate
from hone.trainer.prefixes import shared_prefixes
from hone.types import MicroBatch, Row

SECTIONS = ("rule", "convolution", "waits", "passes", "chunks", "layer", "speed")
DEVICE = torch.device("cuda")
CUTS: dict[str, list[tuple[int, int | None]]] = {
    "uneven": [(size, None) for size in (1, 63, 64, 65, 700, 2)],
    "one": [(2048, None)],
    "many": [(129, None)] * 30,
    "shared": [(200, None), (2, None), (300, 0), (64, 0), (1, 1), (70, 1), (65, 0)],
    "three levels": [(130, None), (1, 0), (65, 1), (300, 0), (3, 1), (64, 4)],
}
"""Segments of a pass: tokens, and the number of the segment whose last state comes first."""
HEADS = hybrid_decode_check.HEADS | {
    "27B": DeltaHeads(num_key_heads=16, num_value_heads=48, key_dim=128, value_dim=128),
    "narrow": DeltaHeads(num_key_heads=2, num_value_heads=4, key_dim=32, value_dim=64),
}
CLOSE = 0.02
"""Relative error of what is rounded to bfloat16 several times."""
TINY: dict[str, Any] = {
    "family": "qwen3_5_text",
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def send(array: Any) -> Tensor:
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(DEVICE, non_blocking=True) if DEVICE.type == "cuda" else tensor


def plan_of(cut: Sequence[tuple[int, int | None]], *, reads: bool = False) -> SegmentPlan:
    starts = accumulate((size for size, _ in cut), initial=0)
    segments = [
        Segment(start, size, parent, read=0 if reads and parent is None else None)
        for start, (size, parent) in zip(starts, cut, strict=False)
    ]
    return plan_segments(segments, send)


def rows_plan(lengths: Sequence[int]) -> SegmentPlan:
    return plan_of([(length, None) for length in lengths])


def group_plan(prompt: int, completions: Sequence[int]) -> SegmentPlan:
    return plan_of([(prompt, None), *((length, 0) for length in completions)])


@contextmanager
def plain_torch() -> Generator[None]:
    with patch.object(kernels, "has_fla", lambda: False):
        yield


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def differentiate(
    call: Callable[..., tuple[Tensor, ...]], leaves: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    own = [x.detach().requires_grad_() for x in leaves]
    outputs = call(*own)
    pairs = [(x, g.to(x.dtype)) for x, g in zip(outputs, upstream, strict=True)]
    total = torch.stack([(x.double() * g.double()).sum() for x, g in pairs]).sum()
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, own)]


def draw_tokens(num_tokens: int, heads: DeltaHeads) -> Tokens:
    """Random inputs in the dtypes that a layer gives: bfloat16, and float32 for decays."""
    draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    shape = num_tokens, heads.num_value_heads
    return Tokens(
        q=draw(num_tokens, heads.num_key_heads, heads.key_dim),
        k=draw(num_tokens, heads.num_key_heads, heads.key_dim),
        v=draw(*shape, heads.value_dim),
        g=-torch.exp(2 * torch.randn(shape, device=DEVICE) - 3),
        beta=torch.rand(shape, device=DEVICE).bfloat16(),
    )


def rule(run: Run) -> None:
    names = ("output", "final", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
    run.row("relative errors", *names)
    for (size, heads), (cut, segments), starts in (
        (h, n, s) for h in HEADS.items() for n in CUTS.items() for s in (False, True)
    ):
        name = f"{size}, {cut}, {'states' if starts else 'zeros'}"
        if not run.has_time(name):
            return
        with run.attempt(name):
            torch.manual_seed(0)
            plan = plan_of(segments, reads=starts)
            tokens = draw_tokens(sum(plan.lengths), heads)
            shape = heads.num_value_heads, heads.key_dim, heads.value_dim
            stored = torch.randn(len(plan.levels[0].lengths), *shape, device=DEVICE)
            leaves = [*tokens, *([stored] if starts else [])]
            ended = torch.randn(len(plan.lengths), *shape, device=DEVICE)
            upstream = [torch.randn_like(tokens.v), ended]
            found = differentiate(partial(of_kernels, plan), leaves, upstream)
            exact = differentiate(partial(of_torch, plan), [x.double() for x in leaves], upstream)
            errors = [error(a, b) for a, b in zip(found, exact, strict=True)]
            run.check(name, max(errors) < CLOSE, *errors)


def of_kernels(plan: SegmentPlan, *values: Tensor) -> tuple[Tensor, ...]:
    stored = values[5] if len(values) > 5 else None
    output, final = kernels.gated_delta_rule(Tokens(*values[:5]), plan, stored, gives_final=True)
    assert final is not None
    return output, final


def of_torch(plan: SegmentPlan, *values: Tensor) -> tuple[Tensor, ...]:
    with plain_torch():
        return of_kernels(plan, *values)


def convolutions(run: Run) -> None:
    run.row("relative errors", "output", "last", "dx", "dweight")
    for cut, segments in CUTS.items():
        for starts in (False, True):
            name = f"{cut}, {'inputs before' if starts else 'zeros before'}"
            with run.attempt(name):
                torch.manual_seed(0)
                plan = plan_of(segments, reads=starts)
                draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
                num_channels = HEADS["0.8B"].num_key_heads * 128 * 3
                leaves = [draw(sum(plan.lengths), num_channels), draw(num_channels, 4)]
                before = draw(len(plan.levels[0].lengths), 3, num_channels) if starts else None
                upstream = [torch.randn_like(leaves[0])]
                found = of_convolution(partial(convolved, plan, before), leaves, upstream)
                exact = of_convolution(
                    partial(convolved_in_torch, plan, before),
                    [x.double() for x in leaves],
                    upstream,
                )
                errors = [error(a, b) for a, b in zip(found, exact, strict=True)]
                run.check(name, max(errors) < CLOSE, *errors)


def of_convolution(
    call: Callable[..., tuple[Tensor, Tensor]], leaves: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """The last inputs, which have no gradient, and what `differentiate` finds of the outputs."""
    _, last = call(*leaves)
    output, *gradients = differentiate(lambda *x: call(*x)[:1], leaves, upstream)
    return [output, last, *gradients]


def convolved(
    plan: SegmentPlan, before: Tensor | None, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    output, last = kernels.convolve(x, weight, plan, before, gives_final=True)
    assert last is not None
    return output, last


def convolved_in_torch(
    plan: SegmentPlan, before: Tensor | None, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    with plain_torch():
        return convolved(plan, before, x, weight)


class Layer:
    """Forward and backward of what a layer does between its matrix products."""

    def __init__(self, plan: SegmentPlan, num_tokens: int, heads: DeltaHeads) -> None:
        torch.manual_seed(0)
        tokens = draw_tokens(num_tokens, heads)
        channels = torch.cat([x.flatten(1) for x in (tokens.q, tokens.k, tokens.v)], 1)
        leaves = (channels, tokens.g, tokens.beta)
        self.inputs = DeltaInputs(*(x.requires_grad_() for x in leaves))
        num_channels = channels.shape[1]
        self.weight = torch.randn(
            num_channels, 4, device=DEVICE, dtype=torch.bfloat16, requires_grad=True
        )
        self.heads, self.upstream = heads, torch.randn_like(tokens.v)
        self.context = PackedContext.from_lengths([num_tokens], device=DEVICE)
        self.context.segments = plan

    def __call__(self) -> None:
        output = mix(self.inputs, self.weight, self.heads, None, self.context)
        torch.autograd.grad(output, [*self.inputs, self.weight], self.upstream)


def waits(run: Run) -> None:
    plans = {
        "rows": (rows_plan([300, 64, 700]), 1064),
        "a shared prompt": (group_plan(200, [70, 1, 300]), 571),
    }
    for name, (plan, num_tokens) in plans.items():
        with run.attempt(name):
            layer = Layer(plan, num_tokens, HEADS["0.8B"])
            layer()  # compiles kernels, and measures which of their variants is the fastest
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                layer()
                run.check(f"{name}: no wait", good=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def packed(rows: list[Row], model: PreTrainedModel) -> dict[str, MicroBatch]:
    weights, inputs = [1.0] * len(rows), inputs_of(model.config)
    prefixes = shared_prefixes(rows)
    return {
        "plain": collate(rows, weights, DEVICE, inputs=inputs),
        "shared": collate(rows, weights, DEVICE, prefixes=prefixes, inputs=inputs),
    }


def models(dtype: torch.dtype) -> dict[str, Callable[[], PreTrainedModel]]:
    return {
        "tiny": partial(random_model, **TINY, dtype=dtype),
        "0.8B": partial(hybrid_decode_check.build, "0.8B", dtype, num_hidden_layers=4),
    }


def passes(run: Run) -> None:
    rows = group_rows(3, 200, [70, 1, 300, 64], vocab=1000)
    for size in models(torch.float32):
        if not run.has_time(size):
            return
        found: dict[str, list[Tensor]] = {}
        for dtype, way in (
            (torch.float32, "float32"),
            (torch.bfloat16, "torch"),
            (torch.bfloat16, "fla"),
        ):
            model = models(dtype)[size]()
            follow_inputs(model)
            for name, batch in packed(rows, model).items():
                with nullcontext() if way == "fla" else plain_torch():
                    work = Pass(model, batch)
                    logprobs = work.logprobs()
                    (logprobs * work.weights).sum().backward()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                gradient = torch.cat([grad.double().flatten() for grad in gradients])
                found[f"{way}, {name}"] = [logprobs.detach().double(), gradient]
                model.zero_grad()
            del model
            release()
        exact = found.pop("float32, plain")
        for number, kind in enumerate(("log-probabilities", "gradient")):
            errors = {name: error(own[number], exact[number]) for name, own in found.items()}
            good = errors["float32, shared"] < 1e-3
            for name in ("plain", "shared"):
                good &= errors[f"fla, {name}"] < 1.5 * errors[f"torch, {name}"] + 1e-4
            told = ", ".join(f"{name} {value:.2e}" for name, value in errors.items())
            run.check(f"{size} {kind}: {told}", good)


def chunks(run: Run) -> None:
    from hone.attention.recurrent.chunk_gradients import ChunkInputs, Tuning, chunk_gradients

    lengths = [1024] * 16
    plan = rows_plan(lengths)
    run.row("gradients inside of chunks, 16,384 tokens", "us", "TB/s", "against the first")
    for size in ("0.8B", "9B"):
        torch.manual_seed(0)
        heads = HEADS[size]
        tokens = draw_tokens(sum(lengths), heads)
        states = len(plan.chunks), heads.num_value_heads, heads.key_dim, heads.value_dim
        draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        normed = [torch.nn.functional.normalize(x, dim=-1) for x in (tokens.q, tokens.k)]
        inputs = ChunkInputs(
            *normed,
            *(draw(tokens.v.shape) for _ in range(3)),
            -torch.rand_like(tokens.g).view(-1, 64, heads.num_value_heads).cumsum(1).flatten(0, 1),
            *(draw(states) for _ in range(2)),
        )
        first: list[Tensor] = []
        for tuning in itertools.starmap(
            Tuning, itertools.product((64, 128), (32, 64, 128), (4, 8))
        ):
            name = f"{size}: {tuning.keys} keys, {tuning.values} values, {tuning.num_warps} warps"
            if not run.has_time(name):
                return
            with run.attempt(name):
                work = partial(
                    chunk_gradients, inputs, plan.cu_seqlens, plan.chunks, 0.1, tuning=tuning
                )
                found = [x.double() for x in work()]
                first = first or found
                off = max(error(x, y) for x, y in zip(found, first, strict=True))
                ms = device_ms(work)
                num_bytes = sum(x.nbytes for x in (*inputs, *work()))
                run.check(name, off < 1e-2, 1e3 * ms, num_bytes / ms / 1e9, off)


def layer_times(run: Run) -> None:
    run.row("forward and backward of 16,384 tokens", "fla ms", "torch ms", "times")
    lengths = [1024] * 16
    plan = rows_plan(lengths)
    for size in ("0.8B", "9B"):
        heads = HEADS[size]
        torch.manual_seed(0)
        tokens = draw_tokens(sum(lengths), heads)
        shape = len(lengths), heads.num_value_heads, heads.key_dim, heads.value_dim
        upstream = [torch.randn_like(tokens.v), torch.randn(shape, device=DEVICE)]
        channels = torch.cat([x.flatten(1) for x in (tokens.q, tokens.k, tokens.v)], 1)
        weight = torch.randn(channels.shape[1], 4, device=DEVICE).bfloat16()
        of_channels = torch.randn_like(channels)
        works = {
            "rule": (
                partial(differentiate, partial(of_kernels, plan), [*tokens], upstream),
                partial(differentiate, partial(of_torch, plan), [*tokens], upstream),
            ),
            "convolution": (
                partial(grads_of_convolution, plan, channels, weight, of_channels, convolved),
                partial(
                    grads_of_convolution, plan, channels, weight, of_channels, convolved_in_torch
                ),
            ),
        }
        for name, (ours, theirs) in works.items():
            if not run.has_time(f"{size} {name}"):
                return
            with run.attempt(f"{size} {name}"):
                times = device_ms(ours), device_ms(theirs, 3)
                run.row(f"{size} {name}", *times, times[1] / times[0])


def grads_of_convolution(
    plan: SegmentPlan, x: Tensor, weight: Tensor, upstream: Tensor, call: Callable[..., Any]
) -> None:
    own = [value.detach().requires_grad_() for value in (x, weight)]
    output, _ = call(plan, None, *own)
    torch.autograd.grad(output, own, upstream)


SHARED = {"256 + 8 x 1,024": (256, [1024] * 8), "512 + 8 x 512": (512, [512] * 8)}
"""Prompts and completions of a group of eight."""


def speed(run: Run) -> None:
    """Time passes of one group, where a host that is slower than the device shows, and of two
    groups, where it does not; each with shared prompts and without."""
    run.row("forward and backward", "device ms", "wall ms", "tokens", "tokens/s of all rows")
    for shape, recompute in (("0.8b", "off"), ("2b", "off"), ("9b", "full")):
        if not run.has_time(shape):
            return
        model = compiled_policy(build(f"qwen3.5-{shape}"), recompute=recompute).model
        for (group, (prompt, completions)), groups in itertools.product(SHARED.items(), (1, 2)):
            rows = group_rows(groups, prompt, completions, vocab=model.config.vocab_size)
            for name, batch in packed(rows, model).items():
                case = f"{shape}, {groups} x ({group}), {name}"
                if not run.has_time(case):
                    return
                with run.attempt(case):
                    work = Pass(model, batch)
                    times = device_ms(work, 5), wall_ms(work, 5)
                    all_tokens = sum(row.num_tokens for row in rows)
                    run.row(case, *times, batch.num_tokens, 1e3 * all_tokens / times[1])
        del model
        torch.compiler.reset()
        release()


def main() -> None:
    run = Run(__doc__, SECTIONS, seconds=240)
    use_found_launches(DEVICE)
    work = (rule, convolutions, waits, passes, chunks, layer_times, speed)
    sys.exit(run.go({name: partial(part, run) for name, part in zip(SECTIONS, work, strict=True)}))


if __name__ == "__main__":
    main()
