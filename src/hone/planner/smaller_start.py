"""Settings with which a run that has no device memory left can be started again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from hone.config.plan import RunPlan
from hone.hardware import GIB, installed_gpu
from hone.planner.fitting import Change, changed, errors, memory_changes
from hone.planner.run_memory import RunMemory

__all__ = ["smaller_start"]

_LEAST = GIB // 10
"""Bytes that are worth another start."""
_TAKEN = {
    "trainer.max_tokens_per_microbatch",
    "critic.max_tokens_per_microbatch",
    "trainer.recompute",
    "critic.recompute",
}
"""What a step gives up without another start."""
_SHARE = "engine.gpu_memory_utilization"
_UNPLANNED = (ArithmeticError, AssertionError, LookupError, ValueError)
"""Raised for runs that the planner was not made for: nothing is predicted for them."""


def smaller_start(plan: RunPlan) -> str:
    """A sentence that lists settings of `plan` to start the run again with, the cheapest first, and
    the bytes of the fullest device that each saves while it trains, where the GPU is known. Empty
    where no setting helps."""
    if not plan.is_on_cpu and plan.devices.gpu is None:
        plan = replace(plan, devices=replace(plan.devices, gpu=installed_gpu()))
    found: dict[str, str] = {}
    for change in _allowed(plan):
        saved = _saved_bytes(plan, change)
        if saved is None or saved > _LEAST:
            words = " with ".join(f"{key} {str(value).lower()}" for key, value in change.items())
            bytes_ = "" if saved is None else f" (by prediction {-saved / GIB:+.1f} GiB)"
            found.setdefault(" ".join(change), words + bytes_)
    return f"Start it again with one of these: {'; '.join(found.values())}." if found else ""


def _allowed(plan: RunPlan) -> Iterator[Change]:
    """Changes that the rules allow, and that change something."""
    known, ladder = errors(plan), [*memory_changes(plan)]
    if plan.engine is not None and plan.engine.kv_cache_gib is None and not plan.is_apart:
        ladder.append({_SHARE: max(round(plan.engine.gpu_memory_utilization - 0.1, 2), 0.05)})
    for change in ladder:
        is_there = all(attrgetter(key)(plan.config) == change[key] for key in change)
        if not (is_there or _TAKEN & change.keys()) and errors(changed(plan, change)) <= known:
            yield change


def _saved_bytes(plan: RunPlan, change: Change) -> int | None:
    """Bytes of the fullest device that `change` saves in training; None: not known."""
    if plan.is_on_cpu or plan.shape is None or plan.devices.gpu is None:
        return None
    try:
        return _training_bytes(plan) - _training_bytes(changed(plan, change))
    except _UNPLANNED:
        return None


def _training_bytes(plan: RunPlan) -> int:
    return max(phase.num_bytes for phase in RunMemory(plan).phases() if phase.name == "train")
