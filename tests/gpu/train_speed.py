"""Where a training step's time goes on one GPU.

    python -m tests.gpu.train_speed [SECTION ...] [--seconds N]

Sections; those with a star run only when they are named:

    layers       gradients of the trainer's layers in bfloat16 against float32, beside transformers'
    kernels      rates of the kernels between products, over their tuning
    step         forward and backward of whole models, packed samples of 2,048 tokens
    profile      the longest kernels of one such pass, and how long the device waits
    present *    transformers' compiled layers in a pass of the 0.6B shape
    products *   each product of a layer, forward and backward; weight gradients in three formats
    attention *  FlashAttention over packed rows, forward and backward, beside other kernels

Rates are shares of the matrix rate measured at the start. A whole pass counts 6 FLOPs a parameter
and token and causal attention; what is recomputed does not count.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from hone.attention import PackedContext, exact
from hone.attention.backends import packed_attention
from hone.models import layer_gradients, layer_kernels
from hone.models.decoder import hidden_states
from hone.models.training_layers import Backbone, TrainingDecoder
from hone.planner.model_shape import ModelShape
from hone.trainer.logprobs import token_logprobs
from hone.trainer.policy import Policy
from tests.gpu.models import build, random_model
from tests.gpu.rounding import errors
from tests.gpu.sections import Run
from tests.gpu.timing import device_ms

TOKENS, LENGTH = 16384, 2048
GIB = 1 << 30
SECTIONS = ("layers", "kernels", "step", "profile", "present", "products", "attention")
SHAPES = {
    # hidden, (qkv, o input), gate and up, heads
    "0.6b": (1024, 4096, 2048, 6144),
    "1.7b": (2048, 4096, 2048, 12288),
    "4b": (2560, 6144, 4096, 19456),
    "8b": (4096, 6144, 4096, 24576),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=draw, device="cuda").to(dtype)


@cache
def matrix_rate() -> float:
    """FLOP/s of a large product."""
    a, b = normal(8192, 8192), normal(8192, 8192, seed=1)
    return 2 * 8192**3 / (device_ms(lambda: a @ b, 20) * 1e-3)


# -- layers --------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 200, "tie_word_embeddings": False},
}
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "every": 2},
)
ROWS, VOCAB = (257, 1, 700, 66), 4096


MAX_RATIO, MAX_APART = 1.5, 0.02
"""Error over that of transformers' layers; relative distance of what modes of recomputing find."""


def layers(run: Run) -> None:
    """Relative errors against float32 by kind of parameter, and of hidden states."""
    for family, fields in FAMILIES.items():
        if run.has_time(f"layers, {family}"):
            with run.attempt(f"layers, {family}"):
                one_family(run, family, fields)


def small(family: str, fields: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    known = {
        "vocab_size": VOCAB,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128 if family == "qwen3" else 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    }
    model = random_model(family, dtype=torch.bfloat16, **(known | fields))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model if dtype == torch.bfloat16 else model.to(dtype)


def one_family(run: Run, family: str, fields: dict[str, Any]) -> None:
    reference = small(family, fields, torch.float32)
    wanted = gradients(reference, partial(hidden_states, reference))
    model = small(family, fields, torch.bfloat16)
    policy = Policy(model)
    theirs = gradients(model, partial(hidden_states, model), policy)
    mine = [
        gradients(model, TrainingDecoder(model, policy.gradient_of, **mode), policy)
        for mode in MODES
    ]
    run.row(f"{family}, errors against float32", "transformers", "own", "ratio")
    of_theirs, of_mine = errors(theirs, wanted), errors(mine[0], wanted)
    for kind, plain in of_theirs.items():
        ratio = of_mine[kind] / plain
        run.check(f"{family}, {kind}", ratio <= MAX_RATIO, plain, of_mine[kind], ratio)
    for mode, other in zip(MODES[1:], mine[1:], strict=True):
        apart = errors(other, mine[0])["all"]
        name = f"{family}, {' '.join(map(str, mode.values()))} from off"
        run.check(name, apart <= MAX_APART, apart)


def gradients(
    model: PreTrainedModel, backbone: Backbone, policy: Policy | None = None
) -> dict[str, Tensor]:
    """Those of two micro-batches, in float32 and by name, and the hidden states of the first."""
    for parameter in policy.masters.values() if policy else model.parameters():
        parameter.grad = None
    found: dict[str, Tensor] = {}
    for seed in range(2):
        draw = torch.Generator("cuda").manual_seed(seed)
        ids = torch.randint(VOCAB, (sum(ROWS),), generator=draw, device="cuda")
        positions = torch.cat([torch.arange(n, device="cuda") for n in ROWS])
        hidden = backbone(ids, positions, PackedContext.from_lengths(ROWS, device="cuda"))
        grad = torch.randn(hidden.shape, generator=draw, device="cuda")
        hidden.backward(grad.to(hidden.dtype))
        found.setdefault("hidden.weight", hidden.detach().float())
    masters = policy.masters if policy else dict(model.named_parameters())
    return found | {n: p.grad.clone() for n, p in masters.items() if p.grad is not None}


# -- kernels -------------------------------------------------------------------------------------


def kernels(run: Run) -> None:
    run.row("kernel, GB/s, as it is, then tuned otherwise", "0.6b", "8b")
    inputs = {shape: KernelInputs(*SHAPES[shape]) for shape in ("0.6b", "8b")}
    tunings: dict[str, list[dict[str, int]]] = {
        "add_norm": [{}, {"NORM_WARPS": 4}, {"NORM_TILE": 2048, "NORM_WARPS": 4}],
        "norm_gradients": [
            {},
            {"NORM_WARPS": 4},
            {"NORM_WARPS": 16},
            {"NORM_TILE": 2048, "NORM_WARPS": 4},
            {"PROGRAMS": 528},
            {"PROGRAMS": 264},
        ],
        "silu": [{}],
        "silu_gradients": [{}, {"SILU_BLOCK": 2048}],
        "rotate": [{}, {"ROTATE_ROWS": 8}, {"ROTATE_ROWS": 32}],
        "rotate_gradients": [
            {},
            {"ROTATE_GRADIENT_ROWS": 16},
            {"ROTATE_GRADIENT_ROWS": 64},
            {"PROGRAMS": 2112},
            {"PROGRAMS": 528},
        ],
    }
    for name, settings in tunings.items():
        for setting in settings:
            tuned = patch.multiple(layer_gradients, **setting) if setting else nullcontext()
            with run.attempt(f"{name} {setting}"), tuned:
                rates = [x.rate(name) for x in inputs.values()]
                run.row(" ".join((name, *(f"{k}={v}" for k, v in setting.items()))), *rates)


class KernelInputs:
    def __init__(self, hidden: int, qkv: int, _: int, gate_up: int) -> None:
        self.x, self.residual, self.grad = (normal(TOKENS, hidden, seed=s) for s in range(3))
        self.weight = normal(hidden)
        self.gate_up = normal(TOKENS, gate_up)
        self.grad_gate_up = torch.empty_like(self.gate_up)
        self.grad_activated = normal(TOKENS, gate_up // 2)
        self.qkv = normal(TOKENS, qkv // 128, 128)
        num_heads = self.num_heads = qkv // 128 - 16
        self.grad_heads = tuple(normal(TOKENS, n, 128, seed=n) for n in (num_heads, 8, 8))
        self.positions = torch.arange(LENGTH, device="cuda").repeat(TOKENS // LENGTH)
        self.rotary = normal(LENGTH, 128)
        self.head_norm = normal(128)

    def rate(self, name: str) -> float:
        """GB/s of the bytes that must move."""
        ops, x, qkv = layer_gradients, self.x, self.qkv
        norms = (self.head_norm, self.head_norm, 1e-6)
        works: dict[str, tuple[float, Callable[[], object]]] = {
            "add_norm": (4 * x.nbytes, lambda: ops.add_norm(self.residual, x, self.weight, 1e-6)),
            "norm_gradients": (
                5 * x.nbytes,
                lambda: ops.norm_gradients(
                    x, self.weight, self.grad, 1e-6, residual_grad=self.residual
                ),
            ),
            "silu": (1.5 * self.gate_up.nbytes, lambda: layer_kernels.silu_mul(self.gate_up)),
            "silu_gradients": (
                3 * self.gate_up.nbytes,
                lambda: ops.silu_gradients(
                    self.gate_up, self.grad_activated, out=self.grad_gate_up
                ),
            ),
            "rotate": (
                2 * qkv[:, : self.num_heads + 8].numel() * 2,
                lambda: ops.rotate(qkv, self.positions, self.rotary, *norms, self.num_heads),
            ),
            "rotate_gradients": (
                2 * qkv.nbytes + qkv[:, : self.num_heads + 8].numel() * 2,
                lambda: ops.rotate_gradients(
                    qkv, self.grad_heads, self.positions, self.rotary, *norms
                ),
            ),
        }
        num_bytes, work = works[name]
        return num_bytes / device_ms(work) / 1e6


# -- products ------------------------------------------------------------------------------------


def products(run: Run) -> None:
    run.row("product, shares", "out x in", "forward", "dX", "dW bf16", "dW f32", "dW += f32")
    for shape in ("0.6b", "4b", "8b"):
        hidden, qkv, attended, gate_up = SHAPES[shape]
        sizes = {
            "qkv": (qkv, hidden),
            "o": (hidden, attended),
            "gate_up": (gate_up, hidden),
            "gate or up alone": (gate_up // 2, hidden),
            "k or v alone": (1024, hidden),
            "down": (hidden, gate_up // 2),
        }
        for name, (width_out, width_in) in sizes.items():
            with run.attempt(f"{shape} {name}"):
                one_product(run, f"{shape} {name}", width_out, width_in)


def one_product(run: Run, name: str, width_out: int, width_in: int) -> None:
    x, weight = normal(TOKENS, width_in), normal(width_out, width_in, seed=1)
    grad = normal(TOKENS, width_out, seed=2)
    total = torch.zeros(width_out, width_in, device="cuda")
    flops = 2 * TOKENS * width_out * width_in
    add = torch.ops.aten.addmm.dtype_out

    def share(work: Callable[[], object]) -> float:
        return flops / (device_ms(work) * 1e-3) / matrix_rate()

    wide = torch.mm(grad.T, x, out_dtype=torch.float32)
    add(total, grad.T, x, torch.float32, out=total)
    apart = float((total - wide).norm() / wide.norm())
    run.check(
        name,
        apart <= 1e-5,
        f"{width_out}x{width_in}",
        share(lambda: F.linear(x, weight)),
        share(lambda: grad @ weight),
        share(lambda: grad.T @ x),
        share(lambda: torch.mm(grad.T, x, out_dtype=torch.float32)),
        share(lambda: add(total, grad.T, x, torch.float32, out=total)),
    )


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
        (TOKENS, {"recompute": "full", "every": 2}),
        (TOKENS, {"recompute": "selective"}),
    ),
    "qwen3-8b": ((TOKENS, {"recompute": "full"}), (TOKENS, {"recompute": "full", "every": 2})),
}
PROFILED = {"qwen3-0.6b": {}, "qwen3-4b": {"recompute": "full"}}
COLUMNS = ("tokens", "ms", "share", "peak GiB", "kept GiB", "host ms", "first s")


class Pass:
    """Forward and backward over samples of `LENGTH` tokens, into float32 masters' gradients."""

    def __init__(self, policy: Policy, backbone: Backbone, num_tokens: int) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        config = policy.model.config
        self.policy, self.backbone, self.num_tokens = policy, backbone, num_tokens
        self.lengths = [min(LENGTH, num_tokens)] * max(num_tokens // LENGTH, 1)
        length = self.lengths[0]
        self.ids = torch.randint(config.vocab_size, (num_tokens,), generator=draw, device="cuda")
        self.positions = torch.arange(length, device="cuda").repeat(len(self.lengths))
        self.context = PackedContext.from_lengths(self.lengths, device="cuda")
        self.predicts = torch.arange(num_tokens, device="cuda")[self.positions < length - 1]
        self.weights = torch.randn(len(self.predicts), generator=draw, device="cuda")
        self.flops = 3 * ModelShape.from_config(config.to_dict()).forward_flops(self.lengths)

    def __call__(self) -> None:
        hidden = self.backbone(self.ids, self.positions, self.context)
        logprobs, _ = token_logprobs(
            self.policy.model,
            hidden.index_select(0, self.predicts),
            self.ids[self.predicts + 1],
            temperature=1.0,
            chunk_tokens=1024,
            with_entropy=True,
            compile=True,
        )
        (logprobs * self.weights).sum().backward()


def own_backbone(policy: Policy, options: dict[str, Any]) -> Backbone:
    return TrainingDecoder(policy.model, policy.gradient_of, **options)


def step(run: Run) -> None:
    run.row("forward and backward", *COLUMNS)
    for shape, variants in STEPS.items():
        if not run.has_time(f"step, {shape}"):
            return
        with run.attempt(f"step, {shape}"):
            one_shape(run, shape, variants)


def one_shape(run: Run, shape: str, variants: tuple[tuple[int, dict[str, Any]], ...]) -> None:
    policy = Policy(build(shape))
    for num_tokens, options in variants:
        name = " ".join((shape, *map(str, options.values())))
        with run.attempt(name):
            time_passes(run, name, policy, own_backbone(policy, options), num_tokens)


def present(run: Run) -> None:
    run.row("transformers' layers, compiled", *COLUMNS)
    policy = Policy(build("qwen3-0.6b"), compile=True)
    time_passes(run, "qwen3-0.6b", policy, partial(hidden_states, policy.model), TOKENS)


def time_passes(run: Run, name: str, policy: Policy, backbone: Backbone, num_tokens: int) -> None:
    work = Pass(policy, backbone, num_tokens)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    kept = torch.cuda.memory_allocated() / GIB
    time_ms = device_ms(work, 5)
    peak = torch.cuda.max_memory_allocated() / GIB
    share = work.flops / (time_ms * 1e-3) / matrix_rate()
    host_ms = host_milliseconds(Pass(policy, backbone, min(128, num_tokens)))
    run.row(name, num_tokens, time_ms, share, peak, kept, host_ms, first_s)


def host_milliseconds(work: Callable[[], object]) -> float:
    """How long the host takes for a pass that is little work for the device."""
    times: list[float] = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


GROUPS = {
    "attention": ("flash", "fmha", "cudnn_generated"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "copies and fills": ("memcpy", "memset", "fill", "copy"),
    "compiled": ("triton",),
}


def group_of(kernel: str) -> str:
    if kernel.startswith("_"):
        return "between products"
    words = kernel.lower()
    return next((g for g, parts in GROUPS.items() if any(p in words for p in parts)), "other")


def profile_passes(run: Run) -> None:
    for shape, options in PROFILED.items():
        if not run.has_time(f"profile, {shape}"):
            return
        with run.attempt(f"profile, {shape}"):
            policy = Policy(build(shape))
            longest_kernels(run, shape, Pass(policy, own_backbone(policy, options), TOKENS))


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
    run = Run(__doc__, SECTIONS, on_request=SECTIONS[4:], seconds=240)
    rate = f"{matrix_rate() / 1e12:.0f} TFLOP/s"
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", rate)
    work = (layers, kernels, step, profile_passes, present, products, attention)
    sys.exit(run.go({name: partial(part, run) for name, part in zip(SECTIONS, work, strict=True)}))


if __name__ == "__main__":
    main()
