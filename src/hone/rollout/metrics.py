"""Metrics of a step's groups, which are always logged."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence

from hone.algorithms.advantages import has_spread
from hone.observe.metrics import Distribution, Last, Max, Mean, Metrics, Min, Sum
from hone.rollout.counts import RolloutCounts
from hone.types import NOT_SAMPLED, FailureKind, Group, Sample, StopReason

__all__ = ["rollout_metrics"]


def rollout_metrics(groups: Sequence[Group], counts: RolloutCounts) -> Metrics:
    """Metrics of samples, rewards, engines and sampling ahead.

    Failed samples are counted and left out of means.
    """
    samples = [sample for group in groups for sample in group.samples]
    valid = [sample for sample in samples if sample.valid]
    return (
        _reward_metrics(valid)
        | _sample_metrics(samples, valid)
        | _episode_metrics(valid)
        | _group_metrics(groups)
        | _machine_metrics(counts)
        | _ahead_metrics(counts)
        | {
            "rollout/dropped_groups": Sum(counts.num_dropped_groups),
            "rollout/refill_rounds": Sum(counts.num_refill_rounds),
            "rollout/carried_samples": Sum(counts.num_carried_samples),
            "rollout/cached_token_share": Mean(counts.num_cached_tokens, counts.num_prompt_tokens),
        }
    )


def _machine_metrics(counts: RolloutCounts) -> Metrics:
    """Metrics of engines and reward workers."""
    metrics: Metrics = {
        "engine/preemptions": Sum(counts.num_preemptions),
        "engine/lost": Sum(counts.num_lost_engines),
        "engine/steps": Sum(counts.num_engine_steps),
        "engine/waiting/mean": Mean(counts.sum_waiting, counts.num_polls),
        "engine/kv_cache_usage/max": Max(counts.max_kv_cache_usage),
        "perf/engine_tokens_per_s": Mean(counts.num_generated_tokens, counts.engine_busy_s),
        "perf/engine_busy_s": Sum(counts.engine_busy_s),
        "rollout/killed_reward_workers": Sum(counts.num_kills),
        "mem/engine_weights_gib": Last(counts.weight_bytes / 2**30),
        "time/generate/wait_s": Last(counts.wait_s),
    }
    if counts.num_cut_messages:
        metrics["rollout/cut_observations"] = Sum(counts.num_cut_messages)
    for name, number in counts.num_requests.items():
        metrics[f"rollout/requests/{name}"] = Sum(number)
    if counts.num_restarts:
        metrics["rollout/restarted_episodes"] = Sum(counts.num_restarts)
    if not math.isnan(counts.reward_p99_s):
        metrics["time/reward/p99_s"] = Last(counts.reward_p99_s)
    if counts.kv_cache_bytes:
        metrics["mem/engine_cache_gib"] = Last(counts.kv_cache_bytes / 2**30)
    if counts.reward_model_s:
        metrics["time/generate/reward_model_s"] = Last(counts.reward_model_s)
    return metrics


def _ahead_metrics(counts: RolloutCounts) -> Metrics:
    """Metrics of sampling ahead; empty in synchronous mode."""
    if counts.staleness is None:
        return {}
    return {
        "rollout/staleness": Distribution.of([float(updates) for updates in counts.staleness]),
        "rollout/too_old_groups": Sum(counts.num_too_old),
        "perf/engine_counted_s": Last(counts.counted_s),
        "rollout/buffered_groups": Last(counts.num_buffered_groups),
        "rollout/in_flight_samples": Last(counts.num_in_flight_samples),
    }


def _reward_metrics(valid: Sequence[Sample]) -> Metrics:
    rewards = [sample.reward for sample in valid if sample.reward is not None]
    metrics: Metrics = {"reward": Distribution.of([reward.total for reward in rewards])}
    for part in sorted({name for reward in rewards for name in reward.parts}):
        values = [reward.parts[part] for reward in rewards if part in reward.parts]
        metrics[f"reward/{part}/mean"] = Mean.of(values)
    return metrics


def _sample_metrics(samples: Sequence[Sample], valid: Sequence[Sample]) -> Metrics:
    lengths = [float(sample.num_sampled) for sample in valid]
    versions = [
        float(version)
        for sample in samples
        for path in (sample, *sample.branches)
        for version in {*path.weight_versions}
        if version != NOT_SAMPLED
    ]
    stops = Counter(sample.stop_reason for sample in samples)
    failures = Counter(sample.failure for sample in samples)
    metrics: Metrics = {
        "rollout/completion_tokens": Distribution.of(lengths),
        "rollout/prompt_tokens/mean": Mean.of([float(len(s.opening_ids)) for s in samples]),
        "rollout/num_tokens": Sum(sum(lengths)),
        "rollout/samples": Sum(len(samples)),
        "rollout/valid": Sum(len(valid)),
        "rollout/failed_share": Mean(len(samples) - len(valid), len(samples)),
        "rollout/truncated_share": Mean.of([sample.truncated for sample in valid]),
        "rollout/weight_version/min": Min.of(versions),
        "rollout/weight_version/max": Max.of(versions),
    }
    for reason in StopReason:
        metrics[f"rollout/stop/{reason}"] = Sum(stops[reason])
    for kind in FailureKind:
        metrics[f"rollout/failed/{kind}"] = Sum(failures[kind])
    return metrics


def _episode_metrics(valid: Sequence[Sample]) -> Metrics:
    """Lengths of episodes; empty where all have one turn. Rows are counted where a history was
    rewritten."""
    paths = [(sample, *sample.branches) for sample in valid]
    num_turns = [sum(len(path.turns) for path in own) for own in paths]
    if all(number <= 1 for number in num_turns):
        return {}
    num_tokens = [sum(len(path.token_ids) for path in own) for own in paths]
    inserted = [float(n - s.num_sampled) for n, s in zip(num_tokens, valid, strict=True)]
    metrics: Metrics = {
        "rollout/turns": Distribution.of([float(number) for number in num_turns]),
        "rollout/observation_tokens": Distribution.of(inserted),
    }
    if any(sample.branches for sample in valid):
        num_rows = [float(len(sample.trained_paths)) for sample in valid]
        metrics["rollout/rows_per_episode"] = Distribution.of(num_rows)
    return metrics


def _group_metrics(groups: Sequence[Group]) -> Metrics:
    flat: list[bool] = []
    duplicates = num_samples = 0
    for group in groups:
        rewards = [s.reward.total for s in group.valid_samples if s.reward is not None]
        if len(group.samples) > 1:  # a lone sample is not compared within its group
            flat.append(len(rewards) < 2 or not has_spread(rewards))
        distinct = {_tokens(sample) for sample in group.samples}
        duplicates += len(group.samples) - len(distinct)
        num_samples += len(group.samples)
    return {
        "rollout/groups": Sum(len(groups)),
        "rollout/group_size/min": Min.of([float(len(g.valid_samples)) for g in groups]),
        "rollout/zero_spread_share": Mean.of(flat),
        "rollout/duplicate_share": Mean(duplicates, num_samples),
    }


def _tokens(sample: Sample) -> tuple[object, ...]:
    """A key that is equal for samples with the same tokens on all paths."""
    paths = sample.paths.values()
    return tuple((path.prompt_ids, bytes(array("i", path.token_ids))) for path in paths)
