"""The chunked head on one GPU, right and timed: `python -m benchmarks.gpu.logprobs_check`.

Values and gradients against float64, then milliseconds of each step of a chunk, of launches of the
kernels, and of forward and backward over 16,384 tokens with the memory that logits take. Prints the
tables last; 40 seconds on an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from triton.testing import do_bench

from hone.models.decoder import head_product
from hone.trainer import logprob_kernels as kernels
from hone.trainer import logprobs
from hone.trainer.logprobs import token_logprobs

VOCAB, NUM_TOKENS, CHUNK = 151936, 16384, 1024
WIDTHS = (1024, 2048, 4096)
STATISTICS = ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
GRADIENT = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8))
GIB = 1 << 30


class Head:
    """As much of a model as `token_logprobs` asks for."""

    def __init__(self, width: int, dtype: torch.dtype, softcap: float | None = None) -> None:
        torch.manual_seed(width)
        weight = torch.randn(VOCAB, width, device="cuda") * width**-0.5
        self.weight = nn.Parameter(weight.to(dtype))
        self.config = SimpleNamespace(final_logit_softcapping=softcap)

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.weight)


def inputs(num_tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = (3 * torch.randn(num_tokens, width, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (num_tokens,), device="cuda")
    return hidden, labels, torch.randn(2, num_tokens, device="cuda")


def show(*columns: object) -> None:
    texts = [f"{c:.4g}" if isinstance(c, float) else str(c) for c in columns]
    sys.stdout.write("  ".join(f"{text:>14}" for text in texts) + "\n")
    sys.stdout.flush()


def check(dtype: torch.dtype, temperature: float, softcap: float | None) -> None:
    head = Head(256, dtype, softcap)
    hidden, labels, factors = inputs(200, 256, dtype)
    values, entropy = token_logprobs(
        head, hidden, labels, temperature=temperature, chunk_tokens=96, with_entropy=True
    )
    ours = torch.autograd.grad(
        (factors[0] * values + factors[1] * entropy).sum(), [hidden, head.weight]
    )
    wide = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    logits = wide[0] @ wide[1].T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    expected = log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    theirs = torch.autograd.grad((factors[0] * expected[0] + factors[1] * expected[1]).sum(), wide)
    absolute = [
        float((a - b).detach().abs().max())
        for a, b in zip((values, entropy), expected, strict=True)
    ]
    relative = [
        float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)
    ]
    show(str(dtype)[6:], temperature, str(softcap), *absolute, *relative)
    assert max(absolute) < 5e-5, absolute
    assert max(relative) < (1e-5 if dtype == torch.float32 else 6e-3), relative


def milliseconds(function: Callable[[], Any], rep: int = 60) -> float:
    return float(do_bench(function, warmup=15, rep=rep, return_mode="median"))


def steps(width: int) -> None:
    """Each step of a chunk, with the bytes that it has to move."""
    head = Head(width, torch.bfloat16)
    weight = head.weight.detach()
    hidden = inputs(CHUNK, width, torch.bfloat16)[0].detach()
    logits = head_product(hidden, weight)
    gradient = (0.01 * logits).bfloat16()
    total = torch.zeros(VOCAB, width, device="cuda")

    def add_apart() -> None:
        total.add_(gradient.T @ hidden)

    def add_within() -> None:
        logprobs._add_product(total, gradient.T, hidden)

    within = torch.zeros_like(total)
    torch.addmm(within, gradient.T, hidden, out_dtype=torch.float32, out=within)
    exact = gradient[:, :64].double().T @ hidden.double()
    error = float((within[:64].double() - exact).norm() / exact.norm())
    assert error < 1e-5, f"addmm into float32: {error}"
    out = torch.empty_like(hidden)
    for name, function in (
        ("logits", lambda: head_product(hidden, weight)),
        ("logits, bf16", lambda: hidden @ weight.T),
        ("d hidden", lambda: torch.mm(gradient, weight, out=out)),
        ("d weight, own", lambda: gradient.T @ hidden),
        ("d weight, within", add_within),
        ("d weight, apart", add_apart),
    ):
        ms = milliseconds(function)
        show(width, name, ms, 2e-9 * CHUNK * VOCAB * width / ms)


def launches() -> None:
    """The kernels over a chunk in GB/s, for several blocks and warps."""
    logits = 4 * torch.randn(CHUNK, VOCAB, device="cuda")
    labels = torch.randint(VOCAB, (CHUNK,), device="cuda")
    ones = torch.ones(CHUNK, device="cuda")
    options = {"temperature": 0.9, "softcap": None}
    other = torch.empty_like(logits)
    show("copy", "", 2e-6 * logits.nbytes / milliseconds(lambda: other.copy_(logits)))
    for block, warps in STATISTICS:
        with (
            patch.object(kernels, "STATISTICS_BLOCK", block),
            patch.object(kernels, "STATISTICS_WARPS", warps),
        ):
            ms = milliseconds(
                lambda: kernels.part_statistics(logits, labels, **options, with_entropy=True)
            )
        show("statistics", f"{block}/{warps}", 1e-6 * logits.nbytes / ms, ms)
    for block, warps in GRADIENT:
        with (
            patch.object(kernels, "GRADIENT_BLOCK", block),
            patch.object(kernels, "GRADIENT_WARPS", warps),
        ):
            ms = milliseconds(
                lambda: kernels.logits_gradient(
                    logits,
                    labels,
                    normaliser_C=ones,
                    entropy_C=ones,
                    grad_logprobs_C=ones,
                    grad_entropy_C=ones,
                    **options,
                    dtype=torch.bfloat16,
                )
            )
        show("gradient", f"{block}/{warps}", 1.5e-6 * logits.nbytes / ms, ms)


def add_in_a_pass(total: Tensor, a: Tensor, b: Tensor) -> None:
    total += a @ b


VARIANTS: dict[str, tuple[int, bool, Callable[[], AbstractContextManager[Any]]]] = {
    "as it is": (CHUNK, False, nullcontext),
    "entropy": (CHUNK, True, nullcontext),
    "sum apart": (
        CHUNK,
        False,
        lambda: patch.object(logprobs, "_add_product", add_in_a_pass),
    ),
    "chunk / 2": (CHUNK // 2, False, nullcontext),
    "chunk * 3 / 2": (CHUNK * 3 // 2, False, nullcontext),
    "chunk * 2": (CHUNK * 2, False, nullcontext),
    "one chunk": (NUM_TOKENS, False, nullcontext),
}


def whole(width: int) -> None:
    """Forward and backward, and the peak above inputs, results and gradients: logits."""
    head = Head(width, torch.bfloat16)
    hidden, labels, factors = inputs(NUM_TOKENS, width, torch.bfloat16)
    flops = 8 * NUM_TOKENS * VOCAB * width
    for name, (chunk, with_entropy, change) in VARIANTS.items():

        def run(chunk: int = chunk, with_entropy: bool = with_entropy) -> None:
            values, entropy = token_logprobs(
                head,
                hidden,
                labels,
                temperature=1.0,
                chunk_tokens=chunk,
                with_entropy=with_entropy,
            )
            loss = (factors[0] * values).sum()
            if entropy is not None:
                loss = loss + (factors[1] * entropy).sum()
            torch.autograd.grad(loss, [x for x in (hidden, head.weight) if x.requires_grad])

        with change():
            ms = milliseconds(run, rep=250)
            head.weight.requires_grad_(False)  # its gradient is no logits
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run()
            peak = torch.cuda.max_memory_allocated() - base
            head.weight.requires_grad_(True)
        show(width, name, ms, 1e-9 * flops / ms, (peak - hidden.nbytes) / GIB)


def main() -> None:
    show("dtype", "temperature", "soft cap", "logprob", "entropy", "d hidden", "d weight")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(dtype, 0.7, None)
    check(torch.bfloat16, 1.0, 5.0)
    show("kernel", "block/warps", "GB/s", "ms")
    launches()
    show("width", "step of a chunk", "ms", "TFLOPS")
    for width in WIDTHS:
        steps(width)
    show("width", "16,384 tokens", "ms", "TFLOPS", "logits GiB")
    for width in WIDTHS:
        whole(width)


if __name__ == "__main__":
    main()
