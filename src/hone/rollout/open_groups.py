"""Groups from the draw of their prompt until they are handed out.

A group's requests go to an engine, what comes back goes to the scorer, and what that returns goes
into the group. Who begins how many and hands out which is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import monotonic
from typing import Any, Protocol

from hone.algorithms.advantages import has_spread
from hone.config.rollout import RolloutConfig
from hone.rewards.scorer import ScorerStats, check_failure_rate
from hone.rollout.counts import RolloutCounts
from hone.rollout.requests import Decode, requests_for, sample_of
from hone.rollout.state import (
    group_from_dict,
    group_to_dict,
    request_from_dict,
    request_to_dict,
)
from hone.types import (
    Completion,
    EngineStats,
    Group,
    Prompt,
    Request,
    Sample,
    SamplingEngine,
    StopReason,
)

__all__ = [
    "SCORE_WAIT_S",
    "OpenGroup",
    "OpenGroups",
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

    def submit(self, sample: Sample) -> None: ...
    def poll(self, timeout_s: float = 0.0) -> list[Sample]: ...
    def cancel(self) -> None: ...
    @property
    def pending(self) -> int: ...
    def stats(self) -> ScorerStats: ...


@dataclass(slots=True)
class OpenGroup:
    """A group that has been begun: samples come in by index, requests go out."""

    group: Group
    requests: dict[int, Request]
    """Not finished by the engine yet; after an abort they hold what was sampled."""
    order: int
    """Running number of the group; groups are handed out in this order."""
    begun: int
    """Version of the weights under which it was begun."""
    owner: int = 0
    """The process that generates it in this step. Others learn of it when it is complete, or when
    the step ends."""
    aborted_count: int = 0
    """Changes of weights, or ends of a step, that found it unfinished."""
    unscored: int = 0
    is_shared: bool = False
    """All processes know all of it."""

    @property
    def generated(self) -> bool:
        return not self.requests

    @property
    def complete(self) -> bool:
        return not self.requests and not self.unscored

    @property
    def num_finished(self) -> int:
        """Samples that the engine has finished, scored or not."""
        return len(self.group.samples) + self.unscored

    def is_overdue(self, max_aborted_count: int | None) -> bool:
        """Whether it has been interrupted so often that it must be left to finish."""
        limit = max_aborted_count
        return limit is not None and self.aborted_count >= limit and not self.generated

    def put_first(self) -> None:
        """Let what is unfinished go before fresh requests."""
        self.requests = {i: replace(r, priority=-1) for i, r in self.requests.items()}


@dataclass(slots=True)
class OpenGroups:
    """The groups that have been begun and not handed out, by id and in the order of their draw.

    All requests of the engine and all samples of the scorer are theirs.
    """

    engine: SamplingEngine
    scorer: SampleScorer
    prompts: PromptSource
    cfg: RolloutConfig
    decode: Decode
    seed: int
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """Where everything is counted; replaced by whoever wants to begin anew."""
    by_id: dict[str, OpenGroup] = field(default_factory=dict[str, OpenGroup])
    num_failed: int = 0
    """Samples that the scorer has returned without a reward."""
    _num_started: int = 0
    _discarded: dict[str, OpenGroup] = field(default_factory=dict[str, OpenGroup])
    """What engine or scorer may still return of groups that nobody wants any more."""
    _counted: tuple[EngineStats, ScorerStats, float] = field(init=False)
    """What engine and scorer had counted when it was last taken over, and when that was."""

    def __post_init__(self) -> None:
        self.start_counting()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[OpenGroup]:
        return iter(self.by_id.values())

    # -- into the engine -------------------------------------------------------------------------

    def begin(self, num_prompts: int, *, step: int, version: int) -> list[OpenGroup]:
        """Draw prompts and open their groups, named after `step`. Nothing is submitted."""
        begun: list[OpenGroup] = []
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
            entry = OpenGroup(
                group=Group(id=group_id, prompt=prompt, samples=[]),
                requests=dict(enumerate(requests)),
                order=self._num_started,
                begun=version,
            )
            self.by_id[group_id] = entry
            self._num_started += 1
            begun.append(entry)
        return begun

    def submit(self, entry: OpenGroup) -> None:
        """Hand what is unfinished of a group to the engine."""
        if entry.requests:
            self.engine.submit(list(entry.requests.values()))

    def withdraw(self, entries: Iterable[OpenGroup]) -> None:
        """Take all that runs, which belongs to `entries`, out of the engine; its tokens are kept in
        the requests."""
        running = [request.id for entry in entries for request in entry.requests.values()]
        for completion in self.engine.abort(running) if running else []:
            self._come_back(completion)
        while self.engine.has_unfinished:  # what had just finished
            for completion in self.engine.step():
                self._come_back(completion)
            # Or what an engine had that was lost meanwhile: nobody may be there to sample it.
            for completion in self.engine.abort(running):
                self._come_back(completion)

    def discard(self, entry: OpenGroup, *, is_in_engine: bool) -> None:
        """Give up a group, and withdraw its requests where the engine has them."""
        del self.by_id[entry.group.id]
        self._discarded[entry.group.id] = entry
        if not is_in_engine:
            entry.requests.clear()
        running = [request.id for request in entry.requests.values()]
        for completion in self.engine.abort(running) if running else []:
            self._come_back(completion)
        self._forget(entry)

    # -- out of engine and scorer ----------------------------------------------------------------

    def step(self) -> None:
        """One step of the engine; what it finishes goes to the scorer."""
        for completion in self.engine.step():
            self._come_back(completion)
        usage = self.engine.stats().kv_cache_usage
        self.counts.max_kv_cache_usage = max(self.counts.max_kv_cache_usage, usage)

    def take_scores(self, timeout_s: float) -> list[OpenGroup]:
        """Wait at most `timeout_s` for scores; return the groups that they make complete."""
        completed: list[OpenGroup] = []
        for sample in self.scorer.poll(timeout_s):
            entry = self._find(sample.id)
            entry.unscored -= 1
            self.num_failed += sample.failure is not None
            if entry.group.id in self._discarded:
                self._forget(entry)
                continue
            entry.group.samples.append(sample)
            if entry.complete:
                completed.append(entry)
        return completed

    def hand_out(self, entry: OpenGroup) -> Group:
        """A complete group, no longer open, with its samples in order."""
        del self.by_id[entry.group.id]
        entry.group.samples.sort(key=lambda sample: sample.index)
        return entry.group

    def _find(self, request_id: str) -> OpenGroup:
        group_id = request_id.rpartition("/")[0]
        return self.by_id[group_id] if group_id in self.by_id else self._discarded[group_id]

    def _come_back(self, completion: Completion) -> None:
        """What an engine returns of a request, finished or withdrawn."""
        entry = self._find(completion.request_id)
        index = int(completion.request_id.rpartition("/")[2])
        request = entry.requests[index]
        is_aborted = completion.stop_reason is StopReason.ABORT
        if entry.group.id in self._discarded:
            del entry.requests[index]
            self._forget(entry)
        elif is_aborted:
            resumed = completion if completion.token_ids else None
            entry.requests[index] = replace(request, resumed=resumed)
        else:
            del entry.requests[index]
            self.counts.num_prompt_tokens += len(request.prompt_ids)
            self.counts.num_cached_tokens += completion.num_cached_tokens
            entry.unscored += 1
            self.scorer.submit(sample_of(entry.group.prompt, index, completion, self.decode))

    def _forget(self, entry: OpenGroup) -> None:
        if entry.complete:
            self._discarded.pop(entry.group.id, None)

    # -- counts ----------------------------------------------------------------------------------

    def start_counting(self) -> None:
        """Pass over what engine and scorer have done until now."""
        self._counted = self.engine.stats(), self.scorer.stats(), monotonic()

    def count(self) -> None:
        """Take over what engine and scorer have counted since."""
        (engine, scorer, since), counts = self._counted, self.counts
        self.start_counting()
        now, scored, until = self._counted
        counts.counted_s += until - since
        counts.num_preemptions += now.num_preemptions - engine.num_preemptions
        counts.num_engine_steps += now.num_steps - engine.num_steps
        counts.num_generated_tokens += now.num_generated_tokens - engine.num_generated_tokens
        counts.engine_busy_s += now.busy_s - engine.busy_s
        counts.num_kills += scored.num_kills - scorer.num_kills
        counts.reward_p99_s = scored.p99_s

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Unfinished samples and the running number of groups, as JSON-able values. Nothing may be
        in the engine or with the scorer."""
        return {
            "num_started": self._num_started,
            "open": [
                {
                    "group": group_to_dict(entry.group),
                    "requests": {str(i): request_to_dict(r) for i, r in entry.requests.items()},
                    "order": entry.order,
                    "begun": entry.begun,
                    "aborted_count": entry.aborted_count,
                }
                for entry in self
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._num_started = state["num_started"]
        self.by_id = {
            entry["group"]["id"]: OpenGroup(
                group=group_from_dict(entry["group"]),
                requests={int(i): request_from_dict(r) for i, r in entry["requests"].items()},
                order=entry["order"],
                begun=entry["begun"],
                aborted_count=entry["aborted_count"],
                is_shared=not entry["requests"],
            )
            for entry in state["open"]
        }


def check_failures(
    entries: Iterable[OpenGroup], cfg: RolloutConfig, limit: float, *, num_wanted: int
) -> None:
    """Raise FailureRateError where a step that takes `num_wanted` of the open groups `entries` has
    more failed samples than the share `limit`, whichever it takes and however the rest is scored.

    With dynamic sampling a group may be dropped until it is complete and its rewards differ.
    """
    entries = list(entries)
    num_left_over = max(len(entries) - num_wanted, 0)
    if cfg.dynamic_sampling:
        entries = [entry for entry in entries if entry.complete and teaches(entry.group)]
    groups = sorted((entry.group.samples for entry in entries), key=_num_failed)
    samples = list(chain(*groups[: max(len(groups) - num_left_over, 0)]))
    check_failure_rate(samples, limit, num_samples=cfg.prompts_per_step * cfg.n_samples_per_prompt)


def _num_failed(samples: Sequence[Sample]) -> int:
    return sum(sample.failure is not None for sample in samples)


def teaches(group: Group) -> bool:
    """Whether the group's valid samples earned different rewards."""
    rewards = [sample.reward.total for sample in group.samples if sample.valid and sample.reward]
    return len(rewards) > 1 and has_spread(rewards)


def apply_masks(groups: Iterable[Group], cfg: RolloutConfig) -> None:
    """Mask what `cfg` keeps out of the loss."""
    for sample in (sample for group in groups for sample in group.samples):
        if cfg.truncated_samples == "mask" and sample.truncated:
            sample.loss_mask = [False] * len(sample.token_ids)
        elif cfg.mask_off_policy_tokens:
            newest = max(sample.weight_versions, default=0)
            sample.loss_mask = [
                trained and sampled_by == newest
                for trained, sampled_by in zip(
                    sample.loss_mask, sample.weight_versions, strict=True
                )
            ]
