"""What a run can give up where device memory ends, the cheapest first, and what each rung costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

from hone.config.plan import RunPlan
from hone.config.planning import PlanningConfig
from hone.config.tree import RLConfig
from hone.hardware import GIB, installed_gpu
from hone.planner.fitting import Change, changed, errors, memory_changes
from hone.planner.run_memory import RunMemory
from hone.planner.training_time import TrainingTime

__all__ = ["Rungs", "cap_key"]

_LEAST = GIB // 10
"""Bytes that are worth another start."""
_TAKEN = {
    "trainer.max_tokens_per_microbatch",
    "critic.max_tokens_per_microbatch",
    "trainer.recompute",
    "critic.recompute",
}
"""What a step gives up by itself."""
_SHARE = "engine.gpu_memory_utilization"
_UNPLANNED = (ArithmeticError, AssertionError, LookupError, ValueError)
"""Raised for runs that the planner was not made for: nothing is predicted for them."""


def cap_key(role: str, kind: str, *, in_rows: bool) -> str:
    """The key that sets the cap of a role's passes, `backward` or `forward`, of tokens or rows."""
    if in_rows:
        return "trainer.micro_batch_size"
    section = role if role == "critic" or (role, kind) == ("teacher", "forward") else "trainer"
    return f"{section}.max_tokens_per_{'microbatch' if kind == 'backward' else 'forward'}"


class Rungs:
    """Of a planned run; of one that is not known nothing is predicted."""

    def __init__(self, plan: RunPlan | None) -> None:
        self._plan = plan
        if plan is not None and not plan.is_on_cpu and plan.devices.gpu is None:
            self._plan = replace(plan, devices=replace(plan.devices, gpu=installed_gpu()))

    def cost(self, change: Change) -> str:
        """Such as ` (by prediction -12.1 GiB, +0.40 s a step)`; empty where nothing is known. Time
        is that of rows of full length."""
        plan = self._plan
        if (saved := self._saved_bytes(change)) is None or plan is None:
            return ""
        told = f"{-saved / GIB:+.1f} GiB"
        if isinstance(plan.config, RLConfig):
            with suppress(*_UNPLANNED):
                told += f", {_step_s(changed(plan, change)) - _step_s(plan):+.2f} s a step"
        return f" (by prediction {told})"

    def rest(self) -> str:
        """A sentence on the rungs of another start; empty where none is served, or helps."""
        plan, told = self._plan, dict[str, str]()
        for change in () if plan is None else self._served(plan):
            saved = self._saved_bytes(change)
            if saved is None or saved > _LEAST:
                words = (f"{key} {str(value).lower()}" for key, value in change.items())
                told.setdefault(" ".join(change), " with ".join(words) + self.cost(change))
        return f"Start it again with one of these: {'; '.join(told.values())}." if told else ""

    @staticmethod
    def _served(plan: RunPlan) -> Iterator[Change]:
        """Changes that the rules allow, and that change something."""
        known, ladder = errors(plan), [*memory_changes(plan)]
        if plan.engine is not None and plan.engine.kv_cache_gib is None and not plan.is_apart:
            ladder.append({_SHARE: max(round(plan.engine.gpu_memory_utilization - 0.1, 2), 0.05)})
        for change in ladder:
            is_there = all(attrgetter(key)(plan.config) == change[key] for key in change)
            if not (is_there or _TAKEN & change.keys()) and errors(changed(plan, change)) <= known:
                yield change

    def _saved_bytes(self, change: Change) -> int | None:
        """Of the fullest device while it trains; None where nothing is known."""
        plan = self._plan
        if plan is None or plan.is_on_cpu or plan.shape is None or plan.devices.gpu is None:
            return None
        try:
            return _training_bytes(plan) - _training_bytes(changed(plan, change))
        except _UNPLANNED:
            return None


def _training_bytes(plan: RunPlan) -> int:
    return max(phase.num_bytes for phase in RunMemory(plan).phases() if phase.name == "train")


def _step_s(plan: RunPlan) -> float:
    """Of an update on rows of full length."""
    cfg, batch = plan.config, plan.batch
    assert isinstance(cfg, RLConfig)
    assert batch is not None
    num_rows = batch.samples_per_step
    lengths = [plan.max_sequence_tokens or 0] * num_rows
    return TrainingTime(plan, PlanningConfig()).step_s(
        lengths, num_rows * cfg.rollout.max_completion_tokens
    )
