"""Simulated runs against formulas, a twin that makes every token, and measurements."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.config.plan import Devices, resolve
from hone.config.planning import LengthsConfig, PlanningConfig
from hone.config.tree import PlanConfig
from hone.distributed.settings import RoleName
from hone.engine.settings import BLOCK_SIZE, EngineConfig
from hone.engine.shared_prefix import find_prefix_groups
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape, public_shape
from hone.hardware import GPUS
from hone.planner.run_memory import RunMemory
from hone.rollout.settings import PipelineConfig, RolloutConfig
from hone.tools.plan.comparison import compare, placement_rates
from hone.tools.plan.compute_time import Compute
from hone.tools.plan.lengths import draw_lengths
from hone.tools.plan.simulated_engine import EngineRates, SimulatedEngine, SimulatedSample
from hone.tools.plan.simulator import (
    Placement,
    Rates,
    Scoring,
    SimulatedRun,
    Simulation,
    _Run,  # pyright: ignore[reportPrivateUsage]
    simulate,
)
from hone.tools.plan.training_time import TrainingTime

SHAPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")


def of_cost(engine: EngineRates, *, train_s: float, sync_s: float, max_num_keys: int) -> Rates:
    """Training that takes the same time whatever its rows."""
    return Rates(
        engine=engine,
        train_s=lambda rows, num_trained: train_s,
        sync_s=sync_s,
        max_num_keys=max_num_keys,
    )


# -- formulas -------------------------------------------------------------------------------------

ONE = EngineRates(
    weights_s=0.5,
    seq_s=0.01,
    state_s=0.02,
    key_s=0.001,
    overhead_s=0.25,
    prefill_token_s=0.02,
    prefill_key_s=0.003,
    prefill_seq_s=0.1,
)
PROMPT, LENGTH, GROUPS, MEMBERS = 5, 7, 4, 2
BATCH = GROUPS * MEMBERS
GENERATE = (
    # A group's prompt is computed once; each sample has its own first logits.
    GROUPS * (PROMPT * 0.02 + PROMPT**2 / 2 * 0.003)
    + BATCH * 0.1
    + sum(0.75 + BATCH * (0.02 + 0.001 * (PROMPT + 1 + n)) for n in range(LENGTH - 1))
)


def fixed_lengths(
    placement: Placement, *, train_s: float, sync_s: float = 0.0, **pipeline: Any
) -> SimulatedRun:
    return simulate(
        placement,
        of_cost(ONE, train_s=train_s, sync_s=sync_s, max_num_keys=10_000),
        [[LENGTH] * MEMBERS],
        num_prompt_tokens=PROMPT,
        num_steps=8,
        rollout=RolloutConfig(
            prompts_per_step=GROUPS, n_samples_per_prompt=MEMBERS, max_completion_tokens=LENGTH
        ),
        pipeline=PipelineConfig.model_validate(pipeline),
        engine=EngineConfig(max_num_seqs=BATCH),
    )


@pytest.mark.parametrize("colocated", [True, False])
def test_a_synchronous_step_is_generate_train_sync(colocated: bool) -> None:
    placement = Placement(num_trainers=1, num_engines=1, colocated=colocated)
    run = fixed_lengths(placement, train_s=3.0, sync_s=0.5)
    for step in run.steps:
        assert step.wait_s == pytest.approx(GENERATE)
        assert (step.train_s, step.sync_s) == pytest.approx((3.0, 0.5))
        assert step.staleness == (0,) * GROUPS
    assert run.step_s == pytest.approx(GENERATE + 3.5)
    tokens = BATCH * (PROMPT + LENGTH)
    assert run.tokens_per_s == pytest.approx(tokens / run.step_s)
    assert run.completion_tokens_per_s == pytest.approx(BATCH * LENGTH / run.step_s)
    if colocated:
        assert run.engine_idle == run.trainer_idle == pytest.approx(0.0)
    else:
        assert run.engine_idle == pytest.approx(3.0 / run.step_s)
        assert run.trainer_idle == pytest.approx(GENERATE / run.step_s)


@pytest.mark.parametrize("train_s", [0.3 * GENERATE, 3.0 * GENERATE])
def test_staleness_1_overlaps_all_but_the_sync(train_s: float) -> None:
    """A step lasts as long as the slower side, and the sync, for which both stop."""
    run = fixed_lengths(
        Placement(num_trainers=1, num_engines=1), train_s=train_s, sync_s=0.5, max_staleness=1
    )
    assert run.step_s == pytest.approx(max(GENERATE, train_s) + 0.5)
    assert (run.staleness_mean, run.staleness_max) == (1.0, 1)
    assert run.engine_idle == pytest.approx(max(train_s - GENERATE, 0.0) / run.step_s)
    assert run.trainer_idle == pytest.approx(max(GENERATE - train_s, 0.0) / run.step_s)
    assert all(step.sync_s == pytest.approx(0.5) for step in run.steps)


def test_engines_halt_as_in_flight_says() -> None:
    """At the end of a step, or of all samples; what is aborted has its prompt computed again."""
    apart, ahead = Placement(num_trainers=1, num_engines=1), {"max_staleness": 3}
    pause, finish, abort = (
        fixed_lengths(apart, train_s=0.4 * GENERATE, in_flight=how, **ahead)
        for how in ("pause", "finish", "abort")
    )
    one_step_s = 0.75 + 0.001 * BATCH * (PROMPT + LENGTH)
    halts = {
        name: max(x.halt_s for x in run.steps)
        for name, run in (("pause", pause), ("finish", finish), ("abort", abort))
    }
    assert max(halts["pause"], halts["abort"]) <= one_step_s < halts["finish"]
    assert abort.step_s > pause.step_s
    for run in (pause, finish, abort):
        assert 0 < run.staleness_max <= 3


def test_engines_wait_for_the_slowest() -> None:
    """Two engines with a long and a short sample each: the short ones save nothing."""
    rates = of_cost(EngineRates(weights_s=1.0), train_s=2.0, sync_s=0.0, max_num_keys=1000)
    run = simulate(
        Placement(num_trainers=2, num_engines=2, colocated=True),
        rates,
        [[21], [11]],
        num_prompt_tokens=1,
        num_steps=4,
        rollout=RolloutConfig(prompts_per_step=2, n_samples_per_prompt=1, max_completion_tokens=21),
        pipeline=PipelineConfig(),
        engine=EngineConfig(),
    )
    assert run.step_s == pytest.approx(20 + 2)
    assert run.engine_idle == pytest.approx(10 / 2 / 22)


# -- any case -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Case:
    """Everything that a run depends on."""

    placement: Placement
    rates: Rates
    lengths: list[list[int]]
    prompt: int
    num_steps: int
    rollout: RolloutConfig
    pipeline: PipelineConfig
    engine: EngineConfig

    def begin(self) -> Simulation:
        return Simulation(
            self.placement,
            self.rates,
            self.lengths,
            num_prompt_tokens=self.prompt,
            rollout=self.rollout,
            pipeline=self.pipeline,
            engine=self.engine,
        )

    def simulate(self) -> SimulatedRun:
        return self.begin().until(self.num_steps)


class TokenEngine:
    """An engine that makes one decode step at a time."""

    def __init__(self, case: Case) -> None:
        self.rates, self.max_num_keys = case.rates.engine, case.rates.max_num_keys
        self.engine, self.time_s = case.engine, 0.0
        self.batch, self.num_spared = list[SimulatedSample](), 0
        self.waiting: list[SimulatedSample] = []
        self.running: list[SimulatedSample] = []
        self.prompts: set[int] = set()

    def submit(self, samples: list[SimulatedSample], now_s: float) -> None:
        while self.running and self.time_s < now_s:
            self.step()
        self.time_s = max(self.time_s, now_s)
        self.waiting += samples
        self.admit()

    @property
    def num_keys(self) -> int:
        return sum(x.num_prompt_tokens + x.done for x in self.running)

    def step(self) -> None:
        rates, size = self.rates, len(self.running)
        weights_s = rates.weights_s - rates.experts_s * rates.unused_share**size
        step_s = max(weights_s, size * rates.seq_s) + size * rates.state_s + rates.overhead_s
        step_s += size * rates.sent_s
        if self.batch != self.running:  # as decode steps of the engine find out who shares
            self.batch, self.num_spared = [*self.running], self.keys_read_once()
        keys = self.num_keys - rates.gained_share * self.num_spared
        self.time_s += step_s + keys * rates.key_s
        for sample in self.running:
            sample.done += 1
            if sample.done == sample.length:
                sample.ended_s = self.time_s
        self.running = [x for x in self.running if x.done < x.length]
        while self.num_keys + len(self.running) > self.max_num_keys:
            self.waiting.insert(0, self.running.pop())
        self.admit()

    def keys_read_once(self) -> int:
        """Keys that the engine's own function need not read again, by tables of blocks."""
        lens = np.array([x.num_prompt_tokens + x.done for x in self.running])
        tables = np.arange(len(lens) * 1000, dtype=np.int32).reshape(-1, 1000)
        for row, sample in enumerate(self.running):
            if self.engine.enable_prefix_caching:
                size = (sample.num_prompt_tokens - 1) // BLOCK_SIZE
                tables[row, :size] = -1000 * (sample.group + 1) + np.arange(size)
        found = find_prefix_groups(tables, lens, block_size=BLOCK_SIZE, num_rows=len(lens))
        if found is None:
            return 0
        return int((((found.rows >= 0).sum(1) - 1).clip(0) * found.lens).sum())

    def admit(self) -> None:
        rates, instant = self.rates, list[SimulatedSample]()
        while self.waiting and len(self.running) < self.engine.max_num_seqs:
            sample = self.waiting[0]
            context = sample.num_prompt_tokens + sample.done
            if self.num_keys + len(self.running) + context + 2 > self.max_num_keys:
                break
            self.waiting.pop(0)
            known = sample.num_prompt_tokens if sample.group in self.prompts else 0
            if self.engine.enable_prefix_caching:
                self.prompts.add(sample.group)
            self.time_s += rates.prefill_seq_s
            for position in range(known, context):
                self.time_s += rates.prefill_token_s + rates.prefill_key_s * (position + 0.5)
            sample.done += 1
            (self.running if sample.done < sample.length else instant).append(sample)
        for sample in instant:
            sample.ended_s = self.time_s


def random_case(seed: int) -> Case:
    """A few groups on a few engines, in any mode."""
    rng = random.Random(seed)
    size, members = rng.randint(1, 4), rng.choice([1, 2, 3, rng.randint(4, 18)])
    # Beside 400 tokens of each a prompt of two samples is little.
    longest = rng.choice([12, 400]) if members == 2 else rng.randint(1, 12)
    prompt = rng.choice([rng.randint(1, 5), rng.randint(16, 80)])
    shortest = rng.choice([0, 1, 1])

    def seconds(high: float) -> float:
        """Often nothing; in sixty-fourths, so that sums are exact in any order."""
        return rng.choice([0, rng.randint(1, int(high * 64)) / 64])

    engine = EngineRates(
        weights_s=0.5 + seconds(1),
        experts_s=seconds(0.5),
        unused_share=rng.choice([0, 0.5, 0.75]),
        seq_s=seconds(0.5),
        state_s=seconds(0.25),
        sent_s=seconds(0.25),
        key_s=seconds(0.125),
        gained_share=rng.choice([0, 0.25, 0.5, 1]),
        overhead_s=seconds(1),
        prefill_token_s=seconds(1),
        prefill_key_s=seconds(0.125),
        prefill_seq_s=seconds(1),
    )
    row_s, base_s = seconds(0.5), seconds(5)
    rates = Rates(
        engine=engine,
        train_s=lambda rows, num_trained: base_s + row_s * sum(rows) + num_trained / 8,
        sync_s=seconds(3),
        max_num_keys=prompt + longest + rng.choice([rng.randint(1, 40), 2000]),
    )
    is_ahead = rng.random() < 0.7
    pipeline = PipelineConfig.model_validate(
        {
            "max_staleness": is_ahead * rng.randint(0, 4),
            "in_flight": rng.choice(["pause", "abort", "finish"]),
        }
    )
    colocated = not is_ahead and rng.random() < 0.5
    return Case(
        placement=Placement(num_trainers=2, num_engines=rng.randint(1, 3), colocated=colocated),
        rates=rates,
        lengths=[[rng.randint(shortest, longest) for _ in range(members)] for _ in range(13)],
        prompt=prompt,
        num_steps=6,
        rollout=RolloutConfig(
            prompts_per_step=size,
            n_samples_per_prompt=members,
            max_completion_tokens=longest,
            oversample_prompts=rng.choice([0, 0, 1, 3, size]),
            max_aborted_count=rng.choice([None, 0, 1]),
        ),
        pipeline=pipeline,
        engine=EngineConfig(
            max_num_seqs=rng.choice([rng.randint(1, 6), 20]),
            enable_prefix_caching=rng.random() < 0.7,
        ),
    )


def test_an_engine_equals_one_that_makes_every_token() -> None:
    for seed in range(400):
        case = random_case(seed)
        jumping = SimulatedEngine(
            case.rates.engine,
            case.engine.max_num_seqs,
            case.rates.max_num_keys,
            shares_prompts=case.engine.enable_prefix_caching,
        )
        stepping, found = TokenEngine(case), list[list[SimulatedSample]]()
        for engine in (jumping, stepping):
            samples = [
                SimulatedSample(group, length, case.prompt, 12)
                for group, lengths in enumerate(case.lengths)
                for length in lengths
                if length
            ]
            for number in range(0, len(samples), 5):
                engine.submit(samples[number : number + 5], now_s=float(number))
            engine.submit([], now_s=1e6)
            found.append(samples)
        ended_s, expected = ([x.ended_s for x in samples] for samples in found)
        assert ended_s == pytest.approx(expected, rel=1e-12), seed
        assert max(x.ended_s for x in found[0]) < 1e6


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_is_lost_and_nothing_is_too_old(seed: int) -> None:
    case = random_case(seed)
    run, size = case.simulate(), case.rollout.prompts_per_step
    trained = [group for step in run.steps for group in step.groups]
    assert len(set(trained)) == len(trained) == size * case.num_steps
    lengths = [sum(case.lengths[group % 13]) for group in trained]
    rows = sum(step.num_tokens for step in run.steps)
    assert rows == sum(lengths) + len(trained) * len(case.lengths[0]) * case.prompt
    assert run.num_sampled_tokens == sum(lengths) + run.num_open_tokens
    for busy in run.engine_busy:
        assert all(start < end for start, end in busy)
        assert all(one[1] < other[0] for one, other in pairwise(busy))
    assert 0 <= run.engine_idle <= 1
    assert 0 <= run.trainer_idle < 1
    if case.pipeline.samples_ahead:
        assert 0 <= run.staleness_max <= case.pipeline.max_staleness
    elif not case.rollout.oversample_prompts:
        assert run.staleness_max == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_simulation_goes_on_as_if_it_had_not_been_looked_at(seed: int) -> None:
    case = random_case(seed)
    looked_at = case.begin()
    seen = [looked_at.until(number) for number in range(1, case.num_steps + 1)]
    assert seen[-1] == case.simulate()
    for number, run in enumerate(seen, start=1):  # what was sampled is trained, or open
        rows = [case.lengths[group % 13] for step in run.steps for group in step.groups]
        assert run.num_sampled_tokens == sum(map(sum, rows)) + run.num_open_tokens, number


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_every_simulation_ends(seed: int) -> None:
    """Each event makes a token: of engines of any speed, also where a time is too short to be seen
    beside the one that has passed, or is nothing."""
    case, rng = random_case(seed), random.Random(seed)
    engine, factor = case.rates.engine, rng.choice([0.0, 10.0 ** rng.randint(-30, 12)])
    times = [rate.name for rate in fields(engine) if rate.name.endswith("_s")]
    engine = replace(engine, **{name: factor * getattr(engine, name) for name in times})
    sync_s = rng.choice([case.rates.sync_s, 1e12])
    case.rates = replace(case.rates, engine=engine, sync_s=sync_s)
    num_groups = 2 * case.rollout.prompts_per_step * (case.num_steps + 5)
    most = num_groups * max(map(sum, case.lengths))
    num_events, next_event = 0, _Run._next_event  # pyright: ignore[reportPrivateUsage]

    def counted(run: _Run) -> None:
        nonlocal num_events
        num_events += 1
        assert num_events <= most, "it stands still"
        next_event(run)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Run, "_next_event", counted)
        run = case.simulate()
    assert num_events <= run.num_sampled_tokens


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({"weights_s": -0.1}, "weights_s must be a finite time"),
        ({"weights_s": 1.0, "key_s": math.nan}, "key_s must be a finite time"),
        ({"weights_s": 1.0, "overhead_s": math.inf}, "overhead_s must be a finite time"),
        ({"weights_s": 1.0, "gained_share": 1.1}, "gained_share must be from 0 to 1"),
        ({"weights_s": 1.0, "unused_share": 2.0}, "unused_share must be from 0 to 1"),
        ({"weights_s": 1.0, "experts_s": 1.1}, "experts are weights"),
    ],
)
def test_time_cannot_go_back(rates: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineRates(**rates)


@pytest.mark.parametrize(("name", "time_s"), [("train_s", -1.0), ("train_s", math.nan)])
def test_updates_take_a_time(name: str, time_s: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a finite time"):
        fixed_lengths(Placement(num_trainers=1, num_engines=1), train_s=time_s)


def run_of(lengths: list[list[int]], *, num_engines: int = 1, **pipeline: Any) -> SimulatedRun:
    """Updates of 2 s of two groups, engines that make a token a second."""
    return simulate(
        Placement(num_trainers=1, num_engines=num_engines),
        of_cost(EngineRates(weights_s=1.0), train_s=2.0, sync_s=0.0, max_num_keys=1000),
        lengths,
        num_prompt_tokens=1,
        num_steps=4,
        rollout=RolloutConfig(prompts_per_step=2, n_samples_per_prompt=2, max_completion_tokens=9),
        pipeline=PipelineConfig.model_validate(pipeline),
        engine=EngineConfig(),
    )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_samples_without_tokens_are_there_at_once(max_staleness: int) -> None:
    """Some of a group, and all of one. Groups without samples are none."""
    some = run_of([[5, 0], [5, 5]], max_staleness=max_staleness)
    full = run_of([[5, 5]], max_staleness=max_staleness)
    assert [step.end_s for step in some.steps] == [step.end_s for step in full.steps]
    assert {step.num_completion_tokens for step in some.steps} == {15}
    none = run_of([[0, 0], [], [5, 5]], max_staleness=max_staleness)
    # Ahead, those without tokens are trained while the others are sampled.
    waits_s = [0, 2, 0, 2] if max_staleness else [4, 4, 4, 4]
    assert [step.wait_s for step in none.steps] == waits_s
    assert sum(step.num_tokens for step in none.steps) == 8 * 2 + 4 * 10
    assert run_of([[0]], max_staleness=max_staleness).step_s == 2
    with pytest.raises(ValueError, match="no sample to simulate"):
        run_of([[], []])


def test_steps_that_take_no_time_have_rates() -> None:
    run = simulate(
        Placement(num_trainers=1, num_engines=1),
        of_cost(EngineRates(weights_s=1.0), train_s=0.0, sync_s=0.0, max_num_keys=1000),
        [[0]],
        num_prompt_tokens=1,
        num_steps=4,
        rollout=RolloutConfig(prompts_per_step=1, n_samples_per_prompt=1, max_completion_tokens=9),
        pipeline=PipelineConfig(),
        engine=EngineConfig(),
    )
    assert run.tokens_per_s == run.completion_tokens_per_s == math.inf
    assert (run.step_s, run.engine_idle, run.trainer_idle) == (0, 0, 0)


def test_engines_without_a_prompt_stand_idle() -> None:
    alone, many = run_of([[5]], num_engines=2), run_of([[5]], num_engines=6)
    assert alone.step_s == many.step_s == 4 + 2
    assert alone.engine_idle == pytest.approx(2 / 6)
    assert many.engine_idle == pytest.approx(1 - 2 / 6 * 4 / 6)


def test_members_of_a_group_read_a_prompt_once() -> None:
    """Of 17 samples, 8, 8 and 1 read 32 of 40 keys together, until one keeps 16 of them."""
    rates = EngineRates(weights_s=1.0, key_s=0.001, gained_share=0.5)

    def steps_s(lengths: list[int], prompt: int, **fields: Any) -> float:
        engine = SimulatedEngine(rates, 64, 10_000, **fields)
        engine.submit([SimulatedSample(0, length, prompt, 99) for length in lengths], 0.0)
        return engine._steps_s(1)  # pyright: ignore[reportPrivateUsage]

    assert steps_s([9] * 17, 40) == pytest.approx(1 + 0.001 * (17 * 41 - 0.5 * 14 * 32))
    assert steps_s([9] * 17, 40, shares_prompts=False) == pytest.approx(1 + 0.001 * 17 * 41)
    # No whole block before the last token, and one sample alone.
    assert steps_s([9] * 17, 16) == pytest.approx(1 + 0.001 * 17 * 17)
    assert steps_s([9], 40) == pytest.approx(1 + 0.001 * 41)


# -- what is assumed, and what was measured -------------------------------------------------------


def config(**sections: Any) -> PlanConfig:
    return PlanConfig.model_validate({"model": {"shape": "qwen3-8b"}, **sections})


def measured_engine(shape: str, max_num_seqs: int, *, size: int = 1) -> SimulatedEngine:
    cfg = config(engine={"gpu_memory_utilization": 0.9}, plan={"decode_overhead_s": 0.0005})
    named = public_shape(shape)
    assert named is not None
    placement = Placement(num_trainers=1, num_engines=1, tensor_parallel_size=size)
    rates = placement_rates(cfg, named, GPUS[0], placement)
    return SimulatedEngine(rates.engine, max_num_seqs, rates.max_num_keys)


@pytest.mark.parametrize(
    ("shape", "workload", "tokens_per_s"),
    [
        ("qwen3-0.6b", "uniform", 27_973),
        ("qwen3-8b", "uniform", 10_188),
        ("qwen3-0.6b", "groups", 29_903),
        ("qwen3-8b", "groups", 12_308),
    ],
)
def test_engines_are_as_fast_as_those_measured(
    shape: str, workload: str, tokens_per_s: float
) -> None:
    """The workloads of benchmarks/README.md, within 10 %."""
    rng = np.random.default_rng(0)
    if workload == "uniform":
        drawn = rng.integers(100, 1025, (256, 2)).tolist()
        samples = [SimulatedSample(n, y, x, 1024) for n, (x, y) in enumerate(drawn)]
    else:
        cfg = LengthsConfig(median=800, sigma=0.7)
        lengths = draw_lengths(cfg, 512, most=3800, rng=rng)
        samples = [SimulatedSample(n // 8, x, 256, 3800) for n, x in enumerate(lengths)]
    engine = measured_engine(shape, 256 if workload == "uniform" else 512)
    engine.submit(samples, 0.0)
    while engine.has_unfinished:
        engine.settle(engine.next_event_s())
    assert engine.num_tokens == sum(sample.length for sample in samples)
    assert engine.num_tokens / engine.time_s == pytest.approx(tokens_per_s, rel=0.1)


@pytest.mark.parametrize(
    ("shape", "num_seqs", "alone_ms", "pair_ms"),
    [
        ("qwen3-8b", 8, 5.06, 3.81),
        ("qwen3-8b", 64, 7.05, 4.79),
        ("qwen3-8b", 256, 16.4, 9.75),
        ("qwen3-1.7b", 64, 3.43, 2.66),
        ("qwen3-1.7b", 256, 9.23, 5.85),
    ],
)
def test_two_devices_of_an_engine_gain_what_was_measured(
    shape: str, num_seqs: int, alone_ms: float, pair_ms: float
) -> None:
    """Decode steps at 1,024 tokens on two H200 (benchmarks/README.md), what they gain within 8 %:
    less where batches are small."""
    steps_s: list[float] = []
    for size in (1, 2):
        engine = measured_engine(shape, 256, size=size)
        engine.submit([SimulatedSample(n, 9, 1023, 9) for n in range(num_seqs)], 0.0)
        steps_s.append(engine._steps_s(1))  # pyright: ignore[reportPrivateUsage]
    assert steps_s[0] / steps_s[1] == pytest.approx(alone_ms / pair_ms, rel=0.08)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_devices_of_an_engine_do_not_divide(size: int) -> None:
    """8B has 36 layers, each with two sums of 4,096 values of two bytes, and 151,936 logits of four
    bytes. Of a sum a ring sends every device (n - 1) / n twice, of logits once, at 0.7 of the
    450 GB/s of a link. Ranks meet for 23 us a layer where they are two, else for 120."""
    shape = public_shape("qwen3-8b")
    assert shape is not None
    alone, apart = Placement(num_trainers=4, num_engines=1), config()
    one, several = (
        placement_rates(apart, shape, GPUS[0], replace(alone, tensor_parallel_size=x)).engine
        for x in (1, size)
    )
    elsewhere, link = (size - 1) / size, 0.7 * 450e9
    sums_s = 2 * 36 * 4096 * 2 * 2 * elsewhere / link
    logits_s = 151_936 * 4 * elsewhere / link
    assert (one.sent_s, several.sent_s) == (0, pytest.approx(sums_s + logits_s))
    met_s = several.overhead_s - one.overhead_s
    assert met_s == pytest.approx(36 * (23e-6 if size == 2 else 120e-6))
    for name in ("weights_s", "seq_s", "key_s", "prefill_key_s"):
        assert getattr(several, name) == pytest.approx(getattr(one, name) / size), name
    assert several.prefill_token_s == pytest.approx(one.prefill_token_s / size + sums_s)
    assert several.prefill_seq_s == pytest.approx(one.prefill_seq_s / size + logits_s)


@pytest.fixture
def prompt_in_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers as they are where rows share no prompt."""
    monkeypatch.setattr(TrainingTime, "_sharing", 1)


@pytest.mark.usefixtures("prompt_in_each_row")
def test_runs_are_as_fast_as_those_measured() -> None:
    """`benchmarks/modes.py` of 1.7B on two H200, within 10 %: completion tokens/s."""
    cfg = config(
        model={"shape": "qwen3-1.7b"},
        rollout={"prompts_per_step": 16, "n_samples_per_prompt": 8, "max_completion_tokens": 3072},
        plan={"gpus": 2, "lengths": {"median": 300, "sigma": 1.0}},
    )
    measured = {
        "sync separate": 6_865,
        "sync colocated": 7_965,
        "partial colocated": 11_368,
        "async, staleness 1": 12_395,
        "async, staleness 2": 15_443,
    }
    found = {x.mode: x.run.completion_tokens_per_s for x in compare(cfg).outcomes}
    assert {mode: found[mode] for mode in measured} == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("shape", "step_s"), [("qwen3-0.6b", 9.35), ("qwen3-1.7b", 12.8)])
def test_steps_of_one_device_are_as_long_as_those_measured(shape: str, step_s: float) -> None:
    """32 x 8 samples of 256 + 1,024 tokens on one H200, within 10 %."""
    cfg = config(
        model={"shape": shape},
        data={"max_prompt_tokens": 256},
        rollout={"prompts_per_step": 32, "max_completion_tokens": 1024},
        plan={"gpus": 1, "lengths": {"distribution": "fixed", "median": 1024}},
    )
    assert compare(cfg).plain.run.step_s == pytest.approx(step_s, rel=0.1)


def test_a_critic_makes_a_step_as_much_longer_as_it_was_measured() -> None:
    """22.0 beside 14.2 s: 1.7B on one H200, 32 x 8 samples of 256 + 1,024 tokens."""
    step_s = {
        advantage: compare(
            PlanConfig.model_validate(
                {
                    "model": {"shape": "qwen3-1.7b"},
                    "data": {"max_prompt_tokens": 256},
                    "rollout": {"prompts_per_step": 32, "max_completion_tokens": 1024},
                    "algorithm": {"advantage": advantage},
                    "plan": {"gpus": 1, "lengths": {"distribution": "fixed", "median": 1024}},
                }
            )
        ).plain.run.step_s
        for advantage in ("grpo", "gae")
    }
    assert step_s["gae"] / step_s["grpo"] == pytest.approx(22.0 / 14.2, rel=0.1)


def test_rates_follow_devices_and_settings() -> None:
    shape = public_shape("qwen3-8b")
    assert shape is not None
    apart = Placement(num_trainers=2, num_engines=1)

    def rates(placement: Placement = apart, **sections: Any) -> Rates:
        return placement_rates(config(**sections), shape, GPUS[0], placement)

    plain, rows = rates(), [1000] * 8
    assert plain.engine.weights_s == pytest.approx(shape.decode_bytes() / 4.3e12 / 0.9)
    assert plain.sync_s == pytest.approx(shape.num_params * 2 / 5e10)
    step = RunMemory(resolve(config(), ModelFacts.of_shape(shape), Devices())).engine.step
    held = (140 * 2**30 // 2 - shape.weight_bytes() - step) / shape.kv_bytes_per_token()
    assert plain.max_num_keys == int(held)
    beside = rates(replace(apart, colocated=True, num_engines=2))
    assert beside.max_num_keys <= plain.max_num_keys  # it has weights of its own there too
    alone = rates(replace(apart, num_trainers=1)).train_s(rows, 7000) - 0.15
    # Gradients are added to their sums in the device's memory, whatever the trainers reach.
    sums_s = (4 + 2) * shape.num_params / 2 / (0.7 * 450e9)
    together = plain.train_s(rows, 7000) - 0.15 - sums_s
    assert alone / together == pytest.approx(2 * 0.93, rel=0.01)
    pair = rates(replace(apart, tensor_parallel_size=2))
    assert plain.engine.key_s / pair.engine.key_s == pytest.approx(2)
    assert rates(replace(apart, colocated=True)).sync_s == 0.15
    lora = {"shape": "qwen3-8b", "lora": {"rank": 8}}
    assert rates(model=lora).sync_s == plain.sync_s  # merged weights travel
    assert plain.engine.gained_share == 0.5
    assert rates(engine={"backend": "vllm"}).engine.gained_share == 0
    halved = rates(engine={"kv_cache_dtype": "fp8"}).engine.key_s
    assert halved == pytest.approx(plain.engine.key_s / 2)
    scored = rates(algorithm={"kl": {"coef": 0.1}}).train_s(rows, 7000) - 0.15
    assert (scored - sums_s) / together == pytest.approx(4 / 3, rel=0.01)


def test_a_critic_apart_learns_while_the_policy_does() -> None:
    """Its values come first, a pass; then it holds up a step only where it takes longer."""
    shape, rows, gae = public_shape("qwen3-8b"), [1000] * 8, {"advantage": "gae"}
    assert shape is not None
    placement = Placement(num_trainers=2, num_engines=1)
    gpu = replace(GPUS[0], link_bytes_per_s=1e18)  # what processes exchange costs nothing

    def train_s(number: int, **sections: Any) -> float:
        cfg = config(cluster={"num_critics": number}, **sections)
        return placement_rates(cfg, shape, gpu, placement).train_s(rows, 7000)

    alone = train_s(0)
    beside, one, two = (train_s(number, algorithm=gae) for number in (0, 1, 2))
    a_pass = (beside - alone) / 4
    assert two == pytest.approx(alone + a_pass, rel=0.01)
    assert alone + a_pass < two * 1.006 < one
    assert train_s(8, algorithm=gae) < two
    # It waits where it has stages, and then it is what a step waits for.
    stages = {"parallel": {"pipeline_parallel_size": 2}}
    assert train_s(2, algorithm=gae, critic=stages) > two * 1.01
    assert train_s(2, algorithm=gae, critic={"parallel": {"ring_size": 2}}) == two
    # Not where the policy's stages wait as long.
    staged = train_s(0, trainer=stages)
    assert staged > alone * 1.01
    assert train_s(2, algorithm=gae, trainer=stages) == pytest.approx(staged + a_pass, rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_public_shapes_are_those_of_the_models(name: str, tmp_path: Path) -> None:
    from hone.models.tiny import make_model_folder

    make_model_folder(tmp_path, name)
    assert public_shape(name) == ModelShape.from_config(tmp_path)


def test_lengths() -> None:
    def drawn(most: int = 10**6, **fields: Any) -> Any:
        cfg = LengthsConfig.model_validate(fields)
        return np.array(draw_lengths(cfg, 4000, most=most, rng=np.random.default_rng(0)))

    assert set(drawn(distribution="fixed", median=7.0)) == {7}
    uniform = drawn(distribution="uniform", median=50)
    assert (uniform.min(), uniform.max()) == (1, 100)
    normal = drawn(median=800, sigma=0.7)
    assert np.median(normal) == pytest.approx(800, rel=0.05)
    assert np.log(normal).std() == pytest.approx(0.7, rel=0.05)
    assert drawn(most=900).max() == 900


def test_measured_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    cfg = LengthsConfig(distribution="file", path=path)

    def drawn() -> set[int]:
        return set(draw_lengths(cfg, 100, most=50, rng=np.random.default_rng(0)))

    path.write_text('{"tokens": 3}\n\n{"token_ids": [1, 2]}\n{"tokens": 900}\n')
    assert drawn() == {2, 3, 50}
    for text, said in (
        ("", "has no lengths"),
        ('{"tokens": 3}\nx\n', "lengths.jsonl:2: a line must be"),
        ('{"tokens": 0}\n', "a whole number from 1 on"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            drawn()


# -- all modes and splits -------------------------------------------------------------------------

SMALL = {"prompts_per_step": 8, "n_samples_per_prompt": 4, "max_completion_tokens": 512}


def small(**simulate_fields: Any) -> dict[str, Any]:
    fields = {"steps": 8, "lengths": {"median": 100, "sigma": 1.0}, **simulate_fields}
    return {"model": {"shape": "qwen3-0.6b"}, "rollout": SMALL, "plan": fields}


def test_all_modes_are_ranked_against_the_plain_one() -> None:
    result = compare(config(**small(gpus=4)))
    assert {(x.mode, x.split) for x in result.outcomes} >= {
        ("sync colocated", "4 = 4"),
        ("partial colocated", "4 = 4"),
        ("sync separate", "3 + 1"),
        ("partial separate", "1 + 3"),
        ("async, staleness 1", "2 + 2"),
        ("async, staleness 2", "1 + 3"),
    }
    # Colocated engines of one, two and four GPUs; engines of one GPU, and of two.
    assert len(result.outcomes) == 2 * 3 + 3 * 4 + 1 * 4
    rates = [x.run.tokens_per_s for x in result.outcomes]
    assert rates == sorted(rates, reverse=True)
    together = [x for x in result.outcomes if x.mode == "sync colocated"]
    assert result.plain is max(together, key=lambda x: x.run.tokens_per_s)
    assert result.speedup(result.plain) == 1
    assert all(x.run.placement.num_gpus == 4 for x in result.outcomes)


@pytest.mark.usefixtures("prompt_in_each_row")
def test_the_verdict_says_where_asynchrony_does_not_pay() -> None:
    """Equal lengths and full batches leave nothing to overlap but the training."""
    even = small(gpus=2, lengths={"distribution": "fixed", "median": 200}, overhead_s=0)
    even["rollout"] = SMALL | {"prompts_per_step": 128}
    result = compare(config(**even))
    assert result.verdict.startswith("Asynchrony does not pay: the best of it (async, staleness")
    tail = small(gpus=8, lengths={"median": 60, "sigma": 1.5})
    assert compare(config(**tail)).verdict.startswith("Asynchrony pays: the best of it")
    alone = compare(config(**small(gpus=1)))
    assert "Asynchrony needs engines on GPUs of their own" in alone.verdict
    assert not any("leaves none to trainers" in note for note in alone.notes)
    with pytest.raises(UserError, match="takes 1 of 1 GPUs, which leaves none to trainers"):
        compare(config(**{**small(gpus=1, gpu="4090"), "model": {"shape": "qwen3-32b"}}))


def step_s(rates: Rates, rows: Sequence[int]) -> float:
    """Seconds of an update whose samples have all ended at once, with 7000 trained tokens."""
    scoring = Scoring() if rates.scoring is None else rates.scoring(rows, 7000)
    return rates.train_s(rows, 7000) + scoring.wait_s


def test_references_apart_take_their_time_off_the_trainers() -> None:
    """Two of them beside two trainers, by hand; what trainers score meanwhile is no longer."""
    shape, rows = public_shape("qwen3-0.6b"), [1000] * 8
    assert shape is not None
    placement = Placement(num_trainers=2, num_engines=1)

    def train_s(coef: float, num_references: int, num_epochs: int = 1) -> float:
        cfg = config(
            plan={"training_scaling": 1.0},
            cluster={"num_engines": 1, "num_trainers": 2, "num_references": num_references},
            algorithm={"kl": {"coef": coef}},
            trainer={"num_epochs": num_epochs},
        )
        return step_s(placement_rates(cfg, shape, GPUS[0], placement), rows)

    forward_s = train_s(0.1, 0) - train_s(0.0, 0)
    assert forward_s > 0
    assert train_s(0.1, 2) == pytest.approx(train_s(0.1, 0))
    assert train_s(0.1, 1) == pytest.approx(train_s(0.0, 0) + 2 * forward_s)
    assert train_s(0.1, 4) == pytest.approx(train_s(0.0, 0) + forward_s / 2)
    assert train_s(0.1, 2, num_epochs=2) == pytest.approx(train_s(0.0, 0, num_epochs=2))
    cluster = {"num_trainers": 2, "num_engines": 3, "num_references": 1}
    result = compare(config(**small(), cluster=cluster, algorithm={"kl": {"coef": 0.1}}))
    assert {x.split for x in result.outcomes} == {"5 = 5", "2 + 3"}
    assert any("in no split" in note for note in result.notes)


@pytest.mark.parametrize("role", ["teacher", "reward_model"])
def test_the_time_of_a_teacher_and_of_a_reward_model_is_planned_wherever_it_is(role: str) -> None:
    """By hand, of one trainer and an engine. A reward model apart leaves its last passes over."""
    shape, other = public_shape("qwen3-0.6b"), public_shape("qwen3-4b")
    assert shape is not None
    assert other is not None
    rows, placement = [1000] * 8, Placement(num_trainers=1, num_engines=1)
    model = {"path": "Qwen/Qwen3-4B"}
    sections = {
        "teacher": {"teacher": model | {"loss": "js"}},
        "reward_model": {"reward": {"model": model | {"max_tokens_per_forward": 1000}}},
    }

    def train_s(number: int, *, is_there: bool = True) -> float:
        cfg = config(
            plan={"training_scaling": 1.0},
            cluster={"num_engines": 1, "num_trainers": 1, f"num_{role}s": number},
            **(sections[role] if is_there else {}),
        )
        return step_s(placement_rates(cfg, shape, GPUS[0], placement), rows)

    head = 7000 if role == "teacher" else 0
    compute = Compute(GPUS[0], PlanningConfig())
    pass_s = compute.forward_s(other, rows, num_head_tokens=head)
    if role == "teacher":  # 7 of 8 rows leave out their prompt of 125 tokens
        pass_s -= compute.forward_s(other, [125] * 7, num_head_tokens=0)
    without = train_s(0, is_there=False)
    assert train_s(0) == pytest.approx(without + pass_s)
    left = pass_s if role == "teacher" else pass_s * 2 / 8
    assert train_s(2) == pytest.approx(without + left / 2)
    result = compare(
        config(
            **small(),
            cluster={"num_trainers": 2, "num_engines": 3, f"num_{role}s": 1},
            **sections[role],
        )
    )
    # Several engines on trainers' devices cannot all reach reward models.
    beside = {"5 = 5"} if role == "teacher" else set[str]()
    assert {x.split for x in result.outcomes} == {"2 + 3"} | beside
    assert any("in no split" in note for note in result.notes)


def test_trainers_that_share_a_reward_model_gather_its_weights_for_every_pass() -> None:
    """By hand, of two that sample: each scores half of the rows, in as many passes as it takes."""
    shape, judge = public_shape("qwen3-0.6b"), public_shape("qwen3-4b")
    assert shape is not None
    assert judge is not None
    judge = replace(judge, tied=True)
    rows, placement = [1000] * 8, Placement(num_trainers=2, num_engines=2, colocated=True)

    def train_s(stage: int, path: str | None, budget: int = 1000) -> float:
        cfg = config(
            plan={"training_scaling": 1.0},
            cluster={"num_engines": 0, "num_trainers": 1},
            trainer={"parallel": {"zero_stage": stage}},
            reward={"functions": (), "model": {"path": path, "max_tokens_per_forward": budget}},
        )
        return placement_rates(cfg, shape, GPUS[0], placement).train_s(rows, 7000)

    pass_s = Compute(GPUS[0], PlanningConfig()).forward_s(judge, rows, num_head_tokens=0)
    gather_s = judge.weight_bytes(2) / 2 / (0.7 * GPUS[0].link_bytes_per_s)
    path = "Qwen/Qwen3-4B"
    assert train_s(2, path) == pytest.approx(train_s(2, None) + pass_s / 2)
    without = train_s(3, None)
    assert train_s(3, path) == pytest.approx(without + pass_s / 2 + 4 * gather_s)
    assert train_s(3, path, budget=10**4) == pytest.approx(without + pass_s / 2 + gather_s)


def scored_by(name: RoleName, each: float) -> Rates:
    """An engine with a token a second, updates of 10 s, and a model apart; trainers score the rows
    themselves for 1 s."""
    rates = of_cost(EngineRates(weights_s=1.0), train_s=10.0, sync_s=0.0, max_num_keys=10_000)

    def scoring(rows: Sequence[int], num_trained: int) -> Scoring:
        seconds: dict[RoleName, float] = {name: len(rows) * each} if each else {}
        return Scoring(seconds=seconds, beside_s=1.0, left_s=0.5 * ("reward_model" in seconds))

    return replace(rates, scoring=scoring)


@pytest.mark.parametrize("name", ["reference", "teacher", "reward_model"])
def test_models_apart_score_beside_what_is_sampled_ahead(name: RoleName) -> None:
    """Two groups of two samples an update. Of updates at 10 s, 1 s a sample is hidden, and 4 s a
    sample are the pace: 16 s an update. In turns all of it is waited for."""
    rollout = RolloutConfig(prompts_per_step=2, n_samples_per_prompt=2, max_completion_tokens=8)

    def step_s(each: float, max_staleness: int) -> float:
        run = simulate(
            Placement(num_trainers=1, num_engines=1),
            scored_by(name, each),
            [[4, 4]],
            num_prompt_tokens=1,
            num_steps=12,
            rollout=rollout,
            pipeline=PipelineConfig(max_staleness=max_staleness),
            engine=EngineConfig(),
        )
        return run.step_s

    ahead = step_s(0, 1)
    assert ahead == pytest.approx(10, abs=0.5), "the engine is quicker than the trainer"
    assert step_s(1, 1) == pytest.approx(ahead)
    assert step_s(4, 1) == pytest.approx(16, abs=0.5)
    in_turns = 0.5 if name == "reward_model" else 4 * 1 - 1
    assert step_s(1, 0) == pytest.approx(step_s(0, 0) + in_turns)


def test_splits_follow_the_recipe() -> None:
    asked = config(**small(staleness=[4]), cluster={"num_trainers": 2, "num_engines": 3})
    splits = {x.split for x in compare(asked).outcomes}
    assert splits == {"5 = 5", "2 + 3"}
    assert {x.mode for x in compare(asked).outcomes if x.is_async} == {
        "async, staleness 4",
    }
    pairs = {"engine": {"tensor_parallel_size": 2}, "trainer": {"parallel": {"ring_size": 3}}}
    result = compare(config(**small(gpus=7), **pairs))
    assert {x.split for x in result.outcomes} == {"3 + 2 x 2"}
    assert result.plain.mode == "sync separate"
    assert any("1 and 5 to 7 trainers: " in note for note in result.notes)
    beside = compare(config(**small(gpus=4), engine={"tensor_parallel_size": 2}))
    assert {x.split for x in beside.outcomes} == {"4 = 4", "4 = 2 x 2", "2 + 1 x 2"}
    assert any(x.name.endswith("colocated, 4 GPUs, engines of 2") for x in beside.outcomes)
    wide = small(gpus=40, steps=4) | {"cluster": {"devices_per_node": 39}}
    told = "16 of 39 splits with engines of 1 were tried"
    assert any(told in note for note in compare(config(**wide)).notes)
    many = compare(config(**small(gpus=40, steps=4)))
    assert {x.split for x in many.outcomes if x.run.placement.tensor_parallel_size == 1} == {
        "40 = 40",
        *(f"{n} + {40 - n}" for n in (*range(1, 9), 16, 24, 32)),
    }
    assert any("trainers: beside engines they have whole nodes" in x for x in many.notes)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"plan": {"gpu": "H2000"}}, "'H2000', which hone's table lacks; it has H200, B200"),
        ({"model": {}}, "neither model.shape nor model.path is set"),
        ({"model": {"path": "no/such"}}, "model.path is 'no/such', which is no folder with"),
        (
            {"plan": {"gpus": 3}, "trainer": {"parallel": {"ring_size": 4}}},
            "3 x H200 cannot be split into trainers and engines",
        ),
        (
            {
                "plan": {"gpus": 1, "gpu": "a10"},
                "model": {"shape": "qwen3-8b", "dtype": "float32"},
            },
            "1 x A10 cannot be split.*more than the 22 GiB",
        ),
        (
            {"plan": {"prompt_tokens": 10**6}},
            "colocated and separate engines: their KV cache holds [0-9]+ tokens",
        ),
    ],
)
def test_mistakes_are_explained(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compare(config(**sections))


def test_ranks_that_share_experts_wait_for_the_one_that_reads_most() -> None:
    """As many experts of a layer above the mean as drawn routes give it."""
    shape = public_shape("qwen3-30b-a3b")
    assert shape is not None
    draw = np.random.default_rng(0)
    for size in (2, 4, 8):
        placement = Placement(num_trainers=4, num_engines=1, tensor_parallel_size=size)
        plan = {"model": {"shape": "qwen3-30b-a3b"}, "trainer": {"offload": "optimizer"}}
        rates = placement_rates(config(**plan), shape, GPUS[0], placement).engine
        for num_seqs in (2, 8, 32):
            engine = SimulatedEngine(rates, 64, 1 << 30)
            # Prompts of no length, whose keys no step reads.
            engine.submit([SimulatedSample(i, 9, 0, 9) for i in range(num_seqs)], 0.0)
            found = engine._steps_s(1) - rates.overhead_s  # pyright: ignore[reportPrivateUsage]
            shares = []
            for _ in range(300):
                routes = draw.random((num_seqs, 128)).argsort(1)[:, :8]
                passed = np.bincount(routes.ravel(), minlength=128) > 0
                shares.append(passed.reshape(size, -1).mean(1).max())
            dense_s = rates.weights_s - rates.experts_s
            keys_s = num_seqs * rates.key_s
            sent_s = num_seqs * rates.sent_s
            expected = dense_s + keys_s + sent_s + float(np.mean(shares)) * rates.experts_s
            assert found == pytest.approx(expected, rel=0.03), (size, num_seqs)
