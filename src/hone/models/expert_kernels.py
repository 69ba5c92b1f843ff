"""Triton kernels of a decode step's experts.

Few tokens reach an expert in a decode step, and each expert that any of them reaches is read whole:
the step is bound by reading weights. Four kernels do it, none of which asks the host how many
tokens came to which expert, so that a graph can replay them:

    route      a program a token: its K experts and their gate weights
    group      a program an expert of this rank: the list of its (token, choice) pairs
    gate_up    tiles of an expert's first products, silu(gate) * up, a row for each pair
    down       tiles of its second product, weighted: K parts of each token's sum

Where weights are 8-bit codes, the rows of the last two are integers in two planes
(`hone.models.int8_kernels`). Programs are started for every expert and for as many blocks of tokens
as one expert could get; those without a token end at once. The parts are added up, in the order of
the router's choices, by the norm that follows (`hone.models.layer_kernels.add_rms_norm`). All is
rounded where transformers rounds it.

Letters: T tokens, K experts of a token, E experts, P = T K pairs, D model width, I inner width.

This module imports triton; `hone.models.layer_kernels` imports it.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# ruff: noqa: PLR0917

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.attention.kernel_launch import fitting_stages, launch, next_power_of_2, shared_bytes
from hone.models.experts import Experts, Record
from hone.models.int8_kernels import TAIL_BYTES, join_planes, row_scale, split_rows
from hone.models.int8_rows import is_packed
from hone.models.product_kernels import Tile, gated_product

__all__ = ["MAX_TOKENS", "choose_tiles", "is_served", "sum_parts"]

MAX_TOKENS = 1024
"""Largest number of tokens: beyond it products are bound by arithmetic, and the partial sums get
large."""
DTYPES = (torch.bfloat16, torch.float16)
PAIRS = 1024
"""Pairs that a program of `group` reads at a time."""


def is_served(x: Tensor, experts: Experts) -> bool:
    """Whether `sum_parts` supports rows x [T, D]: few rows, a 16-bit dtype, sizes that tiles
    divide, and no choice of experts by groups."""
    sigmoid = experts.sigmoid
    if sigmoid is not None and sigmoid.kept_groups < sigmoid.num_groups:
        return False
    return len(x) <= MAX_TOKENS and x.dtype in DTYPES and choose_tiles(len(x), experts) is not None


def choose_tiles(num_tokens: int, experts: Experts) -> tuple[Tile, Tile] | None:
    """Tiles of both products, whose rows are tokens, or None if none divides the weights.

    They are the fastest that `benchmarks/gpu/experts_check.py` has measured on an H100; few differ
    by more than a tenth. A tile of tokens fits one and a half times the average number per expert,
    so that most weights are read once.
    """
    width, inner = experts.down.shape[1], experts.gate_up.shape[1] // 2
    expected = 1.5 * num_tokens * experts.per_token / len(experts.router)
    tokens = min(max(next_power_of_2(int(expected) + 1), 16), 64)
    has_codes = is_packed(experts.down)
    if has_codes:
        first = Tile(tokens, 64, 128, 1, 4, 4 if tokens <= 32 else 3)
        second = Tile(tokens, 128 if tokens == 32 else 64, 128, 1, 4, 3 if tokens <= 32 else 4)
    else:
        first = Tile(tokens, 64, 64 if width % 128 else 128, 1, 4, 3 if tokens > 32 else 4)
        second = Tile(tokens, 64, 64, 1, 4, 4)
    memory = shared_bytes(experts.down.get_device())
    # Rows take two bytes either way, as floats or as codes in two planes.
    num_bytes = 1 if has_codes else 2
    first, second = (
        tile._replace(
            num_stages=fitting_stages(
                tile.num_stages,
                tile.depth * (2 * tile.rows + num_weights * num_bytes * tile.columns),
                memory,
            )
        )
        for tile, num_weights in ((first, 2), (second, 1))
    )
    if inner % first.columns or width % first.depth or width % second.columns:
        return None
    return None if inner % second.depth else (first, second)


def sum_parts(
    x: Tensor,
    logits: Tensor,
    experts: Experts,
    tiles: tuple[Tile, Tile] | None = None,
    beside: Tensor | None = None,
    record: Record = None,
) -> Tensor:
    """The weighted outputs of each token's experts, parts of its sum: float32 [K, T, D]. Zeros for
    experts of other ranks. What lies `beside` them, [T, D], is a further part.

    x [T, D] and the router's logits [T, E] are contiguous; x has the dtype of the weights.
    `is_served` says of which x; `tiles` are those of `choose_tiles` where none are given.
    """
    (num_tokens, width), per_token = x.shape, experts.per_token
    num_experts, inner_size = len(experts.down), experts.gate_up.shape[1] // 2
    tiles = tiles or choose_tiles(num_tokens, experts)
    assert tiles is not None, "is_served says for which x there are tiles"
    first, second = tiles
    num_pairs = num_tokens * per_token
    make_parts = torch.empty if experts.are_all else torch.zeros
    num_parts = per_token + (beside is not None)
    parts = make_parts(num_parts, num_tokens, width, dtype=torch.float32, device=x.device)
    sigmoid = experts.sigmoid
    ids = x.new_empty(num_pairs, dtype=torch.int32)
    gates = x.new_empty(num_pairs, dtype=torch.float32)
    launch(
        _route_kernel,
        (num_tokens, 1, 1),
        (ids, gates, logits, None if sigmoid is None else sigmoid.correction),
        (1.0 if sigmoid is None else sigmoid.scale,),
        (
            len(experts.router),
            next_power_of_2(len(experts.router)),
            per_token,
            next_power_of_2(per_token),
            experts.normalises,
        ),
        num_warps=1,
    )
    counts = x.new_empty(num_experts, dtype=torch.int32)
    pairs = x.new_empty(num_experts, num_tokens, dtype=torch.int32)
    launch(
        _group_kernel,
        (num_experts, 1, 1),
        (pairs, counts, ids),
        (num_tokens, num_pairs),
        (experts.first, min(PAIRS, next_power_of_2(num_pairs))),
        num_warps=4,
    )
    inner = x.new_empty(num_pairs, inner_size)
    has_codes = is_packed(experts.down)
    # A token chooses an expert once at most.
    for tile, kernel, target, rows, weights, outputs, inputs in (
        (first, _gate_up_kernel, inner, x, (experts.gate_up,), inner_size, width),
        (second, _down_kernel, parts, inner, (experts.down, gates), width, inner_size),
    ):
        source = split_rows(rows) if has_codes else (rows, None)
        launch(
            kernel,
            (-(-num_tokens // tile.rows), outputs // tile.columns, num_experts),
            (target, *source, *weights, pairs, counts),
            (num_tokens,),
            (outputs, inputs, per_token, has_codes, tile.rows, tile.columns, tile.depth),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    if beside is not None:
        parts[per_token].copy_(beside)
    if record is not None:  # last, because the kernels above overlap
        record(ids.view(num_tokens, per_token))
    return parts


@triton.jit(do_not_specialize=["gate_scale"])
def _route_kernel(
    ids_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    correction_ptr: tl.tensor,
    gate_scale: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALISES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Scores are a softmax, or with a correction, by which experts are chosen, sigmoids."""
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    mask = expert < EXPERTS
    logits = tl.load(logits_ptr + token * EXPERTS + expert, mask=mask, other=-float("inf"))
    exact = logits.to(tl.float32)
    if correction_ptr is None:
        powers = tl.exp(exact - tl.max(exact, axis=0))
        scores = powers / tl.sum(powers, axis=0)
        left = scores
    else:
        scores = 1.0 / (1.0 + tl.exp(-exact))
        correction = tl.load(correction_ptr + expert, mask=mask, other=0.0)
        left = tl.where(mask, scores + correction, -float("inf"))
    total = 0.0
    choice = tl.arange(0, CHOICES)
    ids = tl.zeros([CHOICES], tl.int32)
    gates = tl.zeros([CHOICES], tl.float32)
    for k in tl.static_range(PER_TOKEN):
        largest = tl.max(left, axis=0)
        best = tl.min(tl.where(left == largest, expert, BLOCK), axis=0)
        # With NaN logits nothing equals the largest.
        best = tl.minimum(best, EXPERTS - 1)
        gate = tl.sum(tl.where(expert == best, scores, 0.0), axis=0)
        left = tl.where(expert == best, -float("inf"), left)
        ids = tl.where(choice == k, best, ids)
        gates = tl.where(choice == k, gate, gates)
        total += gate
    if NORMALISES:
        gates = gates / total
    gates *= gate_scale
    at = token * PER_TOKEN + choice
    tl.store(ids_ptr + at, ids, mask=choice < PER_TOKEN)
    tl.store(gates_ptr + at, gates.to(dtype).to(tl.float32), mask=choice < PER_TOKEN)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs"])
def _group_kernel(
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_pairs: tl.tensor,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    pairs_ptr += expert.to(tl.int64) * num_tokens
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    count = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1)
        own = (ids == FIRST + expert).to(tl.int32)
        place = count + tl.cumsum(own, axis=0) - 1
        tl.store(pairs_ptr + place, pair, mask=own == 1)
        count += tl.sum(own, axis=0)
    tl.store(counts_ptr + expert, count)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_kernel(
    inner_ptr: tl.tensor,
    x_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CODES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """silu(gate) * up of a block of an expert's tokens, into the rows of their pairs. With CODES
    the rows x are planes, and have scales."""
    width: tl.constexpr = INPUTS + TAIL_BYTES if CODES else INPUTS
    sums: tl.constexpr = tl.int32 if CODES else tl.float32  # pyright: ignore[reportAssignmentType]
    expert = tl.program_id(2).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = place < tl.load(counts_ptr + expert)
    if tl.program_id(0) * TOKENS < tl.load(counts_ptr + expert):
        pair = tl.load(pairs_ptr + expert * num_tokens + place, mask=mask, other=0).to(tl.int64)
        token = pair // PER_TOKEN
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        rows_ptr = x_ptr + token[:, None] * INPUTS + depth[None, :]
        low_rows_ptr = rows_ptr + num_tokens.to(tl.int64) * INPUTS
        weight_ptr += expert * 2 * OUTPUTS * width
        columns_ptr = weight_ptr + column[:, None] * width + depth[None, :]
        gate = tl.zeros([COLUMNS, TOKENS], sums)
        up = tl.zeros([COLUMNS, TOKENS], sums)
        gate_low = tl.zeros([COLUMNS, TOKENS], sums)
        up_low = tl.zeros([COLUMNS, TOKENS], sums)
        for start in range(0, INPUTS, DEPTH):
            x = tl.load(rows_ptr + start, mask=mask[:, None], other=0).T
            gate_weight = tl.load(columns_ptr + start)
            gate = tl.dot(gate_weight, x, gate, out_dtype=sums)
            up_weight = tl.load(columns_ptr + OUTPUTS * width + start)
            up = tl.dot(up_weight, x, up, out_dtype=sums)
            if CODES:
                x_low = tl.load(low_rows_ptr + start, mask=mask[:, None], other=0).T
                gate_low = tl.dot(gate_weight, x_low, gate_low, out_dtype=sums)
                up_low = tl.dot(up_weight, x_low, up_low, out_dtype=sums)
        if CODES:
            scale = tl.load(scales_ptr + token, mask=mask, other=0.0)[None, :]
            gate_scale = row_scale(weight_ptr, column, INPUTS)[:, None] * scale
            up_scale = row_scale(weight_ptr, OUTPUTS + column, INPUTS)[:, None] * scale
            product = gated_product(
                join_planes(gate, gate_low) * gate_scale,
                join_planes(up, up_low) * up_scale,
                inner_ptr.dtype.element_ty,
            )
        else:
            product = gated_product(gate, up, inner_ptr.dtype.element_ty)
        target_ptr = inner_ptr + pair[None, :] * OUTPUTS + column[:, None]
        tl.store(target_ptr, product, mask=mask[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    parts_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    gates_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CODES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """An expert's output for a block of its tokens times their gate weights, part k of T. With
    CODES the rows of `inner` are planes, and have scales."""
    width: tl.constexpr = INPUTS + TAIL_BYTES if CODES else INPUTS
    sums: tl.constexpr = tl.int32 if CODES else tl.float32  # pyright: ignore[reportAssignmentType]
    expert = tl.program_id(2).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = place < tl.load(counts_ptr + expert)
    if tl.program_id(0) * TOKENS < tl.load(counts_ptr + expert):
        pair = tl.load(pairs_ptr + expert * num_tokens + place, mask=mask, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        rows_ptr = inner_ptr + pair[:, None] * INPUTS + depth[None, :]
        low_rows_ptr = rows_ptr + num_tokens.to(tl.int64) * PER_TOKEN * INPUTS
        weight_ptr += expert * OUTPUTS * width
        columns_ptr = weight_ptr + column[:, None] * width + depth[None, :]
        total = tl.zeros([COLUMNS, TOKENS], sums)
        total_low = tl.zeros([COLUMNS, TOKENS], sums)
        for start in range(0, INPUTS, DEPTH):
            inner = tl.load(rows_ptr + start, mask=mask[:, None], other=0).T
            weight = tl.load(columns_ptr + start)
            total = tl.dot(weight, inner, total, out_dtype=sums)
            if CODES:
                inner_low = tl.load(low_rows_ptr + start, mask=mask[:, None], other=0).T
                total_low = tl.dot(weight, inner_low, total_low, out_dtype=sums)
        gate = tl.load(gates_ptr + pair, mask=mask, other=0.0)
        if CODES:
            scale = tl.load(scales_ptr + pair, mask=mask, other=0.0) * gate
            of_column = row_scale(weight_ptr, column, INPUTS)[:, None]
            weighted = join_planes(total, total_low) * (of_column * scale[None, :])
        else:
            dtype: tl.constexpr = inner_ptr.dtype.element_ty
            weighted = (total.to(dtype).to(tl.float32) * gate[None, :]).to(dtype).to(tl.float32)
        row = (pair % PER_TOKEN) * num_tokens + pair // PER_TOKEN
        target_ptr = parts_ptr + row[None, :] * OUTPUTS + column[:, None]
        tl.store(target_ptr, weighted, mask=mask[None, :])
