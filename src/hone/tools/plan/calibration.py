"""Calibration: the ratio of a run's measured times to the planner's prediction.

    engine_scale, train_scale, rest_s = calibrated(plan, measured)

The run is simulated over the lengths that were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hone.config.plan import RunPlan
from hone.config.planning import PlanningConfig
from hone.config.tree import RLConfig
from hone.hardware import Peaks
from hone.planner.run_memory import RunMemory
from hone.tools.plan.comparison import plan_rates
from hone.tools.plan.simulator import Placement, Rates, SimulatedRun, simulate

__all__ = ["ASSUMED", "Calibration", "Measured", "calibrated", "simulated"]

_CPU = Peaks("CPU", 2e10, 1e11, "datasheet")
"""Device for plans without one; only ratios of predictions count."""
ASSUMED = PlanningConfig(overhead_s=0)
"""Constants of the uncalibrated prediction. They have no time outside the phases of a step, since
that is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a typical step of a run."""

    step_s: float
    engine_busy_s: float
    """Seconds in which each engine was busy."""
    train_s: float
    """Seconds of the update and the passes before it."""
    sync_s: float
    wait_s: float
    """Seconds in which the trainers waited for samples."""
    cache_bytes: float
    """Completion tokens a second of each engine device; 0: not known."""
    num_prompt_tokens: int
    lengths: Sequence[Sequence[int]]
    """Completion lengths of the samples of each group, in the order in which the groups were
    started."""

    @classmethod
    def of(
        cls, usual: Callable[[str], float], plan: RunPlan, lengths: Sequence[Sequence[int]]
    ) -> Measured:
        """The measurements of a run of `plan`, from `usual` values of its metrics; 0 for a metric
        that the run does not have."""
        num_engines = plan.roles["engine"].num_workers
        step_s, counted_s = usual("time/step_s"), usual("perf/engine_counted_s")
        busy_s = usual("perf/engine_busy_s") / num_engines
        return cls(
            step_s=step_s,
            engine_busy_s=busy_s * step_s / counted_s if counted_s else busy_s,
            train_s=usual("time/train_s") + usual("time/experience_s"),
            sync_s=usual("time/sync_s"),
            wait_s=usual("time/generate_s"),
            cache_bytes=usual("mem/engine_cache_gib") * 2**30 / num_engines,
            num_prompt_tokens=round(usual("rollout/prompt_tokens/mean")),
            lengths=lengths,
        )


class Calibration(NamedTuple):
    """Factors between a measured step and its prediction by `ASSUMED`."""

    engine_scale: float
    """Measured time of the engines over their predicted time."""
    train_scale: float
    """Measured time of updates and the passes before them over their predicted time."""
    rest_s: float
    """Seconds of a step that none of its phases explains."""


def calibrated(plan: RunPlan, measured: Measured) -> Calibration:
    """The factors of a run of `plan`. Raises ValueError for one that cannot be simulated."""
    cfg = plan.config
    assert isinstance(cfg, RLConfig)
    if plan.shape is None:
        raise ValueError("the sizes of its model are not known")
    if not (any(map(sum, measured.lengths)) and measured.engine_busy_s > 0):
        raise ValueError("nothing was sampled")
    plan = _on_known_device(plan)
    rates = plan_rates(ASSUMED, _placement(plan), plan)
    max_num_keys = rates.max_num_keys
    if measured.cache_bytes:
        engine = RunMemory(plan).engine
        held = int((measured.cache_bytes - engine.states) / engine.kv_bytes_per_token)
        max_num_keys = min(held, max_num_keys)
    rates = replace(rates, sync_s=measured.sync_s, max_num_keys=max_num_keys)
    run = _simulated(plan, rates, measured.lengths, measured.num_prompt_tokens)
    num_steps = len(run.steps)
    busy_s = sum(end - start for engine in run.engine_busy for start, end in engine)
    waited_s = measured.wait_s if cfg.pipeline.samples_ahead else measured.engine_busy_s
    known_s = waited_s + measured.train_s + measured.sync_s
    return Calibration(
        engine_scale=measured.engine_busy_s * len(run.engine_busy) * num_steps / busy_s,
        train_scale=measured.train_s * num_steps / sum(step.train_s for step in run.steps),
        rest_s=max(measured.step_s - known_s, 0.0),
    )


def simulated(
    assumed: PlanningConfig,
    plan: RunPlan,
    lengths: Sequence[Sequence[int]],
    num_prompt_tokens: int,
) -> SimulatedRun:
    """A run of `plan` on a machine of these constants. Raises ValueError for a cache that one
    sample does not fit."""
    plan = _on_known_device(plan)
    rates = plan_rates(assumed, _placement(plan), plan)
    return _simulated(plan, rates, lengths, num_prompt_tokens)


def _simulated(
    plan: RunPlan, rates: Rates, lengths: Sequence[Sequence[int]], num_prompt_tokens: int
) -> SimulatedRun:
    cfg = plan.config
    assert isinstance(cfg, RLConfig)
    carries_over = cfg.pipeline.samples_ahead or cfg.rollout.oversample_prompts > 0
    return simulate(
        _placement(plan),
        rates,
        lengths,
        num_prompt_tokens=num_prompt_tokens,
        num_steps=8 if carries_over else 4,  # otherwise all steps are the same
        rollout=cfg.rollout,
        pipeline=cfg.pipeline,
        engine=cfg.engine,
    )


def _on_known_device(plan: RunPlan) -> RunPlan:
    if plan.devices.gpu is not None:
        return plan
    return replace(plan, devices=replace(plan.devices, gpu=_CPU))


def _placement(plan: RunPlan) -> Placement:
    engine = plan.roles["engine"]
    return Placement(
        num_trainers=plan.policy.axes.world,
        num_engines=engine.num_workers,
        tensor_parallel_size=engine.axes.tensor,
        colocated=not plan.is_apart,
    )
