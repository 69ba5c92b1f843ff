"""`hone simulate [RECIPE] [flags]`: what a step takes, before GPUs are rented."""

from __future__ import annotations

import json
import logging
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hone.cli.command import load_checked, plan_here
from hone.cli.help import is_help, print_help
from hone.config import UserError
from hone.config.rules import findings
from hone.config.tree import SimulateConfig
from hone.observe.whole_file import whole_file
from hone.planner.comparison import Comparison, Outcome, compare, launch_words, run_flags
from hone.planner.timeline import draw_timelines
from hone.version import __version__

__all__ = ["run"]

_USAGE = """\
usage: hone simulate [RECIPE] [--section.key VALUE ...]

Simulates the steps of a recipe of `hone rl` on GPUs of a type, in every mode
(synchronous, partial rollouts, asynchronous) and every split into trainers and
engines, and ranks them: seconds a step, tokens/s, who is idle, how stale
samples are. Needs no GPU, no model (only its shape) and no data. It prints a
table; --output FILE.json writes all numbers, and FILE.svg, the timeline of the
best and of the plain run. What the columns mean is below the table; tok/s is
that of `hone rl`, tokens of trained rows with their prompts over all GPUs. The
last line has the flags that make `hone rl` run the fastest.

Lengths decide: give measured ones where there are any (simulate.lengths). The
speed of programs is assumed to be what has been measured on one H200; every
assumption is a key: `hone simulate --help simulate`. With cluster.num_engines
only that split is simulated. Keys that neither time nor memory depends on
(data, rewards, evaluation, learning rates, ...) have no effect here. Five modes
on two GPUs came out within 10 % (benchmarks/README.md); more GPUs have not been
compared.

examples:
  hone simulate gsm8k --simulate.gpus 8 --output simulate.json
  hone simulate --model.shape qwen3-8b --simulate.gpus 32 \\
    --rollout.max_completion_tokens 8192 --simulate.lengths.median 1500
  hone simulate gsm8k --simulate.lengths.distribution file \\
    --simulate.lengths.path runs/gsm8k/samples.jsonl
  hone simulate gsm8k --cluster.num_trainers 4 --cluster.num_engines 4 \\
    --simulate.staleness '[1, 2, 4]' --pipeline.in_flight abort
"""

_MAX_ROWS = 16

_log = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Simulate and print the ranking; write the numbers and the plot where that is asked for."""
    if not argv or is_help(argv):
        if any(not word.startswith("-") for word in argv):
            return print_help("simulate", argv)
        sys.stdout.write(_USAGE)
        return 0
    if any(word.partition("=")[0] == "--nproc" for word in argv):
        raise UserError("--nproc is not served by `hone simulate`; set simulate.gpus instead")
    cfg = load_checked(SimulateConfig, argv, lambda cfg, n: findings(plan_here(cfg, n)))
    result = compare(cfg)
    plot = None if cfg.output is None else _write_files(result, cfg.output)
    _print(result, Console(highlight=False))
    if plot is not None:
        _log.info("numbers in %s, plot in %s", cfg.output, plot)
    return 0


def _print(result: Comparison, console: Console) -> None:
    """The fastest and the plain run, one row each, and what follows from them."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("mode", no_wrap=True)
    has_dropped = any(x.run.dropped_share for x in result.outcomes)
    dropped = ("dropped",) if has_dropped else ()
    for name in ("split", "s/step", "tok/s", "x plain", "idle", "stale, most", *dropped):
        table.add_column(name, justify="right", no_wrap=True)
    shown = list(result.outcomes[:_MAX_ROWS])
    if result.plain not in shown:
        shown[-1] = result.plain
    for outcome in shown:
        cells = _cells(result, outcome)
        if has_dropped:
            cells.append(f"{outcome.run.dropped_share:.0%}")
        table.add_row(*cells, style="bold" if outcome is result.plain else None)
    console.print(_title(result), style="bold", markup=False)
    console.print(table)
    console.print(_legend(result), markup=False, style="dim")
    if len(shown) < len(result.outcomes):
        rest = len(result.outcomes) - len(shown)
        output = result.cfg.output
        told = "left out; --output FILE.json has all" if output is None else f"in {output}"
        console.print(f"{rest} slower ones are {told}", markup=False)
    for outcome in dict.fromkeys([result.outcomes[0], result.plain]):
        console.print(_where_time_goes(outcome), markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, style="dim")
    preempted = sum(x.run.num_preemptions > 0 for x in result.outcomes)
    if preempted:
        console.print(
            f"note: in {preempted} of {len(result.outcomes)} runs the KV cache of an engine was "
            "too small for its samples (engine.gpu_memory_utilization)",
            markup=False,
            style="dim",
        )
    console.print(result.verdict, markup=False)
    flags = run_flags(result.cfg, result.outcomes[0])
    launch = shlex.join(launch_words(result.outcomes[0]))
    if flags or launch != "hone rl":
        how = "" if launch == "hone rl" else ", started on every node,"
        console.print(
            f"To run the fastest, add this to `{launch}`{how} with the recipe and flags given here "
            "(but for --simulate, --output and --model.shape):",
            markup=False,
        )
        console.print(shlex.join(flags), markup=False, soft_wrap=True)  # one line, to be copied
    else:
        console.print("The fastest is what `hone rl` does with this recipe as it is.", markup=False)


def _legend(result: Comparison) -> str:
    """What the columns mean; each line fits a terminal of 80 columns."""
    return (
        f"* plain run ({result.plain.mode}); x plain: tok/s over its; idle: trainers, engines\n"
        "3 + 5: trainers, engines apart; 8 = 8: same GPUs; stale: updates behind, mean"
    )


def _cells(result: Comparison, outcome: Outcome) -> list[str]:
    run = outcome.run
    return [
        outcome.mode + " *" * (outcome is result.plain),
        outcome.split,
        f"{run.step_s:.1f}" if run.step_s >= 10 else f"{run.step_s:.3g}",
        f"{run.tokens_per_s:,.0f}",
        f"{result.speedup(outcome):.2f}",
        f"{run.trainer_idle:.0%}, {run.engine_idle:.0%}",
        f"{run.staleness_mean:.2f}, {run.staleness_max}",
    ]


def _where_time_goes(outcome: Outcome) -> str:
    steps = outcome.run.steady
    wait_s, train_s, halt_s, sync_s = (
        statistics.fmean(getattr(step, name) for step in steps)
        for name in ("wait_s", "train_s", "halt_s", "sync_s")
    )
    sampling = "waiting for samples" if outcome.is_async else "sampling"
    return (
        f"a step of {outcome.name}: {wait_s:.3g} s {sampling}, {train_s:.3g} s training, "
        f"{halt_s:.3g} s until engines halt, {sync_s:.3g} s for weights; "
        f"{outcome.run.tokens_per_s:,.0f} tok/s, "
        f"{outcome.run.completion_tokens_per_s:,.0f} of completions"
    )


def _title(result: Comparison) -> str:
    cfg, rollout = result.cfg, result.cfg.rollout
    lengths = [length for group in result.lengths for length in group]
    return (
        f"{_model(result)} on {result.num_gpus} x {result.gpu.name}: "
        f"{rollout.prompts_per_step} prompts of {cfg.simulate.prompt_tokens} tokens x "
        f"{rollout.n_samples_per_prompt} samples a step, completions of "
        f"{statistics.fmean(lengths):,.0f} tokens on average, {max(lengths):,} at most"
    )


def _model(result: Comparison) -> str:
    return result.cfg.model.shape or result.cfg.model.path


def _write_files(result: Comparison, output: Path) -> Path:
    """Write `output`, and the plot beside it; returns the path of the plot."""
    plot = output.with_suffix(".svg")
    with whole_file(output) as file:
        json.dump(_as_json(result), file, indent=1)
        file.write("\n")
    drawn = dict.fromkeys([result.outcomes[0], result.plain])
    title = f"{_model(result)} on {result.num_gpus} x {result.gpu.name}, simulated"
    with whole_file(plot) as file:
        file.write(
            draw_timelines(
                title,
                [(f"{x.name}: {x.run.tokens_per_s:,.0f} tok/s", x.run) for x in drawn],
            )
        )
    return plot


def _as_json(result: Comparison) -> dict[str, Any]:
    """All numbers: what was assumed, and every step of every run."""
    return {
        "version": __version__,
        "verdict": result.verdict,
        "notes": result.notes,
        "gpu": asdict(result.gpu),
        "num_gpus": result.num_gpus,
        "num_params": result.num_params,
        "runs": [
            {
                "mode": x.mode,
                "placement": asdict(x.run.placement),
                "launch": launch_words(x),
                "flags": run_flags(result.cfg, x),
                "step_s": x.run.step_s,
                "tokens_per_s": x.run.tokens_per_s,
                "completion_tokens_per_s": x.run.completion_tokens_per_s,
                "speedup": result.speedup(x),
                "engine_idle": x.run.engine_idle,
                "trainer_idle": x.run.trainer_idle,
                "staleness_mean": x.run.staleness_mean,
                "staleness_max": x.run.staleness_max,
                "dropped_share": x.run.dropped_share,
                "num_preemptions": x.run.num_preemptions,
                "steps": [
                    {
                        "wait_s": round(step.wait_s, 6),
                        "train_s": round(step.train_s, 6),
                        "halt_s": round(step.halt_s, 6),
                        "sync_s": round(step.sync_s, 6),
                        "num_tokens": step.num_tokens,
                        "num_completion_tokens": step.num_completion_tokens,
                        "staleness_mean": statistics.fmean(step.staleness),
                        "num_dropped": step.num_dropped,
                    }
                    for step in x.run.steps
                ],
            }
            for x in result.outcomes
        ],
        "config": result.cfg.model_dump(mode="json"),
    }
