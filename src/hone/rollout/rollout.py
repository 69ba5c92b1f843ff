"""Collects the scored groups of a training step.

A step wants `prompts_per_step` groups. Without over-sampling it starts that many and waits for
all. With `oversample_prompts` it starts more, stops generating as soon as enough groups are
finished, and carries the rest over: finished samples as they are, unfinished ones as partial
rollouts that go on from their tokens. With `dynamic_sampling` groups whose rewards are all equal
are dropped and the round is repeated for what is missing.

Which groups make a step is decided by engine steps alone, never by how fast a reward was computed,
so the same seed gives the same run. Scoring overlaps generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hone.algorithms.advantages import has_spread
from hone.config.rollout import RolloutConfig
from hone.rewards.scorer import ScorerStats
from hone.rollout.requests import Decode, requests_for, sample_of
from hone.rollout.state import group_from_dict, group_to_dict, request_from_dict, request_to_dict
from hone.types import Completion, Engine, EngineStats, Group, Prompt, Request, Sample

__all__ = ["PromptSource", "Rollout", "RolloutCounts", "SampleScorer"]

Progress = Callable[[int, int], None]
"""(finished samples, wanted samples), called while a step generates."""


class PromptSource(Protocol):
    """What the rollout needs of `hone.data.prompts.PromptStream`."""

    def take(self, num: int, /) -> list[Prompt]: ...


class SampleScorer(Protocol):
    """What the rollout needs of `hone.rewards.scorer.Scorer`."""

    def submit(self, sample: Sample) -> None: ...
    def poll(self, timeout_s: float = 0.0) -> list[Sample]: ...
    @property
    def pending(self) -> int: ...
    def stats(self) -> ScorerStats: ...


@dataclass(slots=True)
class RolloutCounts:
    """What happened to the groups of one `collect`."""

    num_dropped_groups: int = 0
    """Dropped by dynamic sampling for want of reward spread."""
    num_refill_rounds: int = 0
    num_carried_samples: int = 0
    """Unfinished samples handed to the next step."""
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_engine_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_generated_tokens: int = 0
    engine_busy_s: float = 0.0
    max_kv_cache_usage: float = 0.0
    """Largest share of KV blocks in use, 0 to 1."""
    num_kills: int = 0
    """Reward workers killed at their deadline."""
    reward_p99_s: float = math.nan
    """99th percentile of the time in reward functions; nan where nothing was scored."""


@dataclass(slots=True)
class _OpenGroup:
    """A group that has been started: samples come in by index, requests go out."""

    group: Group
    requests: dict[int, Request]
    """Not finished by the engine yet; after an abort they hold what was sampled."""
    order: int
    """Running number of the group; groups are handed out in this order."""
    aborted_count: int = 0
    unscored: int = 0

    @property
    def generated(self) -> bool:
        return not self.requests

    @property
    def complete(self) -> bool:
        return not self.requests and not self.unscored


@dataclass(slots=True)
class Rollout:
    """Drives an engine and a scorer over a stream of prompts."""

    engine: Engine
    scorer: SampleScorer
    prompts: PromptSource
    cfg: RolloutConfig
    decode: Decode
    seed: int
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    _open: dict[str, _OpenGroup] = field(default_factory=dict[str, _OpenGroup])
    _num_started: int = 0

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`, in the order in which their prompts were drawn.

        Fewer than `prompts_per_step` come back only when dynamic sampling has used up its rounds.
        """
        self.counts = RolloutCounts()
        engine, scorer = self.engine.stats(), self.scorer.stats()
        target = self.cfg.prompts_per_step
        kept: list[_OpenGroup] = []
        self._resume()
        self._start(target + self.cfg.oversample_prompts - len(self._open), step)
        for round_index in range(self.cfg.max_refill_rounds):
            self._generate(target - len(kept), progress)
            kept += self._take_complete(target - len(kept))
            missing = target - len(kept)
            if missing <= 0 or not self.cfg.dynamic_sampling:
                break
            if round_index + 1 < self.cfg.max_refill_rounds:
                self.counts.num_refill_rounds += 1
                spare = self.cfg.oversample_prompts
                self._start(missing + spare - len(self._open), step)
        self._suspend()
        self._count_since(engine, scorer)
        groups = [entry.group for entry in sorted(kept, key=lambda entry: entry.order)]
        self._apply_masks(groups)
        return groups

    def _count_since(self, engine: EngineStats, scorer: ScorerStats) -> None:
        """Take over what engine and scorer have counted since these snapshots."""
        counts, now = self.counts, self.engine.stats()
        counts.num_preemptions = now.num_preemptions - engine.num_preemptions
        counts.num_engine_steps = now.num_steps - engine.num_steps
        counts.num_drafted_tokens = now.num_drafted_tokens - engine.num_drafted_tokens
        counts.num_accepted_tokens = now.num_accepted_tokens - engine.num_accepted_tokens
        counts.num_generated_tokens = now.num_generated_tokens - engine.num_generated_tokens
        counts.engine_busy_s = now.busy_s - engine.busy_s
        scored = self.scorer.stats()
        counts.num_kills = scored.num_kills - scorer.num_kills
        counts.reward_p99_s = scored.p99_s

    # -- one round ---------------------------------------------------------------------------

    def _start(self, num_prompts: int, step: int) -> None:
        """Draw prompts and hand their requests to the engine."""
        for prompt in self.prompts.take(max(num_prompts, 0)):
            group_id = f"{step}-{self._num_started}"
            requests = requests_for(
                prompt,
                self.cfg,
                group_id=group_id,
                num_samples=self.cfg.n_samples_per_prompt,
                run_seed=self.seed,
                purpose="rollout",
                number=self._num_started,
            )
            self._open[group_id] = _OpenGroup(
                group=Group(id=group_id, prompt=prompt, samples=[]),
                requests=dict(enumerate(requests)),
                order=self._num_started,
            )
            self._num_started += 1
            self.engine.submit(requests)

    def _generate(self, num_groups: int, progress: Progress | None) -> None:
        """Run the engine until enough groups are generated, then wait for their scores."""
        num_samples = self.cfg.n_samples_per_prompt
        while not self._enough(num_groups) and self.engine.has_unfinished:
            for completion in self.engine.step():
                self._finish(completion)
            usage = self.engine.stats().kv_cache_usage
            self.counts.max_kv_cache_usage = max(self.counts.max_kv_cache_usage, usage)
            self._take_scores(0.0)
            if progress is not None:
                finished = sum(len(e.group.samples) + e.unscored for e in self._open.values())
                progress(finished, num_groups * num_samples)
        while any(entry.generated and entry.unscored for entry in self._open.values()):
            self._take_scores(0.05)

    def _enough(self, num_groups: int) -> bool:
        """Whether generation may stop. A sample aborted too often is waited for."""
        limit = self.cfg.max_aborted_count
        if limit is not None and any(
            entry.aborted_count >= limit and not entry.generated for entry in self._open.values()
        ):
            return False
        return sum(entry.generated for entry in self._open.values()) >= num_groups

    def _finish(self, completion: Completion) -> None:
        group_id, _, index = completion.request_id.rpartition("/")
        entry = self._open[group_id]
        request = entry.requests.pop(int(index))
        self.counts.num_prompt_tokens += len(request.prompt_ids)
        self.counts.num_cached_tokens += completion.num_cached_tokens
        entry.unscored += 1
        self.scorer.submit(sample_of(entry.group.prompt, int(index), completion, self.decode))

    def _take_scores(self, timeout_s: float) -> None:
        for sample in self.scorer.poll(timeout_s):
            entry = self._open[sample.id.rpartition("/")[0]]
            entry.group.samples.append(sample)
            entry.unscored -= 1

    def _take_complete(self, limit: int) -> list[_OpenGroup]:
        """Up to `limit` complete groups, oldest first; those without spread are dropped."""
        taken: list[_OpenGroup] = []
        for group_id, entry in sorted(self._open.items(), key=lambda item: item[1].order):
            if not entry.complete or len(taken) == limit:
                continue
            del self._open[group_id]
            entry.group.samples.sort(key=lambda sample: sample.index)
            if self.cfg.dynamic_sampling and not _teaches(entry.group):
                self.counts.num_dropped_groups += 1
                continue
            taken.append(entry)
        return taken

    # -- carrying over -----------------------------------------------------------------------

    def _suspend(self) -> None:
        """Withdraw what still runs; its tokens are kept in the requests."""
        running = [r.id for entry in self._open.values() for r in entry.requests.values()]
        if not running:
            return
        for completion in self.engine.abort(running):
            group_id, _, index = completion.request_id.rpartition("/")
            requests = self._open[group_id].requests
            requests[int(index)] = replace(
                requests[int(index)],
                resumed=completion if completion.token_ids else None,
                priority=-1,
            )
            self.counts.num_carried_samples += 1
        for entry in self._open.values():
            entry.aborted_count += not entry.generated
        while self.scorer.pending:
            self._take_scores(0.05)

    def _resume(self) -> None:
        """Hand carried-over requests back to the engine, before any fresh ones."""
        for entry in sorted(self._open.values(), key=lambda entry: entry.order):
            self.engine.submit(list(entry.requests.values()))

    def _apply_masks(self, groups: list[Group]) -> None:
        version = self.engine.weight_version
        for sample in (sample for group in groups for sample in group.samples):
            if self.cfg.truncated_samples == "mask" and sample.truncated:
                sample.loss_mask = [False] * len(sample.token_ids)
            elif self.cfg.mask_off_policy_tokens:
                sample.loss_mask = [
                    trained and sampled_by == version
                    for trained, sampled_by in zip(
                        sample.loss_mask, sample.weight_versions, strict=True
                    )
                ]

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Unfinished samples and the running number of groups, as JSON-able values."""
        return {
            "num_started": self._num_started,
            "open": [
                {
                    "group": group_to_dict(entry.group),
                    "requests": {str(i): request_to_dict(r) for i, r in entry.requests.items()},
                    "order": entry.order,
                    "aborted_count": entry.aborted_count,
                }
                for entry in self._open.values()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._num_started = state["num_started"]
        self._open = {
            entry["group"]["id"]: _OpenGroup(
                group=group_from_dict(entry["group"]),
                requests={int(i): request_from_dict(r) for i, r in entry["requests"].items()},
                order=entry["order"],
                aborted_count=entry["aborted_count"],
            )
            for entry in state["open"]
        }


def _teaches(group: Group) -> bool:
    """Whether the group's valid samples earned different rewards."""
    rewards = [sample.reward.total for sample in group.samples if sample.valid and sample.reward]
    return len(rewards) > 1 and has_spread(rewards)
