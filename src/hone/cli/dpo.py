"""`hone dpo RECIPE [--nproc N] [flags]`: learn from preferences."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli import sft
from hone.config.tree import DPOConfig

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """As `hone sft`."""
    return sft.run(argv, command="dpo", tree=DPOConfig)
