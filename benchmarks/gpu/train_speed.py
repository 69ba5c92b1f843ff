"""Where a training step's time goes on one GPU.

    python -m benchmarks.gpu.train_speed [SECTION ...] [--seconds N]

Sections; those with a star run only when they are named:

    step         forward and backward of whole models, compiled, packed samples of 2,048 tokens
    profile      the longest kernels of one such pass, and how long the device waits
    attention *  FlashAttention over packed rows, forward and backward, beside other kernels
    experts *    layers of Qwen3-30B-A3B: what one takes, and the longest kernels
    hybrids *    the step of Qwen3.5 beside that of Qwen3 of about the same size, and their kernels

Rates are shares of the matrix rate measured at the start. A whole pass counts 6 FLOPs a parameter
and token and causal attention; what is recomputed does not count.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.models import build, compiled_policy
from benchmarks.gpu.sections import Run, release
from benchmarks.gpu.timing import device_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from hone.attention import PackedContext, exact
from hone.attention.backends import packed_attention
from hone.families.registry import inputs_of
from hone.families.shape import ModelShape
from hone.models.decoder import hidden_states
from hone.segments import Segment, plan_segments
from hone.trainer.logprobs import token_logprobs
from hone.trainer.policy import Policy

TOKENS, LENGTH = 16384, 2048
GIB = 1 << 30
SECTIONS = ("step", "profile", "attention", "experts", "hybrids")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=draw, device="cuda").to(dtype)


@cache
def matrix_rate() -> float:
    """FLOP/s of a large product."""
    a, b = normal(8192, 8192), normal(8192, 8192, seed=1)
    return 2 * 8192**3 / (device_ms(lambda: a @ b, 20) * 1e-3)


# -- attention -----------------------------------------------------------------------------------


def attention(run: Run) -> None:
    run.row("attention, heads of 128", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s")
    equal = [LENGTH] * (TOKENS // LENGTH)
    for num_heads in (16, 32):
        for lengths in (equal, [TOKENS], [257, 1023, 3000, 4096, 8008]):
            name = f"{num_heads} heads, {len(lengths)} rows <= {max(lengths)}"
            for kernel, num_kv_heads in (
                ("flash", 8),
                ("flash", num_heads),
                ("exact", 8),
                ("cudnn", 8),
                ("cudnn", num_heads),
            ):
                own_keys = num_kv_heads == num_heads
                if lengths is not equal and (own_keys or kernel == "cudnn"):
                    continue
                with run.attempt(f"{kernel}/{num_kv_heads} {name}"):
                    one_attention(run, kernel, name, lengths, (num_heads, num_kv_heads))


def one_attention(
    run: Run, kernel: str, name: str, lengths: list[int], heads: tuple[int, int]
) -> None:
    num_heads, num_kv_heads = heads
    q = normal(TOKENS, num_heads, 128).requires_grad_()
    k, v = (normal(TOKENS, num_kv_heads, 128, seed=s).requires_grad_() for s in (1, 2))
    grad = normal(TOKENS, num_heads, 128, seed=3)
    context = PackedContext.from_lengths(lengths, device="cuda")

    def batched(x: Tensor) -> Tensor:
        return x.view(-1, LENGTH, x.shape[1], 128).transpose(1, 2)

    def forward() -> Tensor:
        if kernel == "flash":
            return packed_attention(q, k, v, context, scale=128**-0.5)
        if kernel == "exact":
            return exact.packed_attention(q, k, v, context, scale=128**-0.5, window=None)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                *map(batched, (q, k, v)), is_causal=True, enable_gqa=num_kv_heads < num_heads
            )

    flops = sum(2 * n * n for n in lengths) * num_heads * 128
    upstream = batched(grad) if kernel == "cudnn" else grad
    with torch.no_grad():
        forward_ms = device_ms(forward)
    output = forward()
    backward_ms = device_ms(
        lambda: torch.autograd.grad(output, (q, k, v), upstream, retain_graph=True)
    )
    rates = (flops / forward_ms / 1e9, 2.5 * flops / backward_ms / 1e9)
    run.row(f"{kernel}/{num_kv_heads} {name}", forward_ms, rates[0], backward_ms, rates[1])


# -- whole models --------------------------------------------------------------------------------

STEPS: dict[str, tuple[tuple[int, dict[str, Any]], ...]] = {
    "qwen3-0.6b": (
        (TOKENS, {}),
        (TOKENS, {"recompute": "selective"}),
        (TOKENS, {"recompute": "full"}),
        (2 * TOKENS, {}),
    ),
    "qwen3-1.7b": ((TOKENS, {}), (TOKENS, {"recompute": "full"})),
    "qwen3-4b": (
        (TOKENS, {"recompute": "full"}),
        (TOKENS, {"recompute": "full", "recompute_every_n_layers": 2}),
        (TOKENS, {"recompute": "selective"}),
    ),
    "qwen3-8b": (
        (TOKENS, {"recompute": "full"}),
        (TOKENS, {"recompute": "full", "recompute_every_n_layers": 2}),
    ),
}
HYBRIDS: dict[str, tuple[tuple[int, dict[str, Any]], ...]] = {
    "qwen3.5-9b": ((TOKENS, {"recompute": "full"}),),
    "qwen3-8b": ((TOKENS, {"recompute": "full"}),),
    "qwen3.5-2b": ((TOKENS, {}),),
    "qwen3-1.7b": ((TOKENS, {}),),
    "qwen3.5-0.8b": ((TOKENS, {}),),
    "qwen3-0.6b": ((TOKENS, {}),),
}
PROFILED_HYBRIDS = ("qwen3.5-0.8b", "qwen3.5-9b")
PROFILED = {"qwen3-0.6b": {}, "qwen3-4b": {"recompute": "full"}}
COLUMNS = ("tokens", "ms", "share", "peak GiB", "kept GiB", "host ms", "first s")


def upload(values: Any) -> Tensor:
    return torch.as_tensor(values).pin_memory().to("cuda", non_blocking=True)


class Pass:
    """Forward and backward over samples of `LENGTH` tokens, into float32 masters' gradients."""

    def __init__(self, policy: Policy, num_tokens: int) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        config = policy.model.config
        self.policy, self.num_tokens = policy, num_tokens
        self.lengths = [min(LENGTH, num_tokens)] * max(num_tokens // LENGTH, 1)
        length = self.lengths[0]
        self.ids = torch.randint(config.vocab_size, (num_tokens,), generator=draw, device="cuda")
        self.positions = torch.arange(length, device="cuda").repeat(len(self.lengths))
        self.context = PackedContext.from_lengths(self.lengths, device="cuda")
        if inputs_of(config).has_states:
            starts = range(0, num_tokens, length)
            segments = [Segment(start, length) for start in starts]
            self.context.segments = plan_segments(segments, upload)
        self.predicts = torch.arange(num_tokens, device="cuda")[self.positions < length - 1]
        self.weights = torch.randn(len(self.predicts), generator=draw, device="cuda")
        self.flops = 3 * ModelShape.from_config(config.to_dict()).forward_flops(self.lengths)

    def __call__(self) -> None:
        hidden = hidden_states(self.policy.model, self.ids, self.positions, self.context)
        logprobs, _ = token_logprobs(
            self.policy.model,
            hidden.index_select(0, self.predicts),
            self.ids[self.predicts + 1],
            temperature=1.0,
            chunk_tokens=1024,
            with_entropy=True,
        )
        (logprobs * self.weights).sum().backward()


def step(run: Run) -> None:
    time_shapes(run, STEPS)


def hybrids(run: Run) -> None:
    for shape, variants in HYBRIDS.items():
        time_shapes(run, {shape: variants})
        if shape in PROFILED_HYBRIDS and run.has_time(f"profile, {shape}"):
            with run.attempt(f"profile, {shape}"):
                profile_shape(run, shape, variants[0][1])
            forget()


def profile_shape(run: Run, shape: str, options: Mapping[str, Any]) -> None:
    policy = compiled_policy(build(shape), **options)
    longest_kernels(run, shape, Pass(policy, TOKENS))


def forget() -> None:
    """Give back the memory of the models before the next, of which 9B leaves room for none."""
    torch.compiler.reset()
    release()


def time_shapes(run: Run, shapes: Mapping[str, Sequence[tuple[int, dict[str, Any]]]]) -> None:
    run.row("forward and backward", *COLUMNS)
    for shape, variants in shapes.items():
        if not run.has_time(shape):
            return
        for num_tokens, options in variants:
            name = " ".join((shape, *map(str, options.values())))
            with run.attempt(name):
                time_passes(run, name, compiled_policy(build(shape), **options), num_tokens)
            forget()


def time_passes(run: Run, name: str, policy: Policy, num_tokens: int) -> float:
    """Milliseconds of a pass."""
    work = Pass(policy, num_tokens)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    kept = torch.cuda.memory_allocated() / GIB
    time_ms = device_ms(work, 5)
    peak = torch.cuda.max_memory_allocated() / GIB
    share = work.flops / (time_ms * 1e-3) / matrix_rate()
    host_ms = host_milliseconds(Pass(policy, min(128, num_tokens)))
    run.row(name, num_tokens, time_ms, share, peak, kept, host_ms, first_s)
    return time_ms


def host_milliseconds(work: Callable[[], object]) -> float:
    """How long the host takes for a pass that is little work for the device."""
    times: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def experts(run: Run) -> None:
    """Whole models of 48 layers do not fit with their masters: what 2 and 4 take tells the rest."""
    run.row("experts, tokens/s of 48 layers", *COLUMNS)
    shape = "qwen3-30b-a3b"
    for recompute in ("off", "full"):
        times: list[float] = []
        for num_layers in (2, 4):
            with run.attempt(f"{num_layers} layers, recompute {recompute}"):
                policy = compiled_policy(build(shape, num_layers=num_layers), recompute=recompute)
                name = f"{num_layers} layers, recompute {recompute}"
                times.append(time_passes(run, name, policy, TOKENS))
        if len(times) == 2:
            layer_ms = (times[1] - times[0]) / 2
            rate = TOKENS / (times[0] + 46 * layer_ms) * 1e3
            run.row(f"a layer, recompute {recompute}", f"{layer_ms:.2f} ms", f"{rate:.0f} tokens/s")
    with run.attempt("profile, experts"):
        policy = compiled_policy(build(shape, num_layers=4), recompute="full")
        longest_kernels(run, "4 layers", Pass(policy, TOKENS))


GROUPS = {
    "attention": ("flash", "fmha", "cudnn_generated"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "copies and fills": ("memcpy", "memset", "fill", "copy"),
    "compiled": ("triton",),
}


def group_of(kernel: str) -> str:
    words = kernel.lower()
    return next((g for g, parts in GROUPS.items() if any(p in words for p in parts)), "other")


def profile_passes(run: Run) -> None:
    for shape, options in PROFILED.items():
        if not run.has_time(f"profile, {shape}"):
            return
        with run.attempt(f"profile, {shape}"):
            profile_shape(run, shape, options)
        forget()


def longest_kernels(run: Run, name: str, work: Callable[[], object]) -> None:
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    totals: defaultdict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name].append(event.device_time / 1e3)
            spans.append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    if not spans:
        run.check(f"{name}: the profiler saw no kernel", False)
        return
    busy = sum(map(sum, totals.values()))
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    groups: defaultdict[str, float] = defaultdict(float)
    for kernel, times in totals.items():
        groups[group_of(kernel)] += sum(times)
    run.row(f"{name}, {len(spans)} launches, ms", f"{busy:.1f} of {span:.1f}")
    run.row("  " + ", ".join(f"{group} {total:.1f}" for group, total in groups.items()))
    for kernel, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:24]:
        run.row(f"  {sum(times):8.2f} ms {len(times):5d} x  {kernel[:110]}")


def main() -> None:
    run = Run(__doc__, SECTIONS, on_request=SECTIONS[2:], seconds=240)
    rate = f"{matrix_rate() / 1e12:.0f} TFLOP/s"
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", rate)
    work = (step, profile_passes, attention, experts, hybrids)
    sys.exit(run.go({name: partial(part, run) for name, part in zip(SECTIONS, work, strict=True)}))


if __name__ == "__main__":
    main()
