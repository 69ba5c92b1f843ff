"""Runs the Triton kernels in Triton's interpreter on the CPU and prints their errors as JSON.

A process of its own: the interpreter is chosen by an environment variable that must be set before
triton is first imported. float32 and float16 only, the interpreter has no working bfloat16.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime import interpreter

from hone.attention import triton_decode
from tests.attention.cases import DECODE_CASES, DTYPES
from tests.attention.twin import Pages

SCALE = 0.3

patch_tensor = interpreter._patch_lang_tensor


def patch_loop_bounds(tensor, scope):
    """The interpreter of triton 3.6 calls int() on one-element arrays, which numpy 2.4 refuses."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patch_loop_bounds


def decode_error(dtype, key_lens, shape, options, num_splits, *, bug=None):
    pages = Pages([1] * len(key_lens), key_lens, dtype=dtype, **shape)
    context = pages.context
    triton_decode.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping)
    tables, lengths = context.block_tables, context.context_lens
    if bug == "tables swapped":
        tables = tables.flip(0).contiguous()
    if bug == "context one short":
        lengths = lengths - 1
    actual = triton_decode.decode_attention(
        pages.q,
        pages.kv_cache,
        tables,
        lengths,
        context.max_context_len,
        scale=SCALE,
        num_splits=num_splits,
        **options,
    )
    expected = pages.expected(scale=SCALE, **options)
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def write_is_exact(dtype):
    """Every slot written once, slot -1 not at all, from inputs that are views with odd strides."""
    k = torch.randn(2, 5, 3, 8, dtype=dtype).transpose(1, 2)[1].transpose(0, 1)
    v = torch.randn(5, 3, 8, dtype=dtype)
    kv_cache = torch.zeros(2, 4, 4, 3, 8, dtype=dtype)
    expected = kv_cache.clone().view(2, 16, 3, 8)
    slots = torch.tensor([7, -1, 0, 15, 2])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = k[token], v[token]
    triton_decode.write_kv(k, v, kv_cache, slots)
    return torch.equal(kv_cache.view(2, 16, 3, 8), expected)


def empty_sequence(num_splits):
    pages = Pages([1, 1], [5, 3], dtype=torch.float32, block_size=16)
    output = triton_decode.decode_attention(
        pages.q,
        pages.kv_cache,
        pages.context.block_tables,
        torch.tensor([0, 3], dtype=torch.int32),
        5,
        scale=SCALE,
        num_splits=num_splits,
    )
    return bool((output[0] == 0).all()) and bool(output[1].isfinite().all())


def main() -> None:
    results: dict[str, object] = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        for case, arguments in DECODE_CASES.items():
            results[f"{name} {case}"] = decode_error(dtype, *arguments)
        results[f"{name} write"] = write_is_exact(dtype)
    results["empty 1"], results["empty 4"] = empty_sequence(1), empty_sequence(4)
    for bug in ("tables swapped", "context one short"):
        results[bug] = decode_error(torch.float32, *DECODE_CASES["splits"], bug=bug)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
