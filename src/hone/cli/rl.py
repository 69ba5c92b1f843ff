"""`hone rl RECIPE [flags]`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli.command import conclude, load_checked, quiet_transformers
from hone.config.checks import check_rl
from hone.config.tree import RLConfig

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check the recipe, then train. Torch is loaded only after every check has passed."""
    cfg = load_checked(RLConfig, argv, check_rl)
    from hone.loops import sync

    quiet_transformers()
    outcome = sync.run(cfg)
    return conclude(cfg.run, steps=outcome.steps, interrupted=outcome.interrupted)
