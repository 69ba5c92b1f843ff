"""Sequences that begin with tokens of another one: each backend against sequences with all."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from hone.attention import backends, flash
from hone.attention.context import PackedContext
from hone.attention.packed_keys import _sum_uses, gather_keys
from tests.attention import test_flash, test_flash4
from tests.attention.keys import branching
from tests.attention.twin import attend_packed
from tests.interpreted import run_interpreted
from tests.tables import table

SCALE = 0.3


def draw(context: PackedContext) -> tuple[list[torch.Tensor], torch.Tensor]:
    shapes = [(context.num_tokens, heads, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    return inputs, torch.randn(shapes[0], dtype=torch.float64)


def expected(context: PackedContext, inputs: list[torch.Tensor], window: int | None):
    """Attention of whole sequences, at the tokens that are packed."""
    keys = context.keys
    assert keys is not None
    every = (x[keys.index] for x in inputs)
    output = attend_packed(*every, keys.lengths, scale=SCALE, window=window)
    pieces = output.split(list(keys.lengths))
    return torch.cat([x[-n:] for x, n in zip(pieces, context.lengths, strict=True)])


@table("window", [None, 1, 3, 100])
@table("backend", ["reference", "flash", "flash4"])
def test_output_and_gradients(backend: str, window: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "_packed_backend", lambda q, softcap: backend)
    monkeypatch.setattr(flash, "varlen_attn", test_flash.varlen_twin)
    twins = test_flash4._kernel_twins.__wrapped__  # what stands for the kernels of version 4
    twins(monkeypatch)
    context = branching()
    inputs, grad = draw(context)
    actual = backends.packed_attention(*inputs, context, scale=SCALE, window=window)
    wanted = expected(context, inputs, window)
    torch.testing.assert_close(actual, wanted)
    pairs = zip(*(torch.autograd.grad(x, inputs, grad) for x in (actual, wanted)), strict=True)
    for ours, exact in pairs:
        torch.testing.assert_close(ours, exact)


def test_half_gradients_of_many_uses_are_added_up_in_float32():
    context = branching(num_branches=40)
    keys = context.keys
    assert keys is not None
    k, v = (
        torch.zeros(context.num_tokens, 1, 2, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    gathered = gather_keys(k, v, keys)
    ones = torch.ones_like(gathered[0])
    # 256 + 1 is 256 in bfloat16: one after the other, the ones would be lost.
    ones[0] = 256.0
    grad_k, grad_v = torch.autograd.grad(gathered, [k, v], [ones, 2 * ones])
    assert grad_k[0].tolist() == [[296.0, 296.0]]
    assert torch.equal(grad_v, 2 * grad_k)
    # torch adds up rows of tensors in float32 of its own accord, at least here; not numbers.
    assert _sum_uses(ones[:, 0, 0].contiguous(), keys)[0] == 296.0


@pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")
def test_kernels_copy_and_add_up():
    results = run_interpreted("tests.attention.interpreted_packed_keys")
    assert results["cases"] > 3
    assert results["copied"] == [True] * results["cases"]
    assert max(results["errors"]) < 1e-5
    assert results["planted"] > 1e-2
    assert results["by_heads"], "compiled layers copy any other order"
