"""Policy losses, a file each beside its paper, with a function `loss`.

The name of a file is its value of `algorithm.loss`; nothing else lists losses.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from hone.algorithms.policy_loss import LossInputs, LossTerms
from hone.config.algorithm import LOSS_NAMES, AlgorithmConfig

__all__ = ["LOSSES"]

LOSSES: dict[str, Callable[[LossInputs, AlgorithmConfig], LossTerms]] = {
    name: import_module(f"{__name__}.{name}").loss for name in LOSS_NAMES
}
