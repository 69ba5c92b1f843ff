"""Runs the Triton kernels in Triton's interpreter on the CPU and prints their errors as JSON.

A process of its own: the interpreter is chosen by an environment variable that must be set before
triton is first imported. float32 and float16 only, the interpreter has no working bfloat16.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from contextlib import ExitStack
from unittest import mock

from tests import stand_in_for_transformers  # noqa: F401  # isort: skip
from tests.triton_interpreter import interpreter  # isort: skip

import torch
import triton.language as tl

from hone.attention import decode_tiles, triton_decode, triton_write
from tests.attention.cases import (
    BUGS,
    DECODE_CASES,
    DTYPES,
    FP8_CASES,
    FP8_LIMIT,
    HALF_CASES,
    MERGE_CASE,
)
from tests.attention.twin import Pages, through_fp8

SCALE = 0.3

REPEATED = ("splits within sequences", "shared over many splits")
"""Cases that are run twice: the second run finds the counters that the first one left."""
MANY = {**DECODE_CASES["270 sequences"], "keys": [1 + i % 40 for i in range(37)]}
"""In steps of 16 lengths they are as many steps as 270 sequences in steps of 256, and one more."""
LENGTHS_AT_ONCE = 16

convert_float = interpreter._convert_float


def convert_to_fp8(values, input_dtype, output_dtype, rounding_mode):
    """The interpreter loses the carry of a mantissa that rounds up, and truncates subnormals."""
    if output_dtype != tl.float8e4nv:
        return convert_float(values, input_dtype, output_dtype, rounding_mode)
    assert input_dtype == tl.float32
    floats = torch.from_numpy(values.view("float32"))
    return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = convert_to_fp8


def make_tuning(splits, tile, num_kv_heads):
    """A launch of so many splits a key head; splits None is the kernel's own choice."""
    processors = triton_decode._num_processors(torch.device("cpu"))
    programs = 8 if splits is None else -(-splits * num_kv_heads // processors)
    return triton_decode.DecodeTuning(
        tile=tile, num_warps=2, num_stages=2, programs_per_processor=programs
    )


def decode_error(
    dtype,
    *,
    keys,
    heads,
    splits=None,
    tile=16,
    longest=None,
    groups=(),
    members=0,
    fp8=False,
    bug=None,
    runs=1,
    **options,
):
    pages = Pages([1] * len(keys), keys, groups=groups, dtype=dtype, fp8=fp8, **heads)
    context = pages.decode_context(num_groups=2 * len(groups), members=members)
    triton_write.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping, pages.scales)
    tables, lengths, shared = context.block_tables, context.context_lens, context.shared
    if bug == "tables swapped":
        tables = tables.flip(0).contiguous()
    if bug == "context one short":
        lengths = lengths - 1
    if bug == "shared too far":
        further = {
            name: getattr(shared, name) + heads["block_size"] * (getattr(shared, name) > 0)
            for name in ("lens", "starts")
        }
        shared = dataclasses.replace(shared, **further)
    calls = []
    for _ in range(runs):
        actual = triton_decode.decode_attention(
            pages.q,
            pages.kv_cache,
            tables,
            lengths,
            longest or context.max_context_len,
            scales=pages.scales,
            shared=shared,
            scale=SCALE,
            tuning=make_tuning(splits, tile, heads["num_kv_heads"]),
            **options,
        )
        calls.append(actual)
    counters = triton_decode._counters(torch.device("cpu"), 1)
    if not torch.equal(calls[0], calls[-1]) or counters.any():
        counters.zero_()
        return float("inf")
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
    triton_write.write_kv(k, v, kv_cache, slots)
    return torch.equal(kv_cache.view(2, 16, 3, 8), expected)


def fp8_write_is_exact(dtype):
    """Quantised as torch does it, beyond the range of the scales too."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(5, 3, 8, generator=draw).to(dtype) * 4 for _ in range(2))
    scales = torch.tensor([[0.01, 0.002, 1.0], [0.5, 0.001, 0.03]])
    kv_cache = torch.zeros(2, 2, 4, 3, 8, dtype=torch.float8_e4m3fn)
    slots = torch.tensor([7, -1, 0, 5, 2])
    triton_write.write_kv(k, v, kv_cache, slots, scales)
    stored = kv_cache.float().view(2, 8, 3, 8)
    for j, x in enumerate((k, v)):
        expected = torch.zeros(8, 3, 8)
        kept = slots >= 0
        expected[slots[kept]] = through_fp8(x, scales[j])[kept] / scales[j][:, None]
        if not torch.allclose(stored[j], expected, rtol=1e-6):
            return False
    return True


def empty_sequence(splits):
    """A padding row of length 0 gives zeros, rows beside it are right."""
    pages = Pages([1] * 3, [50, 8, 70], dtype=torch.float32, block_size=16)
    context = pages.decode_context()
    triton_write.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping)
    output = triton_decode.decode_attention(
        pages.q,
        pages.kv_cache,
        context.block_tables,
        context.context_lens * torch.tensor([1, 0, 1], dtype=torch.int32),
        70,
        scale=SCALE,
        tuning=make_tuning(splits, 16, 2),
    )
    expected = pages.expected(scale=SCALE).float()
    good = (output[::2] - expected[::2]).abs().max() < 1e-5
    return bool((output[1] == 0).all() and good)


class Mergers:
    """Within it splits run in a given order, and who merges a sequence is written down.

    With `late`, a split that has read all of a sequence's own keys finds the shared parts missing,
    which are there when it has stored its own.
    """

    def __init__(self, order, *, late=False, bug=False):
        self.order, self.late, self.bug, self.seen = order, late, bug, set()
        self._stack = ExitStack()

    def __enter__(self):
        builder = interpreter.interpreter_builder
        set_index, add = builder.set_grid_idx, builder.create_atomic_rmw
        of_split, of_group = triton_decode.add_shared_parts, triton_decode.add_parts
        part_of = triton_decode.part_of

        def atomic(op, ptr, val, *rest):
            result = add(op, ptr, val, *rest)
            if self.late and not val.data.any():
                result.data = result.data * 0
            return result

        def add_shared_parts(*args):
            rows = args[-2]
            self.seen.add("the only split" if rows == 16 else "the last split")
            return of_split(*args)

        def add_parts(*args):
            self.seen.add("the group")
            return of_group(*args)

        def rounded_once_more(softmax):
            log_sum, values = part_of(softmax)
            return log_sum, values * (1 + 2**-22)

        replaced = [
            (builder, "set_grid_idx", lambda x, y, z: set_index(x, self.order[y], z)),
            (builder, "create_atomic_rmw", atomic),
            (triton_decode, "add_shared_parts", add_shared_parts),
            (triton_decode, "add_parts", add_parts),
        ]
        if self.bug:
            replaced.append((triton_decode, "part_of", rounded_once_more))
        for owner, name, value in replaced:
            self._stack.enter_context(mock.patch.object(owner, name, value))
        return self

    def __exit__(self, *error):
        self._stack.close()


def merged_alike(*, keys, heads, splits, groups, members, bug=False):
    """Who merged over launches in several orders, and whether all results are the same bits.

    Two launches show a planted bug.
    """
    pages = Pages([1] * len(keys), keys, groups=groups, **heads)
    context = pages.decode_context(num_groups=len(groups) * 2, members=members)
    triton_write.write_kv(pages.k, pages.v, pages.kv_cache, context.slot_mapping)
    forward = list(range(splits))
    launches = [(forward, False), (forward[::-1], True)]
    if not bug:
        launches += [(forward, True), (random.Random(0).sample(forward, splits), False)]
    outputs, seen = [], set()
    for order, late in launches:
        with Mergers(order, late=late, bug=bug) as mergers:
            output = triton_decode.decode_attention(
                pages.q,
                pages.kv_cache,
                context.block_tables,
                context.context_lens,
                context.max_context_len,
                shared=context.shared,
                scale=SCALE,
                tuning=make_tuning(splits, 16, heads["num_kv_heads"]),
            )
        outputs.append(output.view(torch.int32))
        seen |= mergers.seen
    return {"by": sorted(seen), "same": all(torch.equal(outputs[0], x) for x in outputs)}


def main() -> None:
    errors: dict[str, tuple[float, float]] = {}  # and their limits
    cases = {name: case for name, case in DECODE_CASES.items() if name != "270 sequences"}
    for name, limit in DTYPES.items():
        dtype = getattr(torch, name)
        for case in cases if dtype == torch.float32 else HALF_CASES:
            runs = 2 if dtype == torch.float32 and case in REPEATED else 1
            errors[f"{name} {case}"] = decode_error(dtype, runs=runs, **cases[case]), limit
    with mock.patch.object(decode_tiles, "LENGTHS_AT_ONCE", tl.constexpr(LENGTHS_AT_ONCE)):
        errors["many sequences"] = decode_error(torch.float32, **MANY), DTYPES["float32"]
    for case in FP8_CASES:
        found = decode_error(torch.float16, fp8=True, **DECODE_CASES[case])
        errors[f"fp8 {case}"] = found, FP8_LIMIT
    dtypes = [getattr(torch, name) for name in DTYPES]
    results = {
        "errors": errors,
        "planted": {
            bug: decode_error(torch.float32, bug=bug, **DECODE_CASES[case])
            for bug, case in BUGS.items()
        },
        "writes": [
            write(dtype) for write in (write_is_exact, fp8_write_is_exact) for dtype in dtypes
        ],
        "empty": [empty_sequence(splits) for splits in (1, 4)],
        "merged": merged_alike(**MERGE_CASE),
        "merged wrongly": merged_alike(**MERGE_CASE, bug=True),
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
