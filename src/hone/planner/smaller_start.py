"""Settings for a new launch of a run that has exhausted device memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from hone.config.plan import RunPlan
from hone.hardware import GIB, installed_gpu
from hone.planner.fitting import changed, errors, memory_changes
from hone.planner.knobs import CACHE, KNOBS, Change
from hone.planner.run_memory import RunMemory

__all__ = ["smaller_start"]

_LEAST = GIB // 10
"""Smallest saving in bytes that is worth a new launch."""
_LOWERED = {key for knob in KNOBS if knob.is_lowered_in_a_step for key in knob.keys}
"""Settings that a running step changes by itself."""
_UNPLANNED = (ArithmeticError, AssertionError, LookupError, ValueError)
"""Errors for runs that the planner does not support; nothing is predicted for them."""


def smaller_start(plan: RunPlan) -> str:
    """A sentence that lists settings of `plan` to start the run again with, the cheapest first, and
    the bytes of the fullest device that each saves while it trains, where the GPU is known. Empty
    where no setting helps."""
    if not plan.is_on_cpu and plan.devices.gpu is None:
        plan = replace(plan, devices=replace(plan.devices, gpu=installed_gpu()))
    words_of: dict[str, str] = {}
    for change in _allowed(plan):
        saved = _saved_bytes(plan, change)
        if saved is None or saved > _LEAST:
            words = " with ".join(f"{key} {str(value).lower()}" for key, value in change.items())
            bytes_ = "" if saved is None else f" (by prediction {-saved / GIB:+.1f} GiB)"
            words_of.setdefault(" ".join(change), words + bytes_)
    return f"Start it again with one of these: {'; '.join(words_of.values())}." if words_of else ""


def _allowed(plan: RunPlan) -> Iterator[Change]:
    """Changes that the rules allow and that differ from the present settings."""
    known = errors(plan)
    for change in (*memory_changes(plan), *CACHE.gpu(plan)):
        is_there = all(attrgetter(key)(plan.config) == change[key] for key in change)
        if not (is_there or _LOWERED & change.keys()) and errors(changed(plan, change)) <= known:
            yield change


def _saved_bytes(plan: RunPlan, change: Change) -> int | None:
    """Bytes that `change` saves on the fullest device in training; None where not known."""
    if plan.is_on_cpu or plan.shape is None or plan.devices.gpu is None:
        return None
    try:
        return _training_bytes(plan) - _training_bytes(changed(plan, change))
    except _UNPLANNED:
        return None


def _training_bytes(plan: RunPlan) -> int:
    return max(phase.num_bytes for phase in RunMemory(plan).phases() if phase.name == "train")
