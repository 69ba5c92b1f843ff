"""`hone eval RECIPE [--nproc N] [flags]`: score a model on a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hone.cli.command import (
    check_here,
    load_checked,
    quiet_transformers,
    say_loading,
    take_nproc,
)
from hone.config.tree import EvaluateConfig
from hone.distributed.processes import processes
from hone.observe.printable import printable

__all__ = ["evaluation_rows", "run"]


def run(argv: Sequence[str]) -> int:
    """Check, sample and score; print the metrics, their standard errors and the number of rows."""
    nproc, arguments = take_nproc(argv)
    cfg = load_checked(EvaluateConfig, arguments, check_here, nproc)
    say_loading()
    from hone.loops.evaluation import run_evaluation
    from hone.tools.report.pages import PAGES

    quiet_transformers()
    scalars = run_evaluation(cfg, nproc or 1, PAGES)
    if processes().rank > 0:
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(cfg, scalars))
    console.print(Text(f"written to {cfg.run.dir}: eval.json, eval_samples.jsonl, report.html"))
    return 0


def _table(cfg: EvaluateConfig, scalars: Mapping[str, float]) -> Table:
    """Table of metrics with their standard errors. The score threshold of passing is named once."""
    prompts, samples = scalars["eval/num_prompts"], scalars["eval/num_samples"]
    num_each = cfg.eval.n_samples_per_prompt
    rows = samples / num_each
    words = f"{rows:,.0f} rows" + f" of {prompts:,.0f} prompts" * (prompts < rows)
    words += f", {num_each} sample{'s' * (num_each > 1)} each"
    failed = round(samples * scalars["eval/failed_share"])
    table = Table(
        "metric",
        Column("value", justify="right"),
        Column("\N{PLUS-MINUS SIGN}", justify="right"),
        title=Text(printable(cfg.model.path)),
        caption=f"{words}, {failed:,} of {samples:,.0f} not scored; "
        "\N{PLUS-MINUS SIGN}: standard error over prompts",
    )
    for name, value, error in evaluation_rows(scalars):
        table.add_row(Text(printable(name)), value, error)
    return table


def evaluation_rows(scalars: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
    """Metrics of an evaluation for display: name, value, standard error. The names of pass@k
    include the score threshold of passing."""
    for name, value in sorted(scalars.items()):
        if name.endswith(("/stderr", "/pass_threshold")):
            continue
        error = scalars.get(f"{name.removesuffix('/mean')}/stderr")
        threshold = scalars.get(f"{name.rpartition('/')[0]}/pass_threshold")
        is_rate = "/pass@" in name and threshold is not None
        shown = f"{name} (score >= {threshold:g})" if is_rate else name
        yield shown, f"{value:.4g}", "" if error is None else f"{error:.2g}"
