"""`hone check [rl|sft|eval|generate] RECIPE [flags]`: everything that can be known before a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone.cli.command import (
    check_eval_here,
    check_generate_here,
    check_rl_here,
    check_sft_here,
    chosen_device,
    known_shape,
    load_arguments,
    local_gpu,
    take_nproc,
)
from hone.cli.help import TREES, print_help
from hone.config import UserError
from hone.config.base import Section
from hone.config.derived import (
    Derived,
    derived_eval,
    derived_generate,
    derived_rl,
    derived_sft,
)
from hone.config.printable import printable
from hone.config.recipe import to_yaml
from hone.config.rules import Finding
from hone.config.tree import RLConfig, SFTConfig
from hone.planner.memory import planned_peak
from hone.planner.run_memory import derived_run_memory

__all__ = ["run"]

_USAGE = """\
usage: hone check [rl|sft|eval|generate] RECIPE [--section.key VALUE ...] [--nproc N] [--json]

Resolves and checks a recipe (of `hone rl` unless another command is named), and prints what is
wrong, what was set, and the numbers that follow, in N processes where that is said. With a GPU on
this host also the memory of each phase of `hone rl`, and whether it fits; on a CPU, and of what is
offloaded, whether this host's memory holds the run. Loads no model; needs no GPU. Exit code: 2 with
errors, else 0. `hone check COMMAND --help` explains the keys.
"""

_CHECKS: dict[str, tuple[Callable[..., list[Finding]], Callable[..., list[Derived]]]] = {
    "rl": (check_rl_here, derived_rl),
    "sft": (check_sft_here, derived_sft),
    "eval": (check_eval_here, derived_eval),
    "generate": (check_generate_here, derived_generate),
}


def run(argv: Sequence[str]) -> int:
    """Check a recipe and print the outcome; 2 where it has errors."""
    nproc, words = take_nproc(argv)
    command = words.pop(0) if words and words[0] in TREES else None
    if not words or "--help" in words or "-h" in words:
        if command is not None and words:
            return print_help(command, [word for word in words if not word.startswith("-")])
        sys.stdout.write(_USAGE)
        return 0
    as_json = "--json" in words
    cfg = load_arguments(TREES[command or "rl"], [word for word in words if word != "--json"])
    if nproc is None and isinstance(cfg, RLConfig) and cfg.cluster.is_used:
        nproc = cfg.cluster.num_trainers
    check, derive = _CHECKS[command or "rl"]
    findings = check(cfg, nproc)
    derived = _derived(derive, cfg, nproc)
    if as_json:
        _print_json(cfg, findings, derived)
    else:
        _print_tables(cfg, findings, derived, nproc)
    return 2 if any(finding.level == "error" for finding in findings) else 0


def _derived(derive: Callable[..., list[Derived]], cfg: Any, nproc: int | None) -> list[Derived]:
    """The numbers that follow; none where the processes make no mesh, which is among the errors."""
    shape, gpu = known_shape(cfg.model.path), local_gpu()
    try:
        rows = derive(cfg, world_size=nproc, num_params=shape and shape.num_params)
        if shape is None or not isinstance(cfg, RLConfig | SFTConfig):
            return rows
        peak = planned_peak(
            shape, cfg.model, cfg.trainer, device=cfg.run.device, world_size=nproc, gpu=gpu
        )
        rows += [] if peak is None else [peak]
        if isinstance(cfg, RLConfig):
            rows += derived_run_memory(cfg, shape, world_size=nproc, gpu=gpu)
    except UserError:
        return []
    return rows


def _print_json(cfg: Section, findings: list[Finding], derived: list[Derived]) -> None:
    outcome = {
        "findings": [asdict(finding) for finding in findings],
        "derived": {row.name: row.value for row in derived},
        "config": cfg.model_dump(mode="json"),
    }
    sys.stdout.write(json.dumps(outcome, indent=2) + "\n")


def _print_tables(
    cfg: Section, findings: list[Finding], derived: list[Derived], nproc: int | None
) -> None:
    console = Console(highlight=False)
    console.print(Text("What differs from the defaults", style="bold"))
    console.print(to_yaml(cfg.model_dump(mode="json", exclude_defaults=True)), markup=False)
    if derived:
        console.print(_table(derived))
    console.print()
    for finding in findings:
        style = "bold red" if finding.level == "error" else "yellow"
        console.print(Text.assemble((f"{finding.level}: ", style), printable(finding.message)))
    console.print(Text(_planned_hardware(cfg), style="dim"))
    if nproc is None:
        hint = "What depends on the number of processes is not checked: add --nproc N, or 1."
        console.print(Text(hint, style="dim"))
    num_errors = sum(finding.level == "error" for finding in findings)
    summary = f"errors: {num_errors}, warnings: {len(findings) - num_errors}"
    console.print(Text(summary, style="bold red" if num_errors else "bold green"))


def _planned_hardware(cfg: Any) -> str:
    """What the numbers are for, where `run.device` leaves that to the host of the run."""
    if cfg.run.device != "auto":
        return f"Planned for run.device {cfg.run.device}."
    if chosen_device("auto") != "cpu":
        return "Planned for the GPUs of this host (run.device auto)."
    return (
        "Planned for GPUs, where model.dtype auto is bfloat16, though this host has none: for a "
        "run on this host's CPU add --run.device=cpu."
    )


def _table(derived: list[Derived]) -> Table:
    table = Table(title="Derived numbers", title_justify="left", title_style="bold", box=None)
    table.add_column("name", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("from")
    for row in derived:
        value = f"{row.value:,}" if isinstance(row.value, int) else str(row.value)
        table.add_row(row.name, value, row.how)
    return table
