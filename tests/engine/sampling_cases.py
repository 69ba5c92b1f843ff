"""What the fused sampling kernels are checked with, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hone.engine import sampling_kernels
from hone.engine.sampler import scale_and_filter
from hone.engine.sampling_table import SamplingTable
from hone.models import token_logprobs
from hone.types import SamplingParams
from tests.engine import reference

GRID = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "top-k": {"top_k": 5, "temperature": 1.3},
    "top-1": {"top_k": 1},
    "wide top-k": {"top_k": 600},
    "top-p": {"top_p": 0.8},
    "narrow top-p": {"top_p": 1e-4, "temperature": 1.7},
    "min-p": {"min_p": 0.05, "temperature": 0.8},
    "top-k, top-p": {"top_k": 40, "top_p": 0.7},
    "all": {"min_p": 0.02, "top_k": 30, "top_p": 0.9, "temperature": 1.4},
}


def make_params(num_rows, *, seed, names=tuple(GRID)):
    """`num_rows` requests with seeds of their own that take the settings `names` in turn."""
    seeds = np.random.default_rng(seed).integers(-(2**63), 2**63, num_rows)
    return [
        SamplingParams(max_tokens=1, seed=int(one), **GRID[names[i % len(names)]])
        for i, one in enumerate(seeds)
    ]


def make_table(params, vocab_size, device="cpu"):
    table = SamplingTable(len(params), vocab_size=vocab_size, device=torch.device(device))
    for slot, one in enumerate(params):
        table.write(slot, one)
    table.flush()
    return table


def sample_rows(logits, params, positions, *, filtered=True, change=None):
    """Fused sampling of every row; `change` plants a bug in the parameters."""
    slots = torch.arange(len(params), device=logits.device)
    batch = make_table(params, logits.shape[1], logits.device).rows(slots, filtered=filtered)
    batch = change(batch) if change else batch
    return sampling_kernels.sample(logits, batch, positions)


def draw_errors(logits, params, positions, tokens, logprobs, *, filtered=True):
    """How far each uniform number lies outside its token's part of the float64 cumulative
    distribution (1 for a token of probability 0), and the error of each log-probability."""
    away, wrong = [], []
    rows = logits.double().cpu().numpy()
    for row, one, position, token, logprob in zip(
        rows, params, positions.tolist(), tokens.tolist(), logprobs.tolist(), strict=True
    ):
        plain = replace(one, top_k=0, top_p=1.0, min_p=0.0)
        probs = distribution(row, one if filtered else plain)
        if probs[token] == 0:
            away.append(1.0)
            wrong.append(1.0)
            continue
        end = probs[: token + 1].sum()
        level = reference.uniform(one.seed % 2**64, position)
        outside = max(end - probs[token] - level, level - end, 0.0)
        if one.temperature == 0:
            outside = float(token != row.argmax())
        away.append(outside)
        wrong.append(abs(logprob - np.log(probs[token])))
    return np.array(away), np.array(wrong)


def distribution(logits, params):
    """`reference.distribution` for rows that are too long for its loops."""
    if len(logits) < 2000:
        return reference.distribution(logits, params)
    logits = logits / (params.temperature or 1.0)
    weights = np.exp(logits - logits.max())
    if params.temperature > 0:
        order = np.argsort(-logits, kind="stable")
        ranked = weights[order] / weights.sum()
        ranked[ranked < params.min_p * ranked[0]] = 0
        if params.top_k:
            ranked[params.top_k :] = 0
        before = np.cumsum(ranked) - ranked
        if params.top_p < 1:
            ranked[1:][before[1:] >= params.top_p * ranked.sum()] = 0
        weights[order[ranked == 0]] = 0
    return weights / weights.sum()


def kept_differences(logits, params, *, tolerance=2e-6, change=None):
    """Tokens kept by one of kernels and yardstick only. Not counting those where the mass of the
    more probable ones meets top-p within `tolerance`, and those without any mass."""
    slots = torch.arange(len(params), device=logits.device)
    table = make_table(params, logits.shape[1], logits.device)
    batch = table.rows(slots, filtered=True)
    expected = scale_and_filter(logits.float(), batch) > -torch.inf
    batch = change(batch) if change else batch
    rows = token_logprobs.Rows.of(logits, batch.temperatures)
    borders, last_ids = sampling_kernels._find_borders(
        rows, *token_logprobs.block_sums(rows), batch
    )
    token = torch.arange(logits.shape[1], device=logits.device)
    values, borders = logits.float(), borders[:, None]
    kept = (values > borders) | ((values == borders) & (token <= last_ids[:, None]))
    different, excused = kept != expected, 0
    for i in different.any(1).nonzero().flatten().tolist():
        one = params[i]
        probs = distribution(values[i].double().cpu().numpy(), replace(one, top_p=1.0))
        for j in different[i].nonzero().flatten().tolist():
            distance = (values[i].max() - values[i, j]) / one.temperature
            ahead = (values[i] > values[i, j]) | ((values[i] == values[i, j]) & (token < j))
            before = probs[ahead.cpu().numpy()].sum()
            at_border = one.top_p < 1 and abs(before - one.top_p) < tolerance
            excused += bool(at_border or distance > 40)  # e**-40 > 2**-64
    return int(different.sum()) - excused
