"""What a step's groups say about themselves: the metrics that are always on."""

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
    """Metrics under `rollout/` and `reward/`, and those of sampling ahead.

    Failed samples are counted and enter no mean.
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
    """How engine and reward workers fared."""
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
    if not math.isnan(counts.reward_p99_s):
        metrics["time/reward/p99_s"] = Last(counts.reward_p99_s)
    if counts.kv_cache_bytes:
        metrics["mem/engine_cache_gib"] = Last(counts.kv_cache_bytes / 2**30)
    if counts.reward_model_s:
        metrics["time/generate/reward_model_s"] = Last(counts.reward_model_s)
    return metrics


def _ahead_metrics(counts: RolloutCounts) -> Metrics:
    """How far sampling was ahead of training; nothing where it never is."""
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
    versions = [float(v) for one in samples for v in {*one.weight_versions} if v != NOT_SAMPLED]
    stops = Counter(sample.stop_reason for sample in samples)
    failures = Counter(sample.failure for sample in samples)
    metrics: Metrics = {
        "rollout/completion_tokens": Distribution.of(lengths),
        "rollout/prompt_tokens/mean": Mean.of([float(len(s.prompt.token_ids)) for s in samples]),
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
    """How long episodes were; nothing where all were of one turn."""
    if all(len(sample.turns) <= 1 for sample in valid):
        return {}
    inserted = [float(len(s.token_ids) - s.num_sampled) for s in valid]
    return {
        "rollout/turns": Distribution.of([float(len(sample.turns)) for sample in valid]),
        "rollout/observation_tokens": Distribution.of(inserted),
    }


def _group_metrics(groups: Sequence[Group]) -> Metrics:
    flat: list[bool] = []
    duplicates = num_samples = 0
    for group in groups:
        rewards = [s.reward.total for s in group.valid_samples if s.reward is not None]
        if len(group.samples) > 1:  # a lone sample is not compared within its group
            flat.append(len(rewards) < 2 or not has_spread(rewards))
        distinct = {bytes(array("i", sample.token_ids)) for sample in group.samples}
        duplicates += len(group.samples) - len(distinct)
        num_samples += len(group.samples)
    return {
        "rollout/groups": Sum(len(groups)),
        "rollout/group_size/min": Min.of([float(len(g.valid_samples)) for g in groups]),
        "rollout/zero_spread_share": Mean.of(flat),
        "rollout/duplicate_share": Mean(duplicates, num_samples),
    }
