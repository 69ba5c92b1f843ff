"""`hone generate RECIPE [--nproc N] [flags]`: sample completions for prompts from a file."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hone.cli.command import (
    check_here,
    load_checked,
    quiet_transformers,
    say_loading,
    take_nproc,
)
from hone.config.tree import GenerateConfig

__all__ = ["run"]

_log = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Check, sample, and write one row per completion."""
    nproc, arguments = take_nproc(argv)
    cfg = load_checked(GenerateConfig, arguments, check_here, nproc)
    say_loading()
    from hone.loops.generation import run_generation

    quiet_transformers()
    what = "pairs" if cfg.keep == "pairs" else "completions"
    _log.info("%d %s written to %s", run_generation(cfg, nproc or 1), what, cfg.output)
    return 0
