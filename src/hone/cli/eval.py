"""`hone eval RECIPE [--nproc N] [flags]`: score a model on a data set."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hone.cli.command import load_checked, quiet_transformers, run_in_processes, take_nproc
from hone.config.checks import check_eval
from hone.config.tree import EvaluateConfig
from hone.distributed.processes import processes

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check, sample, score; print the metrics as a table."""
    nproc, arguments = take_nproc(argv)
    if nproc is not None and nproc > 1:
        return run_in_processes("eval", EvaluateConfig, arguments, check_eval, nproc)
    cfg = load_checked(EvaluateConfig, arguments, check_eval)
    from hone.loops.inference import run_evaluation

    quiet_transformers()
    scalars = run_evaluation(cfg)
    if processes().rank > 0:
        return 0
    table = Table("metric", "value", title=f"{cfg.model.path}: {cfg.run.dir / 'eval.json'}")
    for name, value in sorted(scalars.items()):
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return 0
