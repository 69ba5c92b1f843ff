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
from hone.config.derived import compute_dtype, kv_dtype, optimizer_steps_per_rollout
from hone.config.errors import UserError
from hone.config.hardware import GPUS, Peaks, gpu_peaks
from hone.config.parallel import AxisSizes
from hone.config.pipeline import PipelineConfig
from hone.config.rollout import RolloutConfig
from hone.config.simulate import GPUS_UNSET, SimulatedModelConfig
from hone.config.tree import SimulateConfig
from hone.families.shape import ModelShape, public_shape
from hone.planner.lengths import draw_lengths
from hone.planner.memory import adapter_params, planned_peak
from hone.planner.roofline import training_flops
from hone.planner.simulated_engine import EngineRates
from hone.planner.simulator import Placement, Rates, SimulatedRun, simulate

__all__ = ["Comparison", "Outcome", "compare", "placement_rates", "run_flags"]

_MAX_SPLITS = 16
_TELLING = 1.1
"""Ratios below this are within the error of a prediction."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way to run."""

    mode: str
    is_async: bool
    run: SimulatedRun

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
    gpu, shape = _gpu(cfg.simulate.gpu), _shape(cfg.model)
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
    rates = {
        placement: placement_rates(cfg, shape, gpu, placement)
        for placement in _placements(cfg, shape, gpu, num_gpus, notes)
    }
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
            pipeline.enabled,
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


def run_flags(cfg: SimulateConfig, outcome: Outcome) -> list[str]:
    """The words that make `hone rl`, with the recipe and flags of `cfg`, run in the mode and on the
    devices of `outcome`: `["--nproc", "8"]`, or `["--cluster.num_engines", "5", ...]`.

    Where samples may be older than the weights and nothing corrects for it, `tis` is among them.
    """
    placement, rollout, pipeline = outcome.run.placement, outcome.run.rollout, PipelineConfig()
    if outcome.is_async:
        pipeline, queue = outcome.run.pipeline, outcome.run.pipeline.async_queue_size
        if queue is not None and queue > pipeline.max_staleness:  # which bounds it as well
            pipeline = pipeline.model_copy(update={"async_queue_size": None})
    trainer, algorithm = cfg.trainer, cfg.algorithm
    size = {"tensor_parallel_size": placement.tensor_parallel_size}
    engine = cfg.engine.model_copy(update=size)
    if not placement.colocated:  # to sleep is to leave a shared device to the other
        engine = engine.model_copy(update={"enable_sleep": False})
    if not placement.colocated or placement.num_trainers > 1:
        trainer = trainer.model_copy(update={"enable_sleep": False})
    is_old = (outcome.is_async and pipeline.max_staleness > 0) or rollout.oversample_prompts > 0
    if is_old and algorithm.correction.kind == "none":
        correction = algorithm.correction.model_copy(update={"kind": "tis"})
        algorithm = algorithm.model_copy(update={"correction": correction})
    cluster = _cluster(cfg.cluster, placement)
    sections = {
        "cluster": cluster,
        "engine": engine,
        "pipeline": pipeline,
        "rollout": rollout,
        "algorithm": algorithm,
        "trainer": trainer,
    }
    words: list[str] = []
    if not cluster.is_used and placement.num_trainers > 1:
        words += ["--nproc", f"{placement.num_trainers}"]
    for name, section in sections.items():
        wanted = section.model_dump(mode="json")
        for key, value in _changed(getattr(cfg, name).model_dump(mode="json"), wanted, name):
            words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def _cluster(cluster: ClusterConfig, placement: Placement) -> ClusterConfig:
    """The cluster of a placement; the default, which is none, where no role is apart."""
    if placement.colocated and not cluster.num_references:
        return ClusterConfig()
    update: dict[str, Any] = {
        "num_trainers": placement.num_trainers,
        "num_engines": 0 if placement.colocated else placement.num_engines,
    }
    per_node, needed = cluster.devices_per_node, placement.num_gpus + cluster.num_references
    if per_node is not None and needed > cluster.num_nodes * per_node:
        update |= {"num_nodes": -(-needed // per_node), "address": cluster.address or "auto"}
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
    assumed_cfg, size = cfg.simulate, placement.tensor_parallel_size
    num_bytes = 4 if compute_dtype(cfg.model, "cuda") == "float32" else 2
    kv_bytes = 1 if kv_dtype(cfg.engine, cfg.model, "cuda") == "fp8" else num_bytes
    speed = (2.0 * assumed_cfg.tensor_parallel_scaling) ** math.log2(size)
    read = gpu.bytes_per_s * assumed_cfg.decode_share * speed
    prefill = gpu.flops_per_s * assumed_cfg.prefill_share * speed
    weights = shape.weight_bytes(num_bytes)
    params = shape.body_params + shape.head_params
    engine = EngineRates(
        weights_s=shape.decode_bytes(num_bytes) / read,
        seq_s=2.0 * params / (gpu.flops_per_s * assumed_cfg.decode_share * speed),
        key_s=shape.kv_bytes_per_token(kv_bytes) / read,
        overhead_s=assumed_cfg.decode_overhead_s,
        prefill_token_s=2.0 * shape.body_params / prefill,
        prefill_key_s=shape.attention_flops_per_key / prefill,
        prefill_seq_s=2.0 * shape.head_params / prefill,
    )
    cache = cfg.engine.gpu_memory_utilization * ((gpu.memory_gib or 0) << 30)
    if cfg.engine.kv_cache_gib is not None:
        cache = cfg.engine.kv_cache_gib * 2**30
    elif not placement.colocated:
        cache -= weights / size
    trainers = placement.num_trainers
    training = gpu.flops_per_s * assumed_cfg.training_share * trainers
    if trainers > 1:
        training *= assumed_cfg.training_scaling
    num_epochs, adapters = cfg.trainer.num_epochs, adapter_params(shape, cfg.model.lora)
    has_old, has_reference = optimizer_steps_per_rollout(cfg) > 1, cfg.algorithm.kl.coef > 0
    num_references = cfg.cluster.num_references
    num_scored = has_old + (has_reference and not num_references)
    scoring = gpu.flops_per_s * assumed_cfg.training_share * num_references

    def train_s(rows: Sequence[int], num_trained: int) -> float:
        flops = num_epochs * training_flops(
            shape, rows, num_head_tokens=num_trained, num_adapter_params=adapters or None
        )
        forward_flops = shape.forward_flops(rows, num_head_tokens=num_trained)
        seconds = (flops + num_scored * forward_flops) / training
        if num_references:  # beside the policy's own scores, before the update
            beside_s = has_old * forward_flops / training
            seconds += max(forward_flops / scoring - beside_s, 0.0)
        return seconds + assumed_cfg.overhead_s

    return Rates(
        engine=engine,
        train_s=train_s,
        sync_s=assumed_cfg.switch_s
        if placement.colocated
        else weights / assumed_cfg.sync_bytes_per_s,
        max_num_keys=int(cache * size / shape.kv_bytes_per_token(kv_bytes)),
    )


def _modes(
    cfg: SimulateConfig, placement: Placement
) -> Iterator[tuple[str, RolloutConfig, PipelineConfig]]:
    """Name, rollout and pipeline of what a placement can do."""
    home = "colocated" if placement.colocated else "separate"
    plain = cfg.rollout.model_copy(update={"oversample_prompts": 0})
    synchronous = cfg.pipeline.model_copy(update={"enabled": False})
    yield f"sync {home}", plain, synchronous
    further = cfg.rollout.oversample_prompts or -(-cfg.rollout.prompts_per_step // 4)
    over = cfg.rollout.model_copy(update={"oversample_prompts": further})
    yield f"partial {home}", over, synchronous
    if placement.colocated:
        return
    for staleness in sorted({*cfg.simulate.staleness, cfg.pipeline.max_staleness}):
        pipeline = {"enabled": True, "max_staleness": staleness}
        yield f"async, staleness {staleness}", plain, cfg.pipeline.model_copy(update=pipeline)


def _placements(
    cfg: SimulateConfig, shape: ModelShape, gpu: Peaks, num_gpus: int, notes: list[str]
) -> Iterator[Placement]:
    """Colocated, then the recipe's split, or at most `_MAX_SPLITS` of all there are. An engine on a
    trainer's device has that one alone."""
    size, asked = cfg.engine.tensor_parallel_size, cfg.cluster.num_engines
    splits = [asked] if asked else range(1, (num_gpus - 1) // size + 1)
    found: list[Placement] = []
    too_large: list[int] = []
    refused: list[tuple[int, str]] = []
    for num_engines in splits:
        num_trainers = num_gpus - num_engines * size
        reason = _refusal(cfg, shape, gpu, num_trainers, beside_engines=True)
        if reason == "memory":
            too_large.append(num_trainers)
        elif reason is not None:
            refused.append((num_trainers, reason))
        else:
            found.append(
                Placement(
                    num_trainers=num_trainers, num_engines=num_engines, tensor_parallel_size=size
                )
            )
    reason = _refusal(cfg, shape, gpu, num_gpus)
    if reason is None and size > 1:
        notes.append(
            "colocated engines have one GPU each: engine.tensor_parallel_size is for those apart"
        )
    if reason == "memory":
        too_large.append(num_gpus)
    elif reason is not None:
        refused.append((num_gpus, reason))
    else:
        yield Placement(
            num_trainers=num_gpus, num_engines=num_gpus, tensor_parallel_size=1, colocated=True
        )
    if too_large:
        notes.append(
            f"{_listed(too_large)} trainers: a step needs more than the {gpu.memory_gib} GiB of "
            "a GPU"
        )
    if refused:
        notes.append(f"{_listed([n for n, _ in refused])} trainers: {refused[0][1]}")
    if num_gpus <= size:
        notes.append(f"an engine takes {size} GPUs, which leaves none of {num_gpus} to trainers")
    if len(found) > _MAX_SPLITS:
        picked = np.linspace(0, len(found) - 1, _MAX_SPLITS).round().astype(int)
        notes.append(f"{_MAX_SPLITS} of {len(found)} splits were tried, evenly spread")
        found = [found[index] for index in picked]
    yield from found


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


def _refusal(
    cfg: SimulateConfig,
    shape: ModelShape,
    gpu: Peaks,
    num_trainers: int,
    *,
    beside_engines: bool = False,
) -> str | None:
    """Why so many trainers cannot train; `memory` where they have too little."""
    if num_trainers < 1:
        return "none are left"
    per_node = cfg.cluster.devices_per_node
    if beside_engines and per_node is not None and num_trainers > per_node:
        return f"beside engines all are on one node, of cluster.devices_per_node {per_node}"
    try:
        AxisSizes.of(cfg.trainer.parallel, num_trainers)
    except UserError as error:
        return str(error).partition(". ")[0]
    peak = planned_peak(
        shape, cfg.model, cfg.trainer, device="cuda", world_size=num_trainers, gpu=gpu
    )
    if peak is not None and gpu.memory_gib is not None and float(peak.value) > gpu.memory_gib:
        return "memory"
    return None


def _listed(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _gpu(name: str) -> Peaks:
    peaks = next((x for x in GPUS if x.name.lower() == name.lower()), None) or gpu_peaks(name)
    if peaks is None:
        known = ", ".join(x.name for x in GPUS)
        raise UserError(f"simulate.gpu is '{name}', which hone's table lacks; it has {known}")
    return peaks


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
