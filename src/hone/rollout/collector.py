"""Collects the scored groups that each step trains, from one buffer of groups in flight.

Weights have versions: version v is the policy after v updates. `pipeline` says how far sampling may
run ahead of the training.

*Not ahead* (`pipeline.max_staleness` 0): a step starts `prompts_per_step` groups
and waits for all. With `oversample_prompts` it starts more, stops as soon as enough are generated,
and carries the rest over: unfinished samples are resumed from their tokens in the next step. With
`dynamic_sampling` groups of equal rewards are dropped, and another round starts as many as are
missing. Engine steps alone decide which groups make a step, never how fast rewards are computed, so
the same seed gives the same run.

*Ahead*: the engine samples while the trainer trains. A group may be trained in the update of
version u only while u is at most `max_staleness` above the version that started it, so it has a
deadline, and a later group never has an earlier one. The number of groups in flight is bounded such
that all can meet their deadlines, and a batch is chosen such that the others still can
(`hone.planner.staleness.choose`). Where a sample must be in a batch and is not complete, the step
waits for it.

Several processes, each with an engine of its own, collect together where sampling is not ahead: all
draw all prompts, each generates every n-th group and receives the others'. They decide by what all
of them know, so all hold the same groups in the same order, those that one process alone would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import compress, islice
from threading import Event
from time import monotonic, perf_counter
from typing import Any

from hone.config.pipeline import PipelineConfig
from hone.config.rollout import RolloutConfig
from hone.config.run import EvaluationConfig
from hone.planner.staleness import choose, too_late
from hone.rollout.buffer import (
    Buffer,
    InFlightGroup,
    Progress,
    PromptSource,
    apply_masks,
    check_failures,
    teaches,
)
from hone.rollout.comm import Comm, SingleProcess
from hone.rollout.counts import RolloutCounts
from hone.rollout.episodes import Episodes, RenderTurn
from hone.rollout.evaluate import evaluate
from hone.rollout.requests import Decode
from hone.rollout.runner import SCORE_WAIT_S, Runner, SampleScorer
from hone.rollout.state import sample_of_values, sample_values
from hone.types import Group, Prompt, Request, Sample, SamplingEngine

__all__ = ["Collector", "Comm", "SingleProcess"]


MAX_REFILL_ROUNDS = 10
"""Rounds of further prompts of `dynamic_sampling` before a step goes on with fewer."""
REPORT_S = 0.5
"""How often the progress of a step ahead of the training is counted: over all groups in flight."""


@dataclass(frozen=True, slots=True)
class _GroupUpdate:
    """What the process that generates a group sends to the others, which know its prompt."""

    samples: list[dict[str, Any]]
    requests: Mapping[int, Request]
    """Of each unfinished sample, by index, with the tokens so far of its turn."""
    episodes: Mapping[int, dict[str, Any]]
    """The earlier turns of those."""

    @classmethod
    def of(cls, entry: InFlightGroup) -> _GroupUpdate:
        return cls(
            [sample_values(sample) for sample in entry.group.samples],
            dict(entry.requests),
            {index: sample_values(sample) for index, sample in entry.episodes.items()},
        )

    def apply(self, entry: InFlightGroup) -> None:
        prompt = entry.group.prompt
        entry.group.samples = [sample_of_values(values, prompt) for values in self.samples]
        entry.requests = dict(self.requests)
        entry.episodes = {
            index: sample_of_values(values, prompt) for index, values in self.episodes.items()
        }


@dataclass(slots=True)
class _Rounds:
    """The rounds in which dynamic sampling looks for a batch ahead of the training: a round is as
    many groups as the one before it dropped."""

    num_left: int
    """Groups of this round that have no rewards yet; 0 once no group is missing."""
    max_rounds: int
    num_dropped: int = 0
    num_rounds: int = 1

    @property
    def are_used_up(self) -> bool:
        return self.num_rounds > self.max_rounds

    @property
    def num_refills(self) -> int:
        return min(self.num_rounds, self.max_rounds) - 1

    def count(self, is_kept: bool) -> None:
        if self.num_left <= 0:
            return
        self.num_left -= 1
        self.num_dropped += not is_kept
        if self.num_left == 0 and self.num_dropped:
            self.num_rounds += 1
            self.num_left, self.num_dropped = self.num_dropped, 0


@dataclass(slots=True)
class Collector:
    """Drives an engine and a scorer over a stream of prompts, and gives each step of training its
    groups of scored samples. A step of the loop is

        groups = collector.collect(step)
        with collector.background():
            ...                                # train: version `step`
        with collector.pause(step):
            ...                                # push the weights to the engine

    The engine may be one that samples by itself; its `step` then returns after a short time even if
    nothing has finished. All of its requests, and all samples of the scorer, must be the
    collector's, except inside `idle`. Between steps that are not ahead it is idle anyway.
    """

    engine: SamplingEngine
    scorer: SampleScorer
    prompts: PromptSource
    rollout_cfg: RolloutConfig
    decode: Decode
    """Token ids of a completion to its text (`hone.models.tokenizer.decoder`)."""
    pipeline_cfg: PipelineConfig = field(default_factory=PipelineConfig)
    """By default sampling and training take turns."""
    seed: int = 0
    """It draws all samples."""
    max_failure_rate: float = 1.0
    """Failed samples of a step, as a share (0 to 1), that end the run."""
    render: RenderTurn | None = None
    """Of observations; needed with an environment."""
    comm: Comm = field(default_factory=SingleProcess)
    on_complete: Callable[[Group], None] | None = None
    """Called ahead of the training with each complete group that will be trained, in the thread
    that polls."""
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """Of the last step: what happened since the one before it."""
    _counting: RolloutCounts = field(init=False)
    """Of the step that comes next."""
    _runner: Runner = field(init=False)
    _buffer: Buffer = field(init=False)
    _kept: list[InFlightGroup] = field(default_factory=list[InFlightGroup])
    """Groups of the step that is being collected, taken from the buffer in earlier rounds."""
    _rounds: _Rounds = field(init=False)
    _version: int | None = None
    """The engine's, as of the last `collect` or change of weights."""
    _next_update: int = 0
    """The update that the next batch is for: at the current version, or at the next one."""
    _num_assigned: int = 0
    _num_failed: int = 0
    """Failed samples, of all so far, that `_check_failures` has seen."""
    _progress: tuple[int, int] = (0, 0)
    """What was told last, counted at `_progress_since`."""
    _progress_since: float = 0.0
    _wanted_before: float = math.inf
    """Groups drawn before it may change that there is no batch yet, once they are complete."""
    _has_wanted: bool = False
    """One has become complete."""
    _is_idle: bool = True
    _inside: str = ""
    """The context that the caller must leave before it asks for anything else."""

    def __post_init__(self) -> None:
        self._counting = RolloutCounts()
        self._runner = Runner(self.engine, self.scorer, self._episodes("rollout"))
        self._buffer = Buffer(
            self._runner, self.scorer, self.prompts, self.rollout_cfg, counts=self._counting
        )
        self._rounds = self._new_rounds(0)
        assert not self._is_ahead or self.comm.size == 1, "one process samples ahead for all"

    @property
    def _is_ahead(self) -> bool:
        return self.pipeline_cfg.samples_ahead

    # -- a step of the loop ----------------------------------------------------------------------

    def collect(self, step: int, progress: Progress | None = None) -> list[Group]:
        """The scored groups of `step`, in the order in which their prompts were drawn.

        Fewer than `prompts_per_step` only where dynamic sampling has used up its rounds. The engine
        holds version `step` - 1. `progress` is called after each step of it. Raises
        FailureRateError as soon as a process alone has more failed samples than `max_failure_rate`
        allows of the step.
        """
        assert not self._inside, f"leave {self._inside}() first"
        if self._is_idle:
            self._resume()
        start = perf_counter()
        self._set_version(step - 1)
        self._submit_withdrawn()
        collect = self._collect_ahead if self._is_ahead else self._collect_in_rounds
        batch = collect(progress)
        groups = [entry.group for entry in batch]
        apply_masks(groups, self.rollout_cfg)
        self._next_update = step
        if not self._is_ahead:
            self._suspend()
            self._count_interruption()
        else:
            self._admit()
        self._close_counts(batch, perf_counter() - start)
        return groups

    @contextmanager
    def background(self) -> Generator[None]:
        """Inside, the caller trains. Ahead of it, a thread polls, and the collector may not be
        called: an error of the thread is raised at the end, or becomes a note of the caller's."""
        if not self._is_ahead:
            yield
            return
        stop = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="rollout") as pool:
            self._inside = "background"
            polling = pool.submit(self._poll_until, stop)
            try:
                yield
            except BaseException as error:
                stop.set()
                if other := polling.exception():
                    error.add_note(f"Meanwhile sampling had failed: {other!r}")
                raise
            finally:
                stop.set()
                wait([polling])
                self._inside = ""
            polling.result()

    @contextmanager
    def pause(self, version: int, progress: Progress | None = None) -> Generator[None]:
        """Inside, the engine receives `version`; unfinished samples are as `pipeline.in_flight`
        says, and nothing is polled. Samples that were interrupted `rollout.max_aborted_count` times
        are finished before, with `progress` called after each step of the engine."""
        assert not self._inside, f"leave {self._inside}() first"
        if self._runner.is_submitted and not self._is_idle:
            self._stop_for_weights(progress)
        self._inside = "pause"
        yield
        self._inside = ""
        self._set_version(version)
        if not self._is_idle:
            self._submit_withdrawn()

    @contextmanager
    def idle(self) -> Generator[None]:
        """Inside, engine and scorer are the caller's, for an evaluation or a checkpoint: samples
        keep their tokens, not their keys and values. No interruption for `max_aborted_count`."""
        assert not self._inside, f"leave {self._inside}() first"
        if self._is_idle:
            yield
            return
        self._suspend()
        yield
        self._resume()

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        cfg: EvaluationConfig,
        *,
        progress: Progress | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[Sample] | None:
        """As `hone.rollout.evaluate.evaluate`; while idle. Collective."""
        assert self._is_idle, "only inside idle()"
        return evaluate(
            prompts,
            engine=self.engine,
            scorer=self.scorer,
            cfg=cfg,
            stop=self.rollout_cfg.stop,
            episodes=self._episodes("eval"),
            max_failure_rate=self.max_failure_rate,
            comm=self.comm,
            progress=progress,
            should_stop=should_stop,
        )

    def _episodes(self, purpose: str) -> Episodes:
        return Episodes(
            decode=self.decode,
            max_turns=self.scorer.max_turns,
            render=self.render,
            run_seed=self.seed,
            purpose=purpose,
        )

    # -- not ahead: one round after the other ----------------------------------------------------

    def _collect_in_rounds(self, progress: Progress | None) -> list[InFlightGroup]:
        cfg, self._kept = self.rollout_cfg, []
        for number in range(MAX_REFILL_ROUNDS):
            self._counting.num_refill_rounds = number
            self._admit()
            self._generate(cfg.prompts_per_step - len(self._kept), progress)
            self._share(entry for entry in self._own() if entry.complete)
            self._keep_complete()
            if len(self._kept) == cfg.prompts_per_step or not cfg.dynamic_sampling:
                break
        kept, self._kept = self._kept, []
        return sorted(kept, key=lambda entry: entry.order)

    def _generate(self, num_groups: int, progress: Progress | None) -> None:
        """Run the engine until enough groups are generated, then wait for their scores."""
        all_are_needed = len(self._buffer) <= num_groups  # then no process must ask the others
        while self._runner.is_sampling if all_are_needed else self._must_step(num_groups):
            self._buffer.step()
            while not all_are_needed and self._runner.num_undecided:
                # Which groups make the step must not depend on how fast samples are answered.
                self._buffer.poll(SCORE_WAIT_S)
            self._check_failures(num_groups)
            self._report(progress, num_groups)
        while any(entry.generated and entry.unscored for entry in self._own()):
            self._buffer.poll(SCORE_WAIT_S)
            self._check_failures(num_groups)
            self._report(progress, num_groups)

    def _must_step(self, num_groups: int) -> bool:
        """Whether engines must make another step: all processes together have generated too few
        groups, or a sample has been interrupted too often to be carried over."""
        own = self._own()
        num_generated, num_overdue, num_busy = self.comm.total(
            sum(entry.generated for entry in own),
            sum(entry.is_overdue(self.rollout_cfg.max_aborted_count) for entry in own),
            self._runner.is_sampling,
        )
        return num_busy > 0 and (num_overdue > 0 or num_generated < num_groups)

    def _keep_complete(self) -> None:
        """Take complete groups, oldest first, until there are enough; drop what does not teach."""
        cfg = self.rollout_cfg
        for entry in list(self._buffer):
            if not entry.complete or len(self._kept) == cfg.prompts_per_step:
                continue
            group = self._buffer.pop(entry)
            if cfg.dynamic_sampling and not teaches(group, cfg):
                self._counting.count_dropped(group)
            else:
                self._kept.append(entry)

    def _share(self, entries: Iterable[InFlightGroup]) -> None:
        """Send the other processes these groups of ours, and take theirs over."""
        updates = {e.group.id: _GroupUpdate.of(e) for e in entries if not e.is_shared}
        start = perf_counter()
        everyones = self.comm.gather(updates)
        self._counting.wait_s += perf_counter() - start
        for rank, theirs in enumerate(everyones):
            for group_id, update in theirs.items():
                entry = self._buffer.by_id[group_id]
                if rank != self.comm.rank:
                    update.apply(entry)
                entry.is_shared = entry.complete

    # -- ahead: groups are started as soon as there is room --------------------------------------

    def _collect_ahead(self, progress: Progress | None) -> list[InFlightGroup]:
        size = self.rollout_cfg.prompts_per_step
        assert self._next_update == self._version, f"{self._next_update=} {self._version=}"
        self._rounds = self._new_rounds(size - sum(entry.complete for entry in self._buffer))
        self._admit()
        self._progress_since = 0.0
        num_complete = sum(entry.complete for entry in self._buffer)
        batch = self._choose_batch(num_complete)
        while batch is None:
            assert self._is_busy, f"no batch of {size} in {len(self._buffer)} groups"
            num_dropped, self._has_wanted = self._counting.num_dropped_groups, False
            num_complete += self._step()
            if self._has_wanted or self._counting.num_dropped_groups > num_dropped:
                batch = self._choose_batch(num_complete)
            self._check_failures(size)
            self._report(progress, size, every_s=REPORT_S)
        for entry in batch:
            self._buffer.pop(entry)
        self._counting.num_refill_rounds = self._rounds.num_refills
        self._rounds = self._new_rounds(0)
        return batch

    def _choose_batch(self, num_complete: int) -> list[InFlightGroup] | None:
        """The groups that the next update trains, of `num_complete` that could be; None: not yet.
        Only what has become complete before the last one looked at, or was dropped, changes the
        answer."""
        size, used_up = self.rollout_cfg.prompts_per_step, self._rounds.are_used_up
        self._wanted_before = math.inf
        if num_complete < size and not used_up:  # without a look at all that are in flight
            return None
        entries = list(self._buffer)
        is_complete = [entry.complete for entry in entries]
        chosen = choose(
            [self._deadline(entry) for entry in entries],
            is_complete,
            update=self._next_update,
            size=size,
            may_be_fewer=used_up,
        )
        if chosen is None and not used_up:
            *_, last = islice(compress(entries, is_complete), size)
            self._wanted_before = last.order
        return None if chosen is None else [entries[position] for position in chosen]

    def _deadline(self, entry: InFlightGroup) -> int:
        """The last update that may train a group."""
        return entry.start_version + self.pipeline_cfg.max_staleness

    @property
    def _is_busy(self) -> bool:
        return self._runner.has_requests or self.scorer.pending > 0

    def _step(self, *, admits: bool = True) -> int:
        """How many groups this has made complete, but for those that are dropped."""
        num_complete = self._keep(self._buffer.step())
        if admits and self._is_ahead:
            self._admit()
        return num_complete

    def _keep(self, completed: Iterable[InFlightGroup]) -> int:
        """Drop the groups that do not teach; how many are left."""
        drops, num_kept = self.rollout_cfg.dynamic_sampling and self._is_ahead, 0
        for entry in completed:
            if drops:
                is_kept = teaches(entry.group, self.rollout_cfg)
                self._rounds.count(is_kept)
                if not is_kept:
                    self._counting.count_dropped(self._buffer.pop(entry))
                    continue
            num_kept += 1
            self._has_wanted |= entry.order < self._wanted_before
            if self._is_ahead and self.on_complete is not None:
                self.on_complete(entry.group)
        return num_kept

    def _poll_until(self, stop: Event) -> None:
        while self._is_busy and not stop.is_set():
            self._step()

    def _poll_while(self, condition: Callable[[], bool], progress: Progress | None) -> None:
        """Poll without starting anything."""
        while condition():
            self._step(admits=False)
            self._report(progress, len(self._buffer))

    def _stop_for_weights(self, progress: Progress | None) -> None:
        if self.pipeline_cfg.in_flight == "finish":
            self._poll_while(lambda: self._runner.is_sampling, progress)
        else:
            limit = self.rollout_cfg.max_aborted_count
            self._poll_while(lambda: any(e.is_overdue(limit) for e in self._buffer), progress)
            if self.pipeline_cfg.in_flight == "abort":
                self._withdraw()
        self._count_interruption()

    # -- groups into the engine and out of it ----------------------------------------------------

    def _own(self) -> list[InFlightGroup]:
        if self.comm.size == 1:
            return list(self._buffer)
        return [entry for entry in self._buffer if entry.rank == self.comm.rank]

    def _assign_to_ranks(self, entries: Iterable[InFlightGroup]) -> list[InFlightGroup]:
        """Give each group to the next process; those of this one."""
        own: list[InFlightGroup] = []
        for entry in entries:
            entry.rank = self._num_assigned % self.comm.size
            self._num_assigned += 1
            if entry.rank == self.comm.rank:
                own.append(entry)
        return own

    def _admit(self) -> None:
        """Start as many groups as there is room for."""
        assert self._version is not None
        version = self._version
        drawn = self._buffer.draw(self._num_free_slots, step=version + 1, version=version)
        self._runner.submit(self._assign_to_ranks(drawn))

    @property
    def _num_free_slots(self) -> int:
        """How many groups may be started now."""
        assert self._version is not None
        if self._rounds.are_used_up:
            return 0
        cfg, num_batches = self.rollout_cfg, 1
        if self._is_ahead:
            num_batches += self._version + self.pipeline_cfg.max_staleness - self._next_update
        size = num_batches * cfg.prompts_per_step + cfg.oversample_prompts
        return size - len(self._kept) - len(self._buffer)

    def _submit_withdrawn(self) -> None:
        if not self._runner.is_submitted:
            self._num_assigned = 0
            self._runner.resume(self._assign_to_ranks(self._buffer))

    def _withdraw(self) -> None:
        """Take all requests out of the engine; their tokens are kept, and they go first later."""
        self._runner.withdraw()
        for entry in self._buffer:
            entry.prioritise()

    def _set_version(self, version: int) -> None:
        """The engine samples with `version` from now on. Drop groups that this makes too old: there
        are some only in a run that was resumed with a smaller staleness, before any is submitted.
        """
        assert version == self.engine.weight_version, f"{version=} {self.engine.weight_version=}"
        if version == self._version:
            return
        self._version = version
        self._next_update = max(self._next_update, version)
        if not self._is_ahead:
            return
        entries, size = list(self._buffer), self.rollout_cfg.prompts_per_step
        deadlines = [self._deadline(entry) for entry in entries]
        late = too_late(deadlines, update=self._next_update, size=size)
        assert not (late and self._runner.is_submitted), f"{late=}"
        for position in late:
            self._buffer.pop(entries[position])
        self._counting.num_too_old += len(late)

    # -- interruptions and state -----------------------------------------------------------------

    def _suspend(self) -> None:
        """Withdraw everything from engine and scorer."""
        if self._runner.is_submitted:
            self._withdraw()
        while self.scorer.pending:
            self._keep(self._buffer.poll(SCORE_WAIT_S))
        if len(self._buffer):
            self._share(self._own())
        self._buffer.count()
        self._is_idle = True

    def _resume(self) -> None:
        self._is_idle = False
        self._buffer.start_counting()
        if self._version is not None:  # else the first step submits, at the version that it has
            self._submit_withdrawn()

    def _count_interruption(self) -> None:
        for entry in self._buffer:
            entry.aborted_count += not entry.generated
        self._counting.num_carried_samples = self._buffer.num_unfinished

    def state_dict(self) -> dict[str, Any]:
        """Complete groups, unfinished samples and the running number of groups, as JSON-able
        values; while idle. The same in all processes, and for any number of them."""
        assert self._is_idle, "only inside idle()"
        return self._buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, of a run with any other `rollout` and `pipeline` settings.

        Groups that can no longer be trained within the bound on staleness are dropped by the next
        `collect`, and counted.
        """
        assert not len(self._buffer)
        self._buffer.load_state_dict(state)
        self._runner.is_submitted = False

    # -- counts ----------------------------------------------------------------------------------

    def _new_rounds(self, num_missing: int) -> _Rounds:
        return _Rounds(num_missing, MAX_REFILL_ROUNDS)

    def _close_counts(self, batch: list[InFlightGroup], seconds: float) -> None:
        self._buffer.count()
        counts = self._counting
        if self._is_ahead:
            counts.staleness = [self._next_update - 1 - entry.start_version for entry in batch]
            assert max(counts.staleness, default=0) <= self.pipeline_cfg.max_staleness
            counts.wait_s = seconds
            counts.num_buffered_groups = sum(entry.complete for entry in self._buffer)
            counts.num_in_flight_samples = self._buffer.num_unfinished
        self.counts = RolloutCounts.over(self.comm.gather(counts))
        self._counting = self._buffer.counts = RolloutCounts()

    def _check_failures(self, num_wanted: int) -> None:
        """Raise FailureRateError where too many samples have failed, however the rest is scored."""
        if self._runner.num_failed > self._num_failed:
            self._num_failed = self._runner.num_failed
            limit = self.max_failure_rate
            check_failures(self._buffer, self.rollout_cfg, limit, num_wanted=num_wanted)

    def _report(self, progress: Progress | None, num_groups: int, *, every_s: float = 0.0) -> None:
        """Call `progress` with the samples of the `num_groups` groups of ours that lead, which are
        counted again `every_s`."""
        if progress is None:
            return
        if (now := monotonic()) >= self._progress_since + every_s:
            own = self._own()
            num_groups = min(num_groups, len(own))
            num_finished = sum(nlargest(num_groups, (entry.num_finished for entry in own)))
            self._progress = num_finished, num_groups * self.rollout_cfg.n_samples_per_prompt
            self._progress_since = now
        progress(*self._progress)
