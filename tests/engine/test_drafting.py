"""Verified drafts change no sample, whatever was drafted and wherever a sequence ends."""

import numpy as np
import pytest

from hone.engine import decode_step
from hone.engine.speculation import DRAFT_LENGTHS
from hone.types import SamplingParams, StopReason
from tests.engine.test_generation import PARAMS, assert_equal, make_requests, run
from tests.engine.test_overlap import SETTINGS

STOPS = frozenset((5, 11, 17))


def speculating(models, *, propose, **fields):
    """An engine that drafts in most steps; `propose(sequences, k)` writes the drafts."""
    engine = models.engine(speculation=True, **fields)
    drafting = engine._drafting
    draw = np.random.default_rng(7)
    drafting.length = lambda running: int(draw.choice((0, *DRAFT_LENGTHS)))
    correct = drafting.propose
    trim = type(drafting._index).propose

    def planted(slots, length):
        drafts = propose(engine, slots, length)
        return trim(drafting._index, slots, length) if drafts is None else drafts

    drafting._index.propose = planted
    drafting.propose = correct
    return engine


def oracle(expected):
    """Drafts what will be sampled, with an error now and then."""
    draw = np.random.default_rng(3)

    def propose(engine, slots, length):
        running = {sequence.slot: sequence for sequence in engine._scheduler.running}
        drafts = np.full((len(slots), length), -1, np.int64)
        for row, slot in enumerate(slots):
            sequence = running[slot]
            future = expected[sequence.request.id].token_ids[len(sequence.logprobs) :][:length]
            drafts[row, : len(future)] = future
        wrong = draw.random(drafts.shape) < 0.2
        return np.where(wrong & (drafts >= 0), draw.integers(0, 39, drafts.shape), drafts)

    return propose


def nonsense(engine, slots, length):
    return np.random.default_rng(len(slots)).integers(-1, 39, (len(slots), 1)).repeat(length, 1)


def from_the_index(engine, slots, length):
    return None


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
@pytest.mark.parametrize("source", ["oracle", "nonsense", "index"])
def test_R4_R20_drafts_change_no_sample(models, fields, source):
    requests = make_requests(seed=3) + [
        type(request)(id=f"{request.id}+", prompt_ids=request.prompt_ids, sampling=request.sampling)
        for request in make_requests(seed=3)
    ]
    expected = run(models.engine(eos_token_ids=STOPS), requests)
    assert {done.stop_reason for done in expected.values()} == {StopReason.EOS, StopReason.LENGTH}
    propose = {"oracle": oracle(expected), "nonsense": nonsense, "index": from_the_index}[source]
    engine = speculating(models, propose=propose, eos_token_ids=STOPS, in_flight=1, **fields)
    assert_equal(expected, run(engine, requests))
    counters = engine._drafting.counters
    assert counters.num_drafted_tokens > 0
    if source == "oracle":
        assert counters.num_accepted_tokens > 0.4 * counters.num_drafted_tokens
        assert engine.stats().num_steps < models_steps(models, requests, fields)


def models_steps(models, requests, fields):
    engine = models.engine(eos_token_ids=STOPS, **fields)
    run(engine, requests)
    return engine.stats().num_steps


def test_a_sequence_ends_within_its_limits_and_blocks(models):
    params = [SamplingParams(max_tokens=n, seed=n) for n in (1, 2, 5, 60)]
    requests = make_requests(params=params)
    requests = [r.__class__(id=r.id, prompt_ids=(3,), sampling=r.sampling) for r in requests]
    expected = run(models.engine(), requests)
    engine = speculating(models, propose=oracle(expected))
    assert_equal(expected, run(engine, requests))


def _accepts_all(correct):
    return lambda drafts, sampled: np.full(len(drafts), drafts.shape[1])


def _accepts_one_less(correct):
    return lambda drafts, sampled: np.maximum(correct(drafts, sampled) - 1, 0)


@pytest.mark.parametrize("plant", [_accepts_all, _accepts_one_less])
def test_R20_planted_acceptance_is_caught(models, monkeypatch, plant):
    from hone.engine import model_runner

    requests = make_requests(params=PARAMS[:4])
    expected = run(models.engine(), requests)
    engine = speculating(models, propose=oracle(expected))
    monkeypatch.setattr(model_runner, "accept", plant(model_runner.accept))
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal(expected, run(engine, requests))


def test_R4_planted_draws_at_one_position_are_caught(models, monkeypatch):
    """All queries of a sequence drawn with the uniform of the first."""
    requests = make_requests(params=PARAMS[1:4])
    expected = run(models.engine(), requests)
    engine = speculating(models, propose=oracle(expected))
    correct = decode_step.sample

    def wrong(logits, sampling, positions):
        count = len(engine._scheduler.running)
        first = positions.view(-1, len(positions) // count)[:, :1]
        return correct(logits, sampling, first.expand(-1, len(positions) // count).flatten())

    monkeypatch.setattr(decode_step, "sample", wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equal(expected, run(engine, requests))


def test_step_times_are_those_of_whole_steps_of_their_batch(models):
    """Plain and verified steps by turns, one in flight: every one is measured with its wait."""
    requests = make_requests(params=PARAMS[1:4] * 2)
    engine = models.engine(speculation=True, in_flight=1)
    drafting, seen = engine._drafting, []
    lengths = iter([0, 0, 0, 3, 0, 3, 0, 0, 0, 3] * 20)
    drafting.length = lambda running: next(lengths)
    drafting.record = lambda drafts, sampled, seconds: seen.append((drafts, len(sampled)))
    run(engine, requests)
    assert all(count > 0 for _, count in seen)
    kinds = [drafts is None for drafts, _ in seen]
    assert True in kinds
    assert False in kinds
