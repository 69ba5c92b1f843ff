"""The settings of one placement: those with which its trainers and engines fit, keep the rules and
cost least.

    fitted = best_that_fits(plan, cost_of(cfg), Known())      # None where nothing fits
    fitted = with_memory_used(cfg, placement, fitted)

The plan says who has which devices (`search.py`). Of the ways in which its trainers share layers,
rows and matrices (`layouts.py`), and of the settings that decide about memory (ZeRO's stage,
recomputation, offloads, sleep), the search takes those that fit, keep every rule of `hone rl`, and
cost least. Settings that change the training method (LoRA, numbers of bits) stay unchanged.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from hone.config.plan import RunPlan
from hone.config.rules.finding import Finding
from hone.config.tree import PlanConfig
from hone.distributed.settings import AxisSizes
from hone.planner.fitting import (
    changed,
    does_fit,
    does_fit_host,
    errors,
    exceeds_room,
    keeping_margin,
    remedies,
)
from hone.planner.knobs import (
    LOGITS,
    MOMENTS,
    OFFLOAD,
    RECOMPUTE,
    SEARCHED,
    ZERO,
    Change,
    Knob,
    choices_that_differ,
    setting,
    two_rows,
)
from hone.planner.run_memory import RunMemory, peak_bytes
from hone.tools.plan.layouts import AXES, layouts, numbers_of_stages
from hone.tools.plan.simulator import Placement
from hone.tools.plan.training_time import TrainingTime

__all__ = [
    "CHOSEN",
    "DECIDED",
    "MIN_SIGNIFICANT_RATIO",
    "Known",
    "best_that_fits",
    "cost_of",
    "least_cost",
    "names_one_of",
    "with_memory_used",
]

_Trainers: TypeAlias = tuple[int, tuple[tuple[str, int], ...]]
"""A number of trainers, and the devices of other models."""
_Rank: TypeAlias = tuple[float, int]
"""The cost of a plan, and the number of settings in which it differs from the recipe."""
MIN_SIGNIFICANT_RATIO = 1.05
"""Smallest predicted speed-up for which rows, matrices, layers or experts are shared, or a model
gets devices of its own."""
_UNHINDERED: Change = {
    "trainer.recompute": "off",
    "trainer.offload_activations": False,
    "trainer.offload": "none",
    "trainer.enable_sleep": False,
    "trainer.parallel.zero_stage": 3,
    "trainer.logits_chunk_tokens": 1 << 40,
}
"""Settings of trainers whose devices have memory and links without limit."""
CHOSEN = (
    *(*AXES[:3], "trainer.max_tokens", "engine.gpu_memory_utilization"),
    *("engine.tensor_parallel_size", "cluster"),
    *(key for knob in SEARCHED for key in knob.keys),
)
"""Settings that the search chooses."""
DECIDED = (*CHOSEN, "trainer.parallel", "engine.weight_dtype")
"""Settings that the plan decides: a rule's error about one of them excludes a plan."""


@dataclass(slots=True)
class Known:
    """Results that a search needs again for other placements."""

    trainers: dict[_Trainers, tuple[float, RunPlan | None]] = field(
        default_factory=dict[_Trainers, "tuple[float, RunPlan | None]"]
    )
    """The plan with the best settings of trainers beside remote engines, or None where none costs
    less than the number, which was the limit."""
    colocated: dict[int, float] = field(default_factory=dict[int, float])
    """What an update costs where trainers and engines share all devices, by devices of an
    engine."""
    in_stages: dict[bool, tuple[Knob, ...]] = field(default_factory=dict[bool, tuple[Knob, ...]])
    """The knobs that rules allow trainers in pipeline stages, by whether engines are remote."""


def cost_of(cfg: PlanConfig, *, samples_ahead: bool = False) -> Callable[[RunPlan], float]:
    """The cost function by which settings are chosen: seconds of an update, with or without the
    time until frozen models have scored its samples, or bytes where memory is the goal."""
    if cfg.plan.goal == "memory":
        return peak_bytes
    num_rows = cfg.rollout.prompts_per_step * cfg.rollout.n_samples_per_prompt
    median = cfg.plan.lengths.median
    num_trained = int(min(median, cfg.rollout.max_completion_tokens))
    lengths = np.full(num_rows, cfg.plan.prompt_tokens + num_trained)

    def seconds(plan: RunPlan) -> float:
        time = TrainingTime(plan, cfg.plan)
        of_update = time.ahead_s if samples_ahead else time.step_s
        return of_update(lengths, num_trained * num_rows)

    return seconds


def least_cost(
    plan: RunPlan, cost: Callable[[RunPlan], float], layout: Change | None = None
) -> float:
    """Lower bound of the cost over all settings of a plan's devices, and over all axes unless there
    is a `layout`: that of devices whose memory and links have no limit. Of bytes none is known."""
    gpu = plan.devices.gpu
    assert gpu is not None
    if cost is peak_bytes:
        return 0.0
    names = ("link_bytes_per_s", "node_bytes_per_s", "host_bytes_per_s")
    devices = replace(plan.devices, gpu=replace(gpu, **dict.fromkeys(names, math.inf)))
    return cost(changed(replace(plan, devices=devices), {**_UNHINDERED, **(layout or {})}))


def best_that_fits(
    plan: RunPlan, cost: Callable[[RunPlan], float], known: Known, most: float = math.inf
) -> RunPlan | None:
    """The plan with the parallel axes and memory settings that fit, keep the rules and cost least;
    among equal plans the nearest to the recipe. None where none that costs less than `most` fits.

    With remote engines the trainers' settings depend only on their number and on the devices of
    other models, so `known` keeps them.
    """
    plan = _with_started_engine(plan)
    if _lacks_engine(plan):
        return None
    if not plan.is_apart:
        return _settled(plan, cost, known, most)
    others = tuple((role.role, role.number) for role in plan.cluster.others)
    key = (plan.policy.axes.world, others)
    tried, like = known.trainers.get(key, (0.0, None))
    if like is None and tried < most:
        like = _settled(plan, cost, known, most)
        known.trainers[key] = (most, like)
    return None if like is None else changed(plan, {"trainer": like.trainer})


def _settled(
    plan: RunPlan, cost: Callable[[RunPlan], float], known: Known, most: float
) -> RunPlan | None:
    """`best_that_fits` for a plan whose engines fit."""
    allowed = {error for error in errors(plan) if not names_one_of(error, DECIDED)}
    trial = _Trial(plan.policy.axes, allowed, cost)
    laid_out = [changed(plan, layout) for layout in layouts(plan)]
    least, best, numbers = (most, 0), None, list[int]()
    if not _lacks_cache(plan):
        least, best = trial.best_of(laid_out, SEARCHED, least)
        every = numbers_of_stages(plan)
        numbers = [x for x in every if _least_in_stages(plan, x, cost) < least[0]]
    if numbers:
        in_stages = [changed(plan, x) for number in numbers for x in layouts(plan, number)]
        if plan.is_apart not in known.in_stages:
            known.in_stages[plan.is_apart] = _lawful(in_stages[0], allowed)
        least, best = trial.best_of(in_stages, known.in_stages[plan.is_apart], least, best)
    if best is not None or most < math.inf:
        return best
    smallest = ({**_smallest_memory(x, SEARCHED), **next(MOMENTS.gpu(x), {})} for x in laid_out)
    if all(exceeds_room(changed(*x), "train") for x in zip(laid_out, smallest, strict=True)):
        return None
    return _last_resort(laid_out[0], cost, allowed)


def _last_resort(
    plan: RunPlan, cost: Callable[[RunPlan], float], allowed: Set[Finding]
) -> RunPlan | None:
    """The cheapest of the remedies for a plan whose searched settings do not fit: rounded states,
    other caches, several together. States are not rounded for the margin alone, and where they
    have to be, the margin is kept if it can be."""
    wary = keeping_margin(plan)
    for base in (wary,) if plan.devices.keeps_margin else (wary, plan):
        further = remedies(base, moves=False)
        if plan.devices.keeps_margin:
            further = [change for change in further if not change.keys() & set(MOMENTS.keys)]
        fitting = [changed(base, change) for change in further]
        served = [x for x in fitting if does_fit_host(x) and errors(x) <= allowed]
        if served:
            return min(served, key=cost)
    return None


def _least_in_stages(plan: RunPlan, number: int, cost: Callable[[RunPlan], float]) -> float:
    """Lower bound of what a number of pipeline stages costs, with the gain that it must have. How
    long stages wait for each other depends on the tensor axis and on budgets alone."""
    bounding = (x for x in layouts(plan, number) if not x.keys() & set(AXES[1:4]))
    return MIN_SIGNIFICANT_RATIO * min(least_cost(plan, cost, x) for x in bounding)


class _Kind(IntEnum):
    """What waits in a search, in the order in which it is looked at where bounds are equal."""

    WAY = 0
    PRICED = 1
    PLAN = 2
    LAYOUT = 3


@dataclass(frozen=True, slots=True)
class _Way:
    """A layout, with what is known of its settings."""

    base: RunPlan
    searched: Sequence[Knob]
    """The knobs whose choices may fit."""
    change: Change = field(default_factory=dict[str, Any])
    """The way to recompute; of a plan, all that it changes."""
    offloads: Sequence[Change] = ()
    """Those that may leave room."""


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    """A part of a search that is still to be looked at."""

    bound: float
    """What each of its plans costs at least; of a plan, what it costs."""
    kind: _Kind
    differing: int
    """Of a plan, the number of settings in which it differs from the recipe."""
    order: tuple[float, ...]
    """Its place among those of this kind that rank alike."""
    of: _Way = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The search for the settings of a placement's trainers."""

    own: AxisSizes
    """Those of the recipe."""
    allowed: Set[Finding]
    """Errors that no setting of the search is about."""
    cost: Callable[[RunPlan], float]

    def best_of(
        self,
        laid_out: Sequence[RunPlan],
        searched: Sequence[Knob],
        least: _Rank,
        best: RunPlan | None = None,
    ) -> tuple[_Rank, RunPlan | None]:
        """The best plan of these layouts, if it ranks before `best`, whose rank is `least`.

        What may cost least is looked at next: a layout gives ways to recompute and a way gives
        plans, each with a bound of its own, so that the first plan which fits and keeps the rules
        is the best. Of plans that rank alike, it is that of the first layout and way; a layout
        that costs at least as much as the best plan is not looked at.
        """
        waiting: list[_Waiting] = []
        for number, base in enumerate(laid_out):
            (bound,) = self._bounds(base, searched, [{}])
            waiting.append(_Waiting(bound, _Kind.LAYOUT, 0, (number,), _Way(base, searched)))
        heapify(waiting)
        while waiting:
            first = heappop(waiting)
            if first.bound > least[0]:
                break
            match first.kind:
                case _Kind.LAYOUT:
                    if first.bound == least[0]:
                        break
                    further = self._ways(first)
                case _Kind.WAY:
                    further = self._plans(first)
                case _Kind.PRICED:
                    further = [self._at_its_price(first)]
                case _Kind.PLAN:
                    rank = first.bound, first.differing
                    if rank >= least:
                        break
                    plan = changed(first.of.base, first.of.change)
                    if _is_served(plan, self.allowed):
                        return rank, plan
                    continue
            for each in further:
                heappush(waiting, each)
        return least, best

    def _ways(self, layout: _Waiting) -> Iterator[_Waiting]:
        """The ways to recompute of a layout, none where no choice of other settings fits and keeps
        the rules."""
        base, searched = layout.of.base, layout.of.searched
        if not self._may_be_lawful(base, searched):
            return
        fitting = _fitting(base, searched)
        if not any(OFFLOAD.keys == knob.keys and [*knob.choices(base)] for knob in fitting):
            return
        offloads = _choices(OFFLOAD, fitting, base)
        if base.devices.host_bytes is not None:
            offloads = self._with_offload(base, searched, {}, offloads)
            if not offloads:
                return
        recomputed = _recomputed(base)
        bounds = self._bounds(base, fitting, recomputed)
        for number, (recompute, bound) in enumerate(zip(recomputed, bounds, strict=True)):
            of = _Way(base, fitting, recompute, offloads)
            yield _Waiting(bound, _Kind.WAY, 0, (layout.bound, *layout.order, number), of)

    def _plans(self, way: _Waiting) -> Iterator[_Waiting]:
        """The plans with a way to recompute, with the offloads that may leave room."""
        base, searched = way.of.base, way.of.searched
        offloads = self._with_offload(base, searched, way.of.change, way.of.offloads)
        others = [
            choices_that_differ(knob, base)
            for knob in searched
            if knob.keys not in (RECOMPUTE.keys, OFFLOAD.keys)
        ]
        priced = self._priced(base)
        kind = _Kind.PLAN if priced is base else _Kind.PRICED
        for number, changes in enumerate(product(offloads, *others)):
            change = {key: value for each in changes for key, value in each.items()}
            differing = sum(value != setting(base.config, key) for key, value in change.items())
            bound, order = self._weighed(priced, change), (*way.order, number)
            of = _Way(base, searched, change)
            yield _Waiting(bound, kind, differing, order, of)

    def _at_its_price(self, plan: _Waiting) -> _Waiting:
        """A plan that was priced with larger micro-batches than its own, at its own price where
        these do not fit."""
        base, change = plan.of.base, plan.of.change
        larger = changed(self._priced(base), change)
        if does_fit(larger) and does_fit_host(larger):
            return replace(plan, kind=_Kind.PLAN)
        return replace(plan, kind=_Kind.PLAN, bound=self._weighed(base, change))

    def _priced(self, base: RunPlan) -> RunPlan:
        """The plan by which `base` is priced: in more stages than the recipe's, which wait less the
        smaller micro-batches are, with the micro-batches that it gets in the end if they fit."""
        if base.policy.axes.pipeline > self.own.pipeline and (further := two_rows(base)):
            return changed(base, further)
        return base

    def _weighed(self, priced: RunPlan, change: Change) -> float:
        """What a plan costs with a change, with the gain that sharing must have."""
        axes, own = priced.policy.axes, self.own
        must_gain = _sharers(axes) > _sharers(own) or axes.expert > own.expert
        return self.cost(changed(priced, change)) * (MIN_SIGNIFICANT_RATIO if must_gain else 1.0)

    def _bounds(
        self, base: RunPlan, searched: Sequence[Knob], changes: Sequence[Change]
    ) -> list[float]:
        """A lower bound for each of these changes, over all choices of other settings."""
        ends = [*(_smallest if self.cost is peak_bytes else _fastest)(base, searched)]
        priced = self._priced(base)
        return [min(self._weighed(priced, {**end, **change}) for end in ends) for change in changes]

    def _may_be_lawful(self, base: RunPlan, searched: Sequence[Knob]) -> bool:
        """Whether some choice lifts each error."""
        ways = (way for knob in searched for way in choices_that_differ(knob, base))
        chosen = tuple(key for way in ways for key in way)
        return all(names_one_of(error, chosen) for error in errors(base) - self.allowed)

    def _with_offload(
        self,
        base: RunPlan,
        searched: Sequence[Knob],
        recompute: Change,
        offloads: Sequence[Change],
    ) -> list[Change]:
        """This way to recompute, or none in particular where it is empty, with each of the choices
        of `OFFLOAD` that may leave room on GPU and host. What a choice frees of one it takes of the
        other, so that often each of them alone has room with some choice, and both with none."""
        stages = _choices(ZERO, searched, base)  # which takes least of a host depends on sizes
        on_gpu, on_host = _smallest_memory(base, searched), _smallest_for_the_host(base)
        own = {key: setting(base.config, key) for key in OFFLOAD.keys}

        def may_fit(offload: Change) -> bool:
            way = {**recompute, **own, **offload}
            if not does_fit(changed(base, {**on_gpu, **way})):
                return False
            return base.devices.host_bytes is None or any(
                does_fit_host(changed(base, {**on_host, **way, **stage})) for stage in stages
            )

        return [{**recompute, **offload} for offload in offloads if may_fit(offload)]


def _choices(knob: Knob, searched: Sequence[Knob], base: RunPlan) -> Sequence[Change]:
    """The choices of a knob among those of a search."""
    (own,) = (each for each in searched if each.keys == knob.keys)
    return choices_that_differ(own, base)


def _sharers(axes: AxisSizes) -> int:
    """Processes that train the same rows together."""
    return axes.tensor * axes.context * axes.pipeline


def _lawful(plan: RunPlan, allowed: Set[Finding]) -> tuple[Knob, ...]:
    """The knobs of a search without choices that a rule refuses for this plan whatever the choices
    of other knobs are."""

    def is_refused(knob: Knob, change: Change) -> bool:
        others = tuple(key for each in SEARCHED if each is not knob for key in each.keys)
        return any(not names_one_of(x, others) for x in errors(changed(plan, change)) - allowed)

    return tuple(
        _without(knob, [change for change in knob.choices(plan) if is_refused(knob, change)])
        for knob in SEARCHED
    )


def _fitting(plan: RunPlan, searched: Sequence[Knob]) -> list[Knob]:
    """These knobs without choices that do not fit whatever the choices of other knobs are.
    Recomputation keeps all of its choices."""
    if does_fit(changed(plan, next(_fastest(plan, searched)))):
        return [*searched]
    smallest = _smallest_memory(plan, searched)
    does_smallest_fit = does_fit(changed(plan, smallest))

    def may_fit(way: Change) -> bool:
        if way.items() <= smallest.items():
            return does_smallest_fit
        return does_fit(changed(plan, {**smallest, **way}))

    def too_large(knob: Knob) -> list[Change]:
        if knob.keys == RECOMPUTE.keys:
            return []
        return [way for way in knob.choices(plan) if not may_fit(way)]

    return [_without(knob, too_large(knob)) for knob in searched]


def _without(knob: Knob, changes: Sequence[Change]) -> Knob:
    """The knob without some of its choices."""
    if not changes:
        return knob
    return replace(knob, choices=lambda plan: (x for x in knob.choices(plan) if x not in changes))


def _fastest(plan: RunPlan, searched: Sequence[Knob]) -> Iterator[Change]:
    """Combinations of choices of these knobs that include the fastest."""
    return _combined([*knob.choices(plan)][: knob.num_fastest] for knob in searched)


def _smallest(plan: RunPlan, searched: Sequence[Knob]) -> Iterator[Change]:
    """Combinations of choices of these knobs that include the one with the least GPU memory."""
    return _combined([*knob.choices(plan)][-knob.num_smallest :] for knob in searched)


def _combined(choices: Iterable[Sequence[Change]]) -> Iterator[Change]:
    """Every combination of one change from each list that is not empty."""
    for changes in product(*filter(None, choices)):
        yield {key: value for change in changes for key, value in change.items()}


def _smallest_memory(plan: RunPlan, searched: Sequence[Knob]) -> Change:
    """The last choice of each of these knobs, with which the trainer takes the least memory, and a
    sleeping role frees its memory for the other."""
    return next(_combined([*knob.choices(plan)][-1:] for knob in searched))


def _smallest_for_the_host(plan: RunPlan) -> Change:
    """The combined change with the least host memory."""
    changes = (next(knob.host(plan), {}) for knob in SEARCHED)
    return {key: value for change in changes for key, value in change.items()}


def _recomputed(plan: RunPlan) -> list[Change]:
    """The ways to recompute with all of their settings, the plan's own first."""
    ways = [*RECOMPUTE.choices(plan)]
    own = {key: setting(plan.config, key) for key in ways[0]}
    return [own, *(way for way in ways if way != own)]


def _with_started_engine(plan: RunPlan) -> RunPlan:
    """The plan in which remote engines can start with room for one sample: with the sufficient
    share of memory that is nearest to the recipe's."""
    if not plan.is_apart or not _lacks_engine(plan):
        return plan
    assert plan.engine is not None
    given = plan.engine.gpu_memory_utilization
    shares = sorted((n / 20 for n in range(1, 20)), key=lambda share: abs(share - given))
    plans = (changed(plan, {"engine.gpu_memory_utilization": share}) for share in shares)
    return next((each for each in plans if not _lacks_engine(each)), plan)


def _lacks_engine(plan: RunPlan) -> bool:
    """Whether remote engines do not fit their devices, or the weights of colocated ones do not."""
    if not plan.is_apart:
        assert plan.devices.gpu is not None
        return RunMemory(plan).engine.weights > (plan.devices.gpu.memory_gib or 0) << 30
    lacks_room = RunMemory(plan).lacks_room_for_one
    return lacks_room or exceeds_room(plan, "generate") or exceeds_room(plan, "sync", "engine")


def _lacks_cache(plan: RunPlan) -> bool:
    """Whether an engine with its share of memory has no room for one sample, however little the
    trainer takes."""
    engine = RunMemory(plan).engine
    most, needed = engine.cache(reserved=0), engine.sequence_bytes
    return most is not None and needed is not None and most < needed


def with_memory_used(cfg: PlanConfig, placement: Placement, fitted: RunPlan) -> RunPlan:
    """The plan with larger budgets, caches and chunks of logits, as far as there is memory."""
    fitted = _where_it_fits(fitted, two_rows(fitted))
    if cfg.plan.goal == "memory":
        return fitted
    fitted = _with_more_cache(fitted, _num_keys(cfg, placement))
    return _where_it_fits(fitted, next(LOGITS.time(fitted), {}))


def _num_keys(cfg: PlanConfig, placement: Placement) -> int:
    """Tokens in the cache of an engine that runs all of its samples at once."""
    num_samples = cfg.rollout.prompts_per_step * cfg.rollout.n_samples_per_prompt
    at_once = min(-(-num_samples // placement.num_engines), cfg.engine.max_num_seqs)
    return at_once * (cfg.plan.prompt_tokens + cfg.rollout.max_completion_tokens)


def _with_more_cache(plan: RunPlan, num_keys: int) -> RunPlan:
    """The plan whose engine's memory share gives the cache that it can use, as far as that fits. A
    colocated engine sleeps while the trainer works, where that makes the cache at least half as
    large again."""
    engine = plan.engine
    assert engine is not None
    if engine.kv_cache_gib is not None or _cache_keys(plan) >= num_keys:
        return plan
    known = errors(plan)

    def with_share(base: Change, hundredths: int) -> RunPlan:
        return changed(plan, {**base, "engine.gpu_memory_utilization": hundredths / 100})

    def largest(base: Change) -> RunPlan:
        larger = range(95, round(100 * engine.gpu_memory_utilization), -1)
        first = bisect_left(larger, True, key=lambda n: does_fit(with_share(base, n)))
        plans = (with_share(base, n) for n in larger[first::5])
        most = next((each for each in plans if _is_served(each, known)), changed(plan, base))
        return most if _is_served(most, known) else plan

    awake = largest({})
    if plan.is_apart or engine.enable_sleep:
        return awake
    asleep = largest({"engine.enable_sleep": True})
    return asleep if _cache_keys(asleep) > 1.5 * _cache_keys(awake) else awake


def _where_it_fits(plan: RunPlan, change: Change) -> RunPlan:
    """The plan with a change, if it fits GPUs and host and keeps the rules; otherwise the plan
    unchanged."""
    if not change:
        return plan
    after = changed(plan, change)
    return after if _is_served(after, errors(plan)) else plan


def _is_served(plan: RunPlan, allowed: Set[Finding]) -> bool:
    """Whether a plan fits GPUs and host, and breaks no rules but the allowed ones."""
    return does_fit_host(plan) and does_fit(plan) and errors(plan) <= allowed


def _cache_keys(plan: RunPlan) -> int:
    run = RunMemory(plan)
    return (run.cache or 0) // run.engine.kv_bytes_per_token


def names_one_of(finding: Finding, keys: tuple[str, ...]) -> bool:
    """Whether the finding names one of these settings, or one below them."""
    return any(key.startswith(keys) for key in finding.keys)
