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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol, TypeVar

from hone.config.rollout import RolloutConfig
from hone.rollout.counts import RolloutCounts
from hone.rollout.open_groups import (
    SCORE_WAIT_S,
    OpenGroup,
    OpenGroups,
    Progress,
    PromptSource,
    SampleScorer,
    apply_masks,
    check_failures,
    teaches,
)
from hone.rollout.requests import Decode
from hone.rollout.state import sample_of_values, sample_values
from hone.types import Completion, Group, SamplingEngine

__all__ = ["Alone", "Peers", "Rollout"]

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class _Told:
    """What the owner of a group tells of it; the prompt is known to all."""

    samples: list[dict[str, Any]]
    resumed: Mapping[int, Completion | None]
    """Of each sample that is not finished, its tokens."""

    @classmethod
    def of(cls, entry: OpenGroup) -> _Told:
        return cls(
            [sample_values(sample) for sample in entry.group.samples],
            {index: request.resumed for index, request in entry.requests.items()},
        )

    def into(self, entry: OpenGroup) -> None:
        prompt = entry.group.prompt
        entry.group.samples = [sample_of_values(values, prompt) for values in self.samples]
        entry.requests = {
            index: replace(entry.requests[index], resumed=resumed)
            for index, resumed in self.resumed.items()
        }


@dataclass(slots=True)
class Rollout:
    """Drives an engine and a scorer over a stream of prompts."""

    engine: SamplingEngine
    scorer: SampleScorer
    prompts: PromptSource
    cfg: RolloutConfig
    decode: Decode
    seed: int
    max_failure_rate: float = 1.0
    """Failed samples of a step, as a share (0 to 1), that end the run."""
    peers: Peers = field(default_factory=Alone)
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    _open: OpenGroups = field(init=False)
    _num_dealt: int = 0

    def __post_init__(self) -> None:
        self._open = OpenGroups(
            self.engine, self.scorer, self.prompts, self.cfg, self.decode, self.seed
        )

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`, in the order in which their prompts were drawn.

        Fewer than `prompts_per_step` come back only when dynamic sampling has used up its rounds.
        Raises FailureRateError as soon as a process alone has more failed samples than
        `max_failure_rate` allows of the step.
        """
        self.counts = self._open.counts = RolloutCounts()
        self._open.start_counting()
        self._num_dealt = 0
        target = self.cfg.prompts_per_step
        kept: list[OpenGroup] = []
        for entry in self._open:
            self._deal(entry)
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
        self._open.count()
        self.counts = RolloutCounts.over(self.peers.gather(self.counts))
        groups = [entry.group for entry in sorted(kept, key=lambda entry: entry.order)]
        apply_masks(groups, self.cfg)
        return groups

    # -- one round ---------------------------------------------------------------------------

    def _own(self) -> list[OpenGroup]:
        return [entry for entry in self._open if entry.owner == self.peers.rank]

    def _deal(self, entry: OpenGroup) -> None:
        """Give a group to the next process; where that is this one, its engine begins."""
        entry.owner = self._num_dealt % self.peers.size
        self._num_dealt += 1
        if entry.owner == self.peers.rank:
            self._open.submit(entry)

    def _start(self, num_prompts: int, step: int) -> None:
        """Draw prompts and deal their groups."""
        version = self.engine.weight_version
        for entry in self._open.begin(num_prompts, step=step, version=version):
            self._deal(entry)

    def _generate(self, num_groups: int, progress: Progress | None) -> None:
        """Run the engine until enough groups are generated, then wait for their scores."""
        num_samples = self.cfg.n_samples_per_prompt
        all_are_needed = len(self._open) <= num_groups  # nobody need know how far the others are
        wanted = min(num_groups, len(self._own())) * num_samples
        while self.engine.has_unfinished if all_are_needed else self._goes_on(num_groups):
            if self.engine.has_unfinished:
                self._open.step()
            self._take_scores(0.0, num_groups)
            if progress is not None:
                progress(sum(entry.num_finished for entry in self._own()), wanted)
        while any(entry.generated and entry.unscored for entry in self._own()):
            self._take_scores(SCORE_WAIT_S, num_groups)
            if progress is not None:
                progress(sum(entry.num_finished for entry in self._own()), wanted)

    def _take_scores(self, timeout_s: float, num_groups: int) -> None:
        """Raises FailureRateError where too many have failed, whatever follows."""
        num_failed = self._open.num_failed
        self._open.take_scores(timeout_s)
        if self._open.num_failed > num_failed:
            check_failures(self._open, self.cfg, self.max_failure_rate, num_wanted=num_groups)

    def _goes_on(self, num_groups: int) -> bool:
        """Whether engines must make another step: too few groups are generated in all processes, or
        a sample has been aborted too often and is waited for."""
        own = self._own()
        num_generated, num_overdue, num_busy = self.peers.total(
            sum(entry.generated for entry in own),
            sum(entry.is_overdue(self.cfg.max_aborted_count) for entry in own),
            self.engine.has_unfinished,
        )
        return num_busy > 0 and (num_overdue > 0 or num_generated < num_groups)

    def _take_complete(self, limit: int) -> list[OpenGroup]:
        """Up to `limit` complete groups, oldest first; those without spread are dropped."""
        taken: list[OpenGroup] = []
        for entry in list(self._open):
            if not entry.complete or len(taken) == limit:
                continue
            group = self._open.hand_out(entry)
            if self.cfg.dynamic_sampling and not teaches(group):
                self.counts.count_dropped(group)
                continue
            taken.append(entry)
        return taken

    # -- what the others generated -----------------------------------------------------------

    def _share(self, entries: Iterable[OpenGroup]) -> None:
        """Tell the other processes of these groups, and take over what they tell."""
        told = {e.group.id: _Told.of(e) for e in entries if not e.is_shared}
        start = perf_counter()
        everyones = self.peers.gather(told)
        self.counts.wait_s += perf_counter() - start
        for rank, groups in enumerate(everyones):
            for group_id, news in groups.items():
                entry = self._open.by_id[group_id]
                if rank != self.peers.rank:
                    news.into(entry)
                entry.is_shared = entry.complete

    # -- carrying over -----------------------------------------------------------------------

    def _suspend(self) -> None:
        """Withdraw what still runs; its tokens are kept in the requests, in all processes."""
        if not self._open:
            return
        self._open.withdraw(self._own())
        while self.scorer.pending:
            self._open.take_scores(SCORE_WAIT_S)
        self._share(self._own())
        for entry in self._open:
            entry.put_first()
            entry.aborted_count += not entry.generated
            self.counts.num_carried_samples += len(entry.requests)

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Unfinished samples and the running number of groups, as JSON-able values. The same in all
        processes, and for any number of them."""
        return self._open.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._open.load_state_dict(state)
