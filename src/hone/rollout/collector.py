"""Collects the scored groups of each training step, from one buffer of groups in flight.

Weights have versions: version v is the policy after v updates. `pipeline` says how far sampling may
run ahead of training.

*Synchronous* (`pipeline.max_staleness` 0): a step starts `prompts_per_step` groups and waits for
all. With `oversample_prompts` it starts more, stops as soon as enough are generated, and carries
the rest over: unfinished samples are resumed from their tokens in the next step. With
`dynamic_sampling`, groups of equal rewards are dropped, and another round starts as many as are
missing. Only engine steps decide which groups form a step, never the speed of reward functions, so
the same seed gives the same run.

*Ahead* (asynchronous): the engine samples while the trainer trains. The update to version u + 1 may
train a group only while u is at most `max_staleness` above the version that started the group. So
each group has a deadline, and deadlines ascend. The number of groups in flight is bounded so that
all of them can meet their deadlines, and a batch is chosen so that the others still can
(`hone.rollout.staleness.choose`). Where a group must be in a batch and is not complete, the step
waits for it.

In synchronous mode several processes, each with its own engine, collect together: each process
draws all prompts, generates every n-th group and receives the groups of the others. Decisions use
only what all processes know, so all have the same groups in the same order as a single process.
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

from hone.config.run import EvaluationConfig
from hone.rollout.buffer import (
    Buffer,
    InFlightGroup,
    Progress,
    PromptSource,
    apply_masks,
    check_failures,
    has_reward_variance,
)
from hone.rollout.comm import Comm, SingleProcess
from hone.rollout.counts import RolloutCounts
from hone.rollout.episodes import Episodes, RenderTurn
from hone.rollout.evaluate import evaluate
from hone.rollout.requests import Decode
from hone.rollout.runner import SCORE_WAIT_S, Runner, SampleScorer
from hone.rollout.settings import PipelineConfig, RolloutConfig
from hone.rollout.staleness import choose, too_late
from hone.rollout.state import sample_of_values, sample_values
from hone.types import Group, Prompt, Request, Sample, SamplingEngine

__all__ = ["Collector", "Comm", "SingleProcess"]


MAX_REFILL_ROUNDS = 10
"""Rounds of further prompts of `dynamic_sampling` before a step goes on with fewer."""
REPORT_S = 0.5
"""Seconds between two counts of progress with sampling ahead, since a count visits all groups."""


@dataclass(frozen=True, slots=True)
class _GroupUpdate:
    """A group as one process sends it to the others, without its prompt, which they know; samples
    with a prompt of their own have it."""

    samples: list[dict[str, Any]]
    requests: Mapping[int, Request]
    """Requests of unfinished samples, by index, with the tokens so far of their turns."""
    episodes: Mapping[int, dict[str, Any]]
    """Earlier turns of unfinished samples, by index."""

    @classmethod
    def of(cls, entry: InFlightGroup) -> _GroupUpdate:
        prompt = entry.group.prompt
        return cls(
            [sample_values(sample, prompt) for sample in entry.group.samples],
            dict(entry.requests),
            {index: sample_values(sample, prompt) for index, sample in entry.episodes.items()},
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
    """The rounds of dynamic sampling with sampling ahead: each round has as many groups as the
    round before it dropped."""

    num_left: int
    """Groups of this round without rewards so far; 0 once no group is missing."""
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
    """Drives an engine and a scorer over a stream of prompts, and returns the scored groups of each
    training step. A step of the loop is

        groups = collector.collect(step)
        with collector.background():
            ...                                # train: version `step`
        with collector.pause(step):
            ...                                # push the weights to the engine

    A remote engine samples by itself; its `step` then returns after a short time even if nothing
    has finished. Only the collector may use the engine and the scorer, except inside `idle`. In
    synchronous mode both are idle between steps anyway.
    """

    engine: SamplingEngine
    scorer: SampleScorer
    prompts: PromptSource
    rollout_cfg: RolloutConfig
    decode: Decode
    """Converts the token ids of a completion to text (`hone.models.tokenizer.decoder`)."""
    pipeline_cfg: PipelineConfig = field(default_factory=PipelineConfig)
    """Default: synchronous."""
    seed: int = 0
    """Seed from which the seeds of all samples are derived."""
    max_failure_rate: float = 1.0
    """Largest share (0 to 1) of failed samples in a step; more end the run."""
    render: RenderTurn | None = None
    """Renders observations; required with an environment."""
    comm: Comm = field(default_factory=SingleProcess)
    meet: Callable[[bool], bool] = bool
    """Called with whether this process waits for scores, before it waits; returns whether it must
    go on. By default it decides alone. Where processes share a reward model
    (`hone.rollout.shared_judge`) the call is collective, scores what all have asked, and all go on
    as long as one of them waits."""
    on_complete: Callable[[Group], None] | None = None
    """Callback, with sampling ahead, for each complete group that will be trained; it runs in the
    polling thread."""
    on_scored: Callable[[Group], None] | None = None
    """Callback for each scored group, also one that dynamic sampling drops. In synchronous mode all
    processes call it with the same groups in the order in which their prompts were drawn, before
    the next prompt is drawn. With sampling ahead it runs in the polling thread, when a group is
    complete."""
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """Counters of the last step, from the end of the step before it."""
    _counting: RolloutCounts = field(init=False)
    """Counters of the next step."""
    _runner: Runner = field(init=False)
    _buffer: Buffer = field(init=False)
    _kept: list[InFlightGroup] = field(default_factory=list[InFlightGroup])
    """Groups of the step being collected, taken from the buffer in earlier rounds."""
    _rounds: _Rounds = field(init=False)
    _version: int | None = None
    """Version of the engine's weights, as of the last `collect` or weight sync."""
    _next_update: int = 0
    """The update that will train the next batch: at the current version, or at the next one."""
    _num_assigned: int = 0
    _num_failed: int = 0
    """Failed samples up to the last call of `_check_failures`."""
    _progress: tuple[int, int] = (0, 0)
    """The last reported progress, counted at `_progress_since`."""
    _progress_since: float = 0.0
    _wanted_before: float = math.inf
    """While there is no batch, only groups drawn before this order can make one possible."""
    _has_wanted: bool = False
    """Whether such a group has become complete."""
    _is_idle: bool = True
    _inside: str = ""
    """Name of the context manager that the caller must leave before other calls."""

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

        There are fewer than `prompts_per_step` only where dynamic sampling has used up its rounds.
        The engine must have version `step` - 1. `progress` is called after each engine step. Raises
        FailureRateError as soon as one process has more failed samples than `max_failure_rate`
        allows for the whole step.
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
        """Sample in a background thread while the caller trains in the block; in synchronous mode
        do nothing. The collector may not be called in the block. An error of the thread is raised
        at the end, or added as a note to the caller's error."""
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
        """Stop polling for the block, in which the caller pushes weights of `version`.
        `pipeline.in_flight` decides what happens to unfinished samples. Samples that were
        interrupted `rollout.max_aborted_count` times are finished before the block; `progress` is
        called after each engine step."""
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
        """Give engine and scorer to the caller in the block, for an evaluation or a checkpoint.
        Unfinished samples keep their tokens and lose their KV cache. This does not count as an
        interruption for `max_aborted_count`."""
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
        """Call `hone.rollout.evaluate.evaluate`; legal only inside `idle`. Collective."""
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
            meet=self.meet,
            progress=progress,
            should_stop=should_stop,
        )

    def _episodes(self, purpose: str) -> Episodes:
        return Episodes(
            decode=self.decode,
            max_turns=self.scorer.max_turns,
            max_turn_tokens=self.scorer.max_turn_tokens,
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
        all_are_needed = len(self._buffer) <= num_groups  # then processes need not communicate
        self._wait_for_answers(all_are_needed)
        while self._runner.is_sampling if all_are_needed else self._must_step(num_groups):
            self._buffer.step()
            self._wait_for_answers(all_are_needed)
            self._check_failures(num_groups)
            self._report(progress, num_groups)
        while self.meet(any(entry.generated and entry.unscored for entry in self._own())):
            self._buffer.poll(SCORE_WAIT_S)
            self._check_failures(num_groups)
            self._report(progress, num_groups)

    def _wait_for_answers(self, all_are_needed: bool) -> None:
        """Wait for the environment, since which groups make the step must not depend on how fast it
        answers."""
        while not all_are_needed and self._runner.num_unanswered:
            self._buffer.poll(SCORE_WAIT_S)

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
        """Take complete groups, oldest first, until there are enough. Dynamic sampling drops groups
        without reward variance."""
        cfg = self.rollout_cfg
        for entry in list(self._buffer):
            if not entry.complete or len(self._kept) == cfg.prompts_per_step:
                continue
            group = self._buffer.pop(entry)
            if self.on_scored is not None:
                self.on_scored(group)
            if cfg.dynamic_sampling and not has_reward_variance(group, cfg):
                self._counting.count_dropped(group)
            else:
                self._kept.append(entry)

    def _share(self, entries: Iterable[InFlightGroup]) -> None:
        """Send these groups of this process to the others, and receive theirs."""
        updates = {e.group.id: _GroupUpdate.of(e) for e in entries if not e.is_shared}
        start = perf_counter()
        updates_by_rank = self.comm.gather(updates)
        self._counting.wait_s += perf_counter() - start
        for rank, received in enumerate(updates_by_rank):
            for group_id, update in received.items():
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
        """The groups that the next update trains, from `num_complete` complete ones; None where
        there is no batch yet. Then the answer can change only when a group drawn before
        `_wanted_before` completes, or when a group is dropped."""
        size, used_up = self.rollout_cfg.prompts_per_step, self._rounds.are_used_up
        self._wanted_before = math.inf
        if num_complete < size and not used_up:  # avoids a pass over all groups in flight
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
        """Poll once; the number of groups that it completed, without dropped ones."""
        num_complete = self._keep(self._buffer.step())
        if admits and self._is_ahead:
            self._admit()
        return num_complete

    def _keep(self, completed: Iterable[InFlightGroup]) -> int:
        """With sampling ahead, drop groups without reward variance; the number of groups left."""
        drops, num_kept = self.rollout_cfg.dynamic_sampling and self._is_ahead, 0
        for entry in completed:
            if self._is_ahead and self.on_scored is not None:
                self.on_scored(entry.group)
            if drops:
                is_kept = has_reward_variance(entry.group, self.rollout_cfg)
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
        """Poll without starting new groups."""
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
        """Assign groups to processes in turn; return those of this process."""
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
        """Abort all requests of the engine. Their tokens are kept, and they are resumed first."""
        self._runner.withdraw()
        for entry in self._buffer:
            entry.prioritise()

    def _set_version(self, version: int) -> None:
        """Note that the engine has weights of `version`, and drop groups that are too old for it.
        There are such groups only when a run was resumed with a smaller `max_staleness`, before any
        request is submitted."""
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
        while self.meet(self.scorer.pending > 0):
            self._keep(self._buffer.poll(SCORE_WAIT_S))
        if len(self._buffer):
            self._share(self._own())
        self._buffer.count()
        self._is_idle = True

    def _resume(self) -> None:
        self._is_idle = False
        self._buffer.start_counting()
        if self._version is not None:  # else the first `collect` submits, when it knows the version
            self._submit_withdrawn()

    def _count_interruption(self) -> None:
        for entry in self._buffer:
            entry.aborted_count += not entry.generated
        self._counting.num_carried_samples = self._buffer.num_unfinished

    def state_dict(self) -> dict[str, Any]:
        """Complete groups, unfinished samples and the number of groups started, as JSON values.
        Legal only inside `idle`. Equal in all processes, and for any number of processes."""
        assert self._is_idle, "only inside idle()"
        return self._buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; `rollout` and `pipeline` settings may have changed.

        The next `collect` drops and counts groups that exceed `max_staleness`.
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
        """Call `progress` with finished and wanted samples of this process's `num_groups` groups
        that are furthest; they are counted at most every `every_s` seconds."""
        if progress is None:
            return
        if (now := monotonic()) >= self._progress_since + every_s:
            own = self._own()
            num_groups = min(num_groups, len(own))
            num_finished = sum(nlargest(num_groups, (entry.num_finished for entry in own)))
            self._progress = num_finished, num_groups * self.rollout_cfg.n_samples_per_prompt
            self._progress_since = now
        progress(*self._progress)
