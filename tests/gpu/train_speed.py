"""Where a training step's time goes on one GPU: `python -m tests.gpu.train_speed [PART ...]`.

Parts; those with a star run only when they are named:

    layers       gradients of the trainer's layers in bfloat16 against float32, beside transformers'
    kernels      rates of the kernels between products, over their tuning
    step         forward and backward of whole models, packed samples of 2,048 tokens
    profile      the longest kernels of one such pass, and how long the device waits (0.6B, 4B)
    present *    adds transformers' compiled layers to `step` (0.6B)
    products *   each product of a layer, forward and backward; weight gradients in three formats
    attention *  FlashAttention over packed rows, forward and backward, beside other kernels

Rates are shares of the matrix rate measured at the start. A whole pass counts 6 FLOPs a parameter
and token and causal attention; what is recomputed does not count.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hone.attention import ATTENTION_NAME, PackedContext
from hone.attention.backends import packed_attention
from hone.models import layer_gradients, layer_kernels
from hone.models.decoder import hidden_states
from hone.models.training_layers import Backbone, TrainingDecoder
from hone.planner.model_shape import ModelShape
from hone.trainer.logprobs import token_logprobs
from hone.trainer.policy import Policy
from tests.gpu.trainer_check import build

TOKENS, LENGTH = 16384, 2048
GIB = 1 << 30
PARTS = ("layers", "kernels", "step", "profile", "present", "products", "attention")
DEFAULT = PARTS[:4]
SHAPES = {
    # hidden, (qkv, o input), gate and up, heads
    "0.6b": (1024, 4096, 2048, 6144),
    "1.7b": (2048, 4096, 2048, 12288),
    "4b": (2560, 6144, 4096, 19456),
    "8b": (4096, 6144, 4096, 24576),
}


def say(*cells: object) -> None:
    texts = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
    first, *others = texts
    sys.stdout.write(f"{first:34}" + "".join(f"{text:>13}" for text in others) + "\n")
    sys.stdout.flush()


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Median time on the device, after two calls to warm up."""
    work()
    work()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=draw, device="cuda").to(dtype)


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """One part that fails must not hide the others."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # a report, whatever it is
        say(what, f"FAILED {type(error).__name__}: {str(error)[:300]}")
        traceback.print_exc()
    gc.collect()
    torch.cuda.empty_cache()


def matrix_rate() -> float:
    """FLOP/s of a large product."""
    a, b = normal(8192, 8192), normal(8192, 8192, seed=1)
    return 2 * 8192**3 / (milliseconds(lambda: a @ b, 20) * 1e-3)


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
ROWS = (257, 1, 700, 66)


def layers(_: float) -> None:
    """Relative errors of gradients: the largest of each kind of parameter, and of hidden states."""
    say("gradients", "transformers", "own", "largest ratio", "modes apart", "(errors against fp32)")
    for family, fields in FAMILIES.items():
        with attempt(family):
            one_family(family, fields)


def small(family: str, fields: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 4096,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128 if family == "qwen3" else 64,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            **fields,
        },
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def one_family(family: str, fields: dict[str, Any]) -> None:
    reference = small(family, fields, torch.float32)
    wanted = gradients(reference, partial(hidden_states, reference))
    model = small(family, fields, torch.bfloat16)
    policy = Policy(model)
    theirs = gradients(model, partial(hidden_states, model), policy)
    mine = [
        gradients(model, TrainingDecoder(model, collector(policy), **mode), policy)
        for mode in MODES
    ]
    assert wanted.keys() == theirs.keys() == mine[0].keys(), (
        f"{wanted.keys() ^ theirs.keys()} {wanted.keys() ^ mine[0].keys()}"
    )
    ratio = max(error(mine[0][n], w) / error(theirs[n], w) for n, w in wanted.items())
    apart = max(error(other[n], mine[0][n]) for other in mine[1:] for n in wanted)
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name in wanted:
        kinds[name.removesuffix(".weight").rpartition(".")[2]].append(name)
    for kind, names in kinds.items():
        both_errors = [
            max(error(found[n], wanted[n]) for n in names) for found in (theirs, mine[0])
        ]
        say(f"  {family} {kind}", *both_errors)
    say(
        family,
        *(max(error(f[n], wanted[n]) for n in wanted) for f in (theirs, mine[0])),
        ratio,
        apart,
    )
    assert ratio < 1.5, f"{family}: {ratio=}"
    assert apart < 0.02, f"{family}: {apart=}"


def gradients(
    model: PreTrainedModel, backbone: Backbone, policy: Policy | None = None
) -> dict[str, Tensor]:
    """Those of two micro-batches, in float32, and the hidden states of the first."""
    for parameter in policy.masters.values() if policy else model.parameters():
        parameter.grad = None
    found: dict[str, Tensor] = {}
    for seed in range(2):
        draw = torch.Generator("cuda").manual_seed(seed)
        ids = torch.randint(4096, (sum(ROWS),), generator=draw, device="cuda")
        positions = torch.cat([torch.arange(n, device="cuda") for n in ROWS])
        hidden = backbone(ids, positions, PackedContext.from_lengths(ROWS, device="cuda"))
        grad = torch.randn(hidden.shape, generator=draw, device="cuda")
        hidden.backward(grad.to(hidden.dtype))
        found.setdefault("hidden", hidden.detach().float())
    masters = policy.masters if policy else dict(model.named_parameters())
    return found | {n: p.grad.clone() for n, p in masters.items() if p.grad is not None}


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def collector(policy: Policy) -> Callable[[nn.Parameter], Tensor]:
    masters = {p: policy.masters[name] for name, p in policy.parameters.items()}

    def gradient_of(parameter: nn.Parameter) -> Tensor:
        master = masters[parameter]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    return gradient_of


# -- kernels -------------------------------------------------------------------------------------


def kernels(_: float) -> None:
    say("kernel, GB/s at 16,384 tokens", "0.6b", "8b", "(as they are, then tuned otherwise)")
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
            {"ROTATE_ROWS": 8},
            {"ROTATE_ROWS": 32},
            {"PROGRAMS": 2112},
            {"PROGRAMS": 528},
        ],
    }
    for name, settings in tunings.items():
        for setting in settings:
            tuned = patch.multiple(layer_gradients, **setting) if setting else nullcontext()
            with attempt(f"{name} {setting}"), tuned:
                rates = [f"{x.rate(name):,.0f}" for x in inputs.values()]
                say(" ".join((name, *(f"{k}={v}" for k, v in setting.items()))), *rates)


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
        return num_bytes / milliseconds(work) / 1e6


# -- products ------------------------------------------------------------------------------------


def products(rate: float) -> None:
    say("product", "out x in", "forward", "dX", "dW bf16", "dW f32", "dW += f32", "(share of rate)")
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
            with attempt(f"{shape} {name}"):
                one_product(f"{shape} {name}", width_out, width_in, rate)


def one_product(name: str, width_out: int, width_in: int, rate: float) -> None:
    x, weight = normal(TOKENS, width_in), normal(width_out, width_in, seed=1)
    grad = normal(TOKENS, width_out, seed=2)
    total = torch.zeros(width_out, width_in, device="cuda")
    flops = 2 * TOKENS * width_out * width_in
    add = torch.ops.aten.addmm.dtype_out

    def share(work: Callable[[], object]) -> float:
        return flops / (milliseconds(work) * 1e-3) / rate

    wide = torch.mm(grad.T, x, out_dtype=torch.float32)
    add(total, grad.T, x, torch.float32, out=total)
    assert (total - wide).norm() <= 1e-5 * wide.norm()
    say(
        name,
        f"{width_out}x{width_in}",
        share(lambda: F.linear(x, weight)),
        share(lambda: grad @ weight),
        share(lambda: grad.T @ x),
        share(lambda: torch.mm(grad.T, x, out_dtype=torch.float32)),
        share(lambda: add(total, grad.T, x, torch.float32, out=total)),
    )


# -- attention -----------------------------------------------------------------------------------


def attention(_: float) -> None:
    say("attention", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "(heads of 128)")
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
                with attempt(f"{kernel}/{num_kv_heads} {name}"):
                    one_attention(kernel, f"{name}", lengths, num_heads, num_kv_heads)


def one_attention(
    kernel: str, name: str, lengths: list[int], num_heads: int, num_kv_heads: int
) -> None:
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
            from hone.attention import exact

            return exact.packed_attention(q, k, v, context, scale=128**-0.5, window=None)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                *map(batched, (q, k, v)), is_causal=True, enable_gqa=num_kv_heads < num_heads
            )

    flops = sum(2 * n * n for n in lengths) * num_heads * 128
    upstream = batched(grad) if kernel == "cudnn" else grad
    both(f"{kernel}/{num_kv_heads} {name}", forward, (q, k, v), upstream, flops)


def both(
    name: str, forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], grad: Tensor, flops: int
) -> None:
    with torch.no_grad():
        forward_ms = milliseconds(forward)
    output = forward()
    backward_ms = milliseconds(lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True))
    rates = (flops / forward_ms / 1e9, 2.5 * flops / backward_ms / 1e9)
    say(name, forward_ms, f"{rates[0]:.0f}", backward_ms, f"{rates[1]:.0f}")


# -- whole models --------------------------------------------------------------------------------

PRESENT = "transformers, compiled"
STEPS: dict[str, tuple[tuple[int, dict[str, Any] | str], ...]] = {
    "qwen3-0.6b": (
        (TOKENS, PRESENT),
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
PROFILED = ("qwen3-0.6b", "qwen3-4b")


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


def step(rate: float, *, with_present: bool, with_profile: bool) -> None:
    say(
        "forward and backward",
        "tokens",
        "ms",
        "share",
        "peak GiB",
        "kept GiB",
        "host ms",
        "first s",
    )
    for shape in STEPS:
        with attempt(shape):
            one_shape(shape, rate, with_present=with_present, with_profile=with_profile)


def one_shape(shape: str, rate: float, *, with_present: bool, with_profile: bool) -> None:
    variants = [v for v in STEPS[shape] if with_present or v[1] != PRESENT]
    compiles = any(options == PRESENT for _, options in variants)
    policy = Policy(build(shape), compile=compiles)
    for index, (num_tokens, options) in enumerate(variants):
        with attempt(f"{shape} {options}"):
            work = one_step(shape, policy, num_tokens, options, rate)
            if with_profile and shape in PROFILED and index == int(compiles):
                longest_kernels(work)
            del work


def one_step(
    shape: str, policy: Policy, num_tokens: int, options: dict[str, Any] | str, rate: float
) -> Pass:
    backbone: Backbone = partial(hidden_states, policy.model)
    if not isinstance(options, str):
        backbone = TrainingDecoder(policy.model, collector(policy), **options)
    work = Pass(policy, backbone, num_tokens)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    kept = torch.cuda.memory_allocated() / GIB
    time_ms = milliseconds(work, 5)
    peak = torch.cuda.max_memory_allocated() / GIB
    name = options if isinstance(options, str) else " ".join(map(str, options.values()))
    say(
        f"{shape} {name or 'own'}",
        num_tokens,
        time_ms,
        work.flops / (time_ms * 1e-3) / rate,
        peak,
        kept,
        host_milliseconds(Pass(policy, backbone, 128)),
        first_s,
    )
    return work


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
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "attention": ("flash", "fmha", "cudnn_generated"),
    "copies and fills": ("memcpy", "memset", "fill", "copy"),
    "triton": ("triton",),
}


def longest_kernels(work: Callable[[], object]) -> None:
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
    busy = sum(map(sum, totals.values()))
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    groups: defaultdict[str, float] = defaultdict(float)
    for name, times in totals.items():
        group = next(
            (g for g, words in GROUPS.items() if any(w in name.lower() for w in words)), "other"
        )
        groups[group] += sum(times)
    sys.stdout.write(f"  {len(spans)} launches, {busy:.1f} of {span:.1f} ms: ")
    sys.stdout.write(", ".join(f"{g} {t:.1f}" for g, t in groups.items()) + "\n")
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[:24]:
        sys.stdout.write(f"  {sum(times):8.2f} ms {len(times):5d} x  {name[:110]}\n")
    sys.stdout.flush()


def main() -> None:
    parts = sys.argv[1:] or DEFAULT
    assert set(parts) <= set(PARTS), f"{parts=}"
    start = time.perf_counter()
    rate = matrix_rate()
    say(torch.cuda.get_device_name(), f"torch {torch.__version__}", f"{rate / 1e12:.0f} TFLOP/s")
    runs = {"layers": layers, "kernels": kernels, "products": products, "attention": attention}
    for part, run in runs.items():
        if part in parts:
            run(rate)
            say(f"# {part} done", f"{time.perf_counter() - start:.0f} s")
    if {"step", "profile"} & set(parts):
        step(rate, with_present="present" in parts, with_profile="profile" in parts)
    say("# all done", f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
