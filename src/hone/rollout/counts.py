"""What a rollout counts while it makes the groups of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hone.types import Group

__all__ = ["RolloutCounts"]


@dataclass(slots=True)
class RolloutCounts:
    """What happened to the groups of one step, in all processes together."""

    num_dropped_groups: int = 0
    """Dropped by dynamic sampling since all rewards are equal, or their mean out of range."""
    num_dropped_failures: int = 0
    """Samples of these that failed."""
    num_refill_rounds: int = 0
    num_carried_samples: int = 0
    """Unfinished samples handed to the next step, or when the weights changed."""
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_lost_engines: int = 0
    num_engine_steps: int = 0
    num_generated_tokens: int = 0
    engine_busy_s: float = 0.0
    counted_s: float = 0.0
    """Time in which engines were counted. Of the process where it is longest."""
    sum_waiting: int = 0
    """Requests without a place in their engine, added up over `num_polls` looks."""
    num_polls: int = 0
    max_kv_cache_usage: float = 0.0
    """Largest share of KV blocks in use, 0 to 1."""
    kv_cache_bytes: int = 0
    """Of the caches of all engines."""
    weight_bytes: int = 0
    """Of the weights that engines hold beside the trainer's."""
    num_kills: int = 0
    """Reward workers killed at their deadline."""
    reward_p99_s: float = math.nan
    """99th percentile of the time in reward functions; nan where nothing was scored. Of the process
    where it is largest."""
    reward_model_s: float = 0.0
    """Time in a reward model. Of the process where it is largest."""
    wait_s: float = 0.0
    """Longest time that a process waited for the others' groups, or for its batch ahead of the
    training."""
    staleness: list[int] | None = None
    """Ahead of the training, updates between the weights that began a group and its training."""
    num_too_old: int = 0
    """Groups dropped because they could not be trained within `pipeline.max_staleness`."""
    num_buffered_groups: int = 0
    """Complete groups left when the batch was taken."""
    num_in_flight_samples: int = 0
    """Unfinished samples when the batch was taken, those begun in its place included."""

    def count_dropped(self, group: Group) -> None:
        """Count a group that dynamic sampling drops."""
        self.num_dropped_groups += 1
        self.num_dropped_failures += len(group.samples) - len(group.valid_samples)

    @classmethod
    def over(cls, processes: Sequence[RolloutCounts]) -> RolloutCounts:
        """The counts of all processes as one."""
        times = [c.reward_p99_s for c in processes if not math.isnan(c.reward_p99_s)]
        added = {name: sum(getattr(c, name) for c in processes) for name in _OF_ONE_PROCESS}
        return replace(
            processes[0],
            **added,
            max_kv_cache_usage=max(c.max_kv_cache_usage for c in processes),
            reward_p99_s=max(times, default=math.nan),
            counted_s=max(c.counted_s for c in processes),
            reward_model_s=max(c.reward_model_s for c in processes),
            wait_s=max(c.wait_s for c in processes),
        )


_OF_ONE_PROCESS = (
    "num_cached_tokens",
    "num_prompt_tokens",
    "num_preemptions",
    "num_lost_engines",
    "num_engine_steps",
    "num_generated_tokens",
    "sum_waiting",
    "num_polls",
    "engine_busy_s",
    "kv_cache_bytes",
    "weight_bytes",
    "num_kills",
)
"""Counts of what a process does with its own groups; the others are equal in all."""
