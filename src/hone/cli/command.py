"""From arguments to a checked configuration: what the commands with a recipe share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hone.config import UserError
from hone.config.base import Section
from hone.config.checks import Finding
from hone.config.load import load_config, resolve_recipe
from hone.config.run import RunConfig

__all__ = ["conclude", "load_arguments", "load_checked", "quiet_transformers"]

T = TypeVar("T", bound=Section)
_log = logging.getLogger(__name__)


def load_arguments(tree: type[T], argv: Sequence[str]) -> T:
    """Load `[RECIPE] [flags]`. The recipe is the first argument, a path or a built-in's name."""
    recipe: Path | None = None
    flags = list(argv)
    if flags and not flags[0].startswith("-") and ("=" not in flags[0] or Path(flags[0]).is_file()):
        recipe = resolve_recipe(flags.pop(0))
    return load_config(tree, recipe, flags)


def load_checked(tree: type[T], argv: Sequence[str], check: Callable[[T], list[Finding]]) -> T:
    """Load `[RECIPE] [flags]` and check it; warnings are logged.

    Raises UserError with every error that the checks have found.
    """
    cfg = load_arguments(tree, argv)
    findings = check(cfg)
    for finding in findings:
        if finding.level == "warning":
            _log.warning("warning: %s", finding.message)
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        raise UserError("\n".join(errors))
    return cfg


def quiet_transformers() -> None:
    """Switch off the bars that transformers draws for reading and writing weights: they would cut
    through ours. Downloads from the hub keep theirs."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def conclude(cfg: RunConfig, *, steps: int, interrupted: bool) -> int:
    """Say where things are; 0 for a finished run, 130 for one that Ctrl-C ended."""
    if interrupted:
        _log.warning(
            "stopped and saved after step %d of %d; the same command goes on from there",
            steps,
            cfg.steps,
        )
        return 130
    _log.info("done after step %d: the model and all records are in %s", steps, cfg.dir)
    return 0
