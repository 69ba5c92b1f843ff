"""From arguments to a checked configuration: what the commands with a recipe share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hone.config import UserError
from hone.config.base import Section
from hone.config.checks import Finding
from hone.config.checks.parallel import check_processes
from hone.config.load import load_config, resolve_recipe
from hone.config.run import RunConfig
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.distributed.processes import processes
from hone.distributed.spawn import spawn
from hone.planner.hardware import max_gpus

__all__ = [
    "conclude",
    "load_arguments",
    "load_checked",
    "quiet_transformers",
    "run_in_processes",
    "take_nproc",
]

T = TypeVar("T", bound=Section)
R = TypeVar("R", bound=RLConfig | SFTConfig | EvaluateConfig | GenerateConfig)
_log = logging.getLogger(__name__)


def load_arguments(tree: type[T], argv: Sequence[str]) -> T:
    """Load `[RECIPE] [flags]`. The recipe is the first argument, a path or a built-in's name."""
    recipe: Path | None = None
    flags = list(argv)
    if flags and not flags[0].startswith("-") and ("=" not in flags[0] or Path(flags[0]).is_file()):
        recipe = resolve_recipe(flags.pop(0))
    return load_config(tree, recipe, flags)


def take_nproc(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """`--nproc N` or `--nproc=N`, None without it, and the other arguments.

    Raises UserError for what is no number above 0, and where it is given twice.
    """
    words = list(argv)
    positions = [n for n, word in enumerate(words) if word.partition("=")[0] == "--nproc"]
    if not positions:
        return None, words
    if len(positions) > 1:
        raise UserError(f"--nproc is given {len(positions)} times; give it once")
    (position,) = positions
    _, equals, value = words[position].partition("=")
    given = value if equals else "".join(words[position + 1 : position + 2])
    del words[position : position + (1 if equals else 2)]
    if not given.isdecimal() or int(given) == 0:
        raise UserError(f"--nproc takes the number of processes to start, 1 or more, got {given!r}")
    return int(given), words


def load_checked(tree: type[T], argv: Sequence[str], check: Callable[[T, int], list[Finding]]) -> T:
    """Load `[RECIPE] [flags]` and check it for the processes that run; warnings are logged.

    Raises UserError with every error that the checks have found.
    """
    cfg = load_arguments(tree, argv)
    findings = check(cfg, processes().world_size)
    for finding in findings:
        if finding.level == "warning":
            _log.warning("warning: %s", finding.message)
    _require_no_error(findings)
    return cfg


def run_in_processes(
    command: str,
    tree: type[R],
    argv: Sequence[str],
    check: Callable[[R, int], list[Finding]],
    nproc: int,
) -> int:
    """Check `[RECIPE] [flags]`, then run the command in `nproc` processes; the exit code.

    Raises UserError as `load_checked` does, before any process is started.
    """
    if processes().world_size > 1:
        raise UserError(
            f"--nproc {nproc} was given to one of {processes().world_size} processes that torchrun "
            "has started. Leave out --nproc, or torchrun."
        )
    cfg = load_arguments(tree, argv)
    _require_no_error(check(cfg, nproc))
    served = check_processes(
        cfg.run.device,
        nproc,
        num_cores=os.cpu_count() or 1,
        max_gpus=max_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
    )
    _require_no_error([*served])
    _log.info("starting %d processes", nproc)
    return spawn([sys.executable, "-m", "hone", command, *argv], nproc)


def _require_no_error(findings: Sequence[Finding]) -> None:
    errors = [finding.message for finding in findings if finding.level == "error"]
    if errors:
        raise UserError("\n".join(errors))


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
