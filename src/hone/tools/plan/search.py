"""Search for placements of trainers and engines on devices, with the fastest settings that fit for
each.

    plans = search(cfg, shape, gpu, num_gpus, notes)     # a plan for each placement that can be

A placement divides the GPUs among trainers and engines, colocated or separate, with one or several
GPUs for each engine. A critic and frozen models are on the trainers' devices, or get some of these
(`divisions.py`). Of the ways in which its trainers share layers, rows and matrices (pipeline
stages, tensor, Ulysses and ring parallelism, budgets of tokens), and of the settings that decide
about memory (ZeRO's stage, recomputation, offloads, sleep), each takes those that fit, keep every
rule of `hone rl`, and cost least. Settings that change the training method (LoRA, numbers of bits)
stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from hone.config.plan import Devices, RunPlan, known_models, resolve
from hone.config.rules.finding import Finding
from hone.config.tree import PlanConfig
from hone.distributed.settings import AxisSizes, ClusterConfig, ulysses_problem
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.hardware import Peaks
from hone.planner.fitting import changed, does_fit, does_fit_host, errors, remedies
from hone.planner.knobs import (
    GPUS_OF_A_NODE,
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
from hone.tools.plan.divisions import divisions, movable_roles
from hone.tools.plan.simulator import Placement
from hone.tools.plan.training_time import TrainingTime

__all__ = ["Notes", "Report", "no_report", "plan_of", "plans_that_fit", "search"]

_MAX_SPLITS = 16
_ENGINE_SIZES = (1, 2, 4, 8)
_AXES = tuple(
    f"trainer.parallel.{axis}_size"
    for axis in ("tensor_parallel", "ulysses", "ring", "expert_parallel", "pipeline_parallel")
)
_Trainers: TypeAlias = tuple[int, tuple[tuple[str, int], ...]]
"""A number of trainers, and the devices of other models."""
_Rank: TypeAlias = tuple[float, int]
"""The cost of a plan, and the number of settings in which it differs from the recipe."""
_MIN_SIGNIFICANT_RATIO = 1.05
"""Smallest predicted speed-up for which rows, matrices, layers or experts are shared, or a model
gets devices of its own."""
_MAX_STAGES = 16
_MAX_HOSTS = 4
"""Hosts up to which trainers of no whole number of hosts may leave some devices to others."""
_MAX_DIVISIONS = 2
"""Divisions of more trainers than a host has that are settled: those that may be the fastest."""
_UNHINDERED: Change = {
    "trainer.recompute": "off",
    "trainer.offload_activations": False,
    "trainer.offload": "none",
    "trainer.enable_sleep": False,
    "trainer.parallel.zero_stage": 3,
    "trainer.logits_chunk_tokens": 1 << 40,
}
"""Settings of trainers whose devices have memory and links without limit."""
_CHOSEN = (
    *(*_AXES[:3], "trainer.max_tokens", "engine.gpu_memory_utilization"),
    *("engine.tensor_parallel_size", "cluster"),
    *(key for knob in SEARCHED for key in knob.keys),
)
"""Settings that the search chooses."""
_DECIDED = (*_CHOSEN, "trainer.parallel", "engine.weight_dtype")
"""Settings that the plan decides: a rule's error about one of them excludes a plan."""


Report: TypeAlias = Callable[[str, int, int], None]
"""Called with what is done, how much of it is, and how much there is."""


def no_report(what: str, done: int, total: int, /) -> None:
    """Report nothing."""


@dataclass(slots=True)
class _Known:
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


@dataclass(frozen=True, slots=True)
class Notes:
    """What a search has to say: what it leaves out, as sentences, and how far it is."""

    lines: list[str] = field(default_factory=list[str])
    report: Report = no_report


def plan_of(cfg: PlanConfig, shape: ModelShape, gpu: Peaks, placement: Placement) -> RunPlan:
    """The plan of `hone rl` with this placement. Colocated trainers and engines sleep in turn."""
    change: dict[str, Any] = {
        "cluster": _cluster(cfg.cluster, placement),
        "engine.tensor_parallel_size": placement.tensor_parallel_size,
    }
    if cfg.trainer.recompute == "auto":
        change["trainer.recompute"] = "off"  # where the search begins, which settles it
    if placement.colocated:  # trainers and engines take turns
        change["pipeline.max_staleness"] = 0
    else:
        change["engine.enable_sleep"] = False
        change["trainer.enable_sleep"] = False
    devices = Devices(
        kind="cuda",
        gpu=gpu,
        per_node=cfg.cluster.devices_per_node,
        host_bytes=None if cfg.plan.host_gib is None else int(cfg.plan.host_gib * 2**30),
    )
    facts, world_size = ModelFacts.of_shape(shape), placement.num_trainers
    plan = resolve(cfg, facts, devices, world_size=world_size, others=known_models(cfg))
    return changed(plan, change)


def search(
    cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int, notes: Notes
) -> dict[Placement, RunPlan]:
    """The plans of `plans_that_fit`, by placement."""
    return dict(plans_that_fit(cfg, shape, gpu, num_gpus, notes))


def plans_that_fit(
    cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int, notes: Notes
) -> Iterator[tuple[Placement, RunPlan]]:
    """Yield a plan for each placement that can be laid out and fits: colocated, then the recipe's
    split, or at most `_MAX_SPLITS` of all splits. Engines have the recipe's number of devices each,
    or any where it has one. At the end `notes` receive the omitted placements."""
    refused: dict[str, tuple[str, list[int]]] = {}
    laid_out: dict[Placement, RunPlan] = {}
    placements = [*_placements(cfg, shape, num_gpus)]
    placements += [*_beside_others(cfg, plan_of(cfg, shape, gpu, placements[0]), placements)]
    for placement in placements:
        plan = plan_of(cfg, shape, gpu, placement)
        refusal = _refusal(plan, placement)
        # Of trainers that are not whole nodes, other models may take some.
        may_divide = num_gpus <= _MAX_HOSTS * (plan.devices.per_node or GPUS_OF_A_NODE)
        if refusal is None or (may_divide and refusal[0] == "node" and movable_roles(cfg, plan)):
            laid_out[placement] = plan
        else:
            kind, reason = refusal
            refused.setdefault(kind, (reason, []))[1].append(placement.num_trainers)
    size = cfg.engine.tensor_parallel_size
    if num_gpus <= size:
        notes.lines.append(
            f"an engine takes {size} of {num_gpus} GPUs, which leaves none to trainers"
        )
    kept = [*_evenly_spread(laid_out, notes.lines)]
    known = _Known()
    has_changed = False
    for number, placement in enumerate(kept):
        notes.report("settings", number, len(kept))
        fitted = _fitted(cfg, placement, laid_out[placement], num_gpus, known)
        if not fitted and placement.num_gpus == num_gpus:
            what = "share GPUs with engines" if placement.colocated else "have GPUs of their own"
            reason = f"where they {what}, a step needs more than the {gpu.memory_gib} GiB of a GPU"
            if cfg.plan.host_gib is not None:
                reason += f" beside {cfg.plan.host_gib:g} GiB of a host"
            refused.setdefault(what, (reason, []))[1].append(placement.num_trainers)
        has_changed |= any(plan is not laid_out[placement] for plan in fitted.values())
        yield from fitted.items()
    notes.lines.extend(
        f"{_listed(numbers)} trainers: {reason}" for reason, numbers in refused.values()
    )
    if has_changed:
        notes.lines.append("the flags below also change what the recipe says about memory")


def _fitted(
    cfg: PlanConfig,
    placement: Placement,
    plan: RunPlan,
    num_gpus: int,
    known: _Known,
) -> dict[Placement, RunPlan]:
    """The plan of a placement with the settings that fit and cost least, and with the devices of
    critic and frozen models that do: where engines sample ahead of frozen models, two plans may be
    needed, one for samples that end before they are scored. Empty where nothing fits."""
    divided = _divided(cfg, placement, plan, num_gpus)
    roles = {role for each in divided for role, _ in each.others}
    may_hide = not placement.colocated and roles - {"critic"} and cfg.plan.goal != "memory"
    size, most = placement.tensor_parallel_size, math.inf
    if placement.num_gpus < num_gpus:  # fewer engines too: it is worth it for a shorter update
        most = known.colocated.get(size, math.inf)
    best = _best_division(cfg, divided, known, samples_ahead=False, most=most)
    if best is None:
        return {}
    if placement.colocated and placement.num_gpus == num_gpus:
        known.colocated[size] = _cost(cfg)(best[1])
    found = dict([best])
    if may_hide:
        most = _weight(best[0]) * _cost(cfg, samples_ahead=True)(best[1])
        ahead = _best_division(cfg, divided, known, samples_ahead=True, most=most)
        found |= {} if ahead is None else dict([ahead])
    return {x: _with_memory_used(cfg, x, fitted) for x, fitted in found.items()}


def _with_memory_used(cfg: PlanConfig, placement: Placement, fitted: RunPlan) -> RunPlan:
    """The plan with larger budgets, caches and chunks of logits, as far as there is memory."""
    fitted = _where_it_fits(fitted, two_rows(fitted))
    if cfg.plan.goal == "memory":
        return fitted
    fitted = _with_more_cache(fitted, _num_keys(cfg, placement))
    return _where_it_fits(fitted, next(LOGITS.time(fitted), {}))


def _divided(
    cfg: PlanConfig, placement: Placement, plan: RunPlan, num_gpus: int
) -> dict[Placement, RunPlan]:
    """Plans of a placement by the devices of critic and frozen models, the undivided one first.
    With engines of their own, trainers give up devices for them; colocated trainers, whose number
    is that of the engines' devices, leave them what they do not use."""
    per_node = plan.devices.per_node or GPUS_OF_A_NODE
    work, unused = movable_roles(cfg, plan), num_gpus - placement.num_gpus
    num_devices = placement.num_trainers + unused
    found: dict[Placement, RunPlan] = {}
    for others in divisions(work, num_devices, per_node=per_node):
        number = sum(n for _, n in others)
        if placement.colocated and number != unused:
            continue
        trainers = num_devices - number
        own = replace(placement, num_trainers=trainers, others=others)
        change = {"cluster": _cluster(cfg.cluster, own)} if others else {}
        found[own] = changed(plan, change) if others else plan
    return found


def _best_division(
    cfg: PlanConfig,
    divided: Mapping[Placement, RunPlan],
    known: _Known,
    *,
    samples_ahead: bool,
    most: float,
) -> tuple[Placement, RunPlan] | None:
    """The division that costs least with the settings of trainers that do, and its plan; None where
    none that costs less than `most` fits."""
    of_settings, cost = _cost(cfg), _cost(cfg, samples_ahead=samples_ahead)
    is_one, least, best = len(divided) == 1 and most == math.inf, most, None
    largest = max(x.num_trainers for x in divided)
    is_large = largest > (next(iter(divided.values())).devices.per_node or GPUS_OF_A_NODE)
    num_fitting = 0

    bounds = {x: 0.0 if is_one else _weight(x) * _least_cost(divided[x], cost) for x in divided}
    for placement in sorted(bounds, key=bounds.__getitem__):
        if bounds[placement] >= least or (is_large and num_fitting == _MAX_DIVISIONS):
            break
        if not is_one and _refusal(divided[placement], placement) is not None:
            continue
        enough = math.inf if samples_ahead else least / _weight(placement)
        fitted = _fastest_that_fits(divided[placement], of_settings, known, enough)
        num_fitting += fitted is not None
        if fitted is not None and (own := _weight(placement) * cost(fitted)) < least:
            least, best = own, (placement, fitted)
    return best


def _weight(placement: Placement) -> float:
    """Factor of what a placement costs where the search gives devices to others."""
    return _MIN_SIGNIFICANT_RATIO if placement.others else 1.0


def _least_cost(
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


def _least_in_stages(plan: RunPlan, number: int, cost: Callable[[RunPlan], float]) -> float:
    """Lower bound of what a number of pipeline stages costs, with the gain that it must have. How
    long stages wait for each other depends on the tensor axis and on budgets alone."""
    layouts = (x for x in _layouts(plan, number) if not x.keys() & set(_AXES[1:4]))
    return _MIN_SIGNIFICANT_RATIO * min(_least_cost(plan, cost, x) for x in layouts)


def _placements(cfg: PlanConfig, shape: ModelShape, num_gpus: int) -> Iterator[Placement]:
    asked, given = cfg.cluster.num_engines, cfg.engine.tensor_parallel_size
    facts = ModelFacts.of_shape(shape)
    sizes = [
        size
        for size in ([given] if given > 1 or asked else _ENGINE_SIZES)
        if size in {1, given} or (facts.is_divided and not facts.undivided(size))
    ]
    for size in dict.fromkeys((1, *sizes)):
        if num_gpus % size == 0:
            yield Placement(
                num_trainers=num_gpus,
                num_engines=num_gpus // size,
                tensor_parallel_size=size,
                colocated=True,
            )
    for size in sizes:
        for number in [asked] if asked else range(1, (num_gpus - 1) // size + 1):
            yield Placement(
                num_trainers=num_gpus - number * size,
                num_engines=number,
                tensor_parallel_size=size,
            )


def _beside_others(
    cfg: PlanConfig, plan: RunPlan, placements: Sequence[Placement]
) -> Iterator[Placement]:
    """Colocated placements on fewer devices than there are, which leave the rest of a host to the
    critic or to frozen models. `plan` is one of `placements`, all of which use all devices."""
    num_gpus, per_node = placements[0].num_gpus, plan.devices.per_node or GPUS_OF_A_NODE
    if num_gpus + cfg.cluster.num_others > per_node or not movable_roles(cfg, plan):
        return
    for placement in placements:
        size = placement.tensor_parallel_size
        if placement.colocated:
            for number in range(size, num_gpus, size):
                yield replace(placement, num_trainers=number, num_engines=number // size)


def _evenly_spread(laid_out: Mapping[Placement, RunPlan], notes: list[str]) -> Iterator[Placement]:
    """At most `_MAX_SPLITS` placements in total, evenly spread for each size of engines, and the
    colocated ones."""
    remote = [placement for placement in laid_out if not placement.colocated]
    yield from (placement for placement in laid_out if placement.colocated)
    sizes = dict.fromkeys(placement.tensor_parallel_size for placement in remote)
    for size in sizes:
        own = [placement for placement in remote if placement.tensor_parallel_size == size]
        most = max(_MAX_SPLITS // (1 if size == 1 else 2), 1)
        if len(own) > most:
            picked = np.linspace(0, len(own) - 1, most).round().astype(int)
            notes.append(
                f"{most} of {len(own)} splits with engines of {size} were tried, evenly spread"
            )
            own = [own[index] for index in picked]
        yield from own


def _cost(cfg: PlanConfig, *, samples_ahead: bool = False) -> Callable[[RunPlan], float]:
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


def _fastest_that_fits(
    plan: RunPlan, cost: Callable[[RunPlan], float], known: _Known, most: float = math.inf
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
    plan: RunPlan, cost: Callable[[RunPlan], float], known: _Known, most: float
) -> RunPlan | None:
    """`_fastest_that_fits` for a plan whose engines fit."""
    allowed = {error for error in errors(plan) if not _names(error, _DECIDED)}
    trial = _Trial(plan.policy.axes, allowed, cost)
    laid_out = [changed(plan, layout) for layout in _layouts(plan)]
    least, best = trial.best_of(laid_out, SEARCHED, (most, 0))
    numbers = [x for x in _numbers_of_stages(plan) if _least_in_stages(plan, x, cost) < least[0]]
    if numbers:
        in_stages = [changed(plan, x) for number in numbers for x in _layouts(plan, number)]
        if plan.is_apart not in known.in_stages:
            known.in_stages[plan.is_apart] = _lawful(in_stages[0], allowed)
        least, best = trial.best_of(in_stages, known.in_stages[plan.is_apart], least, best)
    if best is not None or most < math.inf:
        return best
    smallest = ({**_smallest_memory(x, SEARCHED), **next(MOMENTS.gpu(x), {})} for x in laid_out)
    if all(_excess_of(changed(*x), "train") for x in zip(laid_out, smallest, strict=True)):
        return None
    further = remedies(laid_out[0], moves=False)  # rounded states, other caches, several together
    fitting = [changed(laid_out[0], change) for change in further]
    served = (x for x in fitting if does_fit_host(x) and errors(x) <= allowed)
    return min(served, key=cost, default=None)


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
        """The best plan of these layouts, if it ranks before `best`, whose rank is `least`."""
        bounds = [self._bound(base, searched, {}) for base in laid_out]
        for index in sorted(range(len(bounds)), key=bounds.__getitem__):
            if bounds[index] >= least[0]:
                break
            base = laid_out[index]
            if not self._may_be_lawful(base, searched):
                continue
            offloads = self._with_offload(base, searched, {}, _choices(OFFLOAD, searched, base))
            if not offloads:
                continue
            fitting = _fitting(base, searched)
            for recompute in _recomputed(base):
                if self._bound(base, fitting, recompute) <= least[0]:
                    ways = self._with_offload(base, fitting, recompute, offloads)
                    rank, cheapest = self._cheapest(base, fitting, ways, least)
                    if cheapest is not None:
                        least, best = rank, cheapest
        return least, best

    def _weighed(self, plan: RunPlan) -> float:
        axes, own = plan.policy.axes, self.own
        if axes.pipeline > own.pipeline:  # of smaller micro-batches stages wait less
            plan = changed(plan, two_rows(plan))
        must_gain = _sharers(axes) > _sharers(own) or axes.expert > own.expert
        return self.cost(plan) * (_MIN_SIGNIFICANT_RATIO if must_gain else 1.0)

    def _bound(self, base: RunPlan, searched: Sequence[Knob], change: Change) -> float:
        """A lower bound over all choices of the settings that are not in `change`."""
        ends = (_smallest if self.cost is peak_bytes else _fastest)(base, searched)
        return min(self._weighed(changed(base, {**end, **change})) for end in ends)

    def _may_be_lawful(self, base: RunPlan, searched: Sequence[Knob]) -> bool:
        """Whether some choice lifts each error."""
        ways = (way for knob in searched for way in choices_that_differ(knob, base))
        chosen = tuple(key for way in ways for key in way)
        return all(_names(error, chosen) for error in errors(base) - self.allowed)

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
            return does_fit(changed(base, {**on_gpu, **way})) and any(
                does_fit_host(changed(base, {**on_host, **way, **stage})) for stage in stages
            )

        return [{**recompute, **offload} for offload in offloads if may_fit(offload)]

    def _cheapest(
        self, base: RunPlan, searched: Sequence[Knob], ways: Sequence[Change], least: _Rank
    ) -> tuple[_Rank, RunPlan | None]:
        """The best plan with one of these ways to recompute and to offload that fits, keeps the
        rules and ranks before `least`."""
        others = [
            choices_that_differ(knob, base)
            for knob in searched
            if knob.keys not in (RECOMPUTE.keys, OFFLOAD.keys)
        ]
        ranked: list[tuple[_Rank, RunPlan]] = []
        for changes in product(ways, *others):
            change = {key: value for each in changes for key, value in each.items()}
            plan = changed(base, change)
            differing = sum(value != setting(base.config, key) for key, value in change.items())
            ranked.append(((self._weighed(plan), differing), plan))
        for rank, plan in sorted(ranked, key=lambda each: each[0]):
            if rank >= least:
                break
            if does_fit_host(plan) and does_fit(plan) and errors(plan) <= self.allowed:
                return rank, plan
        return least, None


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
        return any(not _names(x, others) for x in errors(changed(plan, change)) - allowed)

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

    def too_large(knob: Knob) -> list[Change]:
        if knob.keys == RECOMPUTE.keys:
            return []
        ways = knob.choices(plan)
        return [way for way in ways if not does_fit(changed(plan, {**smallest, **way}))]

    return [_without(knob, too_large(knob)) for knob in searched]


def _without(knob: Knob, changes: Sequence[Change]) -> Knob:
    """The knob without some of its choices."""
    if not changes:
        return knob
    return replace(knob, choices=lambda plan: (x for x in knob.choices(plan) if x not in changes))


def _layouts(plan: RunPlan, num_stages: int | None = None) -> Iterator[Change]:
    """Ways in which trainers can share matrices, the tokens of a row and experts, in the recipe's
    number of pipeline stages or another one, the recipe's way first, each with token budgets that
    hold a device's share of the longest row."""
    trainer, shape, world = plan.trainer, plan.shape, plan.world_size or 1
    assert trainer is not None
    assert shape is not None
    parallel, budget = trainer.parallel, trainer.max_tokens_per_microbatch
    stages = num_stages or parallel.pipeline_parallel_size
    sharers = world // stages
    sizes = [(parallel.tensor_parallel_size, parallel.ulysses_size, parallel.ring_size)]
    if parallel.replica_size == 1:  # a recipe's own axes stay
        most = min(sharers, plan.devices.per_node or GPUS_OF_A_NODE)
        powers = [1 << n for n in range(most.bit_length())]
        every = (x for x in product(powers, repeat=3) if math.prod(x) <= most)
        sizes = sorted((x for x in every if sharers % math.prod(x) == 0), key=math.prod)
    shared = (
        (*size, expert) for size in sizes for expert in _expert_sizes(plan, sharers // size[0])
    )
    for tensor, ulysses, ring, expert in shared:
        if ulysses_problem(ulysses, shape.num_heads // tensor, shape.num_kv_heads // tensor):
            continue
        layout: dict[str, Any] = {}
        for key, size in zip(_AXES, (tensor, ulysses, ring, expert, stages), strict=True):
            if size != getattr(parallel, key.rpartition(".")[2]):
                layout[key] = size
        longest = plan.max_sequence_tokens
        if longest is None or trainer.micro_batch_size is not None:
            yield layout
            continue
        share = -(-longest // (ulysses * ring))
        for tokens in dict.fromkeys(max(each, share) for each in (budget, budget // 4, 0)):
            if tokens == budget:
                yield layout
            elif ulysses * ring == 1 or tokens < longest:  # otherwise sharing rows saves nothing
                yield {**layout, "trainer.max_tokens_per_microbatch": tokens}


def _numbers_of_stages(plan: RunPlan) -> list[int]:
    """Numbers of pipeline stages that are tried where the recipe has no axes of its own: powers of
    two, and as many as there are hosts, so that each stage is within one."""
    assert plan.trainer is not None
    assert plan.shape is not None
    if plan.trainer.parallel.replica_size > 1:
        return []
    world = plan.world_size or 1
    most = min(world, plan.shape.num_layers, _MAX_STAGES)
    hosts = world // (plan.devices.per_node or GPUS_OF_A_NODE)
    numbers = {*(1 << n for n in range(1, most.bit_length())), hosts}
    return sorted(n for n in numbers if 1 < n <= most and world % n == 0)


def _expert_sizes(plan: RunPlan, num_sharing: int) -> list[int]:
    """Candidate numbers of processes that share a layer's experts: the recipe's own, or the largest
    possible within a node."""
    assert plan.trainer is not None
    assert plan.shape is not None
    own = plan.trainer.parallel.expert_parallel_size
    most = math.gcd(plan.shape.num_experts, num_sharing, plan.devices.per_node or GPUS_OF_A_NODE)
    return [own] if own > 1 or plan.shape.num_experts == 0 else [*dict.fromkeys((1, most))]


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
    return lacks_room or _excess_of(plan, "generate") or _excess_of(plan, "sync", "engine")


def _excess_of(plan: RunPlan, name: str, role: str | None = None) -> bool:
    """Whether a phase with this name (and role) exceeds the memory of a GPU."""
    assert plan.devices.gpu is not None
    limit = (plan.devices.gpu.memory_gib or 0) << 30
    phases = [x for x in RunMemory(plan).phases() if x.name == name and role in (None, x.role)]
    return any(phase.num_bytes > limit for phase in phases)


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

    def largest(base: Change) -> RunPlan:
        shares = [n / 100 for n in range(95, round(100 * engine.gpu_memory_utilization), -5)]
        changes = [{**base, "engine.gpu_memory_utilization": share} for share in shares]
        plans = [changed(plan, change) for change in (*changes, base)]
        plans.sort(key=lambda each: -min(_cache_keys(each), num_keys))
        fitting = (each for each in plans if does_fit_host(each) and does_fit(each))
        return next((each for each in fitting if errors(each) <= known), plan)

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
    is_served = does_fit_host(after) and does_fit(after) and errors(after) <= errors(plan)
    return after if is_served else plan


def _cache_keys(plan: RunPlan) -> int:
    run = RunMemory(plan)
    return (run.cache or 0) // run.engine.kv_bytes_per_token


def _names(finding: Finding, keys: tuple[str, ...]) -> bool:
    """Whether the finding names one of these settings, or one below them."""
    return any(key.startswith(keys) for key in finding.keys)


def _recomputed(plan: RunPlan) -> list[Change]:
    """The ways to recompute with all of their settings, the plan's own first."""
    ways = [*RECOMPUTE.choices(plan)]
    own = {key: setting(plan.config, key) for key in ways[0]}
    return [own, *(way for way in ways if way != own)]


def _cluster(cluster: ClusterConfig, placement: Placement) -> ClusterConfig:
    """The cluster settings of a placement; the default, without a cluster, where no role is
    remote."""
    if placement.colocated and not cluster.others and not placement.others:
        return ClusterConfig()
    update: dict[str, Any] = {
        "num_trainers": placement.num_trainers,
        "num_engines": 0 if placement.colocated else placement.num_engines,
        **{f"num_{role}s": number for role, number in placement.others},
    }
    per_node = cluster.devices_per_node or GPUS_OF_A_NODE
    needed = placement.num_gpus + cluster.num_others
    if needed > cluster.num_nodes * per_node:
        update |= {
            "num_nodes": -(-needed // per_node),
            "devices_per_node": per_node,
            "address": cluster.address or "auto",
        }
    return cluster.model_copy(update=update)


def _refusal(plan: RunPlan, placement: Placement) -> tuple[str, str] | None:
    """The reason why a placement's trainers cannot be laid out: in one word, and with the
    numbers."""
    per_node = plan.devices.per_node or GPUS_OF_A_NODE
    if plan.problem is not None:
        return "axes", plan.problem.partition(". ")[0]
    trainers = placement.num_trainers
    if not placement.colocated and trainers > per_node and trainers % per_node:
        reason = f"beside engines they have whole nodes, of cluster.devices_per_node {per_node}"
        return "node", reason
    for finding in errors(plan):
        if _names(finding, _DECIDED) and not _names(finding, _CHOSEN):
            return "rules", finding.message.partition(". ")[0]
    return None


def _listed(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
