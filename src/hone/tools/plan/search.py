"""Search for placements of trainers and engines on devices, with the fastest settings that fit for
each.

    plans = search(cfg, shape, gpu, num_gpus, notes)     # a plan for each placement that can be

A placement divides the GPUs among trainers and engines, colocated or separate, with one or several
GPUs for each engine. Of the ways in which its trainers share rows and matrices (tensor, Ulysses and
ring parallelism, budgets of tokens), and of the settings that decide about memory (ZeRO's stage,
recomputation, offloads, sleep), each takes those that fit, keep every rule of `hone rl`, and cost
least. Settings that change the training method (LoRA, numbers of bits) stay unchanged.

Pipeline stages stay those of the recipe: with 2, 4 and 8 of them among the ways, where trainers
span hosts, they came first for 32B and 70B on 16 GPUs, by times that no run has confirmed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    choices_that_differ,
    setting,
    two_rows,
)
from hone.planner.run_memory import RunMemory, peak_bytes
from hone.tools.plan.simulator import Placement
from hone.tools.plan.training_time import TrainingTime

__all__ = ["Notes", "Report", "no_report", "plan_of", "plans_that_fit", "search"]

_MAX_SPLITS = 16
_ENGINE_SIZES = (1, 2, 4, 8)
_AXES = tuple(
    f"trainer.parallel.{axis}_size"
    for axis in ("tensor_parallel", "ulysses", "ring", "expert_parallel")
)
_Rank: TypeAlias = tuple[float, int]
"""The cost of a plan, and the number of settings in which it differs from the recipe."""
_NONE: _Rank = (math.inf, 0)
_MIN_SIGNIFICANT_RATIO = 1.05
"""Smallest predicted speed-up for which rows, matrices or experts are shared."""
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
    for placement in _placements(cfg, shape, num_gpus):
        plan = plan_of(cfg, shape, gpu, placement)
        refusal = _refusal(plan, placement)
        if refusal is None:
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
    trainers: dict[int, RunPlan | None] = {}
    has_changed = False
    for number, placement in enumerate(kept):
        notes.report("settings", number, len(kept))
        fitted = _fitted(cfg, placement, laid_out[placement], trainers)
        if fitted is None:
            what = "share GPUs with engines" if placement.colocated else "have GPUs of their own"
            reason = f"where they {what}, a step needs more than the {gpu.memory_gib} GiB of a GPU"
            if cfg.plan.host_gib is not None:
                reason += f" beside {cfg.plan.host_gib:g} GiB of a host"
            refused.setdefault(what, (reason, []))[1].append(placement.num_trainers)
        else:
            has_changed |= fitted is not laid_out[placement]
            yield placement, fitted
    notes.lines.extend(
        f"{_listed(numbers)} trainers: {reason}" for reason, numbers in refused.values()
    )
    if has_changed:
        notes.lines.append("the flags below also change what the recipe says about memory")


def _fitted(
    cfg: PlanConfig,
    placement: Placement,
    plan: RunPlan,
    trainers: dict[int, RunPlan | None],
) -> RunPlan | None:
    """The plan of a placement with the settings that fit and cost least; None where none fits.
    `trainers` is that of `_fastest_that_fits`."""
    fitted = _fastest_that_fits(plan, _cost(cfg), trainers)
    if fitted is None:
        return None
    fitted = _where_it_fits(fitted, two_rows(fitted))
    if cfg.plan.goal == "memory":
        return fitted
    fitted = _with_more_cache(fitted, _num_keys(cfg, placement))
    return _where_it_fits(fitted, next(LOGITS.time(fitted), {}))


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


def _cost(cfg: PlanConfig) -> Callable[[RunPlan], float]:
    """The cost function by which settings are chosen: seconds of an update, or bytes where memory
    is the goal."""
    if cfg.plan.goal == "memory":
        return peak_bytes
    num_rows = cfg.rollout.prompts_per_step * cfg.rollout.n_samples_per_prompt
    median = cfg.plan.lengths.median
    num_trained = int(min(median, cfg.rollout.max_completion_tokens))
    lengths = np.full(num_rows, cfg.plan.prompt_tokens + num_trained)
    return lambda plan: TrainingTime(plan, cfg.plan).step_s(lengths, num_trained * num_rows)


def _fastest_that_fits(
    plan: RunPlan, cost: Callable[[RunPlan], float], trainers: dict[int, RunPlan | None]
) -> RunPlan | None:
    """The plan with the parallel axes and memory settings that fit, keep the rules and cost least;
    among equal plans the nearest to the recipe. None where none fits.

    With remote engines the trainers' settings depend only on their number, so `trainers` caches
    them.
    """
    plan = _with_started_engine(plan)
    if _lacks_engine(plan):
        return None
    if not plan.is_apart:
        return _settled(plan, cost)
    number = plan.policy.axes.world
    if number not in trainers:
        trainers[number] = _settled(plan, cost)
    like = trainers[number]
    return None if like is None else changed(plan, {"trainer": like.trainer})


def _settled(plan: RunPlan, cost: Callable[[RunPlan], float]) -> RunPlan | None:
    """`_fastest_that_fits` for a plan whose engines fit."""
    allowed = {error for error in errors(plan) if not _names(error, _DECIDED)}
    own = plan.policy.axes
    laid_out = [changed(plan, layout) for layout in _layouts(plan)]

    def weighed(plan: RunPlan) -> float:
        axes = plan.policy.axes
        must_gain = _sharers(axes) > _sharers(own) or axes.expert > own.expert
        return cost(plan) * (_MIN_SIGNIFICANT_RATIO if must_gain else 1.0)

    def serves(plan: RunPlan) -> bool:
        return does_fit_host(plan) and does_fit(plan) and errors(plan) <= allowed

    def bound(base: RunPlan, change: Change) -> float:
        # A lower bound over all choices of the other settings.
        ends = _smallest(base) if cost is peak_bytes else _fastest(base)
        return min(weighed(changed(base, {**end, **change})) for end in ends)

    bounds = [bound(base, {}) for base in laid_out]
    least, best = _NONE, None
    for index in sorted(range(len(bounds)), key=bounds.__getitem__):
        if bounds[index] >= least[0]:
            break
        base = laid_out[index]
        chosen = tuple(
            key for knob in SEARCHED for way in choices_that_differ(knob, base) for key in way
        )
        if any(not _names(error, chosen) for error in errors(base) - allowed):
            continue  # no choice among these lifts it
        offloads = _with_offload(base, {}, choices_that_differ(OFFLOAD, base))
        if not offloads:
            continue
        for recompute in _recomputed(base):
            if bound(base, recompute) <= least[0]:
                ways = _with_offload(base, recompute, offloads)
                rank, cheapest = _cheapest(base, ways, weighed, serves, least)
                if cheapest is not None:
                    least, best = rank, cheapest
    least_of = (changed(x, {**_smallest_memory(x), **next(MOMENTS.gpu(x), {})}) for x in laid_out)
    if best is not None or all(_excess_of(x, "train") for x in least_of):
        return best
    further = remedies(laid_out[0], moves=False)  # rounded states, other caches, several together
    fitting = [changed(laid_out[0], change) for change in further]
    served = (x for x in fitting if does_fit_host(x) and errors(x) <= allowed)
    return min(served, key=cost, default=None)


def _sharers(axes: AxisSizes) -> int:
    """Processes that train the same rows together."""
    return axes.tensor * axes.context * axes.pipeline


def _cheapest(
    base: RunPlan,
    ways: Sequence[Change],
    weighed: Callable[[RunPlan], float],
    serves: Callable[[RunPlan], bool],
    least: _Rank,
) -> tuple[_Rank, RunPlan | None]:
    """The best plan with one of these ways to recompute and to offload that fits, keeps the rules
    and ranks before `least`."""
    knobs = [knob for knob in SEARCHED if knob not in (RECOMPUTE, OFFLOAD)]
    ranked: list[tuple[_Rank, RunPlan]] = []
    for changes in product(ways, *(choices_that_differ(knob, base) for knob in knobs)):
        change = {key: value for each in changes for key, value in each.items()}
        plan = changed(base, change)
        differing = sum(value != setting(base.config, key) for key, value in change.items())
        ranked.append(((weighed(plan), differing), plan))
    for rank, plan in sorted(ranked, key=lambda each: each[0]):
        if rank >= least:
            break
        if serves(plan):
            return rank, plan
    return least, None


def _with_offload(base: RunPlan, recompute: Change, offloads: Sequence[Change]) -> list[Change]:
    """This way to recompute, or none in particular where it is empty, with each of the choices of
    `OFFLOAD` that may leave room on GPU and host. What a choice frees of one it takes of the other,
    so that often each of them alone has room with some choice, and both with none."""
    stages = choices_that_differ(ZERO, base)  # which takes least of a host depends on sizes

    def may_fit(offload: Change) -> bool:
        way = {**recompute, **{key: setting(base.config, key) for key in OFFLOAD.keys}, **offload}
        host = {**_smallest_for_the_host(base), **way}
        return does_fit(changed(base, {**_smallest_memory(base), **way})) and any(
            does_fit_host(changed(base, {**host, **stage})) for stage in stages
        )

    return [{**recompute, **offload} for offload in offloads if may_fit(offload)]


def _layouts(plan: RunPlan) -> Iterator[Change]:
    """Ways in which trainers can share matrices, the tokens of a row and experts, the recipe's way
    first, each with token budgets that hold a device's share of the longest row."""
    trainer, shape, world = plan.trainer, plan.shape, plan.world_size or 1
    assert trainer is not None
    assert shape is not None
    parallel, budget = trainer.parallel, trainer.max_tokens_per_microbatch
    sizes = [(parallel.tensor_parallel_size, parallel.ulysses_size, parallel.ring_size)]
    if parallel.replica_size == 1:  # a recipe's own axes stay
        most = min(world, plan.devices.per_node or GPUS_OF_A_NODE)
        powers = [1 << n for n in range(most.bit_length())]
        every = (x for x in product(powers, repeat=3) if math.prod(x) <= most)
        sizes = sorted((x for x in every if world % math.prod(x) == 0), key=math.prod)
    sharers = world // parallel.pipeline_parallel_size
    shared = (
        (*size, expert) for size in sizes for expert in _expert_sizes(plan, sharers // size[0])
    )
    for tensor, ulysses, ring, expert in shared:
        if ulysses_problem(ulysses, shape.num_heads // tensor, shape.num_kv_heads // tensor):
            continue
        layout: dict[str, Any] = {}
        for key, size in zip(_AXES, (tensor, ulysses, ring, expert), strict=True):
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


def _expert_sizes(plan: RunPlan, num_sharing: int) -> list[int]:
    """Candidate numbers of processes that share a layer's experts: the recipe's own, or the largest
    possible within a node."""
    assert plan.trainer is not None
    assert plan.shape is not None
    own = plan.trainer.parallel.expert_parallel_size
    most = math.gcd(plan.shape.num_experts, num_sharing, plan.devices.per_node or GPUS_OF_A_NODE)
    return [own] if own > 1 or plan.shape.num_experts == 0 else [*dict.fromkeys((1, most))]


def _fastest(plan: RunPlan) -> Iterator[Change]:
    """Combinations of choices of all knobs that include the fastest."""
    return _combined([*knob.choices(plan)][: knob.num_fastest] for knob in SEARCHED)


def _smallest(plan: RunPlan) -> Iterator[Change]:
    """Combinations of choices of all knobs that include the one with the least GPU memory."""
    return _combined([*knob.choices(plan)][-knob.num_smallest :] for knob in SEARCHED)


def _combined(choices: Iterable[Sequence[Change]]) -> Iterator[Change]:
    """Every combination of one change from each list that is not empty."""
    for changes in product(*filter(None, choices)):
        yield {key: value for change in changes for key, value in change.items()}


def _smallest_memory(plan: RunPlan) -> Change:
    """The last choice of every knob, with which the trainer takes the least memory, and a sleeping
    role frees its memory for the other."""
    *_, last = _smallest(plan)
    return last


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
    if placement.colocated and not cluster.others:
        return ClusterConfig()
    update: dict[str, Any] = {
        "num_trainers": placement.num_trainers,
        "num_engines": 0 if placement.colocated else placement.num_engines,
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
