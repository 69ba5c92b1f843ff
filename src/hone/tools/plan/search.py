"""Search for placements of trainers and engines on devices.

    plans = search(cfg, shape, gpu, num_gpus, notes)     # a plan for each placement that can be

A placement divides the GPUs among trainers and engines, colocated or separate, with one or several
GPUs for each engine. A critic and frozen models are on the trainers' devices, or get some of these
(`divisions.py`). This module says which placements and divisions there are and which of them are
tried; the settings of each are those that fit and cost least (`best_settings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from hone.config.plan import Devices, RunPlan, known_models, resolve
from hone.config.rules.finding import Finding
from hone.config.tree import PlanConfig
from hone.distributed.settings import ClusterConfig
from hone.errors import listed
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.hardware import Peaks
from hone.planner.fitting import changed, errors, keeping_margin, leaves_margin
from hone.planner.knobs import GPUS_OF_A_NODE, gpus_of_a_node
from hone.tools.plan.best_settings import (
    CHOSEN,
    DECIDED,
    MIN_SIGNIFICANT_RATIO,
    Known,
    best_that_fits,
    cost_of,
    least_cost,
    names_one_of,
    with_memory_used,
)
from hone.tools.plan.divisions import divisions, movable_roles
from hone.tools.plan.simulator import Placement

__all__ = ["Notes", "Report", "broken_rules", "no_report", "plan_of", "plans_that_fit", "search"]

_MAX_SPLITS = 16
_ENGINE_SIZES = (1, 2, 4, 8)
_MAX_HOSTS = 4
"""Hosts up to which trainers of no whole number of hosts may leave some devices to others."""
_MAX_DIVISIONS = 2
"""Divisions of more trainers than a host has that are settled: those that may be the fastest."""

_READ = ("model", "rollout", "engine", "algorithm", "critic", "teacher", "trainer")
"""Sections whose settings a plan reads."""
_VARIED = ("model.path", "rollout.oversample_prompts", "algorithm.correction", "critic.parallel")
"""Settings of these that modes set, that a plan does without, or that it does not divide by."""

Report: TypeAlias = Callable[[str, int, int], None]
"""Called with what is done, how much of it is, and how much there is."""


def no_report(what: str, done: int, total: int, /) -> None:
    """Report nothing."""


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


def broken_rules(cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int) -> list[Finding]:
    """The rules' errors about settings that a plan keeps, where they are those of every
    placement. What costs no time or memory, such as data and rewards, is not asked about."""
    first, *others = _placements(cfg, shape, num_gpus)
    kept = {
        error
        for error in errors(plan_of(cfg, shape, gpu, first))
        if all(key.partition(".")[0] in _READ for key in error.keys)
        and not names_one_of(error, (*DECIDED, *_VARIED))
    }
    for placement in others:
        if not kept:
            break
        kept &= errors(plan_of(cfg, shape, gpu, placement))
    return sorted(kept, key=lambda finding: finding.keys)


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
    refused: dict[str, tuple[str, list[Placement]]] = {}
    laid_out: dict[Placement, RunPlan] = {}
    placements = [*_placements(cfg, shape, num_gpus)]
    placements += [*_beside_others(cfg, plan_of(cfg, shape, gpu, placements[0]), placements)]
    for placement in placements:
        plan = plan_of(cfg, shape, gpu, placement)
        refusal = _refusal(plan, placement)
        # Of trainers that are not whole nodes, other models may take some.
        may_divide = num_gpus <= _MAX_HOSTS * gpus_of_a_node(plan)
        if refusal is None or (may_divide and refusal[0] == "node" and movable_roles(cfg, plan)):
            laid_out[placement] = plan
        else:
            kind, reason = refusal
            refused.setdefault(kind, (reason, []))[1].append(placement)
    kept = [*_evenly_spread(laid_out, notes.lines)]
    known = _Margins()
    too_large, fitting = list[Placement](), list[Placement]()
    has_changed = False
    for number, placement in enumerate(kept):
        notes.report("settings", number, len(kept))
        fitted = _fitted(cfg, placement, laid_out[placement], num_gpus, known)
        if fitted:
            fitting.append(placement)
        elif placement.num_gpus == num_gpus:
            too_large.append(placement)
        given = laid_out[placement].config
        has_changed |= any(plan.config is not given for plan in fitted.values())
        yield from fitted.items()
    size = cfg.engine.tensor_parallel_size
    if num_gpus <= size and not fitting:
        notes.lines.append(
            f"an engine takes {size} of {num_gpus} GPUs, which leaves none to trainers"
        )
    for reason, left_out in refused.values():
        notes.lines.extend(_of_trainers(left_out, fitting, reason))
    needs = f"a step needs more than the {gpu.memory_gib} GiB of a GPU"
    if cfg.plan.host_gib is not None:
        needs += f" beside {cfg.plan.host_gib:g} GiB of a host"
    for colocated in (True, False):
        own = [x for x in too_large if x.colocated == colocated]
        beside = [x for x in fitting if x.colocated == colocated]
        notes.lines.extend(_too_large(own, beside, needs))
    if has_changed:
        notes.lines.append("the flags below also change what the recipe says about memory")


@dataclass(frozen=True, slots=True)
class _Margins:
    """What is known of plans that keep the margin, and of plans without it."""

    kept: Known = field(default_factory=Known)
    without: Known = field(default_factory=Known)


def _fitted(
    cfg: PlanConfig, placement: Placement, plan: RunPlan, num_gpus: int, known: _Margins
) -> dict[Placement, RunPlan]:
    """The plans of a placement that leave as much of a GPU free as predictions have been off, and
    where there is none, those that fit without; `Devices.keeps_margin` says which they are. Empty
    where nothing fits."""
    found = _best_plans(cfg, placement, keeping_margin(plan), num_gpus, known.kept)
    is_smaller = placement.num_gpus < num_gpus
    if found or (is_smaller and placement.tensor_parallel_size in known.kept.colocated):
        return found
    found = _best_plans(cfg, placement, plan, num_gpus, known.without)
    return {x: keeping_margin(own) if leaves_margin(own) else own for x, own in found.items()}


def _best_plans(
    cfg: PlanConfig, placement: Placement, plan: RunPlan, num_gpus: int, known: Known
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
        known.colocated[size] = cost_of(cfg)(best[1])
    found = dict([best])
    if may_hide:
        most = _weight(best[0]) * cost_of(cfg, samples_ahead=True)(best[1])
        ahead = _best_division(cfg, divided, known, samples_ahead=True, most=most)
        found |= {} if ahead is None else dict([ahead])
    return {x: with_memory_used(cfg, x, fitted) for x, fitted in found.items()}


def _divided(
    cfg: PlanConfig, placement: Placement, plan: RunPlan, num_gpus: int
) -> dict[Placement, RunPlan]:
    """Plans of a placement by the devices of critic and frozen models, the undivided one first.
    With engines of their own, trainers give up devices for them; colocated trainers, whose number
    is that of the engines' devices, leave them what they do not use."""
    per_node = gpus_of_a_node(plan)
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
    known: Known,
    *,
    samples_ahead: bool,
    most: float,
) -> tuple[Placement, RunPlan] | None:
    """The division that costs least with the settings of trainers that do, and its plan; None where
    none that costs less than `most` fits."""
    of_settings, cost = cost_of(cfg), cost_of(cfg, samples_ahead=samples_ahead)
    is_one, least, best = len(divided) == 1 and most == math.inf, most, None
    largest = max(x.num_trainers for x in divided)
    is_large = largest > gpus_of_a_node(next(iter(divided.values())))
    num_fitting = 0

    bounds = {x: 0.0 if is_one else _weight(x) * least_cost(divided[x], cost) for x in divided}
    for placement in sorted(bounds, key=bounds.__getitem__):
        if bounds[placement] >= least or (is_large and num_fitting == _MAX_DIVISIONS):
            break
        if not is_one and _refusal(divided[placement], placement) is not None:
            continue
        enough = math.inf if samples_ahead else least / _weight(placement)
        fitted = best_that_fits(divided[placement], of_settings, known, enough)
        num_fitting += fitted is not None
        if fitted is not None and (own := _weight(placement) * cost(fitted)) < least:
            least, best = own, (placement, fitted)
    return best


def _weight(placement: Placement) -> float:
    """Factor of what a placement costs where the search gives devices to others."""
    return MIN_SIGNIFICANT_RATIO if placement.others else 1.0


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
    num_gpus, per_node = placements[0].num_gpus, gpus_of_a_node(plan)
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
    per_node = gpus_of_a_node(plan)
    if plan.problem is not None:
        return "axes", plan.problem.partition(". ")[0]
    trainers = placement.num_trainers
    if not placement.colocated and trainers > per_node and trainers % per_node:
        reason = f"beside engines they have whole nodes, of cluster.devices_per_node {per_node}"
        return "node", reason
    for finding in errors(plan):
        if names_one_of(finding, DECIDED) and not names_one_of(finding, CHOSEN):
            return "rules", finding.message.partition(". ")[0]
    return None


def _too_large(
    refused: Sequence[Placement], fitting: Sequence[Placement], needs: str
) -> Iterator[str]:
    """Notes on the placements, all of them colocated or none, that do not fit: the numbers of
    trainers of which no placement does, and the sizes of engines."""
    sizes = {x.tensor_parallel_size for x in refused}
    sizes -= {x.tensor_parallel_size for x in fitting}
    shared = {x.colocated for x in refused} == {True}

    def where(others: str) -> str:
        return f"share GPUs with {others}" if shared else "have GPUs of their own"

    yield from _of_trainers(refused, fitting, f"where they {where('engines')}, {needs}")
    if sizes and fitting:
        words = f"{listed([*map(str, sorted(sizes))], last='or')} GPU{'s' * (sizes != {1})}"
        yield f"engines of {words}: where they {where('trainers')}, {needs}"


def _of_trainers(
    refused: Iterable[Placement], fitting: Sequence[Placement], reason: str
) -> Iterator[str]:
    """A note on numbers of trainers with which no placement fits, if there are any: in ranges
    without a number that fits."""
    fits = {(x.colocated, x.num_trainers) for x in fitting}
    left_out = {(x.colocated, x.num_trainers) for x in refused} - fits
    homes = {colocated for colocated, _ in left_out}
    between = {number for colocated, number in fits if colocated in homes}
    ranges: list[list[int]] = []
    for number in sorted({number for _, number in left_out}):
        if ranges and not any(ranges[-1][-1] < x < number for x in between):
            ranges[-1].append(number)
        else:
            ranges.append([number])
    if ranges:
        words = [f"{x[0]}" if len(x) == 1 else f"{x[0]} to {x[-1]}" for x in ranges]
        yield f"{listed(words)} trainer{'s' * (words != ['1'])}: {reason}"
