"""What is read from an engine, against steps whose times and lengths are known beforehand."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, count

import numpy as np
import pytest

from hone.engine.engine import EmbeddedEngine
from hone.engine.scheduler import Plan
from hone.engine.settings import EngineConfig
from hone.families.shape import ModelShape
from hone.tools.bench.measure import EngineRun, Measurement, Step, decode_steps, measure
from hone.tools.bench.summary import Quantiles, summarise
from hone.tools.bench.workloads import Workload
from tests.models.test_generation_model import make_model
from tests.tables import table
from tests.tools.bench.fakes import SHAPE, FakeEngine, limits, request

REQUESTS = (request("a", 3, 2), request("b", 5, 4), request("c", 2, 1))


def measured(engine: FakeEngine | None = None, requests=REQUESTS) -> Measurement:
    engine = engine or FakeEngine()
    return measure(engine, requests, clock=engine.clock)


def test_every_step_is_noted() -> None:
    found = measured()
    assert [
        (x.end_s, x.num_seqs, x.num_tokens, x.num_first_tokens, x.num_finished, x.finished_tokens)
        for x in found.steps
    ] == [
        (5.0, 2, 2, 2, 0, 0),  # a and b are prefilled: 8 tokens
        (6.0, 2, 2, 0, 1, 5),  # a ends
        (8.0, 2, 2, 1, 1, 3),  # c is prefilled and ends at once, b decodes
        (9.0, 1, 1, 0, 1, 9),
    ]
    assert found.step_s == [5.0, 1.0, 2.0, 1.0]
    assert found.first_token_s == [5.0, 5.0, 8.0]
    assert found.total_s == 9.0
    assert [x.kv_cache_usage for x in found.steps] == [0.5, 0.25, 0.25, 0.0]
    assert (found.num_cached_tokens, found.num_preemptions) == (3, 0)


def test_a_second_run_counts_from_where_it_begins() -> None:
    engine = FakeEngine()
    assert measured(engine) == measured(engine)


def test_decode_steps_and_their_keys() -> None:
    found = decode_steps(measured(), REQUESTS)
    # Both have one token: 3 + 1 and 5 + 1 keys. Then b alone, with three: 5 + 3.
    assert [(x.duration_s, x.num_seqs, x.num_keys) for x in found] == [(1.0, 2, 10), (1.0, 1, 8)]


def test_steps_with_a_preempted_or_a_prefilling_sequence_are_no_decode_steps() -> None:
    found = measured()
    swapped = {"num_first_tokens": 1}  # one was preempted, another begins
    for fields in ({"num_seqs": 1}, {"num_seqs": 3}, swapped):
        steps = [*found.steps]
        steps[1] = replace(steps[1], **fields)
        left = decode_steps(replace(found, steps=steps), REQUESTS)
        assert 10 not in [x.num_keys for x in left]


@table("max_in_flight", [0, 1])
@table("max_num_batched_tokens", [8, 64])
def test_a_step_that_recomputes_a_preempted_sequence_is_no_decode_step(
    max_num_batched_tokens: int, max_in_flight: int
) -> None:
    requests = [request(f"{i}", 3 + i % 5, 20 + i) for i in range(12)]
    model = make_model()
    sizes = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_gib=24 * 2048 / 2**30,
        enable_prefix_caching=False,
    )
    engine = EmbeddedEngine(model, sizes, eos_token_ids=(), max_model_len=64, block_size=4)
    engine._max_in_flight = max_in_flight
    decodes: list[bool] = []
    schedule = engine._scheduler.schedule

    def watched() -> Plan:
        plan = schedule()
        decodes.append(bool(plan.decodes) and not plan.chunks)
        return plan

    engine._scheduler.schedule = watched
    ticks = accumulate(count())  # step i takes i seconds, from 1 on
    found = measure(engine, requests, clock=lambda: float(next(ticks)))
    assert found.num_preemptions > 3
    # With one step in flight a call waits for the plan of the call before it.
    decodes = [False] * (1 + max_in_flight) + decodes
    counted = [int(step.duration_s) for step in decode_steps(found, requests)]
    assert len(counted) > 10
    assert [i for i in counted if not decodes[i]] == []


def test_keys_equal_a_simulation_of_every_sequence() -> None:
    rng = np.random.default_rng(5)
    requests = [
        request(f"{i}", int(p), int(m)) for i, (p, m) in enumerate(rng.integers(1, 30, (40, 2)))
    ]
    found = decode_steps(measured(FakeEngine(6), requests), requests)
    expected: list[tuple[int, int]] = []
    waiting, running = list(requests), []
    while waiting or running:
        is_decode = bool(running) and (len(running) == 6 or not waiting)
        if is_decode:
            expected.append((len(running), sum(len(x.prompt_ids) + n for x, n in running)))
        running = [(x, n + 1) for x, n in running]
        while waiting and len(running) < 6:
            running.append((waiting.pop(0), 1))
        running = [(x, n) for x, n in running if n < x.sampling.max_tokens]
    assert [(x.num_seqs, x.num_keys) for x in found] == expected
    assert len(expected) > 20


@pytest.mark.parametrize(
    ("forgets", "text"),
    [
        ("num_generated_tokens", "has counted 0 tokens; expected: 7"),
        ("num_first_tokens", "has counted 0 first tokens; expected: 3"),
    ],
)
def test_counts_must_add_up(forgets: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        measured(FakeEngine(forgets=forgets))


def run_of(found: Measurement, *, start_s: float = 3.0, warmup_s: float = 11.0) -> EngineRun:
    return EngineRun("hone", "1", start_s, warmup_s, found)


def test_summary_against_the_napkin() -> None:
    found = summarise(run_of(measured()), Workload("w", REQUESTS), limits())
    assert found.total_s == 9.0
    assert found.tokens_per_s == pytest.approx(7 / 9)
    # Decode steps of the limit: a and b (10 keys), then b alone (7 and 8). c needs none.
    limit_s = (0.424 + 0.160) + (0.424 + 0.112) + (0.424 + 0.128)
    assert found.share_of_limit == pytest.approx(limit_s / 9)
    assert found.decode is not None
    assert (found.decode.batch, found.decode.num_steps, found.decode.context) == (2, 1, 5.0)
    assert found.decode.step_s == 1.0
    assert found.decode.share_of_limit == pytest.approx(0.424 + 0.160)
    assert found.step_s == Quantiles(1.5, pytest.approx(4.1), pytest.approx(4.91), 5.0)
    assert found.first_token_s.p50 == 5.0
    assert found.first_token_s.max == 8.0
    assert found.kv_cache_usage_mean == pytest.approx((5 * 0.5 + 0.25 + 2 * 0.25) / 9)
    assert found.kv_cache_usage_max == 0.5
    assert found.cached_prompt_share == pytest.approx(3 / 10)
    assert (found.start_s, found.cold_start_s) == (3.0, 3.0 + 11.0 - 9.0)


def test_a_first_run_that_was_faster_adds_nothing_to_the_start() -> None:
    run = run_of(measured(), warmup_s=8.0)
    assert summarise(run, Workload("w", REQUESTS), limits()).cold_start_s == 3.0


def test_products_bound_a_step_of_many_sequences() -> None:
    # 2 x 212 FLOPs a sequence: 0.848 s for both at 1,000 FLOP/s, more than the weights' 0.424 s.
    step = decode_steps(measured(), REQUESTS)[0]
    assert limits(flops_per_s=1000.0).step_s(step) == pytest.approx(0.848 + 0.160)


def test_a_cache_of_one_byte_halves_the_time_for_keys_alone() -> None:
    halved = limits(kv_bytes_per_value=1)
    assert halved.step_s(decode_steps(measured(), REQUESTS)[0]) == pytest.approx(0.424 + 0.080)
    total_s = 3 * 0.424 + (0.160 + 0.112 + 0.128) / 2
    assert halved.total_s(Workload("w", REQUESTS)) == pytest.approx(total_s)


def test_a_window_bounds_the_keys() -> None:
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "head_dim": 4,
        "intermediate_size": 8,
        "vocab_size": 10,
        "tie_word_embeddings": True,
        "sliding_window": 3,
    }
    step = decode_steps(measured(), REQUESTS)[0]
    assert limits(ModelShape.from_config(config)).step_s(step) == pytest.approx(0.424 + 6 * 0.016)


def test_shared_prompts_are_prefilled_once_in_the_limit() -> None:
    twice = Workload("w", (request("a", 50, 1), request("b", 50, 1)))
    own, shared = (
        limits(shares_prompts=x, flops_per_s=1000.0).total_s(twice) for x in (False, True)
    )
    flops = SHAPE.forward_flops([50], num_head_tokens=1)
    assert own == pytest.approx(2 * flops / 1000)
    assert shared == pytest.approx(flops / 1000)


def test_a_run_without_a_pure_decode_step_has_no_decode_time() -> None:
    only = (request("a", 3, 1),)
    step = Step(1.0, 1, 1, 1, 1, 4, 0.5)
    found = Measurement([step], num_cached_tokens=0, num_preemptions=0)
    assert summarise(run_of(found), Workload("w", only), limits()).decode is None
