"""The groups whose prompts have been drawn and which have not been trained yet.

The runner generates and scores a group. The buffer gives it an id, keeps it until it is trained,
counts what its step used, and saves it in checkpoints. The collector decides how many groups are
started and which of them form a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple, Protocol

from hone.algorithms.advantages import has_spread
from hone.images.sending import prefetch_pixels
from hone.images.shown import restored, saved
from hone.rewards.scorer import ScorerStats, check_failure_rate
from hone.rollout.counts import RolloutCounts
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Ended, Runner, RunningGroup, SampleScorer
from hone.rollout.settings import RolloutConfig
from hone.rollout.state import (
    group_from_dict,
    group_to_dict,
    inputs_of,
    request_from_dict,
    request_to_dict,
    sample_from_dict,
    sample_to_dict,
)
from hone.types import EngineStats, Group, PerToken, Prompt, Sample, SamplingParams

__all__ = [
    "Buffer",
    "InFlightGroup",
    "Progress",
    "PromptSource",
    "apply_masks",
    "check_failures",
    "has_reward_variance",
    "mean_reward",
]

Progress = Callable[[int, int], None]
"""(finished samples, wanted samples), called while a step generates."""


class PromptSource(Protocol):
    """The part of `hone.data.prompts.PromptStream` that a rollout needs."""

    def take(self, num: int, /, *, step: int) -> list[Prompt]: ...
    def peek(self, num: int, /, *, step: int) -> list[Prompt]: ...


@dataclass(slots=True, kw_only=True)
class InFlightGroup(RunningGroup):
    """A group whose prompt has been drawn and which has not been trained yet."""

    start_version: int = 0
    """Version of the weights when the group was first submitted."""
    rank: int = 0
    """The process that generates the group. The others receive it when it is complete, or when the
    step ends."""
    aborted_count: int = 0
    """Number of weight updates and ends of steps that interrupted the group."""
    is_shared: bool = False
    """All processes have all of its samples."""

    def is_overdue(self, max_aborted_count: int | None) -> bool:
        """Whether it was interrupted so often that it must finish before the next interruption."""
        limit = max_aborted_count
        return limit is not None and self.aborted_count >= limit and not self.generated


class _Totals(NamedTuple):
    """Running totals of engine and scorer; `counts` gets the differences."""

    engine: EngineStats
    scorer: ScorerStats
    num_prompt_tokens: int
    num_cached_tokens: int
    num_cut: int
    read_at_s: float


@dataclass(slots=True)
class Buffer:
    """Groups that have been started and not trained, by id, in the order of their prompts.

    `runner` generates the groups of this process.
    """

    runner: Runner
    scorer: SampleScorer
    prompts: PromptSource
    cfg: RolloutConfig
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """The counters of the current step; the collector replaces them when the next step begins."""
    by_id: dict[str, InFlightGroup] = field(default_factory=dict[str, InFlightGroup])
    _sampling: SamplingParams = field(init=False)
    _num_started: int = 0
    _counted: _Totals = field(init=False)
    """The totals up to which `counts` has been updated."""

    def __post_init__(self) -> None:
        self._sampling = sampling_params(self.cfg, self.cfg.stop)
        self.start_counting()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[InFlightGroup]:
        return iter(self.by_id.values())

    @property
    def num_unfinished(self) -> int:
        """Samples that are unfinished, or may get another turn."""
        return sum(len(entry.requests) + entry.undecided for entry in self)

    def draw(self, num_prompts: int, *, step: int, version: int) -> list[InFlightGroup]:
        """Draw prompts and make their groups, named after `step`. Nothing is submitted."""
        drawn: list[InFlightGroup] = []
        prompts = self.prompts.take(max(num_prompts, 0), step=step)
        prefetch_pixels(
            (prompt.model_input for prompt in prompts),
            lambda: (x.model_input for x in self.prompts.peek(len(prompts), step=step + 1)),
        )
        for prompt in prompts:
            entry = InFlightGroup.of(
                prompt,
                self._sampling,
                self.runner.episodes,
                group_id=f"{step}-{self._num_started}",
                indices=range(self.cfg.n_samples_per_prompt),
                order=self._num_started,
                number=self._num_started,
            )
            entry.start_version = version
            self.by_id[entry.group.id] = entry
            self._num_started += 1
            drawn.append(entry)
        return drawn

    def step(self) -> list[InFlightGroup]:
        """Call `Runner.step` and return the groups that it completes."""
        runner, num_steps = self.runner, self.runner.num_steps
        completed = self._completed(runner.step())
        if runner.num_steps > num_steps:
            now, counts = runner.engine.stats(), self.counts
            counts.max_kv_cache_usage = max(counts.max_kv_cache_usage, now.kv_cache_usage)
            counts.sum_waiting += now.num_waiting
            counts.num_polls += 1
        return completed

    def poll(self, timeout_s: float) -> list[InFlightGroup]:
        """Call `Runner.poll` and return the groups that it completes."""
        return self._completed(self.runner.poll(timeout_s))

    def _completed(self, ended: Ended) -> list[InFlightGroup]:
        if not ended.groups:  # nearly always
            return []
        return [self.by_id[entry.group.id] for entry in ended.groups]

    def pop(self, entry: InFlightGroup) -> Group:
        """Remove a complete group from the buffer."""
        return self.by_id.pop(entry.group.id).group

    # -- counts ----------------------------------------------------------------------------------

    def start_counting(self) -> None:
        """Exclude from `counts` what engine and scorer have done since the last `count`."""
        runner = self.runner
        self._counted = _Totals(
            runner.engine.stats(),
            self.scorer.stats(),
            runner.num_prompt_tokens,
            runner.num_cached_tokens,
            0 if runner.episodes.render is None else runner.episodes.render.num_cut,
            monotonic(),
        )

    def count(self) -> None:
        """Add to `counts` what engine and scorer have done since the last count."""
        before, counts = self._counted, self.counts
        self.start_counting()
        now = self._counted
        counts.counted_s += now.read_at_s - before.read_at_s
        counts.num_prompt_tokens += now.num_prompt_tokens - before.num_prompt_tokens
        counts.num_cached_tokens += now.num_cached_tokens - before.num_cached_tokens
        counts.num_cut_messages += now.num_cut - before.num_cut
        counts.num_kills += now.scorer.num_kills - before.scorer.num_kills
        counts.num_restarts += now.scorer.num_restarts - before.scorer.num_restarts
        new = Counter(now.scorer.num_requests)
        new.subtract(before.scorer.num_requests)
        counts.num_requests = dict(Counter(counts.num_requests) + new)
        counts.reward_p99_s = now.scorer.p99_s
        counts.reward_model_s += now.scorer.model_s - before.scorer.model_s
        engine, earlier = now.engine, before.engine
        counts.num_preemptions += engine.num_preemptions - earlier.num_preemptions
        counts.num_lost_engines += engine.num_lost - earlier.num_lost
        counts.num_engine_steps += engine.num_steps - earlier.num_steps
        counts.num_generated_tokens += engine.num_generated_tokens - earlier.num_generated_tokens
        counts.engine_busy_s += engine.busy_s - earlier.busy_s
        counts.kv_cache_bytes = engine.kv_cache_bytes
        counts.weight_bytes = engine.weight_bytes

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All groups and the number of the next one, as JSON values. Engine and scorer must have no
        requests and samples."""
        samples = (x for entry in self for x in (*entry.group.samples, *entry.episodes.values()))
        inputs = [each for sample in samples for each in inputs_of(sample)]
        return {
            "images": saved(inputs),
            "num_started": self._num_started,
            "groups": [
                {
                    "group": group_to_dict(entry.group),
                    "requests": {str(i): request_to_dict(r) for i, r in entry.requests.items()},
                    "episodes": {
                        str(i): sample_to_dict(s, entry.group.prompt)
                        for i, s in entry.episodes.items()
                    },
                    "order": entry.order,
                    "start_version": entry.start_version,
                    "aborted_count": entry.aborted_count,
                }
                for entry in self
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._num_started = state["num_started"]
        images = restored(state["images"])
        for entry in state["groups"]:
            group = group_from_dict(entry["group"], images)
            group.samples.sort(key=lambda sample: sample.index)
            self.by_id[group.id] = InFlightGroup(
                group=group,
                requests={
                    int(i): request_from_dict(r, images) for i, r in entry["requests"].items()
                },
                episodes={
                    int(i): sample_from_dict(s, group.prompt, images)
                    for i, s in entry["episodes"].items()
                },
                sampling=self._sampling,
                order=entry["order"],
                number=entry["order"],
                start_version=entry["start_version"],
                aborted_count=entry["aborted_count"],
                is_shared=not entry["requests"],
            )


def check_failures(
    entries: Iterable[InFlightGroup], cfg: RolloutConfig, limit: float, *, num_wanted: int
) -> None:
    """Raise FailureRateError where a step of `num_wanted` of the groups `entries` must exceed the
    share `limit` of failed samples, whichever groups it takes and however the rest is scored.

    With dynamic sampling only complete groups that are kept count, since others may be dropped.
    """
    entries = list(entries)
    num_left_over = max(len(entries) - num_wanted, 0)
    if cfg.dynamic_sampling:
        entries = [
            entry for entry in entries if entry.complete and has_reward_variance(entry.group, cfg)
        ]
    groups = sorted((entry.group.samples for entry in entries), key=_num_failed)
    samples = list(chain(*groups[: max(len(groups) - num_left_over, 0)]))
    check_failure_rate(samples, limit, num_samples=cfg.prompts_per_step * cfg.n_samples_per_prompt)


def _num_failed(samples: Sequence[Sample]) -> int:
    return sum(sample.failure is not None for sample in samples)


def has_reward_variance(group: Group, cfg: RolloutConfig) -> bool:
    """Whether dynamic sampling keeps a group: the rewards of its valid samples differ, and their
    mean lies in `rollout.reward_range`. Other groups have no gradient."""
    rewards = _valid_rewards(group)
    if len(rewards) < 2 or not has_spread(rewards):
        return False
    low, high = cfg.reward_range or (-math.inf, math.inf)
    return low < fmean(rewards) < high


def mean_reward(group: Group) -> float | None:
    """Mean reward of the valid samples of a group, its pass rate where rewards are 0 and 1; None
    where no sample is valid."""
    rewards = _valid_rewards(group)
    return fmean(rewards) if rewards else None


def _valid_rewards(group: Group) -> list[float]:
    """Rewards of the samples that have not failed."""
    return [sample.reward.total for sample in group.samples if sample.valid and sample.reward]


def apply_masks(groups: Iterable[Group], cfg: RolloutConfig) -> None:
    """Mask truncated samples or off-policy tokens, where `cfg` excludes them from the loss. Both
    concern an episode as a whole: all paths of a truncated one are masked, and all tokens that are
    older than its newest one, whichever path has that."""
    for sample in (sample for group in groups for sample in group.samples):
        paths = (*sample.branches, sample)
        if cfg.truncated_samples == "mask" and sample.truncated:
            for path in paths:
                path.loss_mask = PerToken("b", bytes(len(path.token_ids)))
        elif cfg.mask_off_policy_tokens:
            newest = max((v for path in paths for v in path.weight_versions), default=0)
            for path in paths:
                masked = zip(path.loss_mask, path.weight_versions, strict=True)
                path.loss_mask = PerToken("b", [mask and v == newest for mask, v in masked])
