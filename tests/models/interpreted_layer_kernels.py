"""Runs the layer kernels in Triton's interpreter on the CPU; prints as JSON how they compare.

A process of its own: the interpreter is chosen by an environment variable that must be set before
triton is first imported. float32 and float16 only, the interpreter has no working bfloat16.

The twins are the functions of transformers, in the same dtype, so that every rounding has to be in
its place: the outcome of a case is the largest error in units of the last place, and the share of
values that differ at all.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from hone.attention.context import FP8_DTYPE
from hone.models import expert_kernels, layer_kernels
from hone.models.experts import Experts, SigmoidScores
from hone.models.int8_kernels import int8_product, split_rows
from hone.models.int8_rows import pack_rows, unpack_rows
from hone.models.product_kernels import Tile, small_product

DTYPES = {"float32": (4.0, 1.0), "float16": (2.0, 0.01)}
"""Units of the last place that a value may be off, and the share of values that may differ.

In float32 sums in another order differ in most values. In float16 they move a rounding now and
then; a rounding left out moves many."""

NORM_CASES = {
    "norm": ((5, 1024), {}),
    "norm of one row": ((1, 64), {}),
    "norm of odd width": ((3, 96), {}),
    "norm of a narrow row": ((5, 40), {}),
}
NORM_CASES["norm of a sum of 3 parts"] = ((5, 96), {"parts": 3})
NORM_CASES["zero-centred norm"] = ((5, 96), {"zero_centred": True})
ROTATE_CASES = {
    "heads": (([7, -1, 0, 5, 2], 8, 4, 64), {"norms": True}),
    "heads without norm": (([7, 3, -1], 4, 4, 16), {"norms": False}),
    "heads without cache": (([1, 2, 0], 4, 2, 32), {"norms": True, "cached": False}),
    "one key head, six queries": (([4, 9], 6, 1, 128), {"norms": True}),
    "head of 80": (([4, 9], 3, 3, 80), {"norms": True}),
    "group of 4": (([-1, 9, 0], 8, 2, 32), {"norms": False}),
}
ROTATE_CASES |= {
    "half of a head": (([7, -1, 0, 5, 2], 8, 4, 64), {"norms": True, "rotary": 32}),
    "a quarter of a head": (([7, 3, -1], 4, 2, 32), {"norms": False, "rotary": 8}),
}
ROTATE_CASES["gated heads"] = (
    ([7, -1, 0, 5, 2], 10, 2, 32),
    {"norms": True, "rotary": 8, "zero_centred": True, "gated": True},
)
ROTATE_CASES["FP8 cache"] = (([3, -1, 0, 9], 6, 3, 64), {"norms": True, "fp8": True})
PRODUCT_CASES = {
    "few rows": ((3, 128, 256, (16, 32, 64, 1, 4, 2)), {}),
    "several tiles of rows": ((17, 64, 128, (16, 16, 32, 1, 4, 2)), {}),
    "bias": ((5, 64, 64, (16, 32, 64, 1, 4, 2)), {"bias": True}),
    "split in 3": ((9, 64, 384, (16, 32, 64, 3, 4, 2)), {"split": True}),
    "gated": ((20, 192, 128, (16, 32, 64, 1, 4, 2)), {"gated": True}),
}
PRODUCT_CASES |= {
    f"packed, {name}": (arguments, options | {"packed": True})
    for name, (arguments, options) in PRODUCT_CASES.items()
}
PRODUCT_CASES["packed, unpacked first"] = ((3, 64, 96, None), {"packed": True, "bias": True})
PRODUCT_CASES["packed, gated, unpacked first"] = (
    (3, 64, 96, None),
    {"packed": True, "gated": True},
)
GATE_CASES = {
    "gates of heads": ((3, 6, 2, 64), {}),
    "gates of wide heads": ((2, 9, 1, 256), {}),
}
SILU_CASES = {
    "silu": ((3, 1500), {}),
    "silu of a narrow row": ((2, 24), {}),
}
SPLIT_CASES = {"split": ((5, 1024), {}), "split of odd width": ((3, 9000), {})}
EXPERT_CASES = {
    # tokens, experts, a token's, width, inner width, tokens of a tile
    "experts": ((5, 6, 2, 64, 128, 16), {}),
    "more tokens than a tile": ((17, 3, 2, 128, 64, 16), {}),
    "three of five, as they are": ((11, 5, 3, 64, 64, 32), {"normalises": False}),
    "one token": ((1, 8, 8, 64, 64, 16), {}),
    "all tokens to the same": ((17, 8, 2, 64, 64, 16), {"favourite": 3}),
    "experts of three ranks": ((5, 6, 2, 64, 128, 16), {"ranks": 3}),
    "sigmoid scores": ((5, 6, 2, 64, 128, 16), {"sigmoid": True}),
    "sigmoid scores, as they are": (
        (11, 5, 3, 64, 64, 32),
        {"sigmoid": True, "normalises": False},
    ),
    "experts and a shared MLP": ((5, 6, 2, 64, 128, 16), {"beside": True}),
    "all tokens to one of two ranks": ((17, 8, 1, 64, 64, 16), {"favourite": 6, "ranks": 2}),
}
PACKED_EXPERT_CASES = {
    f"packed {name}": (
        (*sizes[:3], *(-(-n // 128) * 128 for n in sizes[3:5]), sizes[5]),
        options | {"packed": True},
    )
    for name, (sizes, options) in EXPERT_CASES.items()
}
"""For 16-bit formats: rows are rounded as finely as those round."""
EPS = 1e-5


def normal(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(actual, expected):
    """Largest error in units of the last place, and the share of values that differ.

    Close to zero, where sums cancel, the unit is that of 1.
    """
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    size = torch.finfo(expected.dtype).eps * expected.double().abs().clamp(min=1)
    units = ((actual.double() - expected.double()).abs() / size).max()
    return units.item(), (actual != expected).double().mean().item()


def worst(*outcomes):
    return [max(values) for values in zip(*outcomes, strict=True)]


def norm_module(weight, width, zero_centred=False):
    module = (Qwen3_5RMSNorm if zero_centred else Qwen3RMSNorm)(width, eps=EPS)
    module.weight = nn.Parameter(weight)
    return module


@torch.no_grad()
def norm(dtype, rows, width, parts=None, *, zero_centred=False, bug=None):
    x, residual, weight = (
        normal(*shape, dtype=dtype, seed=i)
        for i, shape in enumerate([(rows, width), (rows, width), (width,)])
    )
    total = residual + x
    twin = norm_module(
        torch.ones_like(weight) if bug == "weight ignored" else weight, width, zero_centred
    )
    zero_centred &= bug != "one not added"
    alone = layer_kernels.rms_norm(residual, weight, EPS, zero_centred)
    expected_alone = twin(residual)
    if parts:  # their sum is rounded, and only then added
        x = normal(parts, rows, width, dtype=torch.float32, seed=3)
        total = residual + (x[:-1] if bug == "a part left out" else x).sum(0).to(dtype)
    normed = layer_kernels.add_rms_norm(x, residual, weight, EPS, zero_centred)
    expected = twin(total)
    if bug == "sum not rounded":
        expected = weight * norm_module(torch.ones(width), width)(residual.float() + x).to(dtype)
    return worst(
        outcome(alone, expected_alone), outcome(normed, expected), outcome(residual, total)
    )


def rotated(x, norm_weight, cos, sin, *, zero_centred=False, bug=None):
    """Heads [T, H, D] as a layer of transformers treats them."""
    if norm_weight is not None:
        x = norm_module(norm_weight, x.shape[-1], zero_centred)(x)
    if (rotary := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotated(x[..., :rotary], None, cos, sin), x[..., rotary:]), -1)
    if bug == "product not rounded":
        half = x.shape[-1] // 2
        swapped = torch.cat((-x[..., half:], x[..., :half]), -1).double()
        return (x.double() * cos[:, None].double() + swapped * sin[:, None].double()).to(x.dtype)
    q, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=1)
    return q


@torch.no_grad()
def rotate(
    dtype,
    slots,
    num_heads,
    num_kv_heads,
    head_dim,
    *,
    norms,
    cached=True,
    fp8=False,
    rotary=None,
    zero_centred=False,
    gated=False,
    bug=None,
):
    tokens, rotary = len(slots), rotary or head_dim
    num_rows = (1 + gated) * num_heads
    qkv = normal(tokens, num_rows + 2 * num_kv_heads, head_dim, dtype=dtype, seed=0)
    weights = [normal(head_dim, dtype=dtype, seed=i) if norms else None for i in (1, 2)]
    angles = 10 * normal(20, rotary // 2, dtype=torch.float32, seed=3)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    positions = torch.randperm(20, generator=torch.Generator().manual_seed(6))[:tokens]
    rows = table[positions + (bug == "position one late")].chunk(2, -1)
    cos, sin = (torch.cat((x, x), -1) for x in rows[:: -1 if bug == "sines first" else 1])
    cache = normal(2, 3, 4, num_kv_heads, head_dim, dtype=dtype, seed=4) if cached else None
    scales = None
    if fp8:
        cache = cache.to(FP8_DTYPE)
        scales = normal(2, num_kv_heads, dtype=torch.float32, seed=5).exp2() / 100
    before = qkv.clone()
    twin_weights = weights[::-1] if bug == "norms swapped" else weights
    q, k, v = before.split((num_rows, num_kv_heads, num_kv_heads), 1)
    if gated:
        q = q[:, :num_heads] if bug == "gates behind all queries" else q[:, ::2]
    if bug == "values before keys":
        k, v = v, k
    expected = [
        *(
            rotated(x, w, cos, sin, zero_centred=zero_centred, bug=bug)
            for x, w in zip((q, k), twin_weights, strict=True)
        ),
        v,
    ]
    expected_cache = None if cache is None else cache.clone()
    for token, slot in enumerate(slots):
        if cache is not None and (slot >= 0 or bug == "negative slot stored"):
            where = (slot + (bug == "slot one late")) % 12
            for i, stored in enumerate(expected_cache.flatten(1, 2)):
                new = expected[1 + i][token]
                if fp8:
                    scale = scales[0 if bug == "scale of keys for values" else i]
                    new = (new.float() / scale[:, None]).clamp(-448, 448).to(FP8_DTYPE)
                stored[where] = new
    actual = layer_kernels.rotate_heads(
        qkv,
        positions,
        table * torch.where(torch.arange(rotary) < rotary // 2, 1, -1).to(dtype)
        if bug == "sine negated"
        else table,
        q_norm=weights[0],
        k_norm=weights[1],
        eps=EPS,
        num_heads=num_heads,
        kv_cache=cache,
        slot_mapping=torch.tensor(slots),
        kv_scales=scales,
        zero_centred=zero_centred and bug != "one not added to head norms",
        gated=gated,
    )
    assert actual[0].is_contiguous()
    found = [outcome(a, e) for a, e in zip(actual, expected, strict=True)]
    if fp8:  # equal but for what the sums of norms have moved over a border
        different = (cache.float() != expected_cache.float()).double().mean().item()
        found.append((0.0, different if (cache.float().abs() == 448).any() else 1.0))
    elif cache is not None:
        found.append(outcome(cache, expected_cache))
    return worst(*found)


def gate_heads(dtype, tokens, num_heads, num_kv_heads, head_dim, *, bug=None):
    x = normal(tokens, num_heads, head_dim, dtype=dtype, seed=0)
    qkv = 3 * normal(tokens, 2 * (num_heads + num_kv_heads), head_dim, dtype=dtype, seed=1)
    first = 0 if bug == "queries for gates" else 1
    gates = qkv[:, first : 2 * num_heads : 2].sigmoid()
    if bug == "share not rounded":
        gates = qkv[:, 1 : 2 * num_heads : 2].double().sigmoid()
    return outcome(layer_kernels.gate_heads(x, qkv), (x * gates).to(dtype))


def silu(dtype, rows, width, *, bug=None):
    gate_up = 3 * normal(rows, 2 * width, dtype=dtype, seed=0)
    gate, up = gate_up.chunk(2, -1)
    if bug == "gate and up swapped":
        gate, up = up, gate
    expected = nn.functional.silu(gate) * up
    if bug == "gate not rounded":
        expected = (nn.functional.silu(gate.double()) * up.double()).to(dtype)
    return outcome(layer_kernels.silu_mul(gate_up), expected)


def product(
    dtype,
    rows,
    outputs,
    inputs,
    tile,
    *,
    gated=False,
    split=False,
    bias=False,
    packed=False,
    bug=None,
):
    x = normal(rows, inputs, dtype=dtype, seed=0)
    weight = normal(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    weight *= 1 + torch.arange(outputs).to(dtype)[:, None] / outputs  # rows of other scales
    offset = normal(outputs, dtype=dtype, seed=2) if bias else None
    compute, tile = small_product, tile and Tile(*tile)
    if packed:
        compute, weight = int8_product, pack_rows(weight)
    if tile is None:
        found = (layer_kernels.gated_linear if gated else layer_kernels.linear)(x, weight, offset)
    else:
        found = compute(x, weight, offset, gated=gated, split=split, tile=tile)
    if packed:
        if tile is not None:  # rows are rounded too
            x = whole_rows(*split_rows(x))
        codes = weight.roll(1, 0) if bug == "scale of another row" else weight
        scales = codes[:, inputs : inputs + 4].view(torch.float32)
        weight = weight[:, :inputs].double() * scales
    exact = x.double() @ weight.double().T
    if bias and bug != "bias ignored":
        exact += offset
    if gated:
        gate, up = exact.chunk(2, -1)[:: -1 if bug == "gate and up of a product swapped" else 1]
        exact = nn.functional.silu(gate) * up
    if split:
        assert found.dtype == torch.float32
        assert len(found) == tile[3]
        found = found[0] if bug == "one part" else found.sum(0)
    # Relative to the values of a row, not each to its own: products cancel.
    error = (found.double() - exact).norm() / exact.norm()
    return (error / torch.finfo(dtype).eps).item(), 0.0


def whole_rows(planes, scales):
    high, low = planes.double()
    return (256 * high + low) * scales.double()[:, None]


def split(dtype, rows, width, *, bug=None):
    """How many times half a step of its row a value is off: 1 at most."""
    x = normal(rows, width, dtype=dtype, seed=0)
    x[0] = 0
    bad = x.clone()
    bad[1, width // 2] = torch.nan
    assert split_rows(bad)[1].isnan().tolist() == [row == 1 for row in range(rows)]
    planes, scales = split_rows(x)
    if bug == "low plane ignored":
        planes[1] = 0
    if bug == "scale of the next row":
        scales = scales.roll(1)
    error = (whole_rows(planes, scales) - x.double()).abs().amax(1)
    steps = x.double().abs().amax(1) / 32_639
    return (error / steps.clamp(min=1e-30)).max().item() / 0.51, 0.0


def experts(
    dtype,
    *sizes,
    normalises=True,
    favourite=None,
    ranks=1,
    packed=False,
    sigmoid=False,
    beside=False,
    bug=None,
):
    """Of several `ranks` that share the experts the parts are added up."""
    tokens, number, per_token, width, inner, tile = sizes
    mixture = Experts(
        router=normal(number, width, dtype=dtype, seed=1) / width**0.5,
        gate_up=normal(number, 2 * inner, width, dtype=dtype, seed=2) / width**0.5,
        down=normal(number, width, inner, dtype=dtype, seed=3) / inner**0.5,
        per_token=per_token,
        normalises=normalises,
    )
    x = normal(tokens, width, dtype=dtype, seed=0)
    logits = x @ mixture.router.T
    if sigmoid:
        correction = normal(number, dtype=torch.float32, seed=4) / 4
        mixture = replace(mixture, sigmoid=SigmoidScores(correction, scale=2.5))
        logits = logits.float()
    shared = normal(tokens, width, dtype=dtype, seed=5) if beside else None
    if favourite is not None:
        logits[:, favourite] += 9
    tiles = [expert_kernels.Tile(tile, 64, 64, 1, 4, 2)] * 2
    size = number // ranks
    if packed:
        gate_up, down = pack_rows(mixture.gate_up), pack_rows(mixture.down)
        mixture = replace(mixture, gate_up=gate_up, down=down)
        tiles = None if bug is None else tiles
    shares = [
        replace(mixture, gate_up=gate_up, down=down, first=rank * size)
        for rank, (gate_up, down) in enumerate(
            zip(mixture.gate_up.split(size), mixture.down.split(size), strict=True)
        )
    ]
    if bug == "ids from zero on":
        shares = [replace(own, first=0) for own in shares]
    found = [expert_kernels.sum_parts(x, logits, own, tiles, shared) for own in shares]
    if packed:
        gate_up, down = (unpack_rows(w, torch.float64) for w in (gate_up, down))
        mixture = replace(mixture, gate_up=gate_up, down=down)
    parts = torch.stack(found).sum(0)
    assert parts.dtype == torch.float32
    assert parts.shape == (per_token + beside, tokens, width)
    exact = shared.double() if beside else torch.zeros(tokens, width, dtype=torch.float64)
    scale = 2.5 if sigmoid and bug != "gate weights not scaled" else 1.0
    all_scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    for token, scores in enumerate(all_scores):
        gates, chosen = (scores + correction if sigmoid else scores).topk(per_token)
        if bug != "gate weights corrected":
            gates = scores[chosen]
        if normalises and bug != "gate weights as they are":
            gates = gates / gates.sum()
        if bug == "gate weights of other choices":
            gates = gates.flip(0)
        for gate, expert in zip(gates, chosen, strict=True):
            expert = (expert + (bug == "the next expert")) % number
            halves = (mixture.gate_up[expert].double() @ x[token].double()).chunk(2)
            first, second = halves[:: -1 if bug == "gate and up of experts swapped" else 1]
            hidden = nn.functional.silu(first) * second
            exact[token] += scale * gate * (mixture.down[expert].double() @ hidden)
    error = (parts.double().sum(0) - exact).norm() / exact.norm()
    return (error / torch.finfo(dtype).eps).item(), 0.0


BUGS = {
    norm: ("weight ignored", "sum not rounded"),
    rotate: (
        "product not rounded",
        "norms swapped",
        "values before keys",
        "negative slot stored",
        "slot one late",
        "sine negated",
        "sines first",
        "position one late",
    ),
    gate_heads: ("queries for gates", "share not rounded"),
    silu: ("gate and up swapped", "gate not rounded"),
}


OTHER_BUGS = {
    "a part left out": (norm, NORM_CASES, "norm of a sum of 3 parts"),
    "one not added": (norm, NORM_CASES, "zero-centred norm"),
    "one not added to head norms": (rotate, ROTATE_CASES, "gated heads"),
    "gates behind all queries": (rotate, ROTATE_CASES, "gated heads"),
    "scale of keys for values": (rotate, ROTATE_CASES, "FP8 cache"),
    "bias ignored": (product, PRODUCT_CASES, "bias"),
    "one part": (product, PRODUCT_CASES, "split in 3"),
    "gate and up of a product swapped": (product, PRODUCT_CASES, "gated"),
    "low plane ignored": (split, SPLIT_CASES, "split"),
    "scale of the next row": (split, SPLIT_CASES, "split"),
    "scale of another row": (product, PRODUCT_CASES, "packed, few rows"),
    "gate weights as they are": (experts, EXPERT_CASES, "experts"),
    "gate weights of other choices": (experts, EXPERT_CASES, "experts"),
    "ids from zero on": (experts, EXPERT_CASES, "experts of three ranks"),
    "gate weights corrected": (experts, EXPERT_CASES, "sigmoid scores"),
    "gate weights not scaled": (experts, EXPERT_CASES, "sigmoid scores"),
    "the next expert": (experts, EXPERT_CASES, "experts"),
    "gate and up of experts swapped": (experts, EXPERT_CASES, "experts"),
}


def main() -> None:
    """Outcomes that lie beyond the limits, or for planted bugs within them."""
    results = {"cases": 0, "wrong": {}, "missed": {}}

    def is_right(outcome, dtype):
        return all(value <= limit for value, limit in zip(outcome, DTYPES[dtype], strict=True))

    for compute, cases in (
        (norm, NORM_CASES),
        (rotate, ROTATE_CASES),
        (gate_heads, GATE_CASES),
        (silu, SILU_CASES),
        (product, PRODUCT_CASES),
        (split, SPLIT_CASES),
        (experts, EXPERT_CASES),
        (experts, PACKED_EXPERT_CASES),
    ):
        names = ["float16"] if cases is PACKED_EXPERT_CASES else DTYPES
        for (case, (arguments, options)), name in itertools.product(cases.items(), names):
            outcome = compute(getattr(torch, name), *arguments, **options)
            results["cases"] += 1
            if not is_right(outcome, name):
                results["wrong"][f"{name} {case}"] = outcome
    bugs = {
        bug: (compute, *next(iter(cases.values())))
        for compute, cases in (
            (norm, NORM_CASES),
            (rotate, ROTATE_CASES),
            (gate_heads, GATE_CASES),
            (silu, SILU_CASES),
        )
        for bug in BUGS[compute]
    }
    bugs |= {bug: (compute, *cases[case]) for bug, (compute, cases, case) in OTHER_BUGS.items()}
    for bug, (compute, arguments, options) in bugs.items():
        outcome = compute(torch.float16, *arguments, **options, bug=bug)
        if is_right(outcome, "float16"):
            results["missed"][bug] = outcome
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
