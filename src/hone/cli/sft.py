"""`hone sft|dpo|reward-model RECIPE [--nproc N] [flags]`: training on rows of files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from hone.cli.command import (
    check_here,
    conclude,
    has_nothing_left,
    load_checked,
    quiet_transformers,
    run_in_processes,
    say_loading,
    take_nproc,
)
from hone.config.tree import TREES, SFTConfig

if TYPE_CHECKING:
    from hone.loops.run import Outcome

__all__ = ["run", "train"]


def run(argv: Sequence[str], command: str = "sft") -> int:
    """Check the recipe, then train. Torch is loaded only after every check has passed."""
    nproc, arguments = take_nproc(argv)
    tree = cast("type[SFTConfig]", TREES[command])
    if nproc is not None and nproc > 1:
        return run_in_processes(command, tree, arguments, check_here, nproc)
    cfg = load_checked(tree, arguments, check_here)
    if has_nothing_left(cfg):
        return 0
    outcome = train(cfg)
    return conclude(
        cfg.run,
        steps=outcome.steps,
        stopped_by=outcome.stopped_by,
        is_saved=outcome.is_saved,
    )


def train(cfg: SFTConfig) -> Outcome:
    """Train in this process with a checked configuration."""
    say_loading()
    from hone.loops import supervised
    from hone.tools.report.pages import PAGES

    quiet_transformers()
    return supervised.run(cfg, pages=PAGES)
