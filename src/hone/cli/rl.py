"""`hone rl RECIPE [--nproc N] [flags]`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli.command import (
    conclude,
    load_checked,
    quiet_transformers,
    run_in_processes,
    take_nproc,
)
from hone.config.checks import check_rl
from hone.config.tree import RLConfig

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check the recipe, then train. Torch is loaded only after every check has passed."""
    nproc, arguments = take_nproc(argv)
    if nproc is not None and nproc > 1:
        return run_in_processes("rl", RLConfig, arguments, check_rl, nproc)
    cfg = load_checked(RLConfig, arguments, check_rl)
    from hone.loops import sync

    quiet_transformers()
    outcome = sync.run(cfg)
    return conclude(cfg.run, steps=outcome.steps, interrupted=outcome.interrupted)
