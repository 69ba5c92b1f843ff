"""What the engine samples, against generation by full recomputation with the stock model."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.engine import decode_step
from hone.models.generation import GenerationModel
from hone.types import Request, SamplingParams, StopReason
from tests.engine import reference
from tests.engine.conftest import FAMILY_FIELDS
from tests.tables import table

PARAMS = [
    SamplingParams(max_tokens=14, temperature=0),
    SamplingParams(max_tokens=20, seed=1),
    SamplingParams(max_tokens=20, seed=2),
    SamplingParams(max_tokens=9, temperature=0.6, top_p=0.9, seed=3),
    SamplingParams(max_tokens=16, temperature=1.4, top_k=5, seed=4),
    SamplingParams(max_tokens=12, temperature=0.8, top_k=9, top_p=0.7, min_p=0.05, seed=5),
]


def make_requests(seed=0, params=PARAMS):
    """Two groups of three with a common prompt beginning, then singles of other lengths."""
    draw = random.Random(seed)
    stem = draw.choices(range(3, 39), k=7)
    prompts = [stem + draw.choices(range(3, 39), k=k) for k in (6, 3)]
    prompts = [prompts[0]] * 3 + [prompts[1]] * 2 + [draw.choices(range(3, 39), k=1)]
    return [
        Request(id=str(i), prompt_ids=tuple(prompts[i % 6]), sampling=one)
        for i, one in enumerate(params)
    ]


def run(engine, requests):
    """Submit at once and drive to the end: completions by id."""
    engine.submit(requests)
    done = {}
    while engine.has_unfinished:
        for completion in engine.step():
            done[completion.request_id] = completion
    return done


@pytest.fixture(scope="session")
def expected_of_qwen3(make_models):
    """What an engine with all the memory it wants gives to `make_requests()`."""
    return run(make_models("qwen3").engine(), make_requests())


def check_against_recomputation(models, requests, done, eos_token_ids=()):
    for request in requests:
        completion = done[request.id]
        tokens, logprobs = reference.generate(
            models.plain, request.prompt_ids, request.sampling, eos_token_ids
        )
        assert completion.token_ids == tokens
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4, rtol=0)


@table("family", FAMILY_FIELDS)
def test_R4_generation_equals_full_recomputation(make_models, family):
    models = make_models(family)
    requests = make_requests()
    check_against_recomputation(models, requests, run(models.engine(), requests))


@table(
    "fields",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 2},
        {"block_size": 1},
        {"block_size": 16},
        {"block_size": 64},
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 7, "max_num_seqs": 3},
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_5_text"])
def test_samples_do_not_depend_on_the_engine_settings(make_models, family, fields):
    models = make_models(family)
    requests = make_requests()
    assert_equal(run(models.engine(), requests), run(models.engine(**fields), requests))


def test_samples_do_not_depend_on_the_batch(models):
    requests = make_requests()
    together = run(models.engine(), requests)
    engine = models.engine()
    alone = {}
    for request in reversed(requests):
        alone |= run(engine, [request])
    assert_equal(together, alone)


def test_samples_do_not_depend_on_preemption(models):
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=30))
        for request in make_requests()
    ]
    tight = models.engine(kv_cache_gib=tight_cache_gib(models, num_blocks=17))
    free = models.engine()
    assert_equal(run(free, requests), run(tight, requests))
    assert tight.stats().num_preemptions > 2
    assert free.stats().num_preemptions == 0
    assert tight.stats().num_prompt_tokens == free.stats().num_prompt_tokens


def tight_cache_gib(models, *, num_blocks, block_size=4):
    config = models.hone.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return (num_blocks + 0.5) * block_size * token_bytes / 2**30


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, completion in left.items():
        other = right[name]
        assert completion.token_ids == other.token_ids
        assert completion.stop_reason == other.stop_reason
        np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-4, rtol=0)


def test_resumed_requests_go_on_as_if_never_interrupted(models):
    requests = make_requests()
    whole = run(models.engine(), requests)
    engine = models.engine()
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    parts = engine.abort([request.id for request in requests])
    assert [part.stop_reason for part in parts] == [StopReason.ABORT] * len(requests)
    assert all(len(part.token_ids) == 5 for part in parts)
    assert not engine.has_unfinished
    assert engine.stats().kv_cache_usage == 0
    resumed = [
        replace(request, resumed=part, priority=-1)
        for request, part in zip(requests, parts, strict=True)
    ]
    assert_equal(whole, run(models.engine(), resumed))


@table("params", PARAMS[3:])
def test_R4_planted_logprob_before_temperature_is_caught(models, monkeypatch, params):
    def wrong(logits, sampling, positions):
        tokens, _ = correct(logits, sampling, positions)
        return tokens, logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    correct = decode_step.sample
    monkeypatch.setattr(decode_step, "sample", wrong)
    requests = make_requests(params=[params])
    with pytest.raises(AssertionError):
        check_against_recomputation(models, requests, run(models.engine(), requests))


@pytest.mark.parametrize("shift", [1, -1])
def test_R4_planted_position_bugs_are_caught(models, monkeypatch, shift):
    correct = GenerationModel.hidden_states

    def wrong(model, input_ids, position_ids, context):
        if context.is_decode:  # prefill right, decode off by one
            position_ids = position_ids + shift
        return correct(model, input_ids, position_ids, context)

    monkeypatch.setattr(GenerationModel, "hidden_states", wrong)
    requests = make_requests()
    with pytest.raises(AssertionError):
        check_against_recomputation(models, requests, run(models.engine(), requests))


def test_a_step_that_fails_leaves_no_trace(models, monkeypatch):
    requests = make_requests()
    expected = run(models.engine(), requests)
    correct = GenerationModel.hidden_states
    calls = 0

    def flaky(*args):
        nonlocal calls
        calls += 1
        if calls in (1, 4, 5):
            raise RuntimeError("out of memory")
        return correct(*args)

    monkeypatch.setattr(GenerationModel, "hidden_states", flaky)
    engine = models.engine()
    engine.submit(requests)
    done, num_failures = {}, 0
    while engine.has_unfinished:
        try:
            done |= {completion.request_id: completion for completion in engine.step()}
        except RuntimeError:
            num_failures += 1
    assert num_failures == 3
    assert_equal(expected, done)


def limit_memory(monkeypatch, limit):
    """Passes of more than `limit()` tokens run out of memory; returns how many did."""
    correct, failed = GenerationModel.hidden_states, []

    def limited(model, input_ids, *args):
        if len(input_ids) > limit():
            failed.append(len(input_ids))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return correct(model, input_ids, *args)

    monkeypatch.setattr(GenerationModel, "hidden_states", limited)
    return failed


@pytest.mark.parametrize(
    ("limit", "in_flight"),
    [
        (1, 1),
        (2, 0),
        (5, 1),
        (20, 0),
        (20, 1),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, 0), (2, 1), (5, 0))),
    ],
)
def test_where_memory_ends_steps_get_smaller_and_samples_stay(
    models, expected_of_qwen3, limit, in_flight, caplog
):
    with pytest.MonkeyPatch.context() as patch:
        failed = limit_memory(patch, lambda: limit)
        engine = models.engine(in_flight=in_flight)
        assert_equal(expected_of_qwen3, run(engine, make_requests()))
    assert 0 < len(failed) < 8, "it does not fail on and on"
    assert caplog.text.count("out of memory in a step of the engine") == len(failed)
    assert engine.stats().num_preemptions > 0


def test_steps_grow_again_once_there_is_memory(models, monkeypatch):
    """And a limit that is tried in vain is tried ever more rarely."""
    params = [replace(one, max_tokens=40, ignore_eos=True) for one in PARAMS]
    requests = make_requests(params=params)
    expected = run(models.engine(), requests)
    monkeypatch.setattr("hone.engine.step_limit._PATIENCE", 2)
    room = [3]
    failed = limit_memory(monkeypatch, lambda: room[0])
    engine = models.engine()
    engine.submit(requests)
    done, failed_at, limits = {}, [], []
    while engine.has_unfinished:
        room[0] = 3 if len(limits) < 40 else 99
        before = len(failed)
        done |= {completion.request_id: completion for completion in engine.step()}
        if len(failed) > before:
            failed_at.append(len(limits))
        limits.append(engine._scheduler.limit.now)
    assert_equal(expected, done)
    assert len(failed_at) == 4, "three to find 3, and one in vain"
    assert failed_at[3] - failed_at[2] > 16
    assert min(limits) == 3
    assert limits[-1] > 3


def test_a_single_token_that_does_not_fit_ends_it(models, monkeypatch):
    failed = limit_memory(monkeypatch, lambda: 0)
    engine = models.engine()
    with pytest.raises(torch.OutOfMemoryError):
        run(engine, make_requests())
    assert len(failed) < 9


def check_where_memory_ends(models, expected, failing, in_flight):
    """Passes whose numbers are in `failing` find no memory for more than one token."""
    passes = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        limit_memory(patch, lambda: 1 if next(passes) in failing else 99)
        assert_equal(expected, run(models.engine(in_flight=in_flight), make_requests()))


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(
    "failing",
    [{0, 1, 2, 3, 9}, {2, 4, 13, 14, 22, 31}],  # from the first pass on; now and then
    ids=str,
)
def test_samples_do_not_depend_on_where_memory_ends(models, expected_of_qwen3, failing, in_flight):
    check_where_memory_ends(models, expected_of_qwen3, failing, in_flight)


@pytest.mark.slow
@given(failing=st.sets(st.integers(0, 40), max_size=6), in_flight=st.integers(0, 1))
@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_samples_do_not_depend_on_where_memory_ends_by_chance(
    models, expected_of_qwen3, failing, in_flight
):
    check_where_memory_ends(models, expected_of_qwen3, failing, in_flight)


def test_counters(models):
    engine = models.engine()
    prompt = tuple(range(3, 16))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    requests = [Request(id=str(i), prompt_ids=prompt, sampling=params) for i in range(3)]
    engine.submit(requests)
    assert engine.stats().num_waiting == 3
    engine.step()
    assert engine.stats().num_running == 3
    assert engine.stats().kv_cache_usage > 0
    done = run(engine, [])
    stats = engine.stats()
    assert [done[str(i)].num_cached_tokens for i in range(3)] == [0, 12, 12]
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (39, 24)
    assert (stats.num_generated_tokens, stats.num_steps) == (12, 4)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert stats.busy_s > 0
