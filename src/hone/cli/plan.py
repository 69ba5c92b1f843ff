"""`hone plan [RECIPE] [flags]`: how to run on given GPUs, and what a step takes there."""

from __future__ import annotations

import json
import logging
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hone.cli.command import load_checked, plan_here
from hone.cli.help import is_help, print_help
from hone.config.recipe import to_yaml
from hone.config.tree import PlanConfig
from hone.errors import UserError, listed
from hone.hardware import available_host_bytes, installed_gpu, known_gpu
from hone.observe.whole_file import write_whole
from hone.planner.fitting import gpu_host_roles
from hone.planner.run_memory import RunMemory
from hone.rules import findings
from hone.tools.plan.comparison import (
    LETTERS,
    NUM_WHOLE,
    Comparison,
    Outcome,
    compare,
    launch_words,
    planned_config,
    recipe_of,
    run_flags,
)
from hone.version import __version__

__all__ = ["run"]

_USAGE = """\
usage: hone plan [RECIPE] [--section.key VALUE ...]

Finds how to run a recipe of `hone rl` on GPUs of a type, before any is rented:
every mode (synchronous, partial rollouts, asynchronous), every split into
trainers and engines, engines over one GPU or several, devices for a critic and
for frozen models or none, and for each how trainers share layers, rows and
matrices (pipeline stages, tensor, Ulysses and ring parallelism), budgets of
tokens, ZeRO stage, recomputation, offloads and sleep: what fits its memory at
the least cost, and `hone check` accepts.
It simulates the steps of each and ranks them: seconds a step, tokens/s, who is
idle, how stale samples are; then memory by phase, and why each of the first
beats the next. It recommends the first, or the best synchronous one where no
prediction tells them apart. What fits nowhere is refused with what would make
it possible. Needs no GPU, no model (only its shape) and no data. --output
FILE.yaml writes what it recommends as a recipe, FILE.json all numbers. What the
columns mean is below the table; tok/s is that of `hone rl`, tokens of trained
rows with their prompts over all GPUs.

Lengths decide: give measured ones where there are any (plan.lengths). The
speed of programs is assumed to be what has been measured on one H200; every
assumption is a key: `hone plan --help plan`. What costs no time or memory
(rewards, learning rates, ...) has no effect, and what changes what is learnt
(LoRA, numbers of bits, batches) stays as it is. Five modes on two H200 came out
within 10 % (benchmarks/README.md); more GPUs, links between hosts and other
types have not been compared.

examples:
  hone plan gsm8k --plan.gpus 8 --output plan.yaml
  hone plan --model.path Qwen/Qwen2.5-7B-Instruct --model.lora.rank 32 \\
    --plan.gpus 2 --plan.gpu 4090
  hone plan --model.shape llama-3.1-70b --plan.gpus 64 --plan.gpu a100 \\
    --rollout.max_completion_tokens 8192 --plan.lengths.median 1500
  hone plan gsm8k --plan.lengths.distribution file \\
    --plan.lengths.path runs/gsm8k/samples.jsonl --plan.goal on_policy
  hone plan gsm8k --cluster.num_trainers 4 --cluster.num_engines 4 \\
    --plan.staleness '[1, 2, 4]' --pipeline.in_flight abort
"""

_MAX_ROWS = NUM_WHOLE
_NUM_EXPLAINED = 4
_MIN_SHARE_SHOWN = 0.01
"""Smallest share of a step that is reported as a difference."""

_WORK = {
    "settings": "settings of each split of GPUs into trainers and engines",
    "steps": "first steps of each split and mode, simulated",
    "whole": "all steps of the fastest of them, simulated",
}
"""What `compare` reports, for the line on the terminal."""

_log = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Search and print the ranking. Writes the recipe or the numbers on request."""
    if not argv or is_help(argv):
        if any(not word.startswith("-") for word in argv):
            return print_help("plan", argv)
        sys.stdout.write(_USAGE)
        return 0
    if any(word.partition("=")[0] == "--nproc" for word in argv):
        raise UserError("--nproc is not served by `hone plan`; set plan.gpus instead")
    cfg = load_checked(PlanConfig, argv, lambda cfg, n: findings(plan_here(cfg, n)))
    console = Console(stderr=True)
    begun: set[str] = set()
    with console.status("") as line:  # on terminals alone

        def report(what: str, done: int, total: int) -> None:
            if console.is_terminal:
                line.update(f"{_WORK[what]}: {done} of {total}")
            elif what not in begun:
                _log.info("%s: %d", _WORK[what], total)
            begun.add(what)

        result = compare(_with_own_host(cfg), report)
    written = None if cfg.output is None else _write(result, cfg.output)
    _print(result, Console(highlight=False))
    if written is not None:
        _log.info("%s", written)
    return 0


def _with_own_host(cfg: PlanConfig) -> PlanConfig:
    """Set the host memory to this host's if it has GPUs of the planned type."""
    if cfg.plan.host_gib is not None or installed_gpu() != known_gpu(cfg.plan.gpu, key="plan.gpu"):
        return cfg
    available = {"host_gib": round(available_host_bytes() / 2**30, 1)}
    return cfg.model_copy(update={"plan": cfg.plan.model_copy(update=available)})


def _write(result: Comparison, output: Path) -> str:
    """Write the recipe or all numbers. Returns a line on what to do with the file."""
    if output.suffix in (".yaml", ".yml"):
        write_whole(output, _recipe(result), "output")
        outcome = result.recommended
        launch = " ".join(launch_words(outcome))
        placement, cluster = outcome.run.placement, outcome.plan.cluster
        nproc = 1
        if placement.colocated and launch == "hone rl":
            nproc = cluster.num_processes if cluster.is_used else placement.num_trainers
        line = f"to run {_named(result)}: {launch} {output}{f' --nproc {nproc}' * (nproc > 1)}"
        missing = ["model.path"] * (result.cfg.model.shape is not None)
        missing += ["data.train"] * (not result.cfg.data.train)
        if not missing:
            return line
        return f"{line}, once {listed(missing)} {'are' if missing[1:] else 'is'} set in it"
    write_whole(output, f"{json.dumps(_as_json(result), indent=1)}\n", "output")
    return f"numbers in {output}"


def _recipe(result: Comparison) -> str:
    """The recommended outcome as a recipe, with comments on what it was made for."""
    outcome = result.recommended
    recipe = recipe_of(planned_config(result.cfg, outcome))
    head = [
        f"{outcome.name}, planned for {_model(result)} on {result.num_gpus} x {result.gpu.name}",
        f"{outcome.run.step_s:.3g} s a step, {outcome.run.tokens_per_s:,.0f} tok/s by prediction",
        *(f"{phase.title}: {phase.in_words()}" for phase in RunMemory(outcome.plan).phases()),
        *_host_lines(result),
    ]
    if shape := result.cfg.model.shape:
        recipe.setdefault("model", {}).pop("path", None)
        head.append(f"model.path is yours to set: a folder or hub name of a {shape}")
        nproc = outcome.run.placement.num_trainers
        head.append(
            f"without a model its numbers come from: hone check THIS_FILE --model.shape {shape} "
            f"--gpu {result.cfg.plan.gpu}{f' --nproc {nproc}' * outcome.run.placement.colocated}"
        )
    comments = "".join(f"# {line}\n" for line in head)
    return f"{comments}{to_yaml(recipe)}"


def _print(result: Comparison, console: Console) -> None:
    """Print the fastest runs and the plain one, one row each, and conclusions."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("mode", no_wrap=True)
    for name in ("split", "s/step", "tok/s", "x plain", "idle", "stale, most"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = list(result.outcomes[:_MAX_ROWS])
    needed = [x for x in dict.fromkeys([result.recommended, result.plain]) if x not in shown]
    shown[len(shown) - len(needed) :] = needed
    for outcome in shown:
        style = "bold" if outcome is result.plain else None
        table.add_row(*_cells(result, outcome), style=style)
    console.print(_title(result), style="bold", markup=False)
    console.print(table)
    console.print(_legend(result, shown), markup=False, style="dim")
    if len(shown) < len(result.outcomes):
        rest = len(result.outcomes) - len(shown)
        output = result.cfg.output
        has_all = output is not None and output.suffix == ".json"
        where = f"in {output}" if has_all else "left out; --output FILE.json has all"
        console.print(f"{rest} slower ones are {where}", markup=False)
    for outcome in dict.fromkeys([result.outcomes[0], result.recommended, result.plain]):
        console.print(_where_time_goes(outcome), markup=False)
    for better, next_best in pairwise(_distinct(result)):
        console.print(_why(better, next_best), markup=False)
    console.print(f"memory of {result.recommended.name}, of {result.gpu.memory_gib} GiB a GPU:")
    for phase in RunMemory(result.recommended.plan).phases():
        console.print(f"  {phase.title}: {phase.in_words()}", markup=False)
    for line in _host_lines(result):
        console.print(f"  {line}", markup=False)
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
    flags = run_flags(result.cfg, result.recommended)
    launch = shlex.join(launch_words(result.recommended))
    if flags or launch != "hone rl":
        how = "" if launch == "hone rl" else ", started on every node,"
        console.print(
            f"To run {_named(result)}, add this to `{launch}`{how} with the recipe and flags given "
            "here (but for --plan, --output and --model.shape):",
            markup=False,
        )
        console.print(shlex.join(flags), markup=False, soft_wrap=True)  # one line, to be copied
    else:
        named = _named(result)
        text = f"{named[0].upper()}{named[1:]} is what `hone rl` does with this recipe as it is."
        console.print(text, markup=False)


def _named(result: Comparison) -> str:
    """What the recommended outcome is called, with the reason where it is not the first."""
    if result.recommended is result.outcomes[0]:
        return "the first"
    return (
        f"{result.recommended.name} (all of whose samples are of the newest weights, and whose "
        "speed a prediction cannot tell from that of the first)"
    )


def _host_lines(result: Comparison) -> list[str]:
    """Host memory of the recommended outcome, on its fullest host."""
    roles, limit = gpu_host_roles(result.recommended.plan), result.cfg.plan.host_gib
    needed = sum(role.num_bytes for role in roles) / 2**30
    if needed < 0.05:  # too little to show
        return []
    size = f"{needed:.1f} GiB" + ("" if limit is None else f" of {limit:.0f} GiB")
    parts = "; ".join(role.in_words() for role in roles)
    lines = [f"memory of a host, for what is offloaded and copied: {size} ({parts})"]
    if limit is None:
        lines.append("plan.host_gib is unset: whether a host has that much is not checked")
    return lines


def _legend(result: Comparison, shown: Sequence[Outcome]) -> str:
    """Explanation of the columns; each line fits a terminal of 80 columns."""
    lines = [
        f"* plain run ({result.plain.mode}); x plain: tok/s over its; idle: trainers, engines",
        "3 + 5: trainers + engines; 8 = 8: same GPUs for both; stale: updates behind, mean",
    ]
    if any(not x.leaves_margin for x in shown):
        lines.append("! fits by less than predictions have been off: `hone check` says what helps")
    roles = {role: None for x in shown for role, _ in x.run.placement.others}
    if roles:
        words = (f"{LETTERS[role]} {role.replace('_', ' ')}" for role in roles)
        lines.append(f"devices of others: {', '.join(words)}")
    return "\n".join(lines)


def _cells(result: Comparison, outcome: Outcome) -> list[str]:
    run = outcome.run
    return [
        outcome.mode + " *" * (outcome is result.plain) + " !" * (not outcome.leaves_margin),
        outcome.split,
        f"{run.step_s:.1f}" if run.step_s >= 10 else f"{run.step_s:.3g}",
        f"{run.tokens_per_s:,.0f}",
        f"{result.speedup(outcome):.2f}",
        f"{run.trainer_idle:.0%}, {run.engine_idle:.0%}",
        f"{run.staleness_mean:.2f}, {run.staleness_max}",
    ]


def _where_time_goes(outcome: Outcome) -> str:
    phases = ", ".join(f"{seconds:.3g} s {name}" for name, seconds in outcome.phases_s.items())
    return (
        f"a step of {outcome.name}: {phases}; "
        f"{outcome.run.tokens_per_s:,.0f} tok/s, "
        f"{outcome.run.completion_tokens_per_s:,.0f} of completions"
    )


def _distinct(result: Comparison) -> list[Outcome]:
    """The first outcomes whose placement or mode, and time, differ."""
    outcomes: list[Outcome] = []
    for outcome in result.outcomes:
        if len(outcomes) == _NUM_EXPLAINED:
            break
        if not outcomes or abs(outcomes[-1].run.step_s / outcome.run.step_s - 1) > _MIN_SHARE_SHOWN:
            outcomes.append(outcome)
    return outcomes


def _why(better: Outcome, other: Outcome) -> str:
    """Difference in time between two outcomes, by phase."""
    ours, theirs = better.phases_s, other.phases_s
    sampling, others_sampling = next(iter(ours)), next(iter(theirs))
    pairs = [(sampling, ours[sampling], theirs[others_sampling])]
    pairs += [(name, ours[name], theirs[name]) for name in [*ours][1:]]
    pairs.sort(key=lambda pair: -abs(pair[2] - pair[1]))
    differences = [
        f"{abs(after - before):.2g} s {'less' if after > before else 'more'} {name}"
        for name, before, after in pairs[:2]
        if abs(after - before) >= _MIN_SHARE_SHOWN * other.run.step_s
    ]
    details = f": {', '.join(differences)}" if differences else ""
    return (
        f"{better.name} before {other.name}: {other.run.step_s - better.run.step_s:.2g} s "
        f"less a step{details}"
    )


def _title(result: Comparison) -> str:
    cfg, rollout = result.cfg, result.cfg.rollout
    lengths = [length for group in result.lengths for length in group]
    return (
        f"{_model(result)} on {result.num_gpus} x {result.gpu.name}: "
        f"{rollout.prompts_per_step} prompts of {cfg.plan.prompt_tokens} tokens x "
        f"{rollout.n_samples_per_prompt} samples a step, completions of "
        f"{statistics.fmean(lengths):,.0f} tokens on average, {max(lengths):,} at most"
    )


def _model(result: Comparison) -> str:
    return result.cfg.model.shape or result.cfg.model.path


def _as_json(result: Comparison) -> dict[str, Any]:
    """All numbers: the assumptions, and every step of every run."""
    return {
        "version": __version__,
        "verdict": result.verdict,
        "notes": result.notes,
        "gpu": asdict(result.gpu),
        "num_gpus": result.num_gpus,
        "num_params": result.num_params,
        "recommended": result.outcomes.index(result.recommended),
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
                "num_preemptions": x.run.num_preemptions,
                "leaves_margin": x.leaves_margin,
                "steps": [
                    {
                        "wait_s": round(step.wait_s, 6),
                        "train_s": round(step.train_s, 6),
                        "halt_s": round(step.halt_s, 6),
                        "sync_s": round(step.sync_s, 6),
                        "num_tokens": step.num_tokens,
                        "num_completion_tokens": step.num_completion_tokens,
                        "staleness_mean": statistics.fmean(step.staleness),
                    }
                    for step in x.run.steps
                ],
            }
            for x in result.outcomes
        ],
        "config": result.cfg.model_dump(mode="json"),
    }
