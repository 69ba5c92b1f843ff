"""Counters of a rollout for one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hone.types import Group

__all__ = ["RolloutCounts"]


@dataclass(slots=True)
class RolloutCounts:
    """Counters of one step, over all processes."""

    num_dropped_groups: int = 0
    """Groups that dynamic sampling dropped: rewards are equal, or their mean is out of range."""
    num_dropped_failures: int = 0
    """Failed samples in dropped groups."""
    num_refill_rounds: int = 0
    num_carried_samples: int = 0
    """Unfinished samples at the end of the step, or at the last weight sync."""
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_lost_engines: int = 0
    num_engine_steps: int = 0
    num_generated_tokens: int = 0
    engine_busy_s: float = 0.0
    counted_s: float = 0.0
    """Time over which the engines' counters were taken; the longest of all processes."""
    sum_waiting: int = 0
    """Requests waiting in engines, summed over `num_polls` polls."""
    num_polls: int = 0
    max_kv_cache_usage: float = 0.0
    """Largest share of KV blocks in use, 0 to 1."""
    kv_cache_bytes: int = 0
    """KV caches of all engines."""
    weight_bytes: int = 0
    """Engines' own weights; those shared with a colocated trainer do not count."""
    num_kills: int = 0
    """Reward workers killed at their deadline."""
    num_cut_messages: int = 0
    """Messages of environments that have lost their middle (`env.max_observation_tokens`)."""
    num_restarts: int = 0
    """Episodes played again from their start, because their session was lost."""
    num_requests: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests of programs that play episodes, by `hone.door.sessions.COUNTS`."""
    reward_p99_s: float = math.nan
    """99th percentile of the time in reward functions, the largest of all processes; nan where
    nothing was scored."""
    reward_model_s: float = 0.0
    """Time in a reward model, the largest of all processes."""
    wait_s: float = 0.0
    """Longest time that a process waited for the groups of the others or, with sampling ahead, for
    its batch."""
    staleness: list[int] | None = None
    """With sampling ahead: for each group, updates between the weights that started it and its
    training."""
    num_too_old: int = 0
    """Groups dropped because they could not be trained within `pipeline.max_staleness`."""
    num_buffered_groups: int = 0
    """Complete groups left when the batch was taken."""
    num_in_flight_samples: int = 0
    """Unfinished samples when the batch was taken, including those started in its place."""

    def count_dropped(self, group: Group) -> None:
        """Count a group that dynamic sampling drops."""
        self.num_dropped_groups += 1
        self.num_dropped_failures += len(group.samples) - len(group.valid_samples)

    @classmethod
    def over(cls, processes: Sequence[RolloutCounts]) -> RolloutCounts:
        """The counts of all processes as one."""
        times = [c.reward_p99_s for c in processes if not math.isnan(c.reward_p99_s)]
        requests = Counter[str]()
        for own in processes:
            requests.update(own.num_requests)
        added = {name: sum(getattr(c, name) for c in processes) for name in _OF_ONE_PROCESS}
        return replace(
            processes[0],
            **added,
            num_requests=dict(requests),
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
    "num_restarts",
    "num_cut_messages",
)
"""Counters of a process's own groups, which are summed; the others are equal in all processes."""
