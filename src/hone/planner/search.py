"""Which devices train and which sample, and with what settings each way fits and is fastest.

    found = search(cfg, shape, gpu, num_gpus, notes)     # a plan for each placement that can be

A placement is as many trainers and engines as there are GPUs for, on the same ones or apart, with
engines over one GPU or several. Of the settings that decide about memory (ZeRO's stage,
recomputation, offloads, sleep) each takes those that fit, keep every rule, and cost least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from hone.config.cluster import ClusterConfig
from hone.config.hardware import Peaks
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import PlanConfig
from hone.families.shape import ModelShape
from hone.planner.fitting import GPUS_OF_A_NODE, Change, changed, does_fit, errors, remedies
from hone.planner.run_memory import RunMemory
from hone.planner.simulator import Placement
from hone.planner.training_time import TrainingTime

__all__ = ["memory_settings", "peak_bytes", "plan_of", "search"]

_MAX_SPLITS = 16
_ENGINE_SIZES = (1, 2, 4, 8)


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
    if not placement.colocated or placement.num_trainers > 1:
        change["trainer.enable_sleep"] = False
    devices = Devices(kind="cuda", gpu=gpu, per_node=cfg.cluster.devices_per_node)
    facts, world_size = ModelFacts.of_shape(shape), placement.num_trainers
    return changed(resolve(cfg, facts, devices, world_size=world_size), change)


def peak_bytes(plan: RunPlan) -> int:
    """Memory of the fullest device in its fullest phase."""
    return max(phase.num_bytes for phase in RunMemory(plan).phases())


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
        notes.append(f"an engine takes {size} GPUs, which leaves none of {num_gpus} to trainers")
    kept = _evenly_spread(laid_out, notes)
    found: dict[Placement, RunPlan] = {}
    for placement in kept:
        fitted = _fastest_that_fits(laid_out[placement], _cost(cfg))
        if fitted is not None and cfg.plan.goal != "memory":
            fitted = _with_more_cache(fitted, _num_keys(cfg, placement))
        if fitted is None:
            what = "colocated" if placement.colocated else "separate"
            reason = f"a step needs more than the {gpu.memory_gib} GiB of a GPU, {what}"
            refused.setdefault(what, (reason, []))[1].append(placement.num_trainers)
        else:
            found[placement] = fitted
    notes += [f"{_listed(numbers)} trainers: {reason}" for reason, numbers in refused.values()]
    if any(found[placement] is not laid_out[placement] for placement in found):
        notes.append("settings of memory that are others than the recipe's are among the flags")
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
        is_divided = facts.has_fused_layers and not facts.undivided(size)
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
    lengths = [cfg.plan.prompt_tokens + num_trained] * num_rows
    return lambda plan: TrainingTime(plan, cfg.plan).step_s(lengths, num_trained * num_rows)


def _fastest_that_fits(plan: RunPlan, cost: Callable[[RunPlan], float]) -> RunPlan | None:
    """The plan with the settings of memory that fit, are served, and cost least; of equal ones the
    nearest to the recipe's. None: none fit."""
    known = errors(plan)
    changes = [*_settings(plan)]
    plans = [changed(plan, change) if change else plan for change in changes]
    costs = [cost(each) for each in plans]
    for index in sorted(range(len(plans)), key=lambda i: (costs[i], len(changes[i]))):
        if does_fit(plans[index]) and errors(plans[index]) <= known:
            return plans[index]
    further = remedies(plan, moves=False)  # smaller budgets, tokens shared, rounded states
    fitting = [changed(plan, change) for change in further]
    return min(fitting, key=cost, default=None)


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
        plans = (changed(plan, change) for change in (*changes, base))
        served = (each for each in plans if does_fit(each) and errors(each) <= known)
        return max(served, key=lambda each: min(_cache_keys(each), num_keys), default=plan)

    awake = largest({})
    if plan.is_apart or engine.enable_sleep:
        return awake
    asleep = largest({"engine.enable_sleep": True})
    return asleep if _cache_keys(asleep) > 1.5 * _cache_keys(awake) else awake


def _cache_keys(plan: RunPlan) -> int:
    run = RunMemory(plan)
    return (run.cache or 0) // run.kv_bytes_per_token


def _settings(plan: RunPlan) -> Iterator[Change]:
    """Combinations of what decides about memory, by the keys that differ from the recipe's."""
    axes = memory_settings(plan)
    for values in product(*axes.values()):
        chosen = zip(axes, values, strict=True)
        yield {key: value for key, value in chosen if value != axes[key][0]}


def memory_settings(plan: RunPlan) -> dict[str, list[Any]]:
    """By key, the values that can be chosen for what decides about memory, the plan's own first."""
    cfg, trainer, world = plan.config, plan.trainer, plan.world_size or 1
    assert isinstance(cfg, PlanConfig)
    assert trainer is not None
    axes: dict[str, Sequence[Any]] = {
        "trainer.recompute": (trainer.recompute, "off", "full"),
        "trainer.offload": (trainer.offload, "none", "optimizer", "gradients", "parameters"),
    }
    if world > 1:
        axes["trainer.parallel.zero_stage"] = (trainer.parallel.zero_stage, 2, 3)
    if not plan.is_apart:
        axes["engine.enable_sleep"] = (cfg.engine.enable_sleep, True)
        if world == 1:
            axes["trainer.enable_sleep"] = (cfg.trainer.enable_sleep, True)
    return {key: list(dict.fromkeys(values)) for key, values in axes.items()}


def _cluster(cluster: ClusterConfig, placement: Placement) -> ClusterConfig:
    """The cluster of a placement; the default, which is none, where no role is apart."""
    if placement.colocated and not cluster.num_references:
        return ClusterConfig()
    update: dict[str, Any] = {
        "num_trainers": placement.num_trainers,
        "num_engines": 0 if placement.colocated else placement.num_engines,
    }
    per_node = cluster.devices_per_node or GPUS_OF_A_NODE
    needed = placement.num_gpus + cluster.num_references
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
    if not placement.colocated and placement.num_trainers > per_node:
        told = f"beside engines all are on one node, of cluster.devices_per_node {per_node}"
        return "node", told
    return None


def _listed(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
