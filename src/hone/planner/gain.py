"""What other settings would bring a run that is under way, from what its own steps have measured.

    pricing = Pricing(plan, measured)          # two simulated runs
    pricing.gain_s({"engine.max_num_seqs": 64})

A run as it is and one with the change are simulated, over the lengths that were sampled. Rates are
the planner's, times what the measured phases took over what it predicts for them; what no phase
explains stays as it is. So the gain is the measured step times a ratio of two predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hone.config.plan import RunPlan
from hone.config.planning import PlanningConfig
from hone.config.tree import RLConfig
from hone.hardware import Peaks
from hone.planner.comparison import plan_rates
from hone.planner.fitting import Change, changed
from hone.planner.run_memory import RunMemory
from hone.planner.simulator import Placement, Rates, SimulatedRun, simulate

__all__ = ["ASSUMED", "Measured", "Pricing", "simulated"]

_CPU = Peaks("CPU", 2e10, 1e11, "datasheet")
"""Only ratios of predictions count."""
ASSUMED = PlanningConfig(overhead_s=0)
"""What a step takes beside its phases is measured."""
_PRICED = (
    "cluster.num_engines",
    "cluster.num_trainers",
    "engine.enable_prefix_caching",
    "engine.gpu_memory_utilization",
    "engine.kv_cache_gib",
    "engine.max_num_seqs",
    "engine.tensor_parallel_size",
    "pipeline.max_staleness",
    "reward.num_workers",
    "rollout.oversample_prompts",
    "trainer.enable_sleep",
    "trainer.logits_chunk_tokens",
    "trainer.offload",
    "trainer.parallel.zero_stage",
    "trainer.recompute",
)
"""Settings whose effect on time the planner knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A usual step of a run."""

    step_s: float
    engine_busy_s: float
    """Of each engine."""
    train_s: float
    """Update and the passes before it."""
    sync_s: float
    wait_s: float
    """In which the trainers waited for samples."""
    reward_wait_s: float = 0.0
    """In which nothing was left to do but to score."""
    reward_call_s: float = 0.0
    """The longest call of reward functions."""
    cache_bytes: float
    """Of each device of an engine; 0: not known."""
    num_prompt_tokens: int
    lengths: Sequence[Sequence[int]]
    """Completion tokens of the samples of each group, in the order in which they were started."""

    @classmethod
    def of(
        cls, usual: Callable[[str], float], plan: RunPlan, lengths: Sequence[Sequence[int]]
    ) -> Measured:
        """Of a run of `plan`, by its `usual` values of metrics, 0 for those it does not have."""
        num_engines = plan.roles["engine"].num_workers
        step_s, counted_s = usual("time/step_s"), usual("perf/engine_counted_s")
        busy_s = usual("perf/engine_busy_s") / num_engines
        return cls(
            step_s=step_s,
            engine_busy_s=busy_s * step_s / counted_s if counted_s else busy_s,
            train_s=usual("time/train_s") + usual("time/experience_s"),
            sync_s=usual("time/sync_s"),
            wait_s=usual("time/generate_s"),
            reward_wait_s=usual("perf/wait_for_rewards_share") * step_s,
            reward_call_s=usual("time/reward/p99_s"),
            cache_bytes=usual("mem/engine_cache_gib") * 2**30 / num_engines,
            num_prompt_tokens=round(usual("rollout/prompt_tokens/mean")),
            lengths=lengths,
        )


class Pricing:
    """Of a run. Raises ValueError where the planner cannot simulate it."""

    engine_scale: float = 1.0
    """Time of its engines, over what is predicted for them by `ASSUMED`."""
    train_scale: float = 1.0
    """The same of updates and the passes before them."""
    rest_s: float = 0.0
    """Of a step, what none of its phases explains."""

    def __init__(self, plan: RunPlan, measured: Measured) -> None:
        cfg = plan.config
        assert isinstance(cfg, RLConfig)
        if plan.shape is None:
            raise ValueError("the sizes of its model are not known")
        if not (any(map(sum, measured.lengths)) and measured.engine_busy_s > 0):
            raise ValueError("nothing was sampled")
        plan = _on_known_device(plan)
        self._plan, self._measured = plan, measured
        self._cache_scale = 1.0
        rates = self._rates(plan)
        if measured.cache_bytes:
            held = measured.cache_bytes / RunMemory(plan).kv_bytes_per_token
            self._cache_scale = min(held / max(rates.max_num_keys, 1), 1.0)
        raw = self._run(plan)
        num_steps = len(raw.steps)
        busy_s = sum(end - start for engine in raw.engine_busy for start, end in engine)
        self.engine_scale = measured.engine_busy_s * len(raw.engine_busy) * num_steps / busy_s
        self.train_scale = measured.train_s * num_steps / sum(x.train_s for x in raw.steps)
        waited_s = measured.wait_s if cfg.pipeline.samples_ahead else measured.engine_busy_s
        known_s = waited_s + measured.train_s + measured.sync_s
        self.rest_s = max(measured.step_s - known_s, 0.0)
        self._now_s = self._run(plan).step_s

    @staticmethod
    def knows(change: Change) -> bool:
        """Whether the time of all these settings can be told."""
        return all(key in _PRICED or key.startswith("algorithm.") for key in change)

    def gain_s(self, change: Change) -> float:
        """Seconds by which a step would be shorter, negative where it would be longer."""
        if (workers := change.get("reward.num_workers")) is not None:
            return self._gain_of_workers_s(workers)
        after_s = self._run(changed(self._plan, change)).step_s
        return self._measured.step_s * (1 - after_s / self._now_s)

    def _gain_of_workers_s(self, num_workers: int) -> float:
        """Calls of reward functions queue for workers; the last of them takes its time anyway."""
        measured, cfg, batch = self._measured, self._plan.config, self._plan.batch
        assert isinstance(cfg, RLConfig)
        assert batch is not None
        now, call_s = cfg.reward.worker_limit, measured.reward_call_s
        queued_s = min(measured.reward_wait_s, batch.samples_per_step / now * call_s) - call_s
        return max(queued_s, 0.0) * (1 - now / num_workers)

    def _run(self, plan: RunPlan) -> SimulatedRun:
        measured = self._measured
        return _simulated(plan, self._rates(plan), measured.lengths, measured.num_prompt_tokens)

    def _rates(self, plan: RunPlan) -> Rates:
        placement = _placement(plan)
        raw = plan_rates(ASSUMED, placement, plan)
        is_moved = placement.colocated != _placement(self._plan).colocated
        return Rates(
            engine=raw.engine.times(self.engine_scale),
            train_s=lambda rows, num_trained: (
                self.train_scale * raw.train_s(rows, num_trained) + self.rest_s
            ),
            scoring=raw.scoring,
            sync_s=raw.sync_s if is_moved else self._measured.sync_s,
            max_num_keys=int(self._cache_scale * raw.max_num_keys),
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
        num_steps=8 if carries_over else 4,  # else all steps are alike
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
