"""Which devices train and which sample, and with what settings each way fits and is fastest.

    found = search(cfg, shape, gpu, num_gpus, notes)     # a plan for each placement that can be

A placement is as many trainers and engines as there are GPUs for, on the same ones or apart, with
engines over one GPU or several. Of the ways in which its trainers share rows and matrices (tensor,
Ulysses and ring parallelism, budgets of tokens), and of the settings that decide about memory
(ZeRO's stage, recomputation, offloads, sleep), each takes those that fit, keep every rule of `hone
rl`, and cost least. What changes what is learnt (LoRA, numbers of bits) stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias, get_args

import numpy as np

from hone.config.cluster import ClusterConfig
from hone.config.parallel import ulysses_problem
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.rules import Finding
from hone.config.trainer import OffloadLevel
from hone.config.tree import PlanConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.families.stages import stage_layers
from hone.hardware import Peaks
from hone.planner.fitting import (
    GPUS_OF_A_NODE,
    Change,
    changed,
    does_fit,
    does_fit_host,
    errors,
    kept_logits,
    remedies,
    setting,
    two_rows,
)
from hone.planner.run_memory import RunMemory, peak_bytes
from hone.planner.simulator import Placement
from hone.planner.training_time import TrainingTime

__all__ = ["memory_settings", "plan_of", "search"]

_MAX_SPLITS = 16
_ENGINE_SIZES = (1, 2, 4, 8)
_AXES = tuple(
    f"trainer.parallel.{axis}_size"
    for axis in ("tensor_parallel", "ulysses", "ring", "expert_parallel")
)
_STAGE = "trainer.parallel.zero_stage"
_QUICKEST, _THRIFTIEST = ("off", 1, False), ("full", 1, True)
"""What is computed again, of every so manieth layer, and whether its input is offloaded."""
_ASLEEP: Change = {"engine.enable_sleep": True, "trainer.enable_sleep": True}
_Rank: TypeAlias = tuple[float, int]
"""What a plan costs, and in how many settings it differs from the recipe."""
_NONE: _Rank = (math.inf, 0)
_SURE_GAIN = 1.05
"""How much faster than trainers without it sharing rows, matrices or experts has to be by
prediction."""
_NOTHING_OFFLOADED: Change = {
    "trainer.offload": "none",
    "trainer.offload_activations": False,
    **dict.fromkeys(_ASLEEP, False),
}
"""By which a host holds least."""
_CHOSEN = (
    *(*_AXES[:3], _STAGE, "trainer.max_tokens", "trainer.offload", "trainer.recompute"),
    *("trainer.enable_sleep", "engine.enable_sleep", "engine.gpu_memory_utilization"),
    *("engine.tensor_parallel_size", "cluster"),
)
"""Settings that the search chooses."""
_DECIDED = (*_CHOSEN, "trainer.parallel", "engine.weight_dtype")
"""Settings of what is planned: an error about one rules a plan out."""


def plan_of(cfg: PlanConfig, shape: ModelShape, gpu: Peaks, placement: Placement) -> RunPlan:
    """`hone rl` with this placement. To sleep is to leave a shared device to the other."""
    change: dict[str, Any] = {
        "cluster": _cluster(cfg.cluster, placement),
        "engine.tensor_parallel_size": placement.tensor_parallel_size,
    }
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
    teacher = None if cfg.teacher.path is None else ModelFacts.known(cfg.teacher.path)
    plan = resolve(cfg, facts, devices, world_size=world_size, teacher=teacher)
    return changed(plan, change)


def search(
    cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int, notes: list[str]
) -> dict[Placement, RunPlan]:
    """A plan for each placement that can be laid out and fits: colocated, then the recipe's split,
    or at most `_MAX_SPLITS` of all there are. Engines on trainers' devices have one each, and as
    many as the recipe says. `notes` receive what was left out."""
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
        notes.append(f"an engine takes {size} of {num_gpus} GPUs, which leaves none to trainers")
    kept = _evenly_spread(laid_out, notes)
    trainers: dict[int, RunPlan | None] = {}
    found: dict[Placement, RunPlan] = {}
    for placement in kept:
        fitted = _fastest_that_fits(laid_out[placement], _cost(cfg), trainers)
        if fitted is not None:
            fitted = _where_it_fits(fitted, two_rows(fitted))
        if fitted is not None and cfg.plan.goal != "memory":
            fitted = _with_more_cache(fitted, _num_keys(cfg, placement))
            fitted = _where_it_fits(fitted, kept_logits(fitted))
        if fitted is None:
            what = "share GPUs with engines" if placement.colocated else "have GPUs of their own"
            reason = f"where they {what}, a step needs more than the {gpu.memory_gib} GiB of a GPU"
            if cfg.plan.host_gib is not None:
                reason += f" beside {cfg.plan.host_gib:g} GiB of a host"
            refused.setdefault(what, (reason, []))[1].append(placement.num_trainers)
        else:
            found[placement] = fitted
    notes += [f"{_listed(numbers)} trainers: {reason}" for reason, numbers in refused.values()]
    if any(found[placement] is not laid_out[placement] for placement in found):
        notes.append("the flags below also change what the recipe says about memory")
    return found


def _placements(cfg: PlanConfig, shape: ModelShape, num_gpus: int) -> Iterator[Placement]:
    asked, given = cfg.cluster.num_engines, cfg.engine.tensor_parallel_size
    for size in dict.fromkeys((1, given)):
        if num_gpus % size == 0:
            yield Placement(
                num_trainers=num_gpus,
                num_engines=num_gpus // size,
                tensor_parallel_size=size,
                colocated=True,
            )
    sizes = [given] if given > 1 or asked else _ENGINE_SIZES
    for size in sizes:
        facts = ModelFacts.of_shape(shape)
        is_divided = facts.is_divided and not facts.undivided(size)
        if size > 1 and size != given and not is_divided:
            continue
        for number in [asked] if asked else range(1, (num_gpus - 1) // size + 1):
            yield Placement(
                num_trainers=num_gpus - number * size,
                num_engines=number,
                tensor_parallel_size=size,
            )


def _evenly_spread(laid_out: Mapping[Placement, RunPlan], notes: list[str]) -> Iterator[Placement]:
    """Of each size of engines as many as share `_MAX_SPLITS`, and the colocated ones."""
    apart = [placement for placement in laid_out if not placement.colocated]
    yield from (placement for placement in laid_out if placement.colocated)
    sizes = dict.fromkeys(placement.tensor_parallel_size for placement in apart)
    for size in sizes:
        own = [placement for placement in apart if placement.tensor_parallel_size == size]
        most = max(_MAX_SPLITS // (1 if size == 1 else 2), 1)
        if len(own) > most:
            picked = np.linspace(0, len(own) - 1, most).round().astype(int)
            notes.append(
                f"{most} of {len(own)} splits with engines of {size} were tried, evenly spread"
            )
            own = [own[index] for index in picked]
        yield from own


def _cost(cfg: PlanConfig) -> Callable[[RunPlan], float]:
    """What settings are chosen by: seconds of an update, or bytes where memory is the goal."""
    if cfg.plan.goal == "memory":
        return peak_bytes
    num_rows = cfg.rollout.prompts_per_step * cfg.rollout.n_samples_per_prompt
    median = cfg.plan.lengths.median
    num_trained = int(min(median, cfg.rollout.max_completion_tokens))
    lengths = np.full(num_rows, cfg.plan.prompt_tokens + num_trained)
    return lambda plan: TrainingTime(plan, cfg.plan).step_s(lengths, num_trained * num_rows)


def _fastest_that_fits(
    plan: RunPlan, cost: Callable[[RunPlan], float], found: dict[int, RunPlan | None]
) -> RunPlan | None:
    """The plan with the axes and the settings of memory that fit, are served, and cost least; of
    equal ones the nearest to the recipe's. None: none fit.

    Trainers apart are settled by their number, whatever the engines: `found` keeps them.
    """
    plan = _with_started_engine(plan)
    if _lacks_engine(plan):
        return None
    if not plan.is_apart:
        return _settled(plan, cost)
    number = plan.policy.axes.world
    if number not in found:
        found[number] = _settled(plan, cost)
    like = found[number]
    return None if like is None else changed(plan, {"trainer": like.trainer})


def _settled(plan: RunPlan, cost: Callable[[RunPlan], float]) -> RunPlan | None:
    """The same for trainers whose engines fit."""
    allowed = {error for error in errors(plan) if not _names(error, _DECIDED)}
    own = plan.policy.axes
    laid_out = [changed(plan, layout) for layout in _layouts(plan)]

    def weighed(plan: RunPlan) -> float:
        axes = plan.policy.axes
        shares_more = axes.tensor * axes.context > own.tensor * own.context
        return cost(plan) * (_SURE_GAIN if shares_more or axes.expert > own.expert else 1.0)

    def serves(plan: RunPlan) -> bool:
        return does_fit_host(plan) and does_fit(plan) and errors(plan) <= allowed

    def bound(base: RunPlan, change: Change) -> float:
        # What no choice of the other settings is below.
        ends = _least_held(base) if cost is peak_bytes else _quickest(base)
        return min(weighed(changed(base, {**end, **change})) for end in ends)

    bounds = [bound(base, {}) for base in laid_out]
    least, best = _NONE, None
    for index in sorted(range(len(bounds)), key=bounds.__getitem__):
        if bounds[index] >= least[0]:
            break
        base = laid_out[index]
        chosen = _settings_of_memory(base)
        if any(not _names(error, chosen) for error in errors(base) - allowed):
            continue  # no choice among these lifts it
        if not does_fit_host(changed(base, _NOTHING_OFFLOADED)):
            continue
        for recompute in _recomputed(base):
            if bound(base, recompute) <= least[0]:
                rank, found = _cheapest(base, recompute, weighed, serves, least)
                if found is not None:
                    least, best = rank, found
    rounded: Change = {"trainer.optimizer.state_dtype": "bfloat16"}
    least_of = (changed(x, {**_thriftiest(x), **rounded}) for x in laid_out)
    if best is not None or all(_excess_of(x, "train") for x in least_of):
        return best
    further = remedies(laid_out[0], moves=False)  # rounded states, other caches, several together
    fitting = [changed(laid_out[0], change) for change in further]
    served = (x for x in fitting if does_fit_host(x) and errors(x) <= allowed)
    return min(served, key=cost, default=None)


def _cheapest(
    base: RunPlan,
    recompute: Change,
    weighed: Callable[[RunPlan], float],
    serves: Callable[[RunPlan], bool],
    least: _Rank,
) -> tuple[_Rank, RunPlan | None]:
    """Of the plans that recompute so the one that serves and ranks first, before `least`."""
    if not does_fit(changed(base, {**_thriftiest(base), **recompute})):
        return least, None
    _, *others = memory_settings(base)
    ranked: list[tuple[_Rank, RunPlan]] = []
    for changes in product(*others):
        change = {key: value for each in (recompute, *changes) for key, value in each.items()}
        plan = changed(base, change)
        differing = sum(value != setting(base.config, key) for key, value in change.items())
        ranked.append(((weighed(plan), differing), plan))
    for rank, plan in sorted(ranked, key=lambda each: each[0]):
        if rank >= least:
            break
        if serves(plan):
            return rank, plan
    return least, None


def _layouts(plan: RunPlan) -> Iterator[Change]:
    """How trainers may share matrices, the tokens of a row and experts, the recipe's way first;
    with it budgets that hold each one's share of the longest row."""
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
            elif ulysses * ring == 1 or tokens < longest:  # else sharing rows saves nothing
                yield {**layout, "trainer.max_tokens_per_microbatch": tokens}


def _expert_sizes(plan: RunPlan, num_sharing: int) -> list[int]:
    """Processes that share a layer's experts: the recipe's own, or all of a node that can."""
    assert plan.trainer is not None
    assert plan.shape is not None
    own = plan.trainer.parallel.expert_parallel_size
    most = math.gcd(plan.shape.num_experts, num_sharing, plan.devices.per_node or GPUS_OF_A_NODE)
    return [own] if own > 1 or plan.shape.num_experts == 0 else [*dict.fromkeys((1, most))]


def _quickest(plan: RunPlan) -> Iterator[Change]:
    """The settings of memory of which one takes least time: stage 0 sends more than 1, 3 more than
    2."""
    plain = _recomputing(*_QUICKEST) | {"trainer.offload": "none"}
    yield from (plain | {_STAGE: stage} for stage in (1, 2))


def _thriftiest(plan: RunPlan) -> Change:
    """The settings of memory by which a plan takes least."""
    found = _recomputing(*_THRIFTIEST) | {"trainer.offload": "parameters", _STAGE: 3}
    return found if plan.is_apart else {**found, **_ASLEEP}


def _least_held(plan: RunPlan) -> Iterator[Change]:
    """The thriftiest settings, awake and asleep: what sleeps leaves its room to the cache."""
    asleep = () if plan.is_apart else _ASLEEP
    for values in product((False, True), repeat=len(asleep)):
        yield {**_thriftiest(plan), **dict(zip(asleep, values, strict=True))}


def _with_started_engine(plan: RunPlan) -> RunPlan:
    """Of engines apart: with the share of memory, the nearest to the recipe's, with which they
    start and have room for a sample."""
    if not plan.is_apart or not _lacks_engine(plan):
        return plan
    assert plan.engine is not None
    given = plan.engine.gpu_memory_utilization
    shares = sorted((n / 20 for n in range(1, 20)), key=lambda share: abs(share - given))
    plans = (changed(plan, {"engine.gpu_memory_utilization": share}) for share in shares)
    return next((each for each in plans if not _lacks_engine(each)), plan)


def _lacks_engine(plan: RunPlan) -> bool:
    """Whether engines on devices of their own do not fit them."""
    if not plan.is_apart:
        return False
    lacks_room = RunMemory(plan).lacks_room_for_one
    return lacks_room or _excess_of(plan, "generate") or _excess_of(plan, "sync", "engine")


def _excess_of(plan: RunPlan, name: str, role: str | None = None) -> bool:
    """Whether a phase of this name (and role) needs more memory than a GPU has."""
    assert plan.devices.gpu is not None
    limit = (plan.devices.gpu.memory_gib or 0) << 30
    phases = [x for x in RunMemory(plan).phases() if x.name == name and role in (None, x.role)]
    return any(phase.num_bytes > limit for phase in phases)


def _num_keys(cfg: PlanConfig, placement: Placement) -> int:
    """Tokens in the cache of an engine that works on all of its samples at once."""
    num_samples = cfg.rollout.prompts_per_step * cfg.rollout.n_samples_per_prompt
    at_once = min(-(-num_samples // placement.num_engines), cfg.engine.max_num_seqs)
    return at_once * (cfg.plan.prompt_tokens + cfg.rollout.max_completion_tokens)


def _with_more_cache(plan: RunPlan, num_keys: int) -> RunPlan:
    """The plan with the share of memory that gives the engine the cache it can use, as far as that
    fits; asleep while a trainer beside it works, where that gives it half as much again."""
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
    """The plan with a change, where GPUs and host hold it and no rule is against it."""
    if not change:
        return plan
    after = changed(plan, change)
    is_served = does_fit_host(after) and does_fit(after) and errors(after) <= errors(plan)
    return after if is_served else plan


def _cache_keys(plan: RunPlan) -> int:
    run = RunMemory(plan)
    return (run.cache or 0) // run.kv_bytes_per_token


def memory_settings(plan: RunPlan) -> list[list[Change]]:
    """The ways to choose each thing that decides about memory, by the keys that differ from the
    plan's; its own way, which changes nothing, first."""
    trainer = plan.trainer
    assert trainer is not None
    ways: list[Sequence[Change]] = [
        _ways_to_recompute(plan),
        [{"trainer.offload": level} for level in get_args(OffloadLevel)],
        [{_STAGE: stage} for stage in _stages(plan)],
    ]
    if not plan.is_apart:
        ways += [[{key: asleep}] for key, asleep in _ASLEEP.items()]
    found: list[list[Change]] = []
    for axis in ways:
        of_axis: list[Change] = [{}]
        for change in axis:
            differs = {k: v for k, v in change.items() if v != setting(plan.config, k)}
            if differs and differs not in of_axis:
                of_axis.append(differs)
        found.append(of_axis)
    return found


def _settings_of_memory(plan: RunPlan) -> tuple[str, ...]:
    """Their keys."""
    return tuple({key for ways in memory_settings(plan) for way in ways for key in way})


def _names(finding: Finding, keys: tuple[str, ...]) -> bool:
    """Whether it names a setting that is one of these, or below one."""
    return any(key.startswith(keys) for key in finding.keys)


def _recomputed(plan: RunPlan) -> list[Change]:
    """The ways to recompute with all of their settings, the plan's own first."""
    ways = _ways_to_recompute(plan)
    own = {key: setting(plan.config, key) for key in ways[0]}
    return [own, *(way for way in ways if way != own)]


def _ways_to_recompute(plan: RunPlan) -> list[Change]:
    """From the quickest to the thriftiest: blocks where no other way computes as many layers."""
    assert plan.shape is not None
    axes = plan.policy.axes
    stages = stage_layers(plan.shape, axes.pipeline, axes.virtual_stages)
    num_layers = max(len(group) for own in stages for group in own)
    eighth, three_quarters = -(-num_layers // 8), -(-3 * num_layers // 4)
    ways = [_QUICKEST, (f"block:{eighth}", 1, False), ("selective", 2, False), ("full", 4, False)]
    ways += [("full", 2, False), ("selective", 1, False), (f"block:{three_quarters}", 1, False)]
    ways += [("full", 1, False), ("uniform:2", 1, False), _THRIFTIEST]
    return [_recomputing(*way) for way in ways]


def _recomputing(mode: str, every_n_layers: int, offloads: bool) -> dict[str, Any]:
    return {
        "trainer.recompute": mode,
        "trainer.recompute_every_n_layers": every_n_layers,
        "trainer.offload_activations": offloads,
    }


def _stages(plan: RunPlan) -> Sequence[int]:
    """Of ZeRO, where there is something to share."""
    return (2, 3, 1, 0) if (plan.world_size or 1) > 1 else ()


def _cluster(cluster: ClusterConfig, placement: Placement) -> ClusterConfig:
    """The cluster of a placement; the default, which is none, where no role is apart."""
    if placement.colocated and not (cluster.num_scorers or cluster.num_critics):
        return ClusterConfig()
    update: dict[str, Any] = {
        "num_trainers": placement.num_trainers,
        "num_engines": 0 if placement.colocated else placement.num_engines,
    }
    per_node = cluster.devices_per_node or GPUS_OF_A_NODE
    needed = placement.num_gpus + cluster.num_critics + sum(cluster.num_scorers.values())
    if needed > cluster.num_nodes * per_node:
        update |= {
            "num_nodes": -(-needed // per_node),
            "devices_per_node": per_node,
            "address": cluster.address or "auto",
        }
    return cluster.model_copy(update=update)


def _refusal(plan: RunPlan, placement: Placement) -> tuple[str, str] | None:
    """Why so many trainers cannot be laid out: in one word, and with the numbers."""
    per_node = plan.devices.per_node or GPUS_OF_A_NODE
    if plan.problem is not None:
        return "axes", plan.problem.partition(". ")[0]
    trainers = placement.num_trainers
    if not placement.colocated and trainers > per_node and trainers % per_node:
        told = f"beside engines they have whole nodes, of cluster.devices_per_node {per_node}"
        return "node", told
    for finding in errors(plan):
        if _names(finding, _DECIDED) and not _names(finding, _CHOSEN):
            return "rules", finding.message.partition(". ")[0]
    return None


def _listed(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
