"""All modes and splits of a number of GPUs, simulated and ranked.

outcomes = compare(cfg).outcomes        # of a SimulateConfig; fastest first
run_flags(cfg, outcomes[0])             # what `hone rl` is to be told for it
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hone.config.cluster import ClusterConfig
from hone.config.errors import UserError
from hone.config.hardware import Peaks, known_gpu
from hone.config.model_facts import ModelFacts
from hone.config.pipeline import PipelineConfig
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.rollout import RolloutConfig
from hone.config.simulate import GPUS_UNSET, SimulatedModelConfig
from hone.config.tree import SimulateConfig
from hone.families.shape import ModelShape, public_shape
from hone.planner.fitting import GPUS_OF_A_NODE, changed, does_fit, remedies
from hone.planner.lengths import draw_lengths
from hone.planner.run_memory import RunMemory
from hone.planner.simulated_engine import EngineRates
from hone.planner.simulator import Placement, Rates, SimulatedRun, simulate
from hone.planner.training_time import TrainingTime

__all__ = ["Comparison", "Outcome", "compare", "launch_words", "placement_rates", "run_flags"]

_MAX_SPLITS = 16
_TELLING = 1.1
"""Ratios below this are within the error of a prediction."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One way to run."""

    mode: str
    is_async: bool
    run: SimulatedRun
    plan: RunPlan
    """Of its placement, with settings that make it fit."""

    @property
    def split(self) -> str:
        """Devices of trainers and of engines; `=` where they are the same."""
        placement, engines = self.run.placement, f"{self.run.placement.num_engines}"
        if placement.tensor_parallel_size > 1:
            engines += f" x {placement.tensor_parallel_size}"
        return f"{placement.num_trainers} {'=' if placement.colocated else '+'} {engines}"

    @property
    def name(self) -> str:
        """Mode and devices in words."""
        placement = self.run.placement
        if placement.colocated:
            return f"{self.mode}, {placement.num_gpus} GPU{'s' * (placement.num_gpus > 1)}"
        trainers, engines = placement.num_trainers, placement.num_engines
        told = f"{trainers} trainer{'s' * (trainers > 1)} + {engines} engine{'s' * (engines > 1)}"
        if placement.tensor_parallel_size > 1:
            told += f" of {placement.tensor_parallel_size} GPUs"
        return f"{self.mode}, {told}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `hone simulate` has found."""

    cfg: SimulateConfig
    gpu: Peaks
    num_gpus: int
    num_params: int
    lengths: tuple[tuple[int, ...], ...]
    """Completion lengths of each group."""
    outcomes: tuple[Outcome, ...]
    """By tokens/s, the most first."""
    notes: tuple[str, ...]
    """What was left out, and why."""

    @property
    def plain(self) -> Outcome:
        """Synchronous and colocated without carrying samples over; separate where it cannot be."""
        plain = [
            x for x in self.outcomes if not x.is_async and not x.run.rollout.oversample_prompts
        ]
        return next((x for x in plain if x.run.placement.colocated), plain[0])

    def speedup(self, outcome: Outcome) -> float:
        """Its tokens/s over those of the plain run."""
        return outcome.run.tokens_per_s / self.plain.run.tokens_per_s

    @property
    def verdict(self) -> str:
        """Whether asynchrony pays, in words."""
        best = next((x for x in self.outcomes if x.is_async), None)
        if best is None:
            return "Asynchrony needs engines on GPUs of their own, and no split has been simulated."
        plain, ratio = self.plain, self.speedup(best)
        told = f"the best of it ({best.name}) reaches {ratio:.2f} x the tokens/s of {plain.mode}"
        if ratio >= _TELLING:
            verdict = f"Asynchrony pays: {told}."
        elif ratio > 1:
            verdict = f"Asynchrony hardly pays: {told}, which a prediction cannot tell from 1."
        else:
            verdict = f"Asynchrony does not pay: {told}."
        top = self.outcomes[0]
        if top not in (best, plain):
            verdict += f" Fastest is {top.name}: {self.speedup(top):.2f} x."
        return verdict


def compare(cfg: SimulateConfig) -> Comparison:
    """Simulate every mode for every split. Raises UserError for what cannot be simulated."""
    gpu, shape = known_gpu(cfg.simulate.gpu, key="simulate.gpu"), _shape(cfg.model)
    num_gpus, rng = _num_gpus(cfg), np.random.default_rng(cfg.run.seed)
    rollout, notes = cfg.rollout, list[str]()
    num_groups = rollout.prompts_per_step * (cfg.simulate.steps + 2)
    drawn = draw_lengths(
        cfg.simulate.lengths,
        num_groups * rollout.n_samples_per_prompt,
        most=rollout.max_completion_tokens,
        rng=rng,
    )
    groups = np.reshape(drawn, (num_groups, rollout.n_samples_per_prompt)).tolist()
    lengths = tuple(tuple(group) for group in groups)
    plans = _plans(cfg, shape, gpu, num_gpus, notes)
    rates = {placement: _rates(cfg, placement, plan) for placement, plan in plans.items()}
    rates = _with_room(cfg, rates, notes)
    if not rates:
        raise UserError(
            f"{num_gpus} x {gpu.name} cannot be split into trainers and engines: "
            + "; ".join(notes)
            + "."
        )
    if cfg.cluster.num_references:
        notes.append(
            f"cluster.num_references {cfg.cluster.num_references}: their time is part of a step; "
            "their GPUs are in no split"
        )
    if shape.num_sliding_layers:
        notes.append("decode steps are taken to read all keys in layers with a sliding window too")
    outcomes = [
        Outcome(
            mode,
            pipeline.samples_ahead,
            simulate(
                placement,
                of_placement,
                lengths,
                num_prompt_tokens=cfg.simulate.prompt_tokens,
                num_steps=cfg.simulate.steps,
                rollout=mode_rollout,
                pipeline=pipeline,
                engine=cfg.engine,
            ),
            plans[placement],
        )
        for placement, of_placement in rates.items()
        for mode, mode_rollout, pipeline in _modes(cfg, placement)
    ]
    return Comparison(
        cfg=cfg,
        gpu=gpu,
        num_gpus=num_gpus,
        num_params=shape.num_params,
        lengths=lengths,
        outcomes=tuple(sorted(outcomes, key=lambda x: x.run.tokens_per_s, reverse=True)),
        notes=tuple(notes),
    )


def launch_words(outcome: Outcome) -> list[str]:
    """The words that start `hone rl` on the devices of `outcome`: `["hone", "rl"]`, or where
    trainers are on several nodes, on each of them torchrun."""
    placement, per_node = outcome.run.placement, outcome.plan.devices.per_node or GPUS_OF_A_NODE
    if not placement.colocated or placement.num_trainers <= per_node:
        return ["hone", "rl"]
    nodes = f"{-(-placement.num_trainers // per_node)}"
    return ["torchrun", "--nnodes", nodes, "--nproc-per-node", f"{per_node}", "-m", "hone", "rl"]


def run_flags(cfg: SimulateConfig, outcome: Outcome) -> list[str]:
    """The words that make `hone rl`, with the recipe and flags of `cfg`, run in the mode and on the
    devices of `outcome`: `["--nproc", "8"]`, or `["--cluster.num_engines", "5", ...]`.

    Where samples may be older than the weights and nothing corrects for it, `tis` is among them.
    """
    placement, rollout, pipeline = outcome.run.placement, outcome.run.rollout, PipelineConfig()
    planned = outcome.plan.config
    assert isinstance(planned, SimulateConfig)
    if outcome.is_async:
        pipeline, queue = outcome.run.pipeline, outcome.run.pipeline.async_queue_size
        if queue is not None and queue > pipeline.max_staleness:  # which bounds it as well
            pipeline = pipeline.model_copy(update={"async_queue_size": None})
    algorithm = cfg.algorithm
    is_old = outcome.is_async or rollout.oversample_prompts > 0
    if is_old and algorithm.correction.kind == "none":
        correction = algorithm.correction.model_copy(update={"kind": "tis"})
        algorithm = algorithm.model_copy(update={"correction": correction})
    sections = {
        "cluster": planned.cluster,
        "engine": planned.engine,
        "pipeline": pipeline,
        "rollout": rollout,
        "algorithm": algorithm,
        "critic": planned.critic,
        "trainer": planned.trainer,
    }
    words: list[str] = []
    is_launched = launch_words(outcome)[0] != "hone"
    if not planned.cluster.is_used and placement.num_trainers > 1 and not is_launched:
        words += ["--nproc", f"{placement.num_trainers}"]
    for name, section in sections.items():
        wanted = section.model_dump(mode="json")
        for key, value in _changed(getattr(cfg, name).model_dump(mode="json"), wanted, name):
            words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def _plan(cfg: SimulateConfig, shape: ModelShape, gpu: Peaks, placement: Placement) -> RunPlan:
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


def _changed(
    given: Mapping[str, Any], wanted: Mapping[str, Any], above: str
) -> Iterator[tuple[str, Any]]:
    """Dotted keys whose values are others, with those that are wanted."""
    for name, value in wanted.items():
        key = f"{above}.{name}"
        if isinstance(value, dict) and isinstance(given[name], dict):
            yield from _changed(given[name], value, key)
        elif value != given[name]:
            yield key, value


def placement_rates(
    cfg: SimulateConfig, shape: ModelShape, gpu: Peaks, placement: Placement
) -> Rates:
    """What the parts of a placement take: the hardware's limits over the shares of them that
    `simulate` assumes."""
    return _rates(cfg, placement, _plan(cfg, shape, gpu, placement))


def _rates(cfg: SimulateConfig, placement: Placement, plan: RunPlan) -> Rates:
    gpu, shape = plan.devices.gpu, plan.shape
    assert gpu is not None
    assert shape is not None
    run = RunMemory(plan)
    assumed_cfg, size = cfg.simulate, placement.tensor_parallel_size
    speed = (2.0 * assumed_cfg.tensor_parallel_scaling) ** math.log2(size)
    read = gpu.bytes_per_s * assumed_cfg.decode_share * speed
    prefill = gpu.flops_per_s * assumed_cfg.prefill_share * speed
    weights = shape.weight_bytes(plan.num_bytes)
    params = shape.body_params + shape.head_params
    engine = EngineRates(
        weights_s=shape.decode_bytes(plan.num_bytes) / read,
        seq_s=2.0 * params / (gpu.flops_per_s * assumed_cfg.decode_share * speed),
        key_s=run.kv_bytes_per_token * size / read,
        overhead_s=assumed_cfg.decode_overhead_s,
        prefill_token_s=2.0 * shape.body_params / prefill,
        prefill_key_s=shape.attention_flops_per_key / prefill,
        prefill_seq_s=2.0 * shape.head_params / prefill,
    )
    return Rates(
        engine=engine,
        train_s=TrainingTime(plan, assumed_cfg).step_s,
        sync_s=assumed_cfg.switch_s
        if placement.colocated
        else weights / assumed_cfg.sync_bytes_per_s,
        max_num_keys=(run.cache or 0) // run.kv_bytes_per_token,
    )


def _modes(
    cfg: SimulateConfig, placement: Placement
) -> Iterator[tuple[str, RolloutConfig, PipelineConfig]]:
    """Name, rollout and pipeline of what a placement can do."""
    home = "colocated" if placement.colocated else "separate"
    plain = cfg.rollout.model_copy(update={"oversample_prompts": 0})
    synchronous = cfg.pipeline.model_copy(update={"max_staleness": 0})
    yield f"sync {home}", plain, synchronous
    further = cfg.rollout.oversample_prompts or -(-cfg.rollout.prompts_per_step // 4)
    over = cfg.rollout.model_copy(update={"oversample_prompts": further})
    yield f"partial {home}", over, synchronous
    if placement.colocated:
        return
    for staleness in sorted({*cfg.simulate.staleness, cfg.pipeline.max_staleness} - {0}):
        pipeline = {"max_staleness": staleness}
        yield f"async, staleness {staleness}", plain, cfg.pipeline.model_copy(update=pipeline)


def _plans(
    cfg: SimulateConfig, shape: ModelShape, gpu: Peaks, num_gpus: int, notes: list[str]
) -> dict[Placement, RunPlan]:
    """Colocated, then the recipe's split, or at most `_MAX_SPLITS` of all there are, with what
    makes each fit. An engine on a trainer's device has that one alone."""
    size, asked = cfg.engine.tensor_parallel_size, cfg.cluster.num_engines
    splits = [asked] if asked else range(1, (num_gpus - 1) // size + 1)
    whole = Placement(
        num_trainers=num_gpus, num_engines=num_gpus, tensor_parallel_size=1, colocated=True
    )
    possible = [
        whole,
        *(
            Placement(
                num_trainers=num_gpus - number * size,
                num_engines=number,
                tensor_parallel_size=size,
            )
            for number in splits
        ),
    ]
    refused: dict[str, tuple[str, list[int]]] = {}
    plans: dict[Placement, RunPlan] = {}
    for placement in possible:
        plan = _plan(cfg, shape, gpu, placement)
        refusal = _refusal(plan, placement)
        if refusal is None:
            plans[placement] = plan
        else:
            kind, reason = refusal
            refused.setdefault(kind, (reason, []))[1].append(placement.num_trainers)
    if whole in plans and size > 1:
        notes.append(
            "colocated engines have one GPU each: engine.tensor_parallel_size is for those apart"
        )
    if num_gpus <= size:
        notes.append(f"an engine takes {size} GPUs, which leaves none of {num_gpus} to trainers")
    apart = [placement for placement in plans if not placement.colocated]
    if len(apart) > _MAX_SPLITS:
        picked = np.linspace(0, len(apart) - 1, _MAX_SPLITS).round().astype(int)
        notes.append(f"{_MAX_SPLITS} of {len(apart)} splits were tried, evenly spread")
        kept = {apart[index] for index in picked} | {whole}
        plans = {placement: plan for placement, plan in plans.items() if placement in kept}
    fitting = {placement: _fitted(plan) for placement, plan in plans.items()}
    for placement, plan in fitting.items():
        if plan is None:
            what = "colocated" if placement.colocated else "separate"
            reason = f"a step needs more than the {gpu.memory_gib} GiB of a GPU, {what}"
            refused.setdefault(what, (reason, []))[1].append(placement.num_trainers)
    notes += [f"{_listed(numbers)} trainers: {reason}" for reason, numbers in refused.values()]
    found = {placement: plan for placement, plan in fitting.items() if plan is not None}
    if any(found[placement] is not plans[placement] for placement in found):
        notes.append(
            "some placements need other settings of memory than the recipe's, which are among the "
            "flags; the time that recomputation and offloading take is left out"
        )
    return found


def _fitted(plan: RunPlan) -> RunPlan | None:
    """The plan with the cheapest settings that make it fit its GPUs; None: none do."""
    if does_fit(plan):
        return plan
    asleep = changed(plan, {"engine.enable_sleep": True})
    if not plan.is_apart and does_fit(asleep):  # part of the time that a switch is taken to need
        return asleep
    changes = remedies(plan, moves=False)
    return changed(plan, changes[0]) if changes else None


def _with_room(
    cfg: SimulateConfig, rates: Mapping[Placement, Rates], notes: list[str]
) -> dict[Placement, Rates]:
    """Placements whose engines hold at least one full sample."""
    longest = cfg.simulate.prompt_tokens + cfg.rollout.max_completion_tokens
    kept = {x: rates[x] for x in rates if rates[x].max_num_keys > longest}
    small = [x for x in rates if x not in kept]
    if small:
        held = max(max(rates[x].max_num_keys, 0) for x in small)
        homes = " and ".join(sorted({"colocated" if x.colocated else "separate" for x in small}))
        notes.append(
            f"{homes} engines: their KV cache holds {held} tokens, and simulate.prompt_tokens + "
            f"rollout.max_completion_tokens are {longest} (raise engine.gpu_memory_utilization or "
            "engine.tensor_parallel_size)"
        )
    return kept


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


def _shape(model: SimulatedModelConfig) -> ModelShape:
    if model.shape is None and not model.path:
        raise UserError(
            "neither model.shape nor model.path is set; name a public shape such as qwen3-8b in "
            "model.shape, or in model.path a folder with config.json or the hub name of such a "
            "shape."
        )
    named = model.shape
    if named is None and not Path(model.path).exists():
        named = model.path.rpartition("/")[2].lower()
    shape = None if named is None else public_shape(named)
    if shape is not None:
        return shape
    try:
        return ModelShape.from_config(model.path)
    except OSError as error:
        raise UserError(
            f"model.path is '{model.path}', which is no folder with a config.json ({error}) and "
            "not the name of a public shape that hone knows; name one in model.shape."
        ) from error


def _num_gpus(cfg: SimulateConfig) -> int:
    """GPUs in all, but for those of references, which every split leaves alone."""
    cluster = cfg.cluster
    if cluster.num_engines:
        return cluster.num_trainers + cluster.num_engines * cfg.engine.tensor_parallel_size
    return (cfg.simulate.gpus or GPUS_UNSET) - cluster.num_references
