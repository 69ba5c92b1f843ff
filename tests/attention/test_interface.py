"""A forward whose attention context is missing or wrong says so; it never attends silently."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import AttentionMaskInterface

from hone.attention import ATTENTION_NAME, PackedContext
from hone.attention.backends import choose_packed_backend, choose_paged_backend
from hone.attention.interface import attend_paged, attention
from tests.attention.twin import Pages, attend_packed
from tests.tables import table

LENGTHS = (3, 4)
TOTAL = 7


def layer(index: int | None = 0) -> nn.Module:
    module = nn.Module()
    if index is not None:
        module.layer_idx = index
    return module


def call(module=None, *, batch=1, tokens=TOTAL, mask=None, **kwargs):
    q, k, v = (torch.randn(batch, h, tokens, 8) for h in (4, 2, 2))
    return attention(module or layer(), q, k, v, mask, scaling=0.5, **kwargs), (q, k, v)


def test_packed_call_returns_tokens_before_heads():
    (output, weights), qkv = call(attention_context=PackedContext.from_lengths(LENGTHS))
    expected = attend_packed(*(x[0].transpose(0, 1) for x in qkv), LENGTHS, scale=0.5)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert weights is None


PACKED = {"attention_context": PackedContext.from_lengths(LENGTHS)}


class Operations(TorchDispatchMode):
    """The operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_gradients_reach_the_layer_without_a_copy():
    """Each would be written into zeros of the size of queries, keys and values: 4 % of a pass."""
    q, k, v = (torch.randn(1, h, TOTAL, 8, requires_grad=True) for h in (4, 2, 2))
    output, _ = attention(layer(), q, k, v, None, scaling=0.5, **PACKED)
    with Operations() as seen:
        output.sum().backward()
    assert "select_backward" not in seen.names
    with Operations() as seen:
        q[0].sum().backward()
    assert "select_backward" in seen.names, "what is looked for has another name"


REFUSED = {
    "no context": ({}, "needs attention_context"),
    "another object": ({"attention_context": object()}, "got object"),
    "a mask": ({**PACKED, "mask": torch.zeros(1, 1, 7, 7)}, "no attention mask"),
    "two rows": ({**PACKED, "batch": 2}, "a batch of 2"),
    "other tokens": ({**PACKED, "tokens": 9}, "describes 7 tokens, the forward has 9"),
    "dropout": ({**PACKED, "dropout": 0.1}, "dropout is not served, got 0.1"),
    "sinks": ({**PACKED, "sinks": torch.zeros(4)}, "sinks are not served"),
}


@table("case", REFUSED)
def test_refuses(case):
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(**arguments)


def test_refuses_a_layer_without_index_and_gradients_through_pages():
    context = Pages([1, 1], [4, 5]).context
    with pytest.raises(ValueError, match="no layer_idx"):
        call(layer(None), tokens=2, attention_context=context)
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    k = torch.randn(1, 2, 2, 8)
    with pytest.raises(ValueError, match="no gradient"):
        attention(layer(), q, k, k, None, scaling=0.5, attention_context=context)


def test_contexts_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="at least one token"):
        PackedContext.from_lengths((3, 0))
    context = Pages([3, 2], [4, 5]).context
    for wrong in (
        {"query_lens": (), "key_lens": ()},
        {"kv_scales": torch.ones(1, 2, 2)},
        {"key_lens": ()},
        {"query_lens": (3, 3)},
    ):
        with pytest.raises(AssertionError):
            dataclasses.replace(context, **wrong)


def attend(pages, context, **options):
    return attend_paged(pages.q, pages.k, pages.v, 0, context, scale=0.5, **options)


def test_attend_paged_writes_and_attends():
    pages = Pages([3, 2], [4, 5], dtype=torch.float64)
    torch.testing.assert_close(attend(pages, pages.context), pages.expected(scale=0.5))
    again = pages.kv_cache.clone()
    pages.k = pages.v = torch.full_like(pages.k, float("nan"))  # in the cache already
    output = attend(pages, pages.context, write=False)
    torch.testing.assert_close(output, pages.expected(scale=0.5))
    assert torch.equal(pages.kv_cache, again)


def test_chunks_of_one_token_are_a_prefill_too():
    pages = Pages([1, 1], [1, 5], dtype=torch.float64)
    assert not pages.context.is_decode
    torch.testing.assert_close(attend(pages, pages.context), pages.expected(scale=0.5))


@table("spread", [1e-3, 1.0, 300.0])
def test_calibration_leaves_room_and_keeps_precision(spread):
    pages = Pages([6, 3], [6, 3], fp8=True)
    pages.k, pages.v = pages.k * spread, pages.v * spread * 7
    context = dataclasses.replace(pages.context, calibrate=True)
    attend(pages, context)
    for j, x in enumerate((pages.k, pages.v)):
        expected = 4 * x.abs().amax((0, 2)) / 448
        torch.testing.assert_close(context.kv_scales[0, j], expected)
        slots = pages.kv_cache[j].flatten(0, 1)[context.slot_mapping]
        stored = slots.float() * context.kv_scales[0, j][:, None]
        assert ((stored - x).abs() <= x.abs() / 16 + expected[:, None] * 2**-9).all()


def test_calibration_on_zeros_and_after_the_write():
    pages = Pages([2], [2], fp8=True)
    pages.k.zero_()
    context = dataclasses.replace(pages.context, calibrate=True)
    attend(pages, context)
    assert (context.kv_scales[0, 0] == 1).all()
    with pytest.raises(ValueError, match="sets the scales before it writes"):
        attend(pages, context, write=False)


def test_no_mask_is_ever_built():
    assert ATTENTION_NAME not in AttentionMaskInterface._global_mapping


def test_backend_rule():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    bf16, fp32 = torch.bfloat16, torch.float32
    assert choose_packed_backend(cuda, bf16, head_dim=128, softcap=None) == "flash"
    assert choose_packed_backend(cuda, fp32, head_dim=128, softcap=None) == "reference"
    assert choose_packed_backend(cuda, bf16, head_dim=128, softcap=50.0) == "reference"
    assert choose_packed_backend(cuda, bf16, head_dim=512, softcap=None) == "reference"
    assert choose_packed_backend(cpu, bf16, head_dim=128, softcap=None) == "reference"
    assert choose_paged_backend(cpu) == "reference"


def test_a_compiled_layer_takes_new_lengths_without_compiling_again():
    counter = CompileCounter()
    module = layer()

    @torch.compile(backend=counter, dynamic=True)
    def compiled(q, k, v, context):
        output, _ = attention(module, q * 2, k, v, None, scaling=0.5, attention_context=context)
        return output + 1

    counts = []
    for lengths in ((3, 5), (4, 7, 2), (6, 6), (2, 2, 9, 4), (12,)):
        q, k, v = (torch.randn(1, h, sum(lengths), 8) for h in (4, 2, 2))
        output = compiled(q, k, v, PackedContext.from_lengths(lengths))
        expected = attend_packed(*(x[0].transpose(0, 1) for x in (q * 2, k, v)), lengths, scale=0.5)
        torch.testing.assert_close(output[0].double(), expected + 1, rtol=1e-5, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1], f"{counts=}"
