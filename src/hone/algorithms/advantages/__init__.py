"""Advantage estimators, a file each beside its paper, with a function `advantages`.

The name of a file is its value of `algorithm.advantage`, and its folder says what the baseline is
taken over; nothing else lists estimators.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from hone.algorithms.advantage import Advantages, Groups
from hone.config.algorithm import BASELINES

__all__ = ["ADVANTAGES"]

ADVANTAGES: dict[str, Callable[[Groups], Advantages]] = {
    name: import_module(f"{__name__}.{folder}.{name}").advantages
    for name, folder in BASELINES.items()
}
