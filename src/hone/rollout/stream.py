"""Scored groups without end, sampled while earlier ones are trained.

Weights have versions: version v is the policy after v updates. A group remembers the version that
began it, and may be trained in the update of version u only while u is at most
`pipeline.max_staleness` further. So each group has a deadline, the last update that may train it,
and later groups never have earlier ones.

How many groups are open at a time is bounded such that all of them could meet their deadlines, and
a batch is chosen such that the rest still can (`choose`). What remains is to wait for samples that
must be in a batch and are not complete; with `pipeline.too_old: drop` they are dropped instead.

With a staleness of 0 the groups are those of `hone.rollout.rollout.Rollout`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest
from threading import Event
from time import perf_counter
from typing import Any

from hone.config.pipeline import PipelineConfig
from hone.config.rollout import RolloutConfig
from hone.planner.staleness import batches_ahead, choose, too_late
from hone.rollout.counts import StreamCounts
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
from hone.types import Group, SamplingEngine

__all__ = ["RolloutStream"]


@dataclass(slots=True)
class _Rounds:
    """The rounds in which dynamic sampling looks for a batch: a round is as many groups as the one
    before it dropped."""

    num_left: int
    """Groups of this round that are not judged yet; 0 where all that were missing are found."""
    max_rounds: int
    num_dropped: int = 0
    num_rounds: int = 1

    @property
    def are_used_up(self) -> bool:
        return self.num_rounds > self.max_rounds

    @property
    def num_refills(self) -> int:
        return min(self.num_rounds, self.max_rounds) - 1

    def judge(self, is_kept: bool) -> None:
        if self.num_left <= 0:
            return
        self.num_left -= 1
        self.num_dropped += not is_kept
        if self.num_left == 0 and self.num_dropped:
            self.num_rounds += 1
            self.num_left, self.num_dropped = self.num_dropped, 0


@dataclass(slots=True)
class RolloutStream:
    """Drives an engine and a scorer ahead of the training, in one process.

    A step of the loop is

        groups = stream.take(version)      # sampled and scored; waits where it must
        with stream.in_background():
            ...                            # train: version + 1
        stream.before_sync()
        ...                                # bring the weights to the engine
        stream.after_sync(version + 1)

    The engine may be one that samples by itself; its `step` then returns after a short time even if
    nothing has finished. All of its requests, and all samples of the scorer, must be the stream's,
    but for the time between `suspend` and `resume`.
    """

    engine: SamplingEngine
    scorer: SampleScorer
    prompts: PromptSource
    rollout_cfg: RolloutConfig
    pipeline_cfg: PipelineConfig
    decode: Decode
    seed: int
    max_failure_rate: float = 1.0
    """Failed samples of a step, as a share (0 to 1), that end the run."""
    counts: StreamCounts = field(default_factory=StreamCounts)
    """Of the last batch: what happened since the one before it."""
    _counting: StreamCounts = field(default_factory=StreamCounts)
    _open: OpenGroups = field(init=False)
    _rounds: _Rounds = field(init=False)
    _ahead: int = field(init=False)
    """Batches that may be open beside the one that is next."""
    _version: int | None = None
    """That of the engine; None until it is told."""
    _next_update: int = 0
    """The update that the next batch is for: at the current version, or at the next one."""
    _is_in_engine: bool = True
    """The engine has the requests of all open groups."""
    _is_suspended: bool = False
    _is_syncing: bool = False
    _is_in_background: bool = False

    def __post_init__(self) -> None:
        self._open = OpenGroups(
            self.engine,
            self.scorer,
            self.prompts,
            self.rollout_cfg,
            self.decode,
            self.seed,
            counts=self._counting,
        )
        self._rounds = self._new_rounds(0)
        self._ahead = batches_ahead(self.pipeline_cfg)

    # -- batches ---------------------------------------------------------------------------------

    def admit(self, version: int) -> None:
        """Begin what may be begun under `version`, the engine's."""
        self._check_free()
        self._advance(version)
        self._hand_over()
        self._admit()

    def pump(self, timeout_s: float) -> bool:
        """One step of the engine; what it finished is scored, what is scored is put into groups,
        and the room of what dynamic sampling drops is filled again.

        Waits at most `timeout_s` for a score where the engine has nothing to do. Returns whether
        anything is left to do before the next batch is taken or the weights change.
        """
        self._check_free()
        self._pump(timeout_s)
        return self._is_busy

    def take(self, version: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of the update from `version` to the next, in the order of their draw.

        Pumps until they are there. Fewer than `prompts_per_step` come back only when dynamic
        sampling has used up its rounds. `progress` is called after each step of the engine. Raises
        FailureRateError as soon as more samples of the batch have failed than `max_failure_rate`
        allows.
        """
        self._check_free()
        start = perf_counter()
        size = self.rollout_cfg.prompts_per_step
        self._advance(version)
        assert self._next_update == version, f"{version=} {self._next_update=}"
        self._rounds = self._new_rounds(size - sum(entry.complete for entry in self._open))
        self._hand_over()
        self._admit()
        while (batch := self._batch()) is None:
            assert self._is_busy, f"no batch of {size} in {self._describe()}"
            num_failed = self._open.num_failed
            self._pump(SCORE_WAIT_S)
            if self._open.num_failed > num_failed:
                limit = self.max_failure_rate
                check_failures(self._open, self.rollout_cfg, limit, num_wanted=size)
            if progress is not None:
                wanted = size * self.rollout_cfg.n_samples_per_prompt
                progress(sum(nlargest(size, (e.num_finished for e in self._open))), wanted)
        staleness = [version - entry.begun for entry in batch]
        assert max(staleness, default=0) <= self.pipeline_cfg.max_staleness, f"{staleness=}"
        groups = [self._open.hand_out(entry) for entry in batch]
        apply_masks(groups, self.rollout_cfg)
        self._next_update += 1
        self._counting.num_refill_rounds = self._rounds.num_refills
        self._rounds = self._new_rounds(0)
        self._admit()
        self._close_counts(staleness, perf_counter() - start)
        return groups

    def _batch(self) -> list[OpenGroup] | None:
        """The groups that the next update trains; None: not yet."""
        entries = list(self._open)
        size, used_up = self.rollout_cfg.prompts_per_step, self._rounds.are_used_up
        if self.pipeline_cfg.too_old == "drop":
            complete = [entry for entry in entries if entry.complete][:size]
            return complete if len(complete) == size or used_up else None
        chosen = choose(
            [self._deadline(entry) for entry in entries],
            [entry.complete for entry in entries],
            update=self._next_update,
            size=size,
            may_be_fewer=used_up,
        )
        return None if chosen is None else [entries[position] for position in chosen]

    def _deadline(self, entry: OpenGroup) -> int:
        """The last update that may train a group."""
        return entry.begun + self.pipeline_cfg.max_staleness

    @contextmanager
    def in_background(self) -> Generator[None]:
        """Inside, a thread pumps, and nothing else of this stream may be called.

        An error of the thread is raised at the end; beside one of the caller it becomes a note.
        """
        self._check_free()
        stop = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="rollout") as pool:
            self._is_in_background = True
            pumping = pool.submit(self._pump_until, stop)
            try:
                yield
            except BaseException as error:
                stop.set()
                if other := pumping.exception():
                    error.add_note(f"Meanwhile sampling had failed: {other!r}")
                raise
            finally:
                stop.set()
                wait([pumping])
                self._is_in_background = False
            pumping.result()

    def _pump_until(self, stop: Event) -> None:
        while self._is_busy and not stop.is_set():
            self._pump(SCORE_WAIT_S)

    # -- beginning and going on ------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self.engine.has_unfinished or self.scorer.pending > 0

    def _pump(self, timeout_s: float, *, admits: bool = True) -> None:
        if self.engine.has_unfinished:
            self._open.step()
            timeout_s = 0.0
        self._take_scores(timeout_s)
        if admits:
            self._admit()

    def _take_scores(self, timeout_s: float) -> None:
        for entry in self._open.take_scores(timeout_s):
            if not self.rollout_cfg.dynamic_sampling:
                continue
            is_kept = teaches(entry.group)
            self._rounds.judge(is_kept)
            if not is_kept:
                self._counting.count_dropped(self._open.hand_out(entry))

    def _new_rounds(self, num_missing: int) -> _Rounds:
        return _Rounds(num_missing, self.rollout_cfg.max_refill_rounds)

    def _admit(self) -> None:
        assert self._version is not None, "the stream has not been told the version of the weights"
        version = self._version
        for entry in self._open.begin(self._room, step=version + 1, version=version):
            self._open.submit(entry)

    @property
    def _room(self) -> int:
        """How many groups may be begun now."""
        assert self._version is not None
        if self._rounds.are_used_up:
            return 0
        if self._ahead == 0 and not all(entry.complete for entry in self._open):
            return 0  # as in the synchronous rollout, one round after the other
        num_batches = self._version + self._ahead + 1 - self._next_update
        return num_batches * self.rollout_cfg.prompts_per_step - len(self._open)

    def _hand_over(self) -> None:
        """Give the engine what was withdrawn."""
        if not self._is_in_engine:
            for entry in self._open:
                self._open.submit(entry)
            self._is_in_engine = True

    def _withdraw(self) -> None:
        self._open.withdraw(self._open)
        for entry in self._open:
            entry.put_first()
        self._is_in_engine = False

    def _advance(self, version: int) -> None:
        """The engine samples with `version` from now on; drop what that makes too old.

        With `wait` there is such a thing only in a run that goes on with less staleness.
        """
        assert version == self.engine.weight_version, f"{version=} {self.engine.weight_version=}"
        if version == self._version:
            return
        self._version = version
        self._next_update = max(self._next_update, version)
        entries, size = list(self._open), self.rollout_cfg.prompts_per_step
        if self.pipeline_cfg.too_old == "drop":
            late = [entry for entry in entries if self._deadline(entry) < self._next_update]
        else:
            deadlines = [self._deadline(entry) for entry in entries]
            positions = too_late(deadlines, update=self._next_update, size=size)
            late = [entries[position] for position in positions]
        for entry in late:
            self._open.discard(entry, is_in_engine=self._is_in_engine)
        self._counting.num_too_old += len(late)

    # -- changes of weights ----------------------------------------------------------------------

    def before_sync(self, progress: Progress | None = None) -> None:
        """Bring what is unfinished into the state in which weights may change, as
        `pipeline.in_flight` says; what was interrupted `rollout.max_aborted_count` times ends
        first. Nothing is pumped until `after_sync`.

        `progress` is called after each step of the engine, with finished and open samples. Legal
        while suspended, too.
        """
        assert not self._is_in_background, "a thread pumps; leave in_background() first"
        assert not self._is_syncing, "after_sync() comes first"
        if self._is_in_engine:
            if self.pipeline_cfg.in_flight == "finish":
                self._pump_while(lambda: self.engine.has_unfinished, progress)
            else:
                limit = self.rollout_cfg.max_aborted_count
                self._pump_while(lambda: any(e.is_overdue(limit) for e in self._open), progress)
                if self.pipeline_cfg.in_flight == "abort":
                    self._withdraw()
                for entry in self._open:
                    entry.aborted_count += not entry.generated
        self._counting.num_carried_samples = sum(len(entry.requests) for entry in self._open)
        self._is_syncing = True

    def after_sync(self, version: int) -> None:
        """The engine has the weights `version`: go on. What may be begun under them is begun by
        `take`, `pump` or `admit`."""
        assert self._is_syncing, "before_sync() comes first"
        self._is_syncing = False
        self._advance(version)
        if not self._is_suspended:
            self._hand_over()

    def _pump_while(self, condition: Callable[[], bool], progress: Progress | None) -> None:
        """Pump without beginning anything."""
        while condition():
            self._pump(0.0, admits=False)
            if progress is not None:
                num_samples = len(self._open) * self.rollout_cfg.n_samples_per_prompt
                progress(sum(entry.num_finished for entry in self._open), num_samples)

    # -- interruptions and state -----------------------------------------------------------------

    def suspend(self) -> None:
        """Withdraw everything from engine and scorer, for an evaluation or a checkpoint.

        Tokens are kept, keys and values are not. Does not count for `rollout.max_aborted_count`.
        """
        self._check_free()
        if self._is_in_engine:
            self._withdraw()
        while self.scorer.pending:
            self._take_scores(SCORE_WAIT_S)
        self._open.count()
        self._is_suspended = True

    def resume(self) -> None:
        """Go on after `suspend`."""
        assert self._is_suspended, "suspend() comes first"
        self._is_suspended = False
        self._open.start_counting()
        self._hand_over()

    def state_dict(self) -> dict[str, Any]:
        """Complete groups, unfinished samples and the running number of groups, as JSON-able
        values. While suspended, or before the first batch."""
        assert self._is_suspended or not len(self._open), "suspend() comes first"
        return self._open.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, or from that of a `Rollout`, when the next batch is taken.

        What can no longer be trained within the bound, because the run goes on with less staleness,
        is dropped then and counted.
        """
        assert not len(self._open), self._describe()
        self._open.load_state_dict(state)
        self._is_in_engine = False

    def _close_counts(self, staleness: list[int], wait_s: float) -> None:
        self._open.count()
        counts = self._counting
        counts.staleness = staleness
        counts.wait_s = wait_s
        counts.num_buffered_groups = sum(entry.complete for entry in self._open)
        counts.num_in_flight_samples = sum(len(entry.requests) for entry in self._open)
        self.counts = counts
        self._counting = self._open.counts = StreamCounts()

    def _check_free(self) -> None:
        """The stream is the caller's, and its engine may step."""
        assert not self._is_in_background, "a thread pumps; leave in_background() first"
        assert not self._is_suspended, "resume() comes first"
        assert not self._is_syncing, "after_sync() comes first"

    def _describe(self) -> str:
        num_complete = sum(entry.complete for entry in self._open)
        return f"{len(self._open)} open groups, {num_complete} complete; {self._version=}"
