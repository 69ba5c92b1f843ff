from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.engine import sampler
from hone.engine.sampler import sample, uniforms
from hone.engine.sampling_table import SamplingTable
from hone.types import SamplingParams
from tests.engine import reference
from tests.tables import table

GRID = [
    SamplingParams(max_tokens=1, temperature=t, top_p=p, top_k=k, min_p=m)
    for t, p, k, m in product((0.5, 1.0, 1.7), (1.0, 0.8), (0, 4), (0.0, 0.1))
]


def batch_of(params, vocab_size):
    table = SamplingTable(len(params), vocab_size=vocab_size, device=torch.device("cpu"))
    for slot, one in enumerate(params):
        table.write(slot, one)
    return rows_of(table, np.arange(len(params)))


def rows_of(table, slots):
    return table.rows(torch.from_numpy(slots), filtered=table.is_filtered(slots))


def draw_many(logits, params, num_draws):
    """Draw from one row of logits at positions 0, 1, ...: tokens and log-probs, numpy."""
    table = SamplingTable(1, vocab_size=len(logits), device=torch.device("cpu"))
    table.write(0, params)
    tokens, logprobs = sampler.sample(
        logits.expand(num_draws, -1),
        rows_of(table, np.zeros(num_draws, np.int64)),
        torch.arange(num_draws),
    )
    return tokens.numpy(), logprobs.numpy()


def assert_counts_fit(counts, probs):
    """Pearson's chi-square within five standard deviations of its mean."""
    expected = probs * counts.sum()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic <= freedom + 5 * np.sqrt(2 * freedom), f"{statistic=} {freedom=}"


def check_scored_equals_sampled(params):
    """Frequencies follow the reference distribution, and each log-prob is that of its token."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = reference.distribution(logits.double().numpy(), params)
    tokens, logprobs = draw_many(logits, replace(params, seed=11), 20_000)
    counts = np.bincount(tokens, minlength=12)
    assert_counts_fit(counts, expected)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


@table("params", GRID)
def test_R5_scored_distribution_is_the_sampled_one(params):
    check_scored_equals_sampled(params)


def _untempered(logits, params):
    return sampler.scale_and_filter(logits, replace(params, temperatures=torch.ones(1, 1)))


PLANTED = {
    "log-prob before temperature": _untempered,
    "log-prob before filters": lambda logits, params: logits / params.temperatures,
}


@pytest.mark.parametrize("scored", PLANTED.values(), ids=PLANTED)
def test_R5_planted_bugs_are_caught(monkeypatch, scored):
    correct = sampler.sample

    def wrong(logits, params, positions):
        tokens, _ = correct(logits, params, positions)
        logprobs = scored(logits, params).log_softmax(-1)
        return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    monkeypatch.setattr(sampler, "sample", wrong)
    with pytest.raises(AssertionError):
        check_scored_equals_sampled(SamplingParams(max_tokens=1, temperature=0.5, top_k=4))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda seeds, positions: uniforms(seeds, positions * 0),
        lambda seeds, positions: uniforms(seeds, positions) ** 1.1,
    ],
    ids=["position ignored", "not uniform"],
)
def test_R5_planted_random_numbers_are_caught(monkeypatch, wrong):
    monkeypatch.setattr(sampler, "uniforms", wrong)
    with pytest.raises(AssertionError):
        check_scored_equals_sampled(SamplingParams(max_tokens=1))


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 100_000))
def test_uniforms_equal_the_integer_reference(seed, position):
    signed = seed - 2**64 if seed >= 2**63 else seed
    got = uniforms(torch.tensor([signed]), torch.tensor([position])).item()
    assert got == reference.uniform(seed % 2**64, position)


def test_uniforms_of_neighbouring_seeds_and_positions_are_independent():
    seeds, positions = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    values = uniforms(seeds.flatten(), positions.flatten()).view(200, 200)
    cells = (values * 8).long().numpy()
    for left, right in (
        (cells[:-1], cells[1:]),
        (cells[:, :-1], cells[:, 1:]),
        (cells[1:, :-1], cells[:-1, 1:]),
    ):
        pairs = np.bincount((left * 8 + right).ravel(), minlength=64)
        assert_counts_fit(pairs, np.full(64, 1 / 64))


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(GRID) + 1, 50, generator=generator)
    params = [replace(one, seed=i) for i, one in enumerate(GRID)]
    params.append(SamplingParams(max_tokens=1, temperature=0, top_k=3))
    positions = torch.arange(len(params))
    tokens, logprobs = sample(logits, batch_of(params, 50), positions)
    for i, one in enumerate(params):
        token, logprob = sample(logits[i : i + 1], batch_of([one], 50), positions[i : i + 1])
        assert token.item() == tokens[i].item()
        assert logprob.item() == logprobs[i].item()


def test_the_slot_behind_the_last_is_neutral():
    table = SamplingTable(2, vocab_size=30, device=torch.device("cpu"))
    for slot in range(2):
        table.write(slot, SamplingParams(max_tokens=1, temperature=0.3, top_p=0.1, min_p=0.2))
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(4))
    padding, positions = torch.full((4,), 2), torch.arange(4)
    assert not table.is_filtered(np.array([2]))
    plain = batch_of([SamplingParams(max_tokens=1)] * 4, 30)
    torch.testing.assert_close(
        sample(logits, table.rows(padding, filtered=True), positions),
        sample(logits, plain, positions),
        rtol=0,
        atol=0,
    )


def test_greedy_takes_the_best_token_and_its_plain_logprob():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    greedy = SamplingParams(max_tokens=1, temperature=0, top_p=0.1, top_k=2, min_p=0.5)
    tokens, logprobs = sample(logits, batch_of([greedy] * 5, 40), torch.zeros(5, dtype=torch.int64))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_ties_at_the_border_keep_the_lower_ids():
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0])
    tokens, logprobs = draw_many(logits, SamplingParams(max_tokens=1, top_k=2), 500)
    assert set(tokens) == {1, 2}
    expected = reference.distribution(logits, SamplingParams(max_tokens=1, top_k=2))
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-6)


@table("level", [0.9975, 0.9985, 0.9995])
def test_improbable_tokens_of_a_large_vocabulary_can_be_drawn(monkeypatch, level):
    """Each adds 2e-8 to the running sum, which float32 would round away."""
    logits = torch.full((150_000,), float(np.log(2e-8)))
    logits[0] = float(np.log(1 - 2e-8 * 149_999))
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, _: torch.full((len(seeds),), level))
    (token,), _ = draw_many(logits, SamplingParams(max_tokens=1), 1)
    assert abs(token - (level - logits[0].exp().item()) / 2e-8) < 20


def test_logits_that_are_not_numbers_show_in_the_logprob():
    logits = torch.full((1, 7), torch.nan)
    token, logprob = sample(logits, batch_of([SamplingParams(max_tokens=1)], 7), torch.tensor([0]))
    assert 0 <= token.item() < 7
    assert logprob.isnan().item()


@table("vocab_size", [1, 7, 128, 300, 1000])
def test_tokens_equal_those_of_one_running_sum(vocab_size):
    """And one of probability 0 is never drawn, wherever it lies in its block."""
    draw = torch.Generator().manual_seed(vocab_size)
    probs = torch.rand(200, vocab_size, generator=draw).pow(8)
    probs[torch.rand(200, vocab_size, generator=draw) < 0.7] = 0
    probs[:, vocab_size // 2] = 1e-3
    probs /= probs.sum(-1, keepdim=True)
    levels = torch.rand(200, 1, generator=draw, dtype=torch.float64)
    levels[:50], levels[50:100] = 0, 1 - 2.0**-48
    running = probs.double().cumsum(-1)
    expected = torch.searchsorted(running, levels * running[:, -1:], right=True)
    tokens = sampler._invert(probs, levels)
    assert (tokens == expected).double().mean() > 0.98  # a level between two tokens may fall either
    assert (probs.gather(-1, tokens) > 0).all()
