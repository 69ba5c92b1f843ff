"""`hone sft RECIPE [flags]`: supervised fine-tuning on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli.command import conclude, load_checked, quiet_transformers
from hone.config.checks import check_sft
from hone.config.tree import SFTConfig

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check the recipe, then train. Torch is loaded only after every check has passed."""
    cfg = load_checked(SFTConfig, argv, check_sft)
    from hone.loops import supervised

    quiet_transformers()
    outcome = supervised.run(cfg)
    return conclude(cfg.run, steps=outcome.steps, interrupted=outcome.interrupted)
