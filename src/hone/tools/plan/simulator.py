"""Simulator of a run: the time of each phase of a step for a mode, a placement and completion
lengths.

    run = simulate(placement, rates, lengths, num_prompt_tokens=256, num_steps=20,
                   rollout=cfg.rollout, pipeline=cfg.pipeline, engine=cfg.engine)
    run.step_s, run.tokens_per_s, run.engine_idle, run.trainer_idle

Engines (`simulated_engine.py`) jump from one end of a sample to the next; the controller deals
groups to the engine with the fewest outstanding tokens, takes batches, trains and syncs by the
rules of a run. With B = `rollout.prompts_per_step` and k = `pipeline.max_staleness`:

* Synchronous: a step begins what is missing of B + `oversample_prompts` groups, trains the first B
  that are complete and carries the rest over with its tokens.
* Asynchronous: at each version groups are started until (1 + k) B are not trained. A group that
  was started under version b is trained by update b + k at the latest.

Rewards take no time of their own, and evaluation and checkpoints are left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hone.distributed.settings import RoleName
from hone.engine.settings import EngineConfig
from hone.rollout.settings import PipelineConfig, RolloutConfig
from hone.rollout.staleness import choose
from hone.tools.plan.simulated_engine import EngineRates, SimulatedEngine, SimulatedSample

__all__ = [
    "Others",
    "Placement",
    "Rates",
    "SimulatedRun",
    "SimulatedStep",
    "Simulation",
    "simulate",
]

Others: TypeAlias = tuple[tuple[RoleName, int], ...]
"""Roles besides policy and engines that have devices of their own, each with their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of trainers and engines."""

    num_trainers: int
    num_engines: int
    tensor_parallel_size: int = 1
    """Number of devices of an engine."""
    colocated: bool = False
    """Whether engines are on the trainers' devices, in turn with them."""
    others: Others = ()
    """Devices of the critic and of frozen models that the search has given some."""

    @property
    def num_gpus(self) -> int:
        others = sum(number for _, number in self.others)
        engines = self.num_engines * self.tensor_parallel_size
        return self.num_trainers + others + (0 if self.colocated else engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Seconds that remote models take for the rows of an update."""

    seconds: Mapping[RoleName, float] = field(default_factory=dict[RoleName, float])
    """Seconds of all copies together, by role."""
    beside_s: float = 0.0
    """Seconds in which the trainers score the rows themselves."""
    left_s: float = 0.0
    """Remaining seconds of a reward model after the last sample has ended."""

    @property
    def wait_s(self) -> float:
        """Seconds that trainers wait if all samples end at once."""
        scored = [x for name, x in self.seconds.items() if name != "reward_model"]
        return max(max(scored, default=0.0) - self.beside_s, 0.0) + self.left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Times of the parts of a placement, in seconds."""

    engine: EngineRates
    train_s: Callable[[Sequence[int], int], float]
    """Function that gives the trainers' seconds for an update, once all inputs are there, from the
    lengths of its rows, prompts included, and the number of trained tokens."""
    sync_s: float
    """Weights to the engines; colocated, with sleep and wake. Trainers and engines take part."""
    max_num_keys: int
    """Tokens whose keys and values fit the cache of an engine."""
    scoring: Callable[[Sequence[int], int], Scoring] | None = None
    """Times of remote models for such rows, in addition to `train_s`; None without such models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One update: waiting for its samples, training, waiting for engines to come to a halt, and
    sync, one after the other."""

    start_s: float
    wait_s: float
    train_s: float
    halt_s: float
    sync_s: float
    num_tokens: int
    """Trained rows, prompts included."""
    num_completion_tokens: int
    """Sampled tokens among them."""
    groups: tuple[int, ...]
    """Numbers of the groups that were trained, in the order in which they were started."""
    staleness: tuple[int, ...]
    """Staleness of each group: the updates between the weights that started it and those it
    trained."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.wait_s + self.train_s + self.halt_s + self.sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Result of a simulation. Rates and shares leave out the first quarter of the steps."""

    placement: Placement
    rollout: RolloutConfig
    pipeline: PipelineConfig
    steps: tuple[SimulatedStep, ...]
    engine_busy: tuple[tuple[tuple[float, float], ...], ...]
    """Intervals in which each engine worked."""
    num_sampled_tokens: int
    num_open_tokens: int
    """The part of these tokens that belongs to samples that were started and not trained."""
    num_preemptions: int

    @property
    def steady(self) -> tuple[SimulatedStep, ...]:
        """The steps after the first quarter, which are counted."""
        return self.steps[len(self.steps) // 4 :]

    @property
    def seconds(self) -> float:
        """All counted steps."""
        return self.steady[-1].end_s - self.steady[0].start_s

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steady)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of trained rows, prompts included, over all devices: `perf/tokens_per_s` of a
        run."""
        return self._rate(sum(step.num_tokens for step in self.steady))

    @property
    def completion_tokens_per_s(self) -> float:
        """Sampled tokens a second: `rollout/num_tokens` of a run, over `time/step_s`."""
        return self._rate(sum(step.num_completion_tokens for step in self.steady))

    def _rate(self, number: int) -> float:
        """`number` per second; inf for steps that take no time."""
        return number / self.seconds if self.seconds else math.inf

    @property
    def engine_idle(self) -> float:
        """Share of the time in which an engine's devices do no work, the mean over engines."""
        start, end = self.steady[0].start_s, self.steady[-1].end_s
        worked = sum(
            max(min(stop, end) - max(begin, start), 0.0)
            for intervals in self.engine_busy
            for begin, stop in intervals
        ) / len(self.engine_busy)
        others = sum(x.sync_s + x.train_s * self.placement.colocated for x in self.steady)
        return max(1.0 - (worked + others) / self.seconds, 0.0) if self.seconds else 0.0

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainers' devices do no work; colocated, they are the
        engines' devices, too."""
        if self.placement.colocated:
            return self.engine_idle
        waited_s = sum(step.wait_s + step.halt_s for step in self.steady)
        return waited_s / self.seconds if self.seconds else 0.0

    @property
    def staleness_mean(self) -> float:
        found = [staleness for step in self.steady for staleness in step.staleness]
        return sum(found) / len(found)

    @property
    def staleness_max(self) -> int:
        return max(staleness for step in self.steps for staleness in step.staleness)


def simulate(
    placement: Placement,
    rates: Rates,
    lengths: Sequence[Sequence[int]],
    *,
    num_prompt_tokens: int,
    num_steps: int,
    rollout: RolloutConfig,
    pipeline: PipelineConfig,
    engine: EngineConfig,
) -> SimulatedRun:
    """Simulate `num_steps` updates, as `Simulation` does, in one go."""
    simulation = Simulation(
        placement,
        rates,
        lengths,
        num_prompt_tokens=num_prompt_tokens,
        rollout=rollout,
        pipeline=pipeline,
        engine=engine,
    )
    return simulation.until(num_steps)


class Simulation:
    """A simulation that can go on after some updates: `simulation.until(3)`, then
    `simulation.until(20)`, which simulates the other 17."""

    def __init__(
        self,
        placement: Placement,
        rates: Rates,
        lengths: Sequence[Sequence[int]],
        *,
        num_prompt_tokens: int,
        rollout: RolloutConfig,
        pipeline: PipelineConfig,
        engine: EngineConfig,
    ) -> None:
        """`lengths` are the completion lengths of the samples of each group, from the start again
        when they are used up; groups without samples are passed over.

        Raises ValueError for lengths of no sample at all, for a cache that one full sample does not
        fit, and in `until` for times that are no times.
        """
        lengths = [group for group in lengths if group]
        if not lengths:
            raise ValueError("there is no sample to simulate")
        longest = num_prompt_tokens + max(rollout.max_completion_tokens, *map(max, lengths))
        if longest >= rates.max_num_keys:
            raise ValueError(
                f"{longest} tokens of a sample do not fit a cache: {rates.max_num_keys=}"
            )
        self._steps: list[SimulatedStep] = []
        self._run = _Run(
            placement=placement,
            rates=rates,
            lengths=lengths,
            num_prompt_tokens=num_prompt_tokens,
            rollout=rollout,
            pipeline=pipeline,
            engines=[
                SimulatedEngine(
                    rates.engine,
                    engine.max_num_seqs,
                    rates.max_num_keys,
                    shares_prompts=engine.enable_prefix_caching,
                )
                for _ in range(placement.num_engines)
            ],
        )

    def until(self, num_steps: int) -> SimulatedRun:
        """The run of so many updates, at least as many as were simulated before."""
        run = self._run
        self._steps += (run.step(update) for update in range(len(self._steps), num_steps))
        open_samples = [x for group in run.open.values() for x in group.samples]
        num_uncounted = sum(engine.num_uncounted_tokens for engine in run.engines)
        return SimulatedRun(
            placement=run.placement,
            rollout=run.rollout,
            pipeline=run.pipeline,
            steps=tuple(self._steps),
            engine_busy=tuple(tuple(engine.busy) for engine in run.engines),
            num_sampled_tokens=sum(engine.num_tokens for engine in run.engines),
            num_open_tokens=sum(x.done for x in open_samples) + num_uncounted,
            num_preemptions=sum(engine.num_preemptions for engine in run.engines),
        )


def _time(seconds: float, name: str) -> float:
    """`seconds`, if it is finite and not negative. Raises ValueError otherwise."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be a finite time, is {seconds}")
    return seconds


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    version: int
    """Version of the weights that started it."""
    samples: list[SimulatedSample]
    num_unfinished: int
    completed_s: float = 0.0
    is_complete: bool = False
    """Whether the controller has all of its samples."""
    aborted_count: int = 0


@dataclass(slots=True, kw_only=True)
class _Run:
    placement: Placement
    rates: Rates
    lengths: Sequence[Sequence[int]]
    num_prompt_tokens: int
    rollout: RolloutConfig
    pipeline: PipelineConfig
    engines: list[SimulatedEngine]
    now_s: float = 0.0
    open: dict[int, _Group] = field(default_factory=dict[int, _Group])
    """Groups that were started and not trained, in this order."""
    num_complete: int = 0
    """Those of them that are complete."""
    num_started: int = 0
    events_s: list[float] = field(init=False)
    """Time of the next change of each engine's batch."""
    changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Heap of these times, each with the number of its engine; times that an engine no longer has
    are among them."""
    completing: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Heap of completing groups: time of completion and number."""
    suspended: list[_Group] = field(default_factory=list[_Group])
    scorers_free_s: dict[RoleName, float] = field(default_factory=dict[RoleName, float])
    """Times at which remote models finish their queued work."""
    scored_s: dict[int, float] = field(default_factory=dict[int, float])
    """Time at which references and teachers have scored a group, by the group's number."""

    def __post_init__(self) -> None:
        self.events_s = [math.inf] * len(self.engines)

    def step(self, update: int) -> SimulatedStep:
        """Take a batch, train on it, and sync the weights to the engines."""
        start_s = self.now_s
        self._begin(update)
        while (batch := self._choose(update)) is None:
            self._await_completion()
        if not self.pipeline.samples_ahead:
            self._halt()
            self.suspend()
        trained_from_s = self.now_s
        rows = [x.num_prompt_tokens + x.length for group in batch for x in group.samples]
        num_trained = sum(x.length for group in batch for x in group.samples)
        scoring = Scoring() if self.rates.scoring is None else self.rates.scoring(rows, num_trained)
        train_s = _time(self.rates.train_s(rows, num_trained), "train_s")
        if self.pipeline.samples_ahead:
            scored_s = max(self.scored_s.get(group.number, 0.0) for group in batch)
            train_s += max(scored_s - (self.now_s + scoring.beside_s), 0.0)
        else:
            train_s += scoring.wait_s
        trained_s = trained_from_s + train_s
        while self._next_completion(trained_s):
            pass
        self.now_s = trained_s
        self.num_complete -= len(batch)
        for group in batch:
            del self.open[group.number]
            self.scored_s.pop(group.number, None)
        halted_s = self._sync()
        return SimulatedStep(
            start_s=start_s,
            wait_s=trained_from_s - start_s,
            train_s=train_s,
            halt_s=halted_s - trained_s,
            sync_s=self.now_s - halted_s,
            num_tokens=sum(rows),
            num_completion_tokens=num_trained,
            groups=tuple(group.number for group in batch),
            staleness=tuple(update - group.version for group in batch),
        )

    # -- groups -----------------------------------------------------------------------------------

    def _begin(self, version: int) -> None:
        """Assign the returned groups to engines, then new groups."""
        loads = [(engine.outstanding_tokens, n) for n, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        for group in self.suspended:
            self._assign_to_engine(group, loads)
        self.suspended = []
        num_groups, pipeline = self.rollout.prompts_per_step, self.pipeline
        if pipeline.samples_ahead:
            most = num_groups * (1 + pipeline.max_staleness)
        else:
            most = num_groups + self.rollout.oversample_prompts
        for _ in range(most - len(self.open)):
            number, self.num_started = self.num_started, self.num_started + 1
            lengths = self.lengths[number % len(self.lengths)]
            cut = self.rollout.max_completion_tokens
            samples = [
                SimulatedSample(number, length, self.num_prompt_tokens, cut) for length in lengths
            ]
            num_unfinished = sum(sample.length > 0 for sample in samples)
            group = self.open[number] = _Group(number, version, samples, num_unfinished)
            if num_unfinished:
                self._assign_to_engine(group, loads)
            else:  # nothing to sample, as where all samples failed
                group.completed_s = self.now_s
                self._finish(group)

    def _assign_to_engine(self, group: _Group, loads: list[tuple[int, int]]) -> None:
        """Assign the unfinished samples of a group to the engine with the fewest outstanding
        tokens, which is the first of the heap `loads` of (these tokens, number of the engine)."""
        _, index = loads[0]
        engine = self.engines[index]
        unfinished = [sample for sample in group.samples if sample.done < sample.length]
        engine.submit(unfinished, self.now_s)
        heapq.heapreplace(loads, (engine.outstanding_tokens, index))
        self._refresh(index)

    def _choose(self, update: int) -> list[_Group] | None:
        """The batch of this update, in the order in which it was started; None: not yet."""
        num_groups = self.rollout.prompts_per_step
        if self.num_complete < num_groups:
            return None
        groups = list(self.open.values())
        if not self.pipeline.samples_ahead:
            complete = [group for group in groups if group.is_complete]
            return None if self._is_overdue() else complete[:num_groups]
        chosen = choose(
            [group.version + self.pipeline.max_staleness for group in groups],
            [group.is_complete for group in groups],
            update=update,
            size=num_groups,
        )
        return None if chosen is None else [groups[index] for index in chosen]

    # -- weights ----------------------------------------------------------------------------------

    def _sync(self) -> float:
        """Halt the engines in the configured way and sync the weights; returns the time of the
        halt."""
        is_ahead, in_flight = self.pipeline.samples_ahead, self.pipeline.in_flight
        if is_ahead and in_flight == "finish":
            while self._next_event_s() < math.inf:
                self._next_event()
        elif is_ahead:
            while self._is_overdue():
                self._await_completion()
        self._halt()
        if is_ahead and in_flight == "abort":
            self.suspend()
        elif is_ahead:
            self._count_interrupted()
        halted_s = self.now_s
        self.now_s += _time(self.rates.sync_s, "sync_s")
        for index, engine in enumerate(self.engines):
            engine.hold(self.now_s)
            self._refresh(index)
        return halted_s

    def _halt(self) -> None:
        """Let every engine finish its current step."""
        for index, engine in enumerate(self.engines):
            engine.settle(self.now_s)
            self._refresh(index)
        self.now_s = max(engine.time_s for engine in self.engines)
        while self.completing and self.completing[0][0] <= self.now_s:  # others are being scored
            self._see_completion()

    def suspend(self) -> None:
        """Withdraw unfinished samples with their tokens."""
        for index, engine in enumerate(self.engines):
            engine.abort()
            self._refresh(index)
        self.suspended = self._count_interrupted()

    def _count_interrupted(self) -> list[_Group]:
        """Count the interruption for all unfinished groups and return them."""
        interrupted = [group for group in self.open.values() if group.num_unfinished]
        for group in interrupted:
            group.aborted_count += 1
        return interrupted

    def _is_overdue(self) -> bool:
        """Whether an unfinished group has reached the limit of interruptions, so that it must
        finish first."""
        limit = self.rollout.max_aborted_count
        return limit is not None and any(
            group.aborted_count >= limit and not group.is_complete for group in self.open.values()
        )

    # -- time -------------------------------------------------------------------------------------

    def _next_completion(self, until_s: float) -> bool:
        """Let engines work until a group is complete, with all that are at the same time; False:
        none is by then."""
        completing = self.completing
        while True:
            event_s = self._next_event_s()
            completed_s = completing[0][0] if completing else math.inf
            first_s = min(event_s, completed_s)
            if first_s > until_s or first_s == math.inf:
                return False
            if completed_s < event_s:
                while completing and completing[0][0] == completed_s:
                    self._see_completion()
                return True
            self._next_event()

    def _await_completion(self) -> None:
        """Let engines work until a group is complete."""
        if not self._next_completion(math.inf):
            raise RuntimeError(f"nothing is left to wait for: {len(self.open)} groups are open")

    def _next_event_s(self) -> float:
        """Time of the next event of all engines; inf where nothing runs."""
        changes, events_s = self.changes, self.events_s
        while changes and events_s[changes[0][1]] != changes[0][0]:
            heapq.heappop(changes)
        return changes[0][0] if changes else math.inf

    def _next_event(self) -> None:
        """Let the first engine with the next event, which `_next_event_s` has found, work until
        then."""
        changes, (_, index) = self.changes, self.changes[0]
        engine = self.engines[index]
        engine.advance()
        self._take_ended(engine)
        event_s = self.events_s[index] = engine.next_event_s()
        if event_s < math.inf:
            heapq.heapreplace(changes, (event_s, index))
        else:
            heapq.heappop(changes)

    def _refresh(self, index: int) -> None:
        """Process an engine's ended samples and update the time of its next event."""
        engine = self.engines[index]
        self._take_ended(engine)
        event_s = engine.next_event_s()
        if event_s != self.events_s[index]:
            self.events_s[index] = event_s
            if event_s < math.inf:
                heapq.heappush(self.changes, (event_s, index))

    def _take_ended(self, engine: SimulatedEngine) -> None:
        for sample in engine.take_ended():
            group = self.open[sample.group]
            group.num_unfinished -= 1
            group.completed_s = max(group.completed_s, sample.ended_s)
            if not group.num_unfinished:
                self._finish(group)

    def _finish(self, group: _Group) -> None:
        """Complete a group whose last sample has ended."""
        if self.pipeline.samples_ahead and self.rates.scoring is not None:
            rows = [x.num_prompt_tokens + x.length for x in group.samples]
            scoring = self.rates.scoring(rows, sum(x.length for x in group.samples))
            self._score_ahead(group, scoring)
        heapq.heappush(self.completing, (group.completed_s, group.number))

    def _score_ahead(self, group: _Group, scoring: Scoring) -> None:
        """Reward models score samples as they end, so that the last is left when a group does,
        which is complete with its score; then references and teachers score it. Groups take
        turns."""
        free_s, seconds = self.scorers_free_s, dict(scoring.seconds)
        if (judging_s := seconds.pop("reward_model", None)) is not None:
            last_s = group.completed_s + judging_s / len(group.samples)
            free_s["reward_model"] = max(free_s.get("reward_model", 0.0) + judging_s, last_s)
            group.completed_s = free_s["reward_model"]
        for name, scoring_s in seconds.items():
            free_s[name] = max(free_s.get(name, 0.0), group.completed_s) + scoring_s
        self.scored_s[group.number] = max((free_s[name] for name in seconds), default=0.0)

    def _see_completion(self) -> None:
        completed_s, number = heapq.heappop(self.completing)
        self.now_s = max(self.now_s, completed_s)
        self.open[number].is_complete = True
        self.num_complete += 1
