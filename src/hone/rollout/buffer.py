"""The groups between the draw of their prompt and the step that trains them.

A group's requests go to the engine, its completions to the scorer, its scored samples into the
group; a sample that an environment answers with an observation goes to the engine again. The
collector decides how many groups are started and which of them make a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean
from time import monotonic
from typing import Any, Protocol

from hone.algorithms.advantages import has_spread
from hone.config.rollout import RolloutConfig
from hone.rewards.scorer import ScorerStats, check_failure_rate
from hone.rollout.counts import RolloutCounts
from hone.rollout.episodes import Episodes
from hone.rollout.requests import requests_for, sampling_params
from hone.rollout.state import (
    group_from_dict,
    group_to_dict,
    request_from_dict,
    request_to_dict,
    sample_from_dict,
    sample_to_dict,
)
from hone.types import (
    Completion,
    EngineStats,
    Group,
    PerToken,
    Prompt,
    Request,
    Sample,
    SamplingEngine,
    StopReason,
)

__all__ = [
    "SCORE_WAIT_S",
    "Buffer",
    "InFlightGroup",
    "Progress",
    "PromptSource",
    "SampleScorer",
    "apply_masks",
    "check_failures",
    "teaches",
]

Progress = Callable[[int, int], None]
"""(finished samples, wanted samples), called while a step generates."""

SCORE_WAIT_S = 0.05
"""How long to wait for a score at a time where there is nothing else to do."""


class PromptSource(Protocol):
    """What a rollout needs of `hone.data.prompts.PromptStream`."""

    def take(self, num: int, /) -> list[Prompt]: ...


class SampleScorer(Protocol):
    """What a rollout needs of `hone.rewards.scorer.Scorer`."""

    def submit(self, *samples: Sample) -> None: ...
    def poll(self, timeout_s: float = 0.0) -> list[Sample]: ...
    def cancel(self) -> None: ...
    @property
    def pending(self) -> int: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def takes_whole_groups(self) -> bool: ...
    def stats(self) -> ScorerStats: ...


@dataclass(slots=True)
class InFlightGroup:
    """A group whose prompt has been drawn and which is not trained yet."""

    group: Group
    requests: dict[int, Request]
    """Those that the engine has not finished; after an abort they hold the tokens so far."""
    order: int
    """Running number of the group; a step trains its groups in this order."""
    start_version: int
    """Version of the weights when it was submitted first."""
    rank: int = 0
    """The process that generates it. The others receive it when it is complete, or when the step
    ends."""
    episodes: dict[int, Sample] = field(default_factory=dict[int, Sample])
    """The earlier turns of `requests`, by index; and samples that have ended, and wait for all of
    the group to have, where reward functions compare them."""
    aborted_count: int = 0
    """Changes of weights, or ends of a step, that interrupted it."""
    unscored: int = 0
    """Samples that are with the scorer."""
    undecided: int = 0
    """Those of them that may come back for another turn."""
    is_shared: bool = False
    """All processes hold all of its samples."""
    is_kept: bool = False
    """Complete, and chosen for the step that is being collected."""

    @property
    def generated(self) -> bool:
        return not self.requests and not self.undecided

    @property
    def complete(self) -> bool:
        return not self.requests and not self.unscored

    @property
    def num_finished(self) -> int:
        """Samples that the engine has finished, scored or not."""
        num_waiting = len(self.episodes.keys() - self.requests.keys()) if self.episodes else 0
        return len(self.group.samples) + num_waiting + self.unscored - self.undecided

    def is_overdue(self, max_aborted_count: int | None) -> bool:
        """Whether it has been interrupted so often that it must finish before the next time."""
        limit = max_aborted_count
        return limit is not None and self.aborted_count >= limit and not self.generated

    def prioritise(self) -> None:
        """Let the engine admit it before groups that have no tokens yet."""
        self.requests = {i: replace(r, priority=-1) for i, r in self.requests.items()}


@dataclass(slots=True)
class Buffer:
    """Groups that have been started and not trained, by id, in the order of their draw.

    All requests of the engine and all samples of the scorer belong to them.
    """

    engine: SamplingEngine
    scorer: SampleScorer
    prompts: PromptSource
    cfg: RolloutConfig
    episodes: Episodes
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """What is added to; whoever starts a new count replaces it."""
    by_id: dict[str, InFlightGroup] = field(default_factory=dict[str, InFlightGroup])
    num_failed: int = 0
    """Samples that the scorer has returned without a reward."""
    is_submitted: bool = True
    """The engine has the requests of all groups, but those of `_next_turns`."""
    _next_turns: list[Request] = field(default_factory=list[Request])
    """Requests to be submitted by the next step."""
    _num_started: int = 0
    _counted: tuple[EngineStats, ScorerStats, float] = field(init=False)
    """The totals of engine and scorer that are in `counts` already, and when they were read."""

    def __post_init__(self) -> None:
        self.start_counting()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[InFlightGroup]:
        return iter(self.by_id.values())

    @property
    def has_requests(self) -> bool:
        """There is work for `step`."""
        return self.engine.has_unfinished or bool(self._next_turns)

    @property
    def is_sampling(self) -> bool:
        """There is, or there may be once the environment has answered."""
        return self.has_requests or self.num_undecided > 0

    @property
    def num_unfinished(self) -> int:
        """Samples that are not finished, as far as is known."""
        return sum(len(entry.requests) + entry.undecided for entry in self)

    @property
    def num_undecided(self) -> int:
        """Samples with the scorer that may come back for another turn."""
        return sum(entry.undecided for entry in self)

    # -- into the engine -------------------------------------------------------------------------

    def draw(self, num_prompts: int, *, step: int, version: int) -> list[InFlightGroup]:
        """Draw prompts and make their groups, named after `step`. Nothing is submitted."""
        drawn: list[InFlightGroup] = []
        for prompt in self.prompts.take(max(num_prompts, 0)):
            group_id = f"{step}-{self._num_started}"
            group = Group(id=group_id, prompt=prompt, samples=[])
            num = self.cfg.n_samples_per_prompt
            entry = InFlightGroup(
                group=group,
                requests=dict(enumerate(self._first_requests(group, self._num_started, num))),
                order=self._num_started,
                start_version=version,
            )
            self.by_id[group_id] = entry
            self._num_started += 1
            drawn.append(entry)
        return drawn

    def _first_requests(self, group: Group, order: int, num: int) -> list[Request]:
        return requests_for(
            group.prompt,
            sampling_params(self.cfg, self.cfg.stop),
            group_id=group.id,
            num_samples=num,
            run_seed=self.episodes.run_seed,
            purpose=self.episodes.purpose,
            number=order,
        )

    def submit(self, entries: Iterable[InFlightGroup]) -> None:
        """Submit the unfinished requests of groups, together."""
        if requests := [request for entry in entries for request in entry.requests.values()]:
            self.engine.submit(requests)

    def withdraw(self, entries: Iterable[InFlightGroup]) -> None:
        """Abort all requests of the engine, which are those of `entries`; their tokens are kept."""
        running = [name for entry in entries for name in self._in_engine(entry)]
        self._next_turns.clear()
        self.is_submitted = False
        for completion in self.engine.abort(running) if running else []:
            self._on_completion(completion)
        while self.engine.has_unfinished:  # requests that had just finished
            for completion in self.engine.step():
                self._on_completion(completion)
            # Requests of an engine that was lost meanwhile wait for another, which may never come.
            for completion in self.engine.abort(running):
                self._on_completion(completion)

    def _in_engine(self, entry: InFlightGroup) -> list[str]:
        """The ids of its requests that the engine has."""
        waiting = {request.id for request in self._next_turns}
        return [one.id for one in entry.requests.values() if one.id not in waiting]

    # -- out of engine and scorer ----------------------------------------------------------------

    def step(self) -> None:
        """Submit the next turns, then one step of the engine; its completions go to the scorer."""
        if self._next_turns:
            # However fast each was answered, the engine gets them in the same order.
            self.engine.submit(sorted(self._next_turns, key=self._place))
            self._next_turns.clear()
        for completion in self.engine.step():
            self._on_completion(completion)
        now, counts = self.engine.stats(), self.counts
        counts.max_kv_cache_usage = max(counts.max_kv_cache_usage, now.kv_cache_usage)
        counts.sum_waiting += now.num_waiting
        counts.num_polls += 1

    def poll_scores(self, timeout_s: float) -> list[InFlightGroup]:
        """Wait at most `timeout_s` for scores; return the groups that they make complete."""
        completed: list[InFlightGroup] = []
        for sample in self.scorer.poll(timeout_s):
            entry = self._find(sample.id)
            entry.unscored -= 1
            entry.undecided -= not sample.must_end
            self.num_failed += sample.failure is not None
            if sample.observation is not None:
                self._go_on(entry, sample)
                continue
            entry.group.samples.append(sample)
            if entry.complete:
                completed.append(entry)
        return completed

    def pop(self, entry: InFlightGroup) -> Group:
        """Take a group out of the buffer, its samples in order; nothing of it is under way."""
        del self.by_id[entry.group.id]
        entry.group.samples.sort(key=lambda sample: sample.index)
        return entry.group

    def _find(self, request_id: str) -> InFlightGroup:
        return self.by_id[request_id.rpartition("/")[0]]

    def _on_completion(self, completion: Completion) -> None:
        """Take a completion, finished or aborted, from the engine."""
        entry = self._find(completion.request_id)
        index = int(completion.request_id.rpartition("/")[2])
        request = entry.requests[index]
        if completion.stop_reason is StopReason.ABORT:
            resumed = completion if completion.token_ids else None
            entry.requests[index] = replace(request, resumed=resumed)
        else:
            del entry.requests[index]
            self.counts.num_prompt_tokens += len(request.prompt_ids)
            self.counts.num_cached_tokens += completion.num_cached_tokens
            sample = entry.episodes.pop(index, None) or self.episodes.begin(
                entry.group.prompt, completion.request_id, number=entry.order
            )
            limit = self.cfg.max_completion_tokens
            self.episodes.take(sample, completion, max_tokens=limit)
            self._score(entry, sample)

    def _score(self, entry: InFlightGroup, sample: Sample) -> None:
        entry.episodes[sample.index] = sample
        if self.scorer.takes_whole_groups and entry.requests:
            return
        ended = sorted(entry.episodes.keys() - entry.requests.keys())
        samples = [entry.episodes.pop(index) for index in ended]
        entry.unscored += len(samples)
        entry.undecided += sum(not one.must_end for one in samples)
        self.scorer.submit(*samples)

    def _go_on(self, entry: InFlightGroup, sample: Sample) -> None:
        """Ask for the turn after an observation."""
        *_, first = self._first_requests(entry.group, entry.order, sample.index + 1)
        request = self.episodes.next_request(sample, first)
        if request is None:
            self._score(entry, sample)
            return
        entry.episodes[sample.index] = sample
        entry.requests[sample.index] = request
        if self.is_submitted:
            self._next_turns.append(request)

    def _place(self, request: Request) -> tuple[int, int]:
        return self._find(request.id).order, int(request.id.rpartition("/")[2])

    # -- counts ----------------------------------------------------------------------------------

    def start_counting(self) -> None:
        """Leave out of `counts` what engine and scorer have done since the last `count`."""
        self._counted = self.engine.stats(), self.scorer.stats(), monotonic()

    def count(self) -> None:
        """Add what engine and scorer have done since to `counts`."""
        (engine, scorer, since), counts = self._counted, self.counts
        self.start_counting()
        now, scored, until = self._counted
        counts.counted_s += until - since
        counts.num_preemptions += now.num_preemptions - engine.num_preemptions
        counts.num_lost_engines += now.num_lost - engine.num_lost
        counts.num_engine_steps += now.num_steps - engine.num_steps
        counts.num_generated_tokens += now.num_generated_tokens - engine.num_generated_tokens
        counts.engine_busy_s += now.busy_s - engine.busy_s
        counts.kv_cache_bytes = now.kv_cache_bytes
        counts.weight_bytes = now.weight_bytes
        counts.num_kills += scored.num_kills - scorer.num_kills
        counts.reward_p99_s = scored.p99_s
        counts.reward_model_s += scored.model_s - scorer.model_s

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All groups and the running number of the next one, as JSON-able values. Nothing may be in
        the engine or with the scorer."""
        return {
            "num_started": self._num_started,
            "groups": [
                {
                    "group": group_to_dict(entry.group),
                    "requests": {str(i): request_to_dict(r) for i, r in entry.requests.items()},
                    "episodes": {str(i): sample_to_dict(s) for i, s in entry.episodes.items()},
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
        for entry in state["groups"]:
            group = group_from_dict(entry["group"])
            self.by_id[group.id] = InFlightGroup(
                group=group,
                requests={int(i): request_from_dict(r) for i, r in entry["requests"].items()},
                episodes={
                    int(i): sample_from_dict(s, group.prompt) for i, s in entry["episodes"].items()
                },
                order=entry["order"],
                start_version=entry["start_version"],
                aborted_count=entry["aborted_count"],
                is_shared=not entry["requests"],
            )


def check_failures(
    entries: Iterable[InFlightGroup], cfg: RolloutConfig, limit: float, *, num_wanted: int
) -> None:
    """Raise FailureRateError where a step that takes `num_wanted` of the groups `entries` has
    more failed samples than the share `limit`, whichever it takes and however the rest is scored.

    With dynamic sampling a group may be dropped until it is complete and known to be kept.
    """
    entries = list(entries)
    num_left_over = max(len(entries) - num_wanted, 0)
    if cfg.dynamic_sampling:
        entries = [entry for entry in entries if entry.complete and teaches(entry.group, cfg)]
    groups = sorted((entry.group.samples for entry in entries), key=_num_failed)
    samples = list(chain(*groups[: max(len(groups) - num_left_over, 0)]))
    check_failure_rate(samples, limit, num_samples=cfg.prompts_per_step * cfg.n_samples_per_prompt)


def _num_failed(samples: Sequence[Sample]) -> int:
    return sum(sample.failure is not None for sample in samples)


def teaches(group: Group, cfg: RolloutConfig) -> bool:
    """Whether dynamic sampling keeps a group: its valid samples earned different rewards, and their
    mean lies in `rollout.reward_range`."""
    rewards = [sample.reward.total for sample in group.samples if sample.valid and sample.reward]
    if len(rewards) < 2 or not has_spread(rewards):
        return False
    low, high = cfg.reward_range or (-math.inf, math.inf)
    return low < fmean(rewards) < high


def apply_masks(groups: Iterable[Group], cfg: RolloutConfig) -> None:
    """Mask what `cfg` keeps out of the loss."""
    for sample in (sample for group in groups for sample in group.samples):
        if cfg.truncated_samples == "mask" and sample.truncated:
            sample.loss_mask = PerToken("b", bytes(len(sample.token_ids)))
        elif cfg.mask_off_policy_tokens:
            newest = max(sample.weight_versions, default=0)
            masked = zip(sample.loss_mask, sample.weight_versions, strict=True)
            sample.loss_mask = PerToken("b", [mask and own == newest for mask, own in masked])
