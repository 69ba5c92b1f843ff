"""All modes and splits of a number of GPUs, simulated and ranked.

result = compare(cfg)                   # cfg: a PlanConfig
result.outcomes                         # fastest first
run_flags(cfg, result.recommended)      # command-line flags of `hone rl` for it
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from hone.config.plan import RunPlan
from hone.config.planning import GPUS_UNSET, PlannedModelConfig, PlanningConfig
from hone.config.tree import PlanConfig, RLConfig
from hone.engine.backends import BACKENDS
from hone.errors import UserError, did_you_mean, listed
from hone.families.model_facts import ModelFacts
from hone.families.registry import public_configs
from hone.families.shape import ModelShape, public_shape
from hone.families.stages import RECURRENCE
from hone.garbage import rare_garbage_collection
from hone.hardware import Peaks, known_gpu
from hone.planner.fitting import gpu_host_roles, rounds_differently
from hone.planner.host_memory import saved_at_the_end, saves_in_background
from hone.planner.knobs import gpus_of_a_node
from hone.planner.run_memory import RunMemory, peak_bytes
from hone.rollout.settings import PipelineConfig, RolloutConfig
from hone.tools.plan.lengths import draw_lengths
from hone.tools.plan.search import (
    Notes,
    Report,
    broken_rules,
    no_report,
    plan_of,
    plans_that_fit,
    search,
)
from hone.tools.plan.simulated_engine import EngineRates
from hone.tools.plan.simulator import Placement, Rates, SimulatedRun, Simulation
from hone.tools.plan.training_time import LINK_SHARE, TrainingTime

__all__ = [
    "LETTERS",
    "NUM_WHOLE",
    "Comparison",
    "Outcome",
    "changed_settings",
    "compare",
    "launch_words",
    "placement_rates",
    "plan_rates",
    "planned_config",
    "recipe_of",
    "run_flags",
]

_PLANNED = ("cluster", "engine", "pipeline", "rollout", "algorithm", "critic", "trainer")
"""Sections of the configuration that a plan sets."""
NUM_WHOLE = 16
"""Number of outcomes that are simulated for all steps: as many as `hone plan` shows."""
_CODES_READ, _CODES_RATE = 0.75, 0.65
"""Share of the rates of bandwidth and of products that decode steps with int8 weights reach
(benchmarks/README.md: the steps of 8B and 30B-A3B)."""
_STATES_MOVED = 0.85
"""Rate at which recurrent states are read and written, of that at which weights and keys are read.
On an H200 it was 0.79 with 256 sequences of Qwen3.5 0.8B and 0.92 with 9B."""
_GAINED_SHARE = 0.5
"""Share of the time for repeated reads of a prompt's keys that is saved where members of a group
read them once: 0.5 for 64 x 8 and 0.6 for 32 x 8 samples on an H200. Merging takes the rest."""
_MIN_SIGNIFICANT_RATIO = 1.1
"""Ratios below this are within the error of a prediction."""


LETTERS: Mapping[str, str] = {
    "critic": "c",
    "reference": "r",
    "teacher": "t",
    "reward_model": "m",
}
"""How the split of an outcome names roles with devices of their own."""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One way to run."""

    mode: str
    is_async: bool
    run: SimulatedRun
    plan: RunPlan
    """The plan of its placement, with settings that make it fit."""

    @property
    def is_plain(self) -> bool:
        """Whether it is synchronous, and no sample is carried over into a later step."""
        return not (self.is_async or self.run.rollout.oversample_prompts)

    @property
    def leaves_margin(self) -> bool:
        """Whether it leaves as much memory of a GPU free as predictions have been off."""
        return self.plan.devices.keeps_margin

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest device in its fullest phase."""
        return peak_bytes(self.plan)

    @property
    def phases_s(self) -> dict[str, float]:
        """Mean seconds of each phase of a step."""
        steps = self.run.steady
        sampling = "waiting for samples" if self.is_async else "sampling"
        return {
            sampling: fmean(step.wait_s for step in steps),
            "training": fmean(step.train_s for step in steps),
            "until engines halt": fmean(step.halt_s for step in steps),
            "for weights": fmean(step.sync_s for step in steps),
        }

    @property
    def split(self) -> str:
        """Devices of trainers and of engines, `=` where they are the same, and those that the
        search has given to other roles."""
        placement, engines = self.run.placement, f"{self.run.placement.num_engines}"
        if placement.tensor_parallel_size > 1:
            engines += f" x {placement.tensor_parallel_size}"
        sides = [f"{placement.num_trainers} = {engines}"]
        if not placement.colocated:
            sides = [f"{placement.num_trainers}", engines]
        sides += [f"{number}{LETTERS[role]}" for role, number in placement.others]
        return " + ".join(sides)

    @property
    def name(self) -> str:
        """Mode and devices in words."""
        placement, size = self.run.placement, self.run.placement.tensor_parallel_size
        others = "".join(
            f" + {_counted(number, role.replace('_', ' '))}" for role, number in placement.others
        )
        if placement.colocated:
            devices = f"{_counted(placement.num_trainers, 'GPU')}{others}"
            return f"{self.mode}, {devices}" + (f", engines of {size}" if size > 1 else "")
        trainers = _counted(placement.num_trainers, "trainer")
        devices = f"{trainers} + {_counted(placement.num_engines, 'engine')}"
        if size > 1:
            devices += f" of {size} GPUs"
        return f"{self.mode}, {devices}{others}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `hone plan`."""

    cfg: PlanConfig
    gpu: Peaks
    num_gpus: int
    num_params: int
    lengths: tuple[tuple[int, ...], ...]
    """Completion lengths of each group."""
    outcomes: tuple[Outcome, ...]
    """Best first, as `plan.goal` says."""
    notes: tuple[str, ...]
    """Notes on omitted placements, with reasons."""

    @property
    def plain(self) -> Outcome:
        """The plain run, for comparison: the first in rank that is synchronous and colocated,
        without carry-over of samples; with remote engines where colocation is not possible."""
        plain = [x for x in self.outcomes if x.is_plain]
        return next((x for x in plain if x.run.placement.colocated), plain[0])

    @property
    def recommended(self) -> Outcome:
        """The one to run: the best in rank, or where no prediction tells its speed from that of the
        best which trains on samples of the newest weights alone, the latter."""
        first = self.outcomes[0]
        plain = next(x for x in self.outcomes if x.is_plain)
        ratio = first.run.tokens_per_s / plain.run.tokens_per_s
        is_alike = self.cfg.plan.goal != "memory" and ratio < _MIN_SIGNIFICANT_RATIO
        return plain if is_alike else first

    def speedup(self, outcome: Outcome) -> float:
        """Tokens/s of the outcome over those of the plain run."""
        return outcome.run.tokens_per_s / self.plain.run.tokens_per_s

    @property
    def verdict(self) -> str:
        """A sentence on whether asynchrony saves time."""
        asynchronous = [x for x in self.outcomes if x.is_async]
        best = max(asynchronous, key=lambda x: x.run.tokens_per_s, default=None)
        if best is None:
            return "Asynchrony needs engines on GPUs of their own, and no split has been simulated."
        plain, ratio = self.plain, self.speedup(best)
        comparison = (
            f"the best of it ({best.name}) reaches {ratio:.2f} x the tokens/s of {plain.mode}"
        )
        if ratio >= _MIN_SIGNIFICANT_RATIO:
            verdict = f"Asynchrony pays: {comparison}."
        elif ratio > 1:
            verdict = (
                f"Asynchrony hardly pays: {comparison}, which a prediction cannot tell from 1."
            )
        else:
            verdict = f"Asynchrony does not pay: {comparison}."
        top = max(self.outcomes, key=lambda x: x.run.tokens_per_s)
        if top not in (best, plain):
            verdict += f" Fastest is {top.name}: {self.speedup(top):.2f} x."
        return verdict


@rare_garbage_collection()
def compare(cfg: PlanConfig, report: Report = no_report) -> Comparison:
    """Simulate every mode for every split. `report` is called before each part of the work. Raises
    UserError for what cannot be simulated."""
    gpu, shape = known_gpu(cfg.plan.gpu, key="plan.gpu"), _shape(cfg.model)
    num_gpus, rng = _num_gpus(cfg), np.random.default_rng(cfg.run.seed)
    if broken := broken_rules(cfg, shape, gpu, num_gpus):
        raise UserError("\nerror: ".join(finding.message for finding in broken))
    rollout, notes = cfg.rollout, list[str]()
    num_groups = rollout.prompts_per_step * (cfg.plan.steps + 2)
    drawn = draw_lengths(
        cfg.plan.lengths,
        num_groups * rollout.n_samples_per_prompt,
        most=rollout.max_completion_tokens,
        rng=rng,
    )
    groups = np.reshape(drawn, (num_groups, rollout.n_samples_per_prompt)).tolist()
    lengths = tuple(tuple(group) for group in groups)
    plans = search(cfg, shape, gpu, num_gpus, Notes(notes, report))
    rates = {placement: plan_rates(cfg.plan, placement, plan) for placement, plan in plans.items()}
    rates = _with_room(cfg, rates, notes)
    if not rates:
        possible = listed([*_possible(cfg, shape, gpu, num_gpus)], last="or")
        raise UserError(
            f"{num_gpus} x {gpu.name} cannot be split into trainers and engines: "
            f"{'; '.join(notes)}. "
            + (f"It would be possible with {possible}." if possible else "Nothing tried helps.")
        )
    notes += (
        f"{role.words}: what nothing hides of their time is part of training; their GPUs are in no "
        "split"
        for role in cfg.cluster.others
    )
    for key, path in (("teacher", cfg.teacher.path), ("reward.model", cfg.reward.model.path)):
        if path is not None and ((facts := ModelFacts.known(path)) is None or facts.shape is None):
            notes.append(f"{key}.path '{path}' is taken to be of the policy's shape")
    if shape.num_sliding_layers:
        notes.append("decode steps are taken to read all keys in layers with a sliding window too")
    candidates = [
        _Candidate(cfg, mode, plans[placement], placement, of_placement, rollout, pipeline, lengths)
        for placement, of_placement in rates.items()
        for mode, rollout, pipeline in _modes(cfg, placement)
    ]
    return Comparison(
        cfg=cfg,
        gpu=gpu,
        num_gpus=num_gpus,
        num_params=shape.num_params,
        lengths=lengths,
        outcomes=tuple(_simulated(candidates, report)),
        notes=tuple(notes),
    )


class _Candidate(NamedTuple):
    """A candidate: a mode on a placement."""

    cfg: PlanConfig
    mode: str
    plan: RunPlan
    placement: Placement
    rates: Rates
    rollout: RolloutConfig
    pipeline: PipelineConfig
    lengths: Sequence[Sequence[int]]

    def simulation(self) -> Simulation:
        return Simulation(
            self.placement,
            self.rates,
            self.lengths,
            num_prompt_tokens=self.cfg.plan.prompt_tokens,
            rollout=self.rollout,
            pipeline=self.pipeline,
            engine=self.cfg.engine,
        )

    def outcome(self, run: SimulatedRun) -> Outcome:
        return Outcome(self.mode, self.pipeline.samples_ahead, run, self.plan)

    @property
    def few_steps(self) -> int:
        """Number of steps of the first simulation, enough for samples to reach their largest
        staleness."""
        steps = self.cfg.plan.steps
        return min(max(steps // 8, 3) + self.pipeline.max_staleness, steps)


def _simulated(candidates: Sequence[_Candidate], report: Report) -> list[Outcome]:
    """Outcomes of all candidates, best first. All are first simulated for a few steps; only the
    leading ones, and the best of each mode, are simulated for all steps. Simulations of those that
    lead so far are kept, to go on with them."""
    cfg = candidates[0].cfg
    found: list[Outcome] = []
    ranks: list[tuple[float, ...]] = []
    begun: dict[int, Simulation] = {}

    def ranked() -> list[int]:
        return sorted(range(len(ranks)), key=ranks.__getitem__)

    def leading() -> set[int]:
        best_first = ranked()
        best_of_mode = {candidates[number].mode: number for number in reversed(best_first)}
        return {*best_first[:NUM_WHOLE], *best_of_mode.values()}

    for number, candidate in enumerate(candidates):
        report("steps", number, len(candidates))
        begun[number] = candidate.simulation()
        found.append(candidate.outcome(begun[number].until(candidate.few_steps)))
        ranks.append(_rank(cfg, found[-1]))
        for left_behind in begun.keys() - leading():
            del begun[left_behind]
    while True:
        short = [number for number in leading() if len(found[number].run.steps) < cfg.plan.steps]
        if not short:
            return [found[number] for number in ranked()]
        for done, number in enumerate(short):
            report("whole", done, len(short))
            simulation = begun.pop(number, None) or candidates[number].simulation()
            found[number] = candidates[number].outcome(simulation.until(cfg.plan.steps))
            ranks[number] = _rank(cfg, found[number])


def _rank(cfg: PlanConfig, outcome: Outcome) -> tuple[float, ...]:
    speed = -outcome.run.tokens_per_s
    match cfg.plan.goal:
        case "throughput":
            return (speed,)
        case "on_policy":
            return (outcome.run.staleness_max > 0, speed)
        case "memory":
            return (outcome.peak_bytes, speed)


def _possible(cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int) -> Iterator[str]:
    """Texts on changes that would make a run possible for which no settings were found."""
    if cfg.plan.host_gib is not None:
        yield from _with_host_memory(cfg, shape, gpu, num_gpus)
    codes = cfg.engine.model_copy(update={"weight_dtype": "int8"})
    if codes != cfg.engine and _can_run(
        cfg.model_copy(update={"engine": codes}), shape, gpu, num_gpus
    ):
        yield "engine.weight_dtype int8 (which rounds the weights that sample)"
    yield from _with_adapters(cfg, shape, gpu, num_gpus)
    for factor in (2, 4, 8, 16, 32):
        if not cfg.cluster.num_engines and _can_run(cfg, shape, gpu, factor * num_gpus):
            yield f"{factor * num_gpus} of these GPUs"
            break
    for name in ("A100", "H200"):
        larger = known_gpu(name)
        is_larger = (larger.memory_gib or 0) > (gpu.memory_gib or 0)
        if is_larger and _can_run(cfg, shape, larger, num_gpus):
            yield f"{num_gpus} x {name}"
            break


def _with_host_memory(
    cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int
) -> Iterator[str]:
    if saves_in_background(cfg):
        change = saved_at_the_end(cfg)
        checkpoint = cfg.checkpoint.model_copy(update=change)
        other = cfg.model_copy(update={"checkpoint": checkpoint})
        if _can_run(other, shape, gpu, num_gpus):
            words = (f"checkpoint.{key} {value}".lower() for key, value in change.items())
            yield f"{', '.join(words)} (which saves no checkpoint)"
    planning = cfg.plan.model_copy(update={"host_gib": None})
    unlimited = cfg.model_copy(update={"plan": planning})
    plans = search(unlimited, shape, gpu, num_gpus, Notes()).values()
    needs = [sum(role.num_bytes for role in gpu_host_roles(plan)) for plan in plans]
    if needs:
        yield f"{math.ceil(min(needs) / 2**30)} GiB of memory on each host (plan.host_gib)"


def _with_adapters(cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int) -> Iterator[str]:
    given = cfg.model.lora
    adapters = {} if given.rank else {"rank": 32}
    for change in (adapters, adapters | {"load_in_4bit": True}):
        lora = given.model_copy(update=change)
        if lora == given:
            continue
        other = cfg.model_copy(update={"model": cfg.model.model_copy(update={"lora": lora})})
        if _can_run(other, shape, gpu, num_gpus):
            words = ", ".join(f"model.lora.{key} {value}".lower() for key, value in change.items())
            learns = "rounds the frozen weights" if given.rank else "trains adapters alone"
            yield f"{words} (another method, which {learns})"
            break


def _can_run(cfg: PlanConfig, shape: ModelShape, gpu: Peaks, num_gpus: int) -> bool:
    """Whether some placement fits. The search ends with the first one."""
    return any(
        _with_room(cfg, {placement: plan_rates(cfg.plan, placement, plan)}, [])
        for placement, plan in plans_that_fit(cfg, shape, gpu, num_gpus, Notes())
    )


def launch_words(outcome: Outcome) -> list[str]:
    """The words that start `hone rl` on the devices of `outcome`: `["hone", "rl"]`, or where
    trainers are on several nodes, on each of them torchrun."""
    placement, per_node = outcome.run.placement, gpus_of_a_node(outcome.plan)
    if not placement.colocated or placement.num_trainers <= per_node:
        return ["hone", "rl"]
    nodes = f"{-(-placement.num_trainers // per_node)}"
    return ["torchrun", "--nnodes", nodes, "--nproc-per-node", f"{per_node}", "-m", "hone", "rl"]


def run_flags(cfg: PlanConfig, outcome: Outcome) -> list[str]:
    """The words that make `hone rl`, with the recipe and flags of `cfg`, run in the mode and on the
    devices of `outcome`: `["--nproc", "8"]`, or `["--cluster.num_engines", "5", ...]`.

    Where samples may be older than the weights, or formats of few bits make them another policy's,
    and nothing corrects for it, `tis` is among them.
    """
    planned, words = planned_config(cfg, outcome), list[str]()
    is_launched = launch_words(outcome)[0] != "hone"
    num_trainers = outcome.run.placement.num_trainers
    if not planned.cluster.is_used and num_trainers > 1 and not is_launched:
        words += ["--nproc", f"{num_trainers}"]
    for key, value in changed_settings(cfg, planned).items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def changed_settings(cfg: PlanConfig, planned: PlanConfig) -> dict[str, Any]:
    """Settings in which a plan differs from `cfg`, by key."""
    found: dict[str, Any] = {}
    for name in _PLANNED:
        given, wanted = getattr(cfg, name), getattr(planned, name)
        found |= _changed(given.model_dump(mode="json"), wanted.model_dump(mode="json"), name)
    return found


def recipe_of(planned: PlanConfig) -> dict[str, Any]:
    """The recipe of `hone rl` with the settings of a plan: what differs from the defaults."""
    recipe = planned.model_dump(mode="json", exclude_defaults=True)
    for key in ("plan", "output"):
        recipe.pop(key, None)
    recipe.get("run", {}).pop("dir", None)
    recipe.get("model", {}).pop("shape", None)
    return {name: section for name, section in recipe.items() if section}


def planned_config(cfg: PlanConfig, outcome: Outcome) -> PlanConfig:
    """`cfg` in the mode and on the devices of `outcome`."""
    rollout, pipeline = outcome.run.rollout, PipelineConfig()
    planned = outcome.plan.config
    assert isinstance(planned, PlanConfig)
    if outcome.is_async:
        pipeline = outcome.run.pipeline
    algorithm = cfg.algorithm
    is_old = outcome.is_async or rollout.oversample_prompts > 0
    if (is_old or rounds_differently(planned)) and algorithm.correction.kind == "none":
        correction = algorithm.correction.model_copy(update={"kind": "tis"})
        algorithm = algorithm.model_copy(update={"correction": correction})
    update = {name: getattr(planned, name) for name in _PLANNED}
    update |= {"pipeline": pipeline, "rollout": rollout, "algorithm": algorithm}
    return cfg.model_copy(update=update)


def _changed(
    given: Mapping[str, Any], wanted: Mapping[str, Any], above: str
) -> Iterator[tuple[str, Any]]:
    """Dotted keys whose values differ, with the wanted values."""
    for name, value in wanted.items():
        key = f"{above}.{name}"
        if isinstance(value, dict) and isinstance(given[name], dict):
            yield from _changed(given[name], value, key)
        elif value != given[name]:
            yield key, value


def placement_rates(cfg: PlanConfig, shape: ModelShape, gpu: Peaks, placement: Placement) -> Rates:
    """Times of the parts of a placement: the hardware's limits divided by the shares that `plan`
    assumes."""
    return plan_rates(cfg.plan, placement, plan_of(cfg, shape, gpu, placement))


def _unevenness(shape: ModelShape, size: int) -> float:
    """Expected excess of the rank with the most active experts over the mean, in standard
    deviations of one expert's activity. The maximum of normal variables follows Blom's formula
    (1958)."""
    if size == 1 or not shape.num_experts:
        return 0.0
    largest = NormalDist().inv_cdf((size - 0.375) / (size + 0.25))
    return largest / math.sqrt(shape.num_experts / size)


def _sent_s(plan: RunPlan, shape: ModelShape, gpu: Peaks, size: int) -> tuple[float, float]:
    """Seconds in which the devices of an engine exchange the two sums of each layer for a token,
    and its logits in float32."""
    rate = gpu.link_bytes_per_s * LINK_SHARE * size / (size - 1) if size > 1 else math.inf
    sums = 2 * 2 * shape.num_layers * shape.hidden_size * plan.num_bytes
    return sums / rate, 4 * shape.vocab_size / rate


def _meetings_s(assumed: PlanningConfig, shape: ModelShape, size: int) -> float:
    """Seconds of a decode step that are not divided among the devices of an engine and do not
    depend on its batch (docs/design/plan.md)."""
    two, more = assumed.two_gpus_layer_s, assumed.more_gpus_layer_s
    return shape.num_layers * (two if size == 2 else more) if size > 1 else 0.0


def _gained_share(plan: RunPlan, shape: ModelShape) -> float:
    """Share of the time for repeated reads of shared keys that is saved. Layers with a window,
    engines on a CPU and some backends do not share reads."""
    cfg = plan.config
    if plan.is_on_cpu or not isinstance(cfg, RLConfig):
        return 0.0
    if not BACKENDS[cfg.engine.backend].shares_prefix_reads:
        return 0.0
    return _GAINED_SHARE * (1 - shape.sliding_share)


def plan_rates(assumed_cfg: PlanningConfig, placement: Placement, plan: RunPlan) -> Rates:
    """`placement_rates` of a plan whose model's shape and GPU are known."""
    gpu, shape = plan.devices.gpu, plan.shape
    assert gpu is not None
    assert shape is not None
    run = RunMemory(plan)
    size = placement.tensor_parallel_size
    sums_s, logits_s = _sent_s(plan, shape, gpu, size)
    read = gpu.bytes_per_s * assumed_cfg.decode_share * size
    prefill = gpu.flops_per_s * assumed_cfg.prefill_share * size
    weights = shape.weight_bytes(plan.num_bytes)
    params = shape.active_body_params + shape.head_params
    decoded = float(shape.decode_bytes(plan.num_bytes, packs_rows=plan.packs_rows))
    experts = float(shape.expert_params * plan.num_bytes)
    product_share = assumed_cfg.decode_share
    if plan.packs_rows:
        decoded, experts = decoded / _CODES_READ, shape.expert_params / _CODES_READ
        product_share *= _CODES_RATE
    engine = EngineRates(
        weights_s=decoded / read,
        experts_s=experts / read,
        uneven_s=experts / read * _unevenness(shape, size),
        unused_share=shape.unused_share,
        seq_s=2.0 * params / (gpu.flops_per_s * product_share * size),
        state_s=2.0 * shape.state_bytes(plan.num_bytes) / (read * _STATES_MOVED),
        sent_s=sums_s + logits_s,
        key_s=run.engine.kv_bytes_per_token * size / read,
        gained_share=_gained_share(plan, shape),
        overhead_s=assumed_cfg.decode_overhead_s + _meetings_s(assumed_cfg, shape, size),
        prefill_token_s=(
            2.0 * shape.active_body_params + RECURRENCE * shape.recurrence_flops_per_token
        )
        / prefill
        + sums_s,
        prefill_key_s=shape.attention_flops_per_key / prefill,
        prefill_seq_s=2.0 * shape.head_params / prefill + logits_s,
    )
    training = TrainingTime(plan, assumed_cfg)
    return Rates(
        engine=engine,
        train_s=training.update_s,
        scoring=training.scoring if any(x.has_own_devices for x in plan.scorers) else None,
        sync_s=assumed_cfg.switch_s
        if placement.colocated
        else weights / assumed_cfg.sync_bytes_per_s,
        max_num_keys=(run.cache or 0) // run.engine.kv_bytes_per_token,
    )


def _modes(
    cfg: PlanConfig, placement: Placement
) -> Iterator[tuple[str, RolloutConfig, PipelineConfig]]:
    """Name, rollout and pipeline settings of each mode that a placement supports."""
    home = "colocated" if placement.colocated else "separate"
    plain = cfg.rollout.model_copy(update={"oversample_prompts": 0})
    synchronous = cfg.pipeline.model_copy(update={"max_staleness": 0})
    yield f"sync {home}", plain, synchronous
    further = cfg.rollout.oversample_prompts or -(-cfg.rollout.prompts_per_step // 4)
    over = cfg.rollout.model_copy(update={"oversample_prompts": further})
    yield f"partial {home}", over, synchronous
    if placement.colocated:
        return
    for staleness in sorted({*cfg.plan.staleness, cfg.pipeline.max_staleness} - {0}):
        pipeline = {"max_staleness": staleness}
        yield f"async, staleness {staleness}", plain, cfg.pipeline.model_copy(update=pipeline)


def _with_room(
    cfg: PlanConfig, rates: Mapping[Placement, Rates], notes: list[str]
) -> dict[Placement, Rates]:
    """Placements whose engines have room for at least one full sample."""
    longest = cfg.plan.prompt_tokens + cfg.rollout.max_completion_tokens
    kept = {x: rates[x] for x in rates if rates[x].max_num_keys > longest}
    small = [x for x in rates if x not in kept]
    if small:
        held = max(max(rates[x].max_num_keys, 0) for x in small)
        homes = " and ".join(sorted({"colocated" if x.colocated else "separate" for x in small}))
        notes.append(
            f"{homes} engines: their KV cache holds {held} tokens, and plan.prompt_tokens + "
            f"rollout.max_completion_tokens are {longest} (raise engine.gpu_memory_utilization or "
            "engine.tensor_parallel_size)"
        )
    return kept


def _shape(model: PlannedModelConfig) -> ModelShape:
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
    if model.shape is not None:
        known = [*public_configs()]
        raise UserError(
            f"model.shape is '{model.shape}', which is no public shape that hone knows."
            f"{did_you_mean(model.shape.rpartition('/')[2].lower(), known)} It knows "
            f"{', '.join(known)}; of another model name a folder with a config.json in model.path."
        )
    try:
        return ModelShape.from_config(model.path)
    except OSError as error:
        raise UserError(
            f"model.path is '{model.path}', which is no folder with a config.json ({error}) and "
            "not the name of a public shape that hone knows; name one in model.shape."
        ) from error


def _num_gpus(cfg: PlanConfig) -> int:
    """Number of GPUs to split: all but those of remote frozen models and a remote critic."""
    cluster = cfg.cluster
    if cluster.num_engines:
        return cluster.num_trainers + cluster.num_engines * cfg.engine.tensor_parallel_size
    return (cfg.plan.gpus or GPUS_UNSET) - cluster.num_others
