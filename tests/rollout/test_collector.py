"""Collecting groups: membership, determinism, filters, carried-over samples."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.observe.metrics import to_scalars
from hone.rewards.scorer import FailureRateError
from hone.rollout.buffer import has_reward_variance
from hone.rollout.collector import Collector
from hone.rollout.counts import RolloutCounts
from hone.rollout.metrics import rollout_metrics
from hone.rollout.requests import request_seed
from hone.rollout.settings import RolloutConfig
from hone.rollout.state import group_to_dict
from hone.types import (
    NOT_SAMPLED,
    FailureKind,
    Group,
    Prompt,
    Reward,
    Sample,
    StopReason,
)
from tests.rollout.fakes import (
    CyclicPrompts,
    FakeEngine,
    FakeScorer,
    by_first_token,
    collect,
    draw,
    in_group,
    make_collector,
    play,
    prompt,
)
from tests.tables import table


def make(
    scorer: FakeScorer | None = None, engine: FakeEngine | None = None, **options: Any
) -> Collector:
    sizes = {"prompts_per_step": 4, "n_samples_per_prompt": 3, "max_completion_tokens": 12}
    return make_collector(scorer=scorer, engine=engine, **sizes | options)


def tokens(groups: list[Group]) -> list[tuple[str, list[list[int]]]]:
    return [(group.prompt.id, [sample.token_ids for sample in group.samples]) for group in groups]


def check_groups(groups: list[Group], *, size: int) -> None:
    for group in groups:
        assert [sample.index for sample in group.samples] == list(range(size))
        for sample in group.samples:
            assert sample.prompt is group.prompt
            lengths = {
                len(sample.token_ids),
                len(sample.logprobs),
                len(sample.weight_versions),
                len(sample.loss_mask),
            }
            assert len(lengths) == 1, f"{sample.id}: {lengths}"


def test_samples_arrive_in_another_process_as_they_were() -> None:
    """Bit by bit, though they travel as arrays."""
    sample = collect(make_collector(prompts_per_step=1), 0)[0].samples[0]
    sample.logprobs = [-1.0 / 3.0, -0.0, -math.inf]
    sample.token_ids, sample.loss_mask = [2**31 - 1, 0, 7], [True, False, True]
    sample.weight_versions = [NOT_SAMPLED, 0, 2**31 - 1]
    arrived = pickle.loads(pickle.dumps(sample))
    assert arrived == sample
    assert repr(arrived) == repr(sample)  # of the same types too


def test_a_step_has_all_its_groups_in_prompt_order() -> None:
    collector = make()
    for step in range(3):
        groups = collect(collector, step)
        check_groups(groups, size=3)
        assert [g.prompt.id for g in groups] == [f"data:{step * 4 + i}" for i in range(4)]


@given(
    rate=st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    limit=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]),
    delay=st.integers(0, 20),
    oversample=st.integers(0, 4),
    dynamic=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_step_ends_early_only_where_it_would_fail(
    rate: float, limit: float, delay: int, oversample: int, dynamic: bool
) -> None:
    """Each step that ends early has too many failed samples when all are scored. Where all groups
    that are drawn make the step, each such step ends early."""

    def fails(sample: Sample) -> FailureKind | None:
        return FailureKind.TIMEOUT if draw("fails", sample.id) % 100 < 100 * rate else None

    options = {"oversample_prompts": oversample, "dynamic_sampling": dynamic}
    whole = make(FakeScorer(delay=delay, fails=fails), **options)
    early = make(FakeScorer(delay=delay, fails=fails), **options)
    early.max_failure_rate = limit
    for step in range(3):
        samples = [sample for group in collect(whole, step) for sample in group.samples]
        num_failed = sum(sample.failure is not None for sample in samples)
        if num_failed <= limit * len(samples):
            collect(early, step)
            continue
        if not (oversample or dynamic):
            with pytest.raises(FailureRateError, match="of 12 samples have no reward"):
                collect(early, step)
        return


def test_a_step_does_not_wait_for_scores_that_cannot_save_it() -> None:
    """Five of twelve may fail, and the sixth that does ends the step."""
    scorer = FakeScorer(delay=10**4, fails=lambda _: FailureKind.TIMEOUT)
    collector = make(scorer)
    collector.max_failure_rate = 5 / 12
    with pytest.raises(FailureRateError) as caught:
        collect(collector, 0)
    assert len(caught.value.samples) == 6
    assert scorer.pending == 6


@given(delay=st.integers(0, 5), oversample=st.integers(0, 5), dynamic=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_speed_of_scoring_changes_nothing(delay: int, oversample: int, dynamic: bool) -> None:
    options = {"oversample_prompts": oversample, "dynamic_sampling": dynamic}
    fast, slow = make(**options), make(FakeScorer(delay=delay), **options)
    for step in range(4):
        expected, actual = collect(fast, step), collect(slow, step)
        assert tokens(actual) == tokens(expected)
        check_groups(actual, size=3)


@given(oversample=st.integers(0, 5), dynamic=st.booleans(), ahead=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_scorer_of_whole_groups_gets_each_in_one_piece(
    oversample: int, dynamic: bool, ahead: bool
) -> None:
    """Whatever is carried over, with the samples that one which goes step by step gets."""
    options: dict[str, Any] = {"dynamic_sampling": dynamic, "max_completion_tokens": 40}
    options |= {"pipeline": {"max_staleness": 1}} if ahead else {"oversample_prompts": oversample}
    scorer = FakeScorer(delay=2, takes_whole_groups=True)
    whole = make(scorer, engine=FakeEngine(end_every=15), **options)
    single = make(engine=FakeEngine(end_every=15), **options)
    for step in range(4):
        groups = collect(whole, step)
        check_groups(groups, size=3)
        if not ahead:
            assert tokens(groups) == tokens(collect(single, step))
        for group in groups:
            (compared,) = (ids for ids in scorer.compared if ids[0].startswith(f"{group.id}/"))
            assert compared == [sample.id for sample in group.samples]
            own = [by_first_token(sample) for sample in group.samples]
            rewards = [sample.reward and sample.reward.total for sample in group.samples]
            assert rewards == [each + in_group(each, own) for each in own]


def is_left(sample: Sample) -> bool:
    """Whether the environment ends an episode without a reward, so that functions score it."""
    return len(sample.turns) != 2


@given(
    oversample=st.integers(0, 5),
    dynamic=st.booleans(),
    ahead=st.booleans(),
    delay=st.integers(0, 4),
    limit=st.sampled_from([None, 1]),
)
@settings(max_examples=40, deadline=None)
def test_episodes_wait_for_their_group_when_they_have_ended_and_no_turn_does(
    oversample: int, dynamic: bool, ahead: bool, delay: int, limit: int | None
) -> None:
    """Turns go on as if functions scored one sample at a time; each group is compared once, without
    samples that have failed, and those that the environment scores keep their rewards."""
    options: dict[str, Any] = {"dynamic_sampling": dynamic, "max_completion_tokens": 24}
    options |= {"pipeline": {"max_staleness": 1}} if ahead else {"oversample_prompts": oversample}
    options |= {"max_aborted_count": limit} if ahead or oversample else {}

    def fails(sample: Sample) -> FailureKind | None:
        return FailureKind.CRASH if draw("fails", *sample.token_ids) % 9 == 0 else None

    def scorer(*, whole: bool) -> FakeScorer:
        return FakeScorer(
            delay=delay, answer=play, fails=fails, takes_whole_groups=whole, scores=is_left
        )

    comparing = scorer(whole=True)
    whole, single = make(comparing, **options), make(scorer(whole=False), **options)
    for step in range(4):
        groups = collect(whole, step)
        check_groups(groups, size=3)
        if not ahead:
            assert tokens(groups) == tokens(collect(single, step))
            assert whole.engine.stats().num_steps == single.engine.stats().num_steps
        for group in groups:
            calls = [ids for ids in comparing.compared if ids[0].startswith(f"{group.id}/")]
            left = [one for one in group.samples if one.failure is None and is_left(one)]
            assert calls == ([[one.id for one in left]] if left else [])
            own = {one.id: by_first_token(one) for one in left}
            for one in group.samples:
                reward = by_first_token(one)
                reward += in_group(reward, list(own.values())) if one.id in own else 0.0
                assert (one.reward.total if one.reward else None) == (
                    None if one.failure else reward
                )


def test_dynamic_sampling_keeps_only_groups_that_teach() -> None:
    collector = make(dynamic_sampling=True)
    dropped = 0
    for step in range(5):
        groups = collect(collector, step)
        assert len(groups) == 4
        for group in groups:
            assert len({sample.reward.total for sample in group.samples if sample.reward}) > 1
        dropped += collector.counts.num_dropped_groups
    assert dropped > 0


def test_dynamic_sampling_keeps_means_within_the_range() -> None:
    open_ended = make(dynamic_sampling=True)
    means = [
        fmean(sample.reward.total for sample in group.samples if sample.reward)
        for group in collect(open_ended, 0)
    ]
    low, high = 0.3, 0.6
    assert any(not low < mean < high for mean in means)
    collector = make(dynamic_sampling=True, reward_range=(low, high))
    for step in range(5):
        for group in collect(collector, step):
            rewards = [sample.reward.total for sample in group.samples if sample.reward]
            assert low < fmean(rewards) < high
            assert len(set(rewards)) > 1


@table(
    "rewards, kept",
    [
        ([0.0, 1.0, 0.5], True),  # a mean of 0.5
        ([0.0, 0.25], False),  # of the lower border itself
        ([0.0, 0.2502], True),
        ([0.5, 1.25], False),  # of the upper one
        ([0.5, 1.2498], True),
        ([0.0, 0.1], False),
        ([1.0, 2.0], False),
        ([0.5, 0.5, 0.5], False),
        ([0.5, None, 0.5], False),
        ([0.0, None, 1.0], True),
        ([0.5, None, None], False),
        ([None, None], False),
    ],
)
def test_a_group_teaches_within_the_range_and_not_on_its_borders(
    rewards: list[float | None], kept: bool
) -> None:
    """Means of valid samples, from 0.125 to 0.875."""
    samples = [
        Sample(
            id=f"g/{index}",
            prompt=prompt(0),
            index=index,
            token_ids=[3],
            logprobs=[-1.0],
            weight_versions=[0],
            loss_mask=[True],
            stop_reason=StopReason.EOS,
            reward=None if reward is None else Reward(total=reward),
            failure=FailureKind.TIMEOUT if reward is None else None,
        )
        for index, reward in enumerate(rewards)
    ]
    cfg = RolloutConfig(dynamic_sampling=True, reward_range=(0.125, 0.875))
    assert has_reward_variance(Group(id="g", prompt=prompt(0), samples=samples), cfg) == kept


def test_dynamic_sampling_gives_up_after_its_rounds() -> None:
    collector = make(FakeScorer(lambda _: 1.0), dynamic_sampling=True)
    assert collect(collector, 0) == []
    assert collector.counts.num_dropped_groups == 40
    assert collector.counts.num_refill_rounds == 9


def test_unfinished_samples_go_on_from_their_tokens() -> None:
    """Whatever is carried over ends as the same sample an uninterrupted run would have drawn."""
    engine = FakeEngine(end_every=15)
    collector = make(engine=engine, oversample_prompts=4, max_completion_tokens=40)
    seen: dict[str, list[list[int]]] = {}
    carried = 0
    for step in range(8):
        groups = collect(collector, step)
        check_groups(groups, size=3)
        assert len(groups) == 4
        carried += collector.counts.num_carried_samples
        seen |= dict(tokens(groups))
    assert carried > 0
    seeds = {r.id: r.sampling.seed for r in engine.submitted}
    prompts = {r.id: f"data:{r.id.split('/')[0].split('-')[1]}" for r in engine.submitted}
    for request_id, seed in seeds.items():
        if prompts[request_id] not in seen:
            continue
        sampled = seen[prompts[request_id]][int(request_id.rpartition("/")[2])]
        assert sampled == [draw(seed, t) % 50 for t in range(len(sampled))]


def test_the_engine_is_counted_step_by_step() -> None:
    engine = FakeEngine()
    collector = make(engine=engine)
    seen = 0
    for step in range(3):
        groups = collect(collector, step)
        counts = collector.counts
        sampled = sum(len(sample.token_ids) for group in groups for sample in group.samples)
        assert counts.num_generated_tokens == sampled
        seen += counts.num_engine_steps
        assert seen == engine.num_steps
        assert 0 < counts.max_kv_cache_usage <= 1
        scalars = to_scalars(rollout_metrics(groups, counts))
        assert scalars["perf/engine_tokens_per_s"] == sampled / counts.num_engine_steps
        assert "time/reward/p99_s" not in scalars


def in_flight(collector: Collector) -> list[str]:
    """Prompts that were drawn but are not part of any step yet."""
    return [entry["group"]["prompt"]["id"] for entry in collector.state_dict()["groups"]]


def test_each_prompt_is_used_once_when_samples_are_carried_over() -> None:
    collector = make(
        engine=FakeEngine(end_every=15), oversample_prompts=5, max_completion_tokens=40
    )
    used = [group.prompt.id for step in range(10) for group in collect(collector, step)]
    waiting = in_flight(collector)
    assert len(set(used + waiting)) == len(used + waiting)
    drawn = {f"data:{i}" for i in range(collector.prompts.position)}
    assert set(used + waiting) == drawn


def test_a_sample_aborted_often_enough_is_waited_for() -> None:
    engine = FakeEngine(length=lambda request: 90 if request.prompt_ids[2] % 4 == 3 else 2)
    collector = make(
        engine=engine, oversample_prompts=4, max_completion_tokens=200, max_aborted_count=1
    )
    first = set(in_flight(_after(collector, steps=1)))
    second = set(in_flight(_after(collector, steps=1, start=1)))
    assert first
    assert not first & second


def _after(collector: Collector, *, steps: int, start: int = 0) -> Collector:
    for step in range(start, start + steps):
        collect(collector, step)
    return collector


def test_tokens_before_an_interruption_are_masked_on_request() -> None:
    engine = FakeEngine(end_every=15)
    collector = make(
        engine=engine,
        oversample_prompts=4,
        max_completion_tokens=40,
        mask_off_policy_tokens=True,
    )
    masked = num_stale = 0
    for step in range(6):
        for group in collect(collector, step):
            for sample in group.samples:
                newest = sample.weight_versions[-1]
                assert sample.loss_mask == [v == newest for v in sample.weight_versions]
                masked += sample.loss_mask.count(False)
                num_stale += newest < step
    assert masked > 0
    assert num_stale > 0, "finished samples wait for others of their group"


def test_carried_over_samples_go_before_fresh_ones() -> None:
    engine = FakeEngine(end_every=15)
    _after(make(engine=engine, oversample_prompts=4, max_completion_tokens=40), steps=4)
    seen = set[str]()
    for request in engine.submitted:
        assert request.priority == (-1 if request.id in seen else 0)
        seen.add(request.id)
    assert len(seen) < len(engine.submitted)


def test_metrics_of_groups_by_hand() -> None:
    """Failed samples enter no mean, duplicates are those of samples, versions those of tokens."""

    def sample(index: int, tokens: list[int], reward: float | None, *, cut: bool = False) -> Sample:
        return Sample(
            id=f"0/{index}",
            prompt=prompt(0),
            index=index,
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            weight_versions=list(range(3, 3 + len(tokens))),
            loss_mask=[True] * len(tokens),
            stop_reason=StopReason.LENGTH if cut else StopReason.EOS,
            reward=None if reward is None else Reward(total=reward),
            failure=FailureKind.TIMEOUT if reward is None else None,
        )

    same, other = [5, 6], [5, 6, 7, 8]
    groups = [
        Group(
            id="0",
            prompt=prompt(0),
            samples=[
                sample(0, same, 1.0),
                sample(1, same, 0.0),
                sample(2, other, 1.0, cut=True),
                sample(3, [7] * 9, None, cut=True),
            ],
        ),
        Group(id="1", prompt=prompt(1), samples=[sample(i, [i], 1.0) for i in range(4)]),
    ]
    counts = RolloutCounts(num_cached_tokens=6, num_prompt_tokens=24, num_generated_tokens=100)
    found = to_scalars(rollout_metrics(groups, counts))
    expected = {
        "rollout/samples": 8,
        "rollout/valid": 7,
        "rollout/failed/timeout": 1,
        "rollout/truncated_share": 1 / 7,
        "rollout/num_tokens": 12,
        "rollout/completion_tokens/mean": 12 / 7,
        "rollout/duplicate_share": 1 / 8,
        "rollout/zero_spread_share": 1 / 2,
        "rollout/group_size/min": 3,
        "rollout/weight_version/min": 3,
        "rollout/weight_version/max": 11,
        "rollout/cached_token_share": 1 / 4,
        "reward/mean": 6 / 7,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_counts_of_processes_become_those_of_the_run() -> None:
    """Work adds up, of shares and waiting the largest counts, what all decide is counted once."""
    one = RolloutCounts(
        num_dropped_groups=2,
        num_dropped_failures=1,
        num_prompt_tokens=10,
        num_kills=1,
        weight_bytes=2**30,
        max_kv_cache_usage=0.2,
        wait_s=3.0,
    )
    other = replace(one, num_prompt_tokens=5, max_kv_cache_usage=0.7, reward_p99_s=0.5, wait_s=1.0)
    added = {"num_prompt_tokens": 15, "num_kills": 2, "weight_bytes": 2**31}
    expected = replace(one, **added, max_kv_cache_usage=0.7, reward_p99_s=0.5)
    for processes in ([one, other], [other, one]):
        assert RolloutCounts.over(processes) == expected
    assert to_scalars(rollout_metrics([], expected))["mem/engine_weights_gib"] == 2


@pytest.mark.parametrize("policy", ["train", "mask"])
def test_R20_truncated_follows_the_stop_reason(policy: str) -> None:
    collector = make(max_completion_tokens=3, truncated_samples=policy)
    samples = [sample for group in collect(collector, 0) for sample in group.samples]
    assert {sample.truncated for sample in samples} == {True, False}
    for sample in samples:
        trained = policy == "train" or not sample.truncated
        assert sample.loss_mask == [trained] * len(sample.token_ids)


def has_waiting(collector: Collector) -> bool:
    """Whether the state has samples that have ended and wait for their group."""
    groups = collector.state_dict()["groups"]
    episodes = [episode for group in groups for episode in group["episodes"].values()]
    return any(episode["reward"] and episode["reward"]["is_partial"] for episode in episodes)


@pytest.mark.parametrize(
    ("whole_groups", "answer"),
    [(False, None), (True, None), (True, play)],
    ids=["one by one", "whole groups", "whole groups of episodes"],
)
def test_R17_state_goes_through_json_and_back(whole_groups: bool, answer: Any) -> None:
    """Of samples that are under way, too: tokens, log-probabilities and the weights of each; and of
    those that have ended and wait for their group, with the rewards that they have by then."""

    def fresh() -> Collector:
        return make(
            FakeScorer(takes_whole_groups=whole_groups, answer=answer, scores=is_left),
            engine=FakeEngine(end_every=15),
            oversample_prompts=4,
            max_completion_tokens=40,
            max_aborted_count=2,
        )

    def collected(collector: Collector, steps: range) -> list[Any]:
        found: list[Any] = []
        for step in steps:
            found += [group_to_dict(group) for group in collect(collector, step)]
        return found

    expected = collected(fresh(), range(8))
    assert any(
        len(set(sample["weight_versions"])) > 1 for group in expected for sample in group["samples"]
    )
    waited = False
    for num_steps in range(1, 8):
        first, second = fresh(), fresh()
        actual = collected(first, range(num_steps))
        waited |= has_waiting(first)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        second.prompts.position = first.prompts.position
        assert actual + collected(second, range(num_steps, 8)) == expected
    assert waited is whole_groups


def test_R12_failed_samples_keep_their_place_but_no_reward() -> None:
    def fails(sample: Sample) -> FailureKind | None:
        return FailureKind.TIMEOUT if draw("fail", sample.id) % 4 == 0 else None

    groups = collect(make(FakeScorer(fails=fails)), 0)
    samples = [sample for group in groups for sample in group.samples]
    failed = [sample for sample in samples if sample.failure]
    assert failed
    assert all(sample.reward is None and not sample.valid for sample in failed)
    assert sum(len(group.valid_samples) for group in groups) == len(samples) - len(failed)


class RepeatedPrompts(CyclicPrompts):
    """Three prompts, again and again."""

    def take(self, num: int, *, step: int) -> list[Prompt]:
        return [prompt(int(p.text) % 3) for p in super().take(num, step=step)]


@pytest.mark.parametrize("prompts_per_step", [1, 2, 4, 12])
def test_R21_each_sample_of_a_run_has_a_seed_of_its_own(prompts_per_step: int) -> None:
    """Whatever batch its prompt is drawn in, and however often that comes."""

    def seeds(prompts_per_step: int) -> list[int]:
        collector = make(prompts_per_step=prompts_per_step)
        collector._buffer.prompts = RepeatedPrompts()
        for step in range(12 // prompts_per_step):
            collect(collector, step)
        return [request.sampling.seed for request in collector.engine.submitted]  # type: ignore[attr-defined]

    found = seeds(prompts_per_step)
    assert len(set(found)) == len(found) == 12 * 3
    assert found == seeds(3)


def test_R21_seeds_are_distinct_and_say_what_they_are() -> None:
    keys = [(step, f"data:{p}", i) for step in range(10) for p in range(100) for i in range(10)]
    seeds = [request_seed(1, "rollout", *key) for key in keys]
    assert len(set(seeds)) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)
    for workers in (1, 3, 4, 8):  # any split draws the same set
        split = [request_seed(1, "rollout", *k) for w in range(workers) for k in keys[w::workers]]
        assert set(split) == set(seeds)
    assert not set(seeds) & {request_seed(2, "rollout", *key) for key in keys}
    # The planted bug: an index that is local to a chunk of 25 prompts.
    chunk_local = {
        request_seed(1, "rollout", step, f"data:{int(prompt_id[5:]) % 25}", index)
        for step, prompt_id, index in keys
    }
    assert len(chunk_local) < len(seeds)
