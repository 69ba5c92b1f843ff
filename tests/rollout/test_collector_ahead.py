"""R19: groups ahead of the training. The rule of batches has a twin that tries everything."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, product
from random import Random
from threading import Event, get_ident
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.config.run import EvaluationConfig
from hone.observe.metrics import to_scalars
from hone.rewards.scorer import FailureRateError
from hone.rollout import collector as collector_module
from hone.rollout.collector import Collector
from hone.rollout.episodes import Episodes
from hone.rollout.evaluate import evaluate
from hone.rollout.metrics import rollout_metrics
from hone.rollout.staleness import choose, too_late
from hone.rollout.state import group_to_dict
from hone.types import Completion, FailureKind, Group, Request, Sample, StopReason
from tests.rollout.fakes import (
    FakeEngine,
    FakeScorer,
    LateEngine,
    collect,
    draw,
    make_collector,
    prompt,
)

BASE: dict[str, Any] = {
    "prompts_per_step": 4,
    "n_samples_per_prompt": 2,
    "max_completion_tokens": 100,
}


def number_of(request_id: str) -> int:
    """Running number of a group, which here is also that of its prompt."""
    return int(request_id.split("/")[0].split("-")[1])


def heavy_tailed(request: Request) -> int:
    """One prompt in eight has answers that are thirty times longer."""
    key = draw("length", request.sampling.seed)
    return 60 + key % 30 if number_of(request.id) % 8 == 3 else 1 + key % 4


def make(
    *,
    engine: FakeEngine | None = None,
    scorer: FakeScorer | None = None,
    pipeline: dict[str, Any] | None = None,
    **rollout: Any,
) -> Collector:
    return make_collector(
        engine=engine or FakeEngine(length=heavy_tailed),
        scorer=scorer,
        pipeline={"max_staleness": 1} | (pipeline or {}),
        **BASE | rollout,
    )


def oversampled() -> Collector:
    """One that is not ahead of the training."""
    engine = FakeEngine(length=heavy_tailed)
    return make_collector(engine=engine, **BASE, oversample_prompts=4)


def bring_weights(collector: Collector, version: int) -> None:
    num_started = collector._buffer._num_started
    with collector.pause(version):
        assert collector._buffer._num_started == num_started
        collector.engine.weight_version = version  # type: ignore[misc]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_does_not_wait_for_scores_that_cannot_save_it(ahead: int) -> None:
    """A quarter may fail, and all do: groups that another batch may take do not count."""
    scorer = FakeScorer(delay=10**4, fails=lambda _: FailureKind.TIMEOUT)
    collector = make(scorer=scorer, pipeline={"max_staleness": ahead})
    collector.max_failure_rate = 0.25
    with pytest.raises(FailureRateError, match="have no reward"):
        collect(collector, 0)
    assert scorer.pending


def batches(
    collector: Collector,
    num_steps: int,
    *,
    first: int = 0,
    num_polls: Callable[[], int] = lambda: 2,
) -> Iterator[list[Group]]:
    """One batch a step; in between some steps of the engine while it would be trained."""
    for version in range(first, first + num_steps):
        yield collect(collector, version)
        for _ in range(num_polls()):
            collector._step()
        bring_weights(collector, version + 1)


def as_values(groups: list[Group]) -> list[dict[str, Any]]:
    return [group_to_dict(group) for group in groups]


def prompts_of(groups: list[Group]) -> list[int]:
    return [int(group.prompt.id.removeprefix("data:")) for group in groups]


# --- the choice of a batch ---------------------------------------------------------------------


def can_meet(deadlines: list[int], first_update: int, size: int) -> bool:
    """Whether any assignment of groups to updates, `size` each, meets all deadlines."""
    options = [range(first_update, due + 1) for due in deadlines]
    return any(
        all(count <= size for count in Counter(assignment).values())
        for assignment in product(*options)
    )


sorted_deadlines = st.lists(st.integers(0, 3), max_size=6).map(sorted)


@given(sorted_deadlines, st.data(), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_R19_a_batch_is_taken_exactly_where_some_choice_keeps_the_bound(
    deadlines: list[int], data: st.DataObject, size: int
) -> None:
    flags = st.lists(st.booleans(), min_size=len(deadlines), max_size=len(deadlines))
    is_complete = data.draw(flags)
    complete = [position for position, done in enumerate(is_complete) if done]
    allowed = [
        chosen
        for chosen in combinations(complete, size)
        if can_meet([d for i, d in enumerate(deadlines) if i not in chosen], 1, size)
    ]
    actual = choose(deadlines, is_complete, update=0, size=size)
    if actual is None:
        assert not allowed
    else:
        assert tuple(actual) in allowed


@given(sorted_deadlines, st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_no_more_is_too_late_than_must_be(deadlines: list[int], size: int) -> None:
    late = too_late(deadlines, update=1, size=size)
    kept = [due for position, due in enumerate(deadlines) if position not in late]
    assert can_meet(kept, 1, size)
    for more in combinations(deadlines, len(kept) + 1):
        assert not can_meet(list(more), 1, size)


# --- the contract at any staleness -------------------------------------------------------------


def check_contract(
    pipeline: dict[str, Any],
    *,
    num_steps: int = 20,
    seed: int = 1,
    scorer: FakeScorer | None = None,
    engine: FakeEngine | None = None,
    **rollout: Any,
) -> None:
    """Bounds, counts, and what becomes of every prompt, with durations that nobody foresees."""
    rng = Random(seed)
    engine = engine or FakeEngine(length=heavy_tailed)
    collector = make(engine=engine, scorer=scorer, pipeline=pipeline, **rollout)
    size, n = collector.rollout_cfg.prompts_per_step, collector.rollout_cfg.n_samples_per_prompt
    bound = collector.pipeline_cfg.max_staleness
    trained: list[int] = []
    num_flat = 0
    step = engine.step

    def limited() -> list[Completion]:
        assert engine.num_steps < 400 * num_steps, "a batch is refused for ever"
        num_open, version = len(collector._buffer), engine.weight_version
        assert num_open <= (1 + bound) * size
        gone = num_flat + collector._counting.num_dropped_groups
        assert collector.prompts.position - gone <= (version + bound + 1) * size
        return step()

    engine.step = limited  # type: ignore[method-assign]
    pumps = batches(collector, num_steps, num_polls=lambda: rng.choice([0, 1, 3, 9, 40]))
    for version, groups in enumerate(pumps):
        seeds = {request.id: request.sampling.seed for request in engine.submitted}
        counts = collector.counts
        assert len(counts.staleness) == len(groups) == size
        assert all(0 <= staleness <= bound for staleness in counts.staleness)
        assert prompts_of(groups) == sorted(prompts_of(groups))
        for group in groups:
            assert [sample.index for sample in group.samples] == list(range(n))
            for sample in group.samples:
                assert all(0 <= version - v <= bound for v in sample.weight_versions)
                expected = [draw(seeds[sample.id], t) % 50 for t in range(len(sample.token_ids))]
                assert sample.token_ids == expected
        trained += prompts_of(groups)
        num_flat += counts.num_dropped_groups
        assert counts.num_too_old == 0
    num_flat += collector._counting.num_dropped_groups
    still_open = prompts_of([entry.group for entry in collector._buffer])
    assert len(set(trained + still_open)) == len(trained + still_open)
    drawn = collector.prompts.position
    assert len(trained) + len(still_open) + num_flat == drawn


@given(
    seed=st.integers(0, 10**6),
    delay=st.integers(0, 3),
    is_late=st.booleans(),
    dynamic=st.booleans(),
    pipeline=st.fixed_dictionaries(
        {
            "max_staleness": st.integers(1, 4),
            "in_flight": st.sampled_from(["pause", "abort", "finish"]),
        }
    ),
)
@settings(max_examples=40, deadline=None)
def test_R19_the_bound_holds_and_every_prompt_is_accounted_for(
    seed: int, delay: int, is_late: bool, dynamic: bool, pipeline: dict[str, Any]
) -> None:
    check_contract(
        pipeline,
        num_steps=8,
        seed=seed,
        scorer=FakeScorer(delay=delay),
        engine=LateEngine(length=heavy_tailed) if is_late else None,
        dynamic_sampling=dynamic,
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("delay", [0, 3])
def test_R19_a_batch_is_looked_for_whenever_there_may_be_one(
    delay: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As early as where it is looked for after every group, with fewer looks."""
    look, looks = Collector._choose_batch, Counter[str]()

    def run(name: str) -> list[tuple[int, list[dict[str, Any]]]]:
        engine, found = FakeEngine(length=heavy_tailed), list[tuple[int, list[dict[str, Any]]]]()

        def counting(collector: Collector, num_complete: int) -> Any:
            looks[name] += 1
            batch = look(collector, num_complete)
            if name == "after every group":
                collector._wanted_before = math.inf
            return batch

        monkeypatch.setattr(Collector, "_choose_batch", counting)
        scorer = FakeScorer(delay=delay)
        collector = make(engine=engine, scorer=scorer, dynamic_sampling=dynamic)
        for groups in batches(collector, 12, num_polls=lambda: 1):
            found.append((engine.stats().num_steps, as_values(groups)))
        return found

    assert run("now") == run("after every group")
    assert looks["now"] < looks["after every group"]


def bug_never_waits(deadlines: list[int], is_complete: list[bool], **options: Any) -> Any:
    chosen = [position for position, done in enumerate(is_complete) if done][: options["size"]]
    return chosen if len(chosen) == options["size"] else None


def bug_looks_one_update_too_late(deadlines: Any, is_complete: Any, **options: Any) -> Any:
    """Leaves more for the next update than it can take, which shows an update later."""
    return choose([due + 1 for due in deadlines], is_complete, **options)


def bug_newest_first(deadlines: Any, is_complete: list[bool], **options: Any) -> Any:
    chosen = choose(deadlines, is_complete, **options)
    complete = [position for position, done in enumerate(is_complete) if done]
    return None if chosen is None else complete[-len(chosen) :]


@pytest.mark.parametrize("bug", [bug_never_waits, bug_looks_one_update_too_late, bug_newest_first])
def test_R19_planted_choice(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = {"max_staleness": 2}
    check_contract(pipeline)
    monkeypatch.setattr(collector_module, "choose", bug)
    with pytest.raises(AssertionError):
        check_contract(pipeline)


@pytest.mark.parametrize("extra", [1, 4])
def test_R19_planted_admission(extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Collector._num_free_slots.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Collector, "_num_free_slots", property(lambda self: room(self) + extra))
    with pytest.raises(AssertionError):
        check_contract({"max_staleness": 1})


# --- length bias -------------------------------------------------------------------------------


def share_of_long(trained: list[int]) -> float:
    """How much of what was trained is long, relative to its share of the data."""
    return 8 * sum(number % 8 == 3 for number in trained) / len(trained)


NUM_BIAS_STEPS = 400


def test_R19_oversampling_has_no_length_bias() -> None:
    rollout = oversampled()
    trained: list[int] = []
    for step in range(NUM_BIAS_STEPS):
        trained += prompts_of(collect(rollout, step))
        left = prompts_of([entry.group for entry in rollout._buffer if entry.complete])
        assert max(trained[-4:]) < min(left, default=math.inf), "complete groups go oldest first"
    assert len(set(trained)) == len(trained) == 4 * NUM_BIAS_STEPS
    assert share_of_long(trained) == pytest.approx(1.0, abs=0.02)


def test_R19_waiting_has_no_length_bias() -> None:
    collector = make(pipeline={"max_staleness": 2})
    trained: list[int] = []
    for groups in batches(collector, NUM_BIAS_STEPS):
        trained += prompts_of(groups)
        assert collector.counts.num_too_old == 0
    assert len(set(trained)) == len(trained) == 4 * NUM_BIAS_STEPS
    assert share_of_long(trained) == pytest.approx(1.0, abs=0.02)


# --- filling up --------------------------------------------------------------------------------


def test_R19_room_is_filled_in_the_call_that_makes_it() -> None:
    collector = make(engine=FakeEngine(length=lambda _: 1), dynamic_sampling=True)
    engine = collector.engine
    collect(collector, 0)
    bring_weights(collector, 1)
    collector._step()
    assert len(collector._buffer) == 8, "two batches: one to train next, one ahead"
    collector._counting.num_dropped_groups = 0
    while not collector._counting.num_dropped_groups:
        before = len(engine.submitted)
        collector._step()
    dropped = collector._counting.num_dropped_groups
    assert len(engine.submitted) - before == 2 * dropped
    assert len(collector._buffer) == 8
    collect(collector, 1)
    assert len(collector._buffer) == 4, "the batch in training leaves one ahead"
    bring_weights(collector, 2)
    collector._step()
    assert len(collector._buffer) == 8


def test_dynamic_sampling_gives_up_ahead_of_the_training_too() -> None:
    collector = make(
        scorer=FakeScorer(lambda _: 1.0),
        dynamic_sampling=True,
    )
    for groups in batches(collector, 4):
        assert groups == []
        assert collector.counts.num_refill_rounds == 9
        assert collector.counts.num_dropped_groups >= 40
        assert len(collector._buffer) >= 4, "sampling goes on while the loop does"


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_how_far_ahead(staleness: int) -> None:
    collector = make(pipeline={"max_staleness": staleness})
    for _ in batches(collector, 6):
        assert len(collector._buffer) == 4 * staleness


# --- changes of weights ------------------------------------------------------------------------


def versions_of(groups: list[Group]) -> list[int]:
    """How many versions sampled each sample."""
    return [len(set(s.weight_versions)) for group in groups for s in group.samples]


def check_masks(groups: list[Group], version: int) -> int:
    """Of each sample the tokens since the last interruption are trained, however old, and the
    earlier ones are not. Returns how many are trained that older weights than `version` drew."""
    num_stale = 0
    for sample in (sample for group in groups for sample in group.samples):
        newest = sample.weight_versions[-1]
        assert sample.loss_mask == [drawn == newest for drawn in sample.weight_versions]
        num_stale += sum(sample.loss_mask) * (newest < version)
    return num_stale


@pytest.mark.parametrize("in_flight", ["pause", "abort", "finish"])
def test_unfinished_samples_at_a_change_of_weights(in_flight: str) -> None:
    engine = FakeEngine(length=lambda request: 20 + draw(request.id) % 20)
    collector = make(
        engine=engine,
        pipeline={"in_flight": in_flight, "max_staleness": 3},
        mask_off_policy_tokens=True,
    )
    num_versions: list[int] = []
    num_resumed = num_carried = num_stale = 0
    for version, groups in enumerate(batches(collector, 10)):
        num_versions += versions_of(groups)
        num_stale += check_masks(groups, version)
        num_carried += collector.counts.num_carried_samples
    for request in engine.submitted:
        num_resumed += request.resumed is not None
        assert request.priority == (-1 if request.resumed is not None else 0)
    ids = [request.id for request in engine.submitted]
    assert num_stale > 0
    if in_flight == "finish":
        assert set(num_versions) == {1}
        assert num_carried == 0
    else:
        assert max(num_versions) > 1
        assert num_carried > 0
    assert (num_resumed > 0) == (in_flight == "abort") == (len(set(ids)) < len(ids))


@pytest.mark.parametrize("in_flight", ["pause", "abort", "finish"])
@pytest.mark.parametrize("limit", [0, 1])
def test_a_sample_interrupted_often_enough_finishes_first(limit: int, in_flight: str) -> None:
    """Before the next change of weights, which waits for it."""
    collector = make(
        pipeline={"in_flight": in_flight, "max_staleness": 3},
        max_aborted_count=limit,
    )
    calls: list[tuple[int, int]] = []
    num_versions: list[int] = []
    for version in range(8):
        num_versions += versions_of(collect(collector, version))
        with collector.pause(version + 1, lambda *counts: calls.append(counts)):
            with pytest.raises(AssertionError, match="pause"):
                collector.collect(version + 1)
            unfinished = [entry for entry in collector._buffer if not entry.generated]
            assert all(entry.aborted_count <= limit for entry in unfinished)
            collector.engine.weight_version = version + 1  # type: ignore[misc]
    assert calls
    assert all(finished <= wanted for finished, wanted in calls)
    most = 0 if in_flight == "finish" else limit
    assert max(num_versions) == most + 1
    submitted = Counter(request.id for request in collector.engine.submitted)
    assert max(submitted.values()) == 1 + most * (in_flight == "abort")


# --- suspension and state ----------------------------------------------------------------------


ENGINES: list[Callable[[], FakeEngine]] = [
    lambda: FakeEngine(length=heavy_tailed),
    lambda: LateEngine(length=heavy_tailed),
]
AHEAD = {"max_staleness": 2, "in_flight": "abort"}


@pytest.mark.parametrize("make_engine", ENGINES, ids=["fake", "late"])
def test_an_evaluation_in_between_changes_nothing(make_engine: Callable[[], FakeEngine]) -> None:
    """Neither groups nor counts, nor how often a sample was aborted."""

    def evaluate_with(collector: Collector) -> None:
        samples = evaluate(
            [prompt(number) for number in range(3)],
            engine=collector.engine,
            scorer=collector.scorer,
            cfg=EvaluationConfig(n_samples_per_prompt=2, max_completion_tokens=9),
            episodes=Episodes(decode=str, run_seed=3, purpose="eval"),
        )
        assert len(samples) == 6

    def trained(*, evaluates: bool) -> list[Any]:
        collector = make(
            engine=make_engine(), scorer=FakeScorer(delay=2), pipeline=AHEAD, max_aborted_count=1
        )
        found: list[Any] = []
        for version, groups in enumerate(batches(collector, 12)):
            counts = collector.counts
            found.append((as_values(groups), counts.num_generated_tokens, counts.num_engine_steps))
            aborted = {entry.group.id: entry.aborted_count for entry in collector._buffer}
            with collector.idle():
                assert not collector.engine.has_unfinished
                assert not collector.scorer.pending
                if evaluates:
                    evaluate_with(collector)
            assert aborted == {entry.group.id: entry.aborted_count for entry in collector._buffer}
            assert version < 1 or aborted
        return found

    assert trained(evaluates=True) == trained(evaluates=False)


def state_after(collector: Collector, num_steps: int) -> Any:
    """What a checkpoint holds after so many steps."""
    for _ in batches(collector, num_steps):
        pass
    with collector.idle():
        return json.loads(json.dumps(collector.state_dict()))


@pytest.mark.parametrize("make_engine", ENGINES, ids=["fake", "late"])
def test_R17_a_collector_goes_on_from_its_state(make_engine: Any) -> None:
    def fresh() -> Collector:
        return make(
            engine=make_engine(),
            scorer=FakeScorer(delay=2),
            pipeline=AHEAD,
            max_aborted_count=2,
        )

    first = fresh()
    saved = state_after(first, 6)
    assert any(entry["requests"] for entry in saved["groups"])
    assert any(not entry["requests"] for entry in saved["groups"])
    expected = [as_values(groups) for groups in batches(first, 6, first=6)]
    second = fresh()
    second.load_state_dict(saved)
    second.prompts.position = saved["num_started"]
    second.engine.weight_version = 6  # type: ignore[misc]
    assert [as_values(groups) for groups in batches(second, 6, first=6)] == expected


def test_R17_planted_state_without_a_buffered_group() -> None:
    first = make(pipeline=AHEAD)
    saved = state_after(first, 6)
    expected = [as_values(groups) for groups in batches(first, 3, first=6)]
    saved["groups"] = [entry for entry in saved["groups"] if entry["requests"]]
    second = make(pipeline=AHEAD)
    second.load_state_dict(saved)
    second.prompts.position = saved["num_started"]
    second.engine.weight_version = 6  # type: ignore[misc]
    assert [as_values(groups) for groups in batches(second, 3, first=6)] != expected


def test_a_run_that_goes_on_with_less_staleness_drops_what_cannot_meet_it() -> None:
    first = make(pipeline={"max_staleness": 5})
    saved = state_after(first, 8)
    num_open = len(first._buffer)
    second = make(pipeline={"max_staleness": 1})
    second.load_state_dict(saved)
    second.prompts.position = first.prompts.position
    second.engine.weight_version = 8  # type: ignore[misc]
    dropped = 0
    for groups in batches(second, 6, first=8):
        assert len(groups) == 4
        assert max(second.counts.staleness) <= 1
        dropped += second.counts.num_too_old
    assert 0 < dropped <= num_open


def test_an_oversampled_run_may_be_resumed_ahead() -> None:
    rollout = oversampled()
    trained = prompts_of(collect(rollout, 1))
    collector = make()
    collector.load_state_dict(json.loads(json.dumps(rollout.state_dict())))
    collector.prompts.position = rollout.prompts.position
    collector.engine.weight_version = 1  # type: ignore[misc]
    for groups in batches(collector, 5, first=1):
        trained += prompts_of(groups)
    assert set(range(8)) < set(trained)
    assert len(set(trained)) == len(trained)


# --- a thread ----------------------------------------------------------------------------------


def test_a_thread_polls_while_the_caller_trains() -> None:
    collector = make(scorer=FakeScorer(delay=3))
    threads = set[int]()
    step = collector.engine.step

    def noted() -> list[Completion]:
        threads.add(get_ident())
        return step()

    collect(collector, 0)
    collector.engine.step = noted  # type: ignore[method-assign]
    with collector.background():
        idle = collector.idle()
        for call in (lambda: collector.collect(1), idle.__enter__):
            with pytest.raises(AssertionError, match="background"):
                call()
        while collector._is_busy:  # until all that may be begun is complete
            time.sleep(0.001)
    assert len(threads) == 1
    assert threads != {get_ident()}
    bring_weights(collector, 1)
    num_steps = collector.engine.num_steps
    assert len(collect(collector, 1)) == 4
    assert collector.engine.num_steps == num_steps, "the batch was there"


class Broken(RuntimeError): ...


def test_an_error_of_the_thread_reaches_the_caller() -> None:
    collector = make()
    failed = Event()

    def fails() -> list[Completion]:
        failed.set()
        raise Broken("engine")

    collect(collector, 0)
    collector.engine.step = fails  # type: ignore[method-assign]
    with pytest.raises(Broken), collector.background():
        assert failed.wait(60)
    failed.clear()

    def trains() -> None:
        with collector.background():
            assert failed.wait(60)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        trains()
    assert "Broken" in caught.value.__notes__[0]
    with pytest.raises(Broken):
        collector._step()


# --- failures, size, metrics -------------------------------------------------------------------


def test_R12_failures_are_counted_and_carry_no_reward() -> None:
    """Of rewards, of requests that no engine can serve, and of calls that raise."""
    kinds = [kind for kind in FailureKind if kind is not FailureKind.ENGINE]

    def fails(sample: Sample) -> FailureKind | None:
        key = draw("fail", sample.id)
        return kinds[key // 7 % len(kinds)] if key % 7 == 0 else None

    def is_refused(request_id: str) -> bool:
        return draw("refused", request_id) % 11 == 0

    collector = make(scorer=FakeScorer(delay=2, fails=fails))
    step = collector.engine.step
    num_calls = 0

    def breaks_now_and_then() -> list[Completion]:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 5 == 0:
            raise Broken("this call, not the next")
        completions = step()
        for completion in completions:
            if is_refused(completion.request_id):
                completion.stop_reason, completion.error = StopReason.ERROR, "too long"
        return completions

    collector.engine.step = breaks_now_and_then  # type: ignore[method-assign]
    expected: Counter[FailureKind | None] = Counter()
    counted: Counter[FailureKind | None] = Counter()
    for version in range(40):
        groups = None
        while groups is None:
            try:
                groups = collect(collector, version)
            except Broken:
                continue
        samples = [sample for group in groups for sample in group.samples]
        assert len(samples) == 8
        for sample in samples:
            failure = FailureKind.ENGINE if is_refused(sample.id) else fails(sample)
            assert sample.failure == failure
            assert (sample.reward is None) == (failure is not None)
            expected[failure] += 1
        scalars = to_scalars(rollout_metrics(groups, collector.counts))
        counted.update({kind: int(scalars[f"rollout/failed/{kind}"]) for kind in FailureKind})
        counted[None] += int(scalars["rollout/valid"])
        bring_weights(collector, version + 1)
    assert counted == expected
    assert all(expected[kind] for kind in FailureKind)


def held(thing: Any, seen: set[int] | None = None) -> int:
    """How many objects are reachable by attributes and containers."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (str, int, float, type(None), FakeEngine)):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        parts: list[Any] = [*thing.keys(), *thing.values()]
    elif isinstance(thing, (list, tuple, set)):
        parts = list(thing)
    else:
        names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [getattr(thing, name) for name in names if hasattr(thing, name)]
        parts += list(getattr(thing, "__dict__", {}).values())
    return 1 + sum(held(part, seen) for part in parts) + len(parts)


def test_R16_a_long_run_holds_no_more_than_a_short_one() -> None:
    collector = make(
        pipeline={"max_staleness": 2},
        scorer=FakeScorer(delay=2),
        dynamic_sampling=True,
        prompts_per_step=2,
    )
    sizes: list[int] = []
    for step, _ in enumerate(batches(collector, 2_000)):
        collector.engine.submitted.clear()
        if step % 5 == 0:
            sizes.append(held(collector))
    assert max(sizes[200:]) <= 1.5 * max(sizes[:40])


def test_the_collector_says_how_far_it_was_ahead() -> None:
    collector = make(pipeline={"max_staleness": 2})
    seen: list[int] = []
    for groups in batches(collector, 6):
        counts = collector.counts
        scalars = to_scalars(rollout_metrics(groups, counts))
        assert scalars["rollout/staleness/mean"] == sum(counts.staleness) / 4
        assert scalars["rollout/staleness/max"] == max(counts.staleness)
        assert scalars["rollout/too_old_groups"] == 0
        num_buffered = scalars["rollout/buffered_groups"]
        assert 0 <= num_buffered <= 8
        assert (8 - num_buffered) <= scalars["rollout/in_flight_samples"] <= 16
        assert not math.isnan(scalars["time/generate/wait_s"])
        seen.append(max(counts.staleness))
    assert max(seen) > 0
