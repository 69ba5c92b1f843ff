"""Collects the scored groups of a training step.

A step wants `prompts_per_step` groups. Without over-sampling it starts that many and waits for
all. With `oversample_prompts` it starts more, stops generating as soon as enough groups are
finished, and carries the rest over: finished samples as they are, unfinished ones as partial
rollouts that go on from their tokens. With `dynamic_sampling` groups whose rewards are all equal
are dropped and the round is repeated for what is missing.

Which groups make a step is decided by engine steps alone, never by how fast a reward was computed,
so the same seed gives the same run. Scoring overlaps generation.

Several processes share a rollout: each draws all prompts, generates and scores every so-many-th
group, and is then told the others'. What is decided is decided on what all know, so every process
holds the same groups, in the same order, as one process alone would. (With over-sampling that is so
as far as engines finish samples in the same steps: processes then take each step together.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, TypeVar

from hone.algorithms.advantages import has_spread
from hone.config.rollout import RolloutConfig
from hone.rewards.scorer import ScorerStats
from hone.rollout.requests import Decode, requests_for, sample_of
from hone.rollout.state import (
    group_from_dict,
    group_to_dict,
    request_from_dict,
    request_to_dict,
    sample_of_values,
    sample_values,
)
from hone.types import Completion, Engine, EngineStats, Group, Prompt, Request, Sample

__all__ = ["Alone", "Peers", "PromptSource", "Rollout", "RolloutCounts", "SampleScorer"]

T = TypeVar("T")

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


class Peers(Protocol):
    """The processes that share a rollout. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, value: T, /) -> list[T]:
        """The picklable value of every process, by rank."""
        ...

    def total(self, *counts: int) -> tuple[int, ...]:
        """Each count, added up over all processes; for many times a second."""
        ...


class Alone:
    """One process that shares with nobody."""

    rank = 0
    size = 1

    def gather(self, value: T, /) -> list[T]:
        return [value]

    def total(self, *counts: int) -> tuple[int, ...]:
        return counts


@dataclass(slots=True)
class RolloutCounts:
    """What happened to the groups of one `collect`, in all processes together."""

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
    """99th percentile of the time in reward functions; nan where nothing was scored. Of the process
    where it is largest."""
    wait_s: float = 0.0
    """Longest time that a process waited for the others' groups."""

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
            wait_s=max(c.wait_s for c in processes),
        )


_OF_ONE_PROCESS = (
    "num_cached_tokens",
    "num_prompt_tokens",
    "num_preemptions",
    "num_engine_steps",
    "num_drafted_tokens",
    "num_accepted_tokens",
    "num_generated_tokens",
    "engine_busy_s",
    "num_kills",
)
"""Counts of what a process does with its own groups; the others are equal in all."""


@dataclass(slots=True)
class _OpenGroup:
    """A group that has been started: samples come in by index, requests go out."""

    group: Group
    requests: dict[int, Request]
    """Not finished by the engine yet; after an abort they hold what was sampled."""
    order: int
    """Running number of the group; groups are handed out in this order."""
    owner: int = 0
    """The process that generates it in this step. Others learn of it when it is complete, or when
    the step ends."""
    aborted_count: int = 0
    unscored: int = 0
    is_shared: bool = False
    """All processes know all of it."""

    @property
    def generated(self) -> bool:
        return not self.requests

    @property
    def complete(self) -> bool:
        return not self.requests and not self.unscored


@dataclass(frozen=True, slots=True)
class _Told:
    """What the owner of a group tells of it; the prompt is known to all."""

    samples: list[dict[str, Any]]
    resumed: Mapping[int, Completion | None]
    """Of each sample that is not finished, its tokens."""

    @classmethod
    def of(cls, entry: _OpenGroup) -> _Told:
        return cls(
            [sample_values(sample) for sample in entry.group.samples],
            {index: request.resumed for index, request in entry.requests.items()},
        )

    def into(self, entry: _OpenGroup) -> None:
        prompt = entry.group.prompt
        entry.group.samples = [sample_of_values(values, prompt) for values in self.samples]
        entry.requests = {
            index: replace(entry.requests[index], resumed=resumed)
            for index, resumed in self.resumed.items()
        }


@dataclass(slots=True)
class Rollout:
    """Drives an engine and a scorer over a stream of prompts."""

    engine: Engine
    scorer: SampleScorer
    prompts: PromptSource
    cfg: RolloutConfig
    decode: Decode
    seed: int
    peers: Peers = field(default_factory=Alone)
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    _open: dict[str, _OpenGroup] = field(default_factory=dict[str, _OpenGroup])
    _num_started: int = 0
    _num_dealt: int = 0

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`, in the order in which their prompts were drawn.

        Fewer than `prompts_per_step` come back only when dynamic sampling has used up its rounds.
        """
        self.counts = RolloutCounts()
        self._num_dealt = 0
        engine, scorer = self.engine.stats(), self.scorer.stats()
        target = self.cfg.prompts_per_step
        kept: list[_OpenGroup] = []
        self._resume()
        self._start(target + self.cfg.oversample_prompts - len(self._open), step)
        for round_index in range(self.cfg.max_refill_rounds):
            self._generate(target - len(kept), progress)
            self._share(entry for entry in self._own() if entry.complete)
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
        self.counts = RolloutCounts.over(self.peers.gather(self.counts))
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

    def _own(self) -> list[_OpenGroup]:
        return [entry for entry in self._open.values() if entry.owner == self.peers.rank]

    def _deal(self, entry: _OpenGroup) -> None:
        """Give a group to the next process; where that is this one, its engine begins."""
        entry.owner = self._num_dealt % self.peers.size
        self._num_dealt += 1
        if entry.owner == self.peers.rank:
            self.engine.submit(list(entry.requests.values()))

    def _start(self, num_prompts: int, step: int) -> None:
        """Draw prompts and deal their groups."""
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
            entry = _OpenGroup(
                group=Group(id=group_id, prompt=prompt, samples=[]),
                requests=dict(enumerate(requests)),
                order=self._num_started,
            )
            self._open[group_id] = entry
            self._num_started += 1
            self._deal(entry)

    def _generate(self, num_groups: int, progress: Progress | None) -> None:
        """Run the engine until enough groups are generated, then wait for their scores."""
        num_samples = self.cfg.n_samples_per_prompt
        all_are_needed = len(self._open) <= num_groups  # nobody need know how far the others are
        wanted = min(num_groups, len(self._own())) * num_samples
        while self.engine.has_unfinished if all_are_needed else self._goes_on(num_groups):
            if self.engine.has_unfinished:
                for completion in self.engine.step():
                    self._finish(completion)
            usage = self.engine.stats().kv_cache_usage
            self.counts.max_kv_cache_usage = max(self.counts.max_kv_cache_usage, usage)
            self._take_scores(0.0)
            if progress is not None:
                finished = sum(len(e.group.samples) + e.unscored for e in self._own())
                progress(finished, wanted)
        while any(entry.generated and entry.unscored for entry in self._own()):
            self._take_scores(0.05)

    def _goes_on(self, num_groups: int) -> bool:
        """Whether engines must make another step: too few groups are generated in all processes, or
        a sample has been aborted too often and is waited for."""
        limit = self.cfg.max_aborted_count
        own = self._own()
        num_generated, num_overdue, num_busy = self.peers.total(
            sum(entry.generated for entry in own),
            sum(
                limit is not None and entry.aborted_count >= limit and not entry.generated
                for entry in own
            ),
            self.engine.has_unfinished,
        )
        return num_busy > 0 and (num_overdue > 0 or num_generated < num_groups)

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

    # -- what the others generated -----------------------------------------------------------

    def _share(self, entries: Iterable[_OpenGroup]) -> None:
        """Tell the other processes of these groups, and take over what they tell."""
        told = {e.group.id: _Told.of(e) for e in entries if not e.is_shared}
        start = perf_counter()
        everyones = self.peers.gather(told)
        self.counts.wait_s += perf_counter() - start
        for rank, groups in enumerate(everyones):
            for group_id, news in groups.items():
                entry = self._open[group_id]
                if rank != self.peers.rank:
                    news.into(entry)
                entry.is_shared = entry.complete

    # -- carrying over -----------------------------------------------------------------------

    def _suspend(self) -> None:
        """Withdraw what still runs; its tokens are kept in the requests, in all processes."""
        if not self._open:
            return
        running = [r.id for entry in self._own() for r in entry.requests.values()]
        for completion in self.engine.abort(running) if running else []:
            group_id, _, index = completion.request_id.rpartition("/")
            requests = self._open[group_id].requests
            requests[int(index)] = replace(
                requests[int(index)], resumed=completion if completion.token_ids else None
            )
        while self.scorer.pending:
            self._take_scores(0.05)
        self._share(self._own())
        for entry in self._open.values():
            entry.requests = {i: replace(r, priority=-1) for i, r in entry.requests.items()}
            entry.aborted_count += not entry.generated
            self.counts.num_carried_samples += len(entry.requests)

    def _resume(self) -> None:
        """Hand carried-over requests to engines, before any fresh ones."""
        for entry in sorted(self._open.values(), key=lambda entry: entry.order):
            self._deal(entry)

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
        """Unfinished samples and the running number of groups, as JSON-able values. The same in all
        processes, and for any number of them."""
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
                is_shared=not entry["requests"],
            )
            for entry in state["open"]
        }


def _teaches(group: Group) -> bool:
    """Whether the group's valid samples earned different rewards."""
    rewards = [sample.reward.total for sample in group.samples if sample.valid and sample.reward]
    return len(rewards) > 1 and has_spread(rewards)
