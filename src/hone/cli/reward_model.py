"""`hone reward-model RECIPE [--nproc N] [flags]`: train a reward model on pairs."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli import sft
from hone.config.tree import RewardModelingConfig

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """As `hone sft`."""
    return sft.run(argv, command="reward-model", tree=RewardModelingConfig)
