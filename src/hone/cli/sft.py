"""`hone sft RECIPE [--nproc N] [flags]`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli.command import (
    check_here,
    conclude,
    load_checked,
    quiet_transformers,
    run_in_processes,
    take_nproc,
)
from hone.config.tree import SFTConfig

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check the recipe, then train. Torch is loaded only after every check has passed."""
    nproc, arguments = take_nproc(argv)
    if nproc is not None and nproc > 1:
        return run_in_processes("sft", SFTConfig, arguments, check_here, nproc)
    cfg = load_checked(SFTConfig, arguments, check_here)
    from hone.loops import supervised

    quiet_transformers()
    outcome = supervised.run(cfg)
    return conclude(cfg.run, steps=outcome.steps, stopped_by=outcome.stopped_by)
