"""Runs the sampling kernels in Triton's interpreter on the CPU and prints what they give as JSON.

A process of its own: the interpreter is chosen by an environment variable that must be set before
triton is first imported. float32 and float16 only, the interpreter has no working bfloat16.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product

from tests import triton_interpreter  # noqa: F401  # isort: skip

import numpy as np
import torch
import triton
import triton.language as tl

from hone.engine import sampling_kernels
from hone.models import token_logprobs
from hone.types import SamplingParams
from tests.engine.sampling_cases import (
    GRID,
    draw_errors,
    kept_differences,
    make_params,
    make_table,
    sample_rows,
)

VOCAB_SIZES = {
    torch.float32: {1: 3, 7: 11, 127: 11, 1037: 11, 20_011: 11, 151_939: 2},
    torch.float16: {256: 11, 1037: 11},
}
"""And the number of rows."""


KEPT_CASES = [(0, 4096), (0, 16), (0.25, 4096), (4.0, 16)]
"""Logits rounded to this, and the tokens that fit into the last step of the search."""


def make_logits(num_rows, vocab_size, dtype=torch.float32, *, seed=0, spread=3.0):
    draw = torch.Generator().manual_seed(1000 * seed + vocab_size)
    return (torch.randn(num_rows, vocab_size, generator=draw) * spread).to(dtype)


def check_draws(vocab_size, num_rows, dtype, *, filtered, change=None, seed=0):
    logits = make_logits(num_rows, vocab_size, dtype, seed=seed)
    names = tuple(GRID)[-num_rows:]  # two rows have the settings that take the longest way
    params = make_params(num_rows, seed=vocab_size + seed, names=names)
    positions = torch.arange(num_rows) * 7
    drawn = sample_rows(logits, params, positions, filtered=filtered, change=change)
    return [
        float(errors.max())
        for errors in draw_errors(logits, params, positions, *drawn, filtered=filtered)
    ]


def check_kept(rounded_to, candidates, *, change=None):
    """Few candidates fit, and many logits are equal."""
    sampling_kernels.CANDIDATES, before = candidates, sampling_kernels.CANDIDATES
    logits = make_logits(len(GRID), 3001, seed=3)
    if rounded_to:
        logits = (logits / rounded_to).round() * rounded_to
    differences = kept_differences(logits, make_params(len(GRID), seed=4), change=change)
    sampling_kernels.CANDIDATES = before
    return differences


def bits(drawn):
    tokens, logprobs = drawn
    return tokens.tolist(), logprobs.view(torch.int32).tolist()


def rows_are_independent():
    """Each row alone, and the batch reversed, and rows with filters beside rows without."""
    logits = make_logits(len(GRID), 700, seed=5)
    params = make_params(len(GRID), seed=6)
    positions = torch.arange(len(GRID))
    tokens, logprobs = bits(sample_rows(logits, params, positions))
    reversed_bits = bits(sample_rows(logits.flip(0), params[::-1], positions.flip(0)))
    good = reversed_bits == (tokens[::-1], logprobs[::-1])
    for i, one in enumerate(params):
        row = logits[i : i + 1], [one], positions[i : i + 1]
        good &= bits(sample_rows(*row)) == ([tokens[i]], [logprobs[i]])
        if not (one.top_k or one.top_p < 1 or one.min_p) or one.temperature == 0:
            good &= bits(sample_rows(*row, filtered=False)) == ([tokens[i]], [logprobs[i]])
    return good


def padding_rows_are_neutral():
    """Rows of the slot behind the last: whatever their logits, the others stay the same."""
    logits = make_logits(5, 300, seed=7)
    logits[1], logits[3] = torch.nan, torch.inf
    params = make_params(3, seed=8, names=("all", "plain", "top-p"))
    batch = make_table(params, 300).rows(torch.tensor([0, 3, 1, 3, 2]), filtered=True)
    positions = torch.tensor([4, 0, 5, 0, 6])
    tokens, logprobs = sampling_kernels.sample(logits, batch, positions)
    alone = sample_rows(logits[[0, 2, 4]], params, positions[[0, 2, 4]])
    padding = logprobs[[1, 3]].isnan().all() and (tokens >= 0).all() and (tokens < 300).all()
    return bits((tokens[[0, 2, 4]], logprobs[[0, 2, 4]])) == bits(alone) and bool(padding)


def scored_bits_equal_sampled():
    good = True
    for dtype in (torch.float32, torch.float16):
        logits = make_logits(8, 1500, dtype, seed=9)
        names = ("plain", "temperature", "greedy")
        params = [replace(one, top_k=0) for one in make_params(8, seed=10, names=names)]
        tokens, logprobs = sample_rows(logits, params, torch.arange(8), filtered=False)
        temperatures = torch.tensor([one.temperature or 1.0 for one in params])
        for rows in (slice(8), slice(3), slice(5, 6)):
            again = token_logprobs.token_logprobs(logits[rows], tokens[rows], temperatures[rows])
            good &= torch.equal(again, logprobs[rows])
    return good


def rows_that_are_no_numbers(filtered):
    """Every log-probability is NaN, and every token is one."""
    logits = make_logits(4, 400, seed=11)
    logits[0, 130], logits[1], logits[2, 399], logits[3] = (
        torch.nan,
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    params = make_params(4, seed=12, names=("all",) if filtered else ("plain", "greedy"))
    tokens, logprobs = sample_rows(logits, params, torch.arange(4), filtered=filtered)
    return bool(logprobs.isnan().all() and (tokens >= 0).all() and (tokens < 400).all())


def impossible_tokens_drawn(filtered):
    """How many of the tokens drawn have a logit of -inf; whole blocks do."""
    logits = make_logits(11, 1000, seed=13)
    logits[:, torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.9] = -torch.inf
    logits[:, 256:700] = -torch.inf
    params = make_params(11, seed=14)
    tokens, logprobs = sample_rows(logits, params, torch.arange(11), filtered=filtered)
    drawn = logits.gather(1, tokens[:, None])
    return int((drawn == -torch.inf).sum()) + int((~logprobs.isfinite()).sum())


def exact_top_p():
    """Sums that meet the target exactly, and top-p within the ties that top-k has cut."""
    settings = [{"top_p": p} for p in (0.5, 0.25, 0.75, 0.01)]
    settings += [{"top_k": 6, "top_p": 0.95}, {"top_k": 4, "top_p": 0.5}, {"min_p": 1.0}]
    params = [SamplingParams(max_tokens=1, **one) for one in settings]
    return kept_differences(torch.zeros(len(params), 8), params, tolerance=0.0)


def exact_min_p():
    """Logits within a few units in the last place of the border, on both sides."""
    params = [
        SamplingParams(max_tokens=1, min_p=p, temperature=t)
        for p, t in product((0.9, 0.3, 0.05, 1e-4), (0.7, 1.0, 1.7))
    ]
    logits = torch.full((len(params), 60), -50.0)
    for row, one in zip(logits, params, strict=True):
        row[0] = 5.0
        border = torch.tensor(one.temperature) * (5.0 / one.temperature + np.log(one.min_p))
        row[10:51] = (border.view(torch.int32) + torch.arange(-20, 21, dtype=torch.int32)).view(
            torch.float32
        )
    return kept_differences(logits, params)


def greedy_takes_the_lowest_id():
    logits = make_logits(6, 3000, seed=17).round().clamp(max=3)
    params = make_params(6, seed=18, names=("greedy",))
    tokens, _ = sample_rows(logits, params, torch.arange(6), filtered=False)
    return tokens.tolist() == [row.tolist().index(row.max()) for row in logits]


@triton.jit
def lowest_uniform(seed, position):
    return (seed * 0).to(tl.float64)


@triton.jit
def highest_uniform(seed, position):
    return (seed * 0).to(tl.float64) + (1.0 - 2.0**-48)


def extreme_tokens():
    """First and last token that can be drawn, where those before and behind are impossible."""
    logits = make_logits(2, 1000, seed=19)
    logits[:, :5] = logits[:, 256:300] = logits[:, 990:] = -torch.inf
    params = make_params(2, seed=20, names=("plain", "temperature"))
    tokens, hashed = [], sampling_kernels._uniform
    for uniform in (lowest_uniform, highest_uniform):
        sampling_kernels._uniform = uniform
        tokens.append(sample_rows(logits, params, torch.arange(2))[0].tolist())
    sampling_kernels._uniform = hashed
    return tokens


def counts(params, num_draws):
    logits = make_logits(1, 12, seed=15, spread=1.5)
    table = make_table([params], 12)
    batch = table.rows(torch.zeros(num_draws, dtype=torch.int64), filtered=False)
    tokens, _ = sampling_kernels.sample(
        logits.expand(num_draws, -1).contiguous(), batch, torch.arange(num_draws)
    )
    return logits[0].tolist(), np.bincount(tokens.numpy(), minlength=12).tolist()


def top_p_of_everything(batch):
    """top-p counted in the mass of all tokens, as if min-p and top-k had dropped none."""
    logits = make_logits(11, 127, seed=16)
    left = sampling_kernels_mass(logits, replace(batch, top_ps=torch.ones_like(batch.top_ps)))
    return replace(batch, top_ps=torch.where(batch.top_ps < 1, batch.top_ps / left, 1.0).float())


def sampling_kernels_mass(logits, batch):
    from hone.engine.sampler import scale_and_filter

    kept = scale_and_filter(logits, batch) > -torch.inf
    return ((logits / batch.temperatures).softmax(-1) * kept).sum(-1, keepdim=True)


PLANTED = {
    "temperature ignored": lambda b: replace(b, temperatures=torch.ones_like(b.temperatures)),
    "top-k off by one": lambda b: replace(b, top_ks=b.top_ks + 1),
    "top-p of everything": top_p_of_everything,
    "seeds ignored": lambda b: replace(b, seeds=torch.zeros_like(b.seeds)),
}


def unfiltered_logprob_error():
    """The error where log-probabilities are those before filters."""
    logits, params, positions = make_logits(11, 127), make_params(11, seed=127), torch.arange(11)
    tokens, _ = sample_rows(logits, params, positions)
    temperatures = torch.tensor([one.temperature or 1.0 for one in params])
    logprobs = token_logprobs.token_logprobs(logits, tokens, temperatures)
    return [float(e.max()) for e in draw_errors(logits, params, positions, tokens, logprobs)]


def main() -> None:
    results: dict[str, object] = {}
    for dtype, sizes in VOCAB_SIZES.items():
        for vocab_size, num_rows in sizes.items():
            for filtered in (False, True):
                name = f"draws {str(dtype).removeprefix('torch.')} {vocab_size} {filtered}"
                results[name] = check_draws(vocab_size, num_rows, dtype, filtered=filtered)
    for rounded_to, candidates in KEPT_CASES:
        results[f"kept {rounded_to} {candidates}"] = check_kept(rounded_to, candidates)
    results["exact top-p"], results["exact min-p"] = exact_top_p(), exact_min_p()
    results["greedy ties"], results["extremes"] = greedy_takes_the_lowest_id(), extreme_tokens()
    results["independent"] = rows_are_independent()
    results["padding"] = padding_rows_are_neutral()
    results["scored"] = scored_bits_equal_sampled()
    for filtered in (False, True):
        results[f"no numbers {filtered}"] = rows_that_are_no_numbers(filtered)
        results[f"impossible {filtered}"] = impossible_tokens_drawn(filtered)
    results["counts"] = counts(SamplingParams(max_tokens=1, temperature=0.7, seed=21), 100)
    for name, change in PLANTED.items():
        results[name] = check_draws(127, 11, torch.float32, filtered=True, change=change, seed=16)
    results["log-prob before filters"] = unfiltered_logprob_error()
    results["kept, top-k off by one"] = check_kept(0, 4096, change=PLANTED["top-k off by one"])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
