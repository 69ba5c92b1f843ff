"""How far predictions of a GPU's memory have been off, and so what has to stay free by them.

The figures are those of `hone.trainer.cost` and benchmarks/README.md.
"""

from __future__ import annotations

__all__ = ["UNUSABLE", "above_plan", "free_share"]

UNUSABLE = 0.02
"""Share of a GPU's memory that a program cannot use, at most (`hone.hardware.Peaks`)."""
_ABOVE_PLAN, _ABOVE_PLAN_OF_SEVERAL = 0.01, 0.05
"""Largest shares by which peaks of training were measured above their prediction, of one process
and of several."""


def above_plan(num_processes: int) -> float:
    """Largest share by which peaks of training were measured above their prediction, where so many
    processes train a model together."""
    return _ABOVE_PLAN if num_processes == 1 else _ABOVE_PLAN_OF_SEVERAL


def free_share(num_processes: int) -> float:
    """Share of a GPU's memory that has to stay free by prediction, where so many processes train a
    model together."""
    return UNUSABLE + above_plan(num_processes)
