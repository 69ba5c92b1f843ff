"""`hone check [COMMAND] RECIPE [flags]`: checks a recipe without running it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone import flash4
from hone.cli.command import (
    check_host,
    check_plan,
    check_run_disk,
    in_processes,
    load_arguments,
    near_name,
    plan_here,
    split,
    started_here,
    take_nproc,
    take_word,
)
from hone.cli.help import is_help, print_help
from hone.config.base import Section
from hone.config.plan import RECIPE_TREES, Command, RunPlan
from hone.config.recipe import read_recipe, to_yaml
from hone.config.rules.finding import Finding
from hone.config.rules.view import Known
from hone.config.sharing import command_of, key_paths
from hone.config.tree import RLConfig, SFTConfig
from hone.data.sources import is_json_array, iter_source
from hone.errors import UserError
from hone.families.registry import public_configs
from hone.families.shape import public_shape
from hone.hardware import known_gpu
from hone.models.settings import compute_dtype
from hone.observe.printable import printable
from hone.paths import data_suffix, local_path, must_be_local
from hone.rewards.jail import missing_walls
from hone.rewards.settings import RewardConfig
from hone.tools.plan.lines import Line, plan_lines

__all__ = ["run"]

_USAGE = """\
usage: hone check [COMMAND] RECIPE [--section.key VALUE ...]
                  [--nproc N] [--gpu NAME] [--model.shape NAME] [--json]

Resolves and checks a recipe of COMMAND (rl, sft, dpo, reward-model, eval or
generate; unset: the one that its keys are for), and prints what is wrong, what
was set, the numbers that follow, the memory of each phase, and whether it fits: N
processes, one a device, on the GPUs of this host, or with --gpu on others (h200,
h100, a100-80g, a100-40g, l40s, a10, 4090, ...; without --nproc on as few as the
recipe can have); on a CPU, and of what is offloaded, whether this host's memory
holds the run. Loads no model, of one on the hub config.json alone, of
--model.shape (qwen3-8b, ...) in place of model.path nothing; needs no GPU, and
with --gpu no packages of that host.
Exit code: 2 with errors, else 0.
`hone check COMMAND --help` explains the keys.
"""

_SOURCES = ("data", "train")
_MODEL = ("model", "path")


def run(argv: Sequence[str]) -> int:
    """Check a recipe and print the result. Returns 2 if it has errors."""
    nproc, words = take_nproc(argv)
    name, words = take_word("--gpu", words)
    shape, words = take_word("--model.shape", words)
    if shape is not None:
        _require_public(shape)
        words.append(f"--model.path={shape}")
    command = words.pop(0) if words and words[0] in RECIPE_TREES else None
    if not words or is_help(words):
        if command is not None and words:
            return print_help(command, words)
        sys.stdout.write(_USAGE)
        return 0
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    is_named = command is not None
    command = command or _command_of(words)
    cfg, notes = _load(command, words)
    if not is_named and (fitting := _command_of(words, has_pairs=_has_pairs(cfg))) != command:
        command = fitting
        cfg, notes = _load(command, words)
    # A run on a CPU is assumed to run on this host.
    known: Known = started_here(nproc) if nproc is not None and cfg.run.device == "cpu" else {}
    if nproc is None and isinstance(cfg, RLConfig) and cfg.cluster.is_used:
        nproc = cfg.cluster.num_processes
    gpu = None if name is None else known_gpu(name)
    if gpu is not None:
        known["can_install"] = True  # assumed for the host with these GPUs
    plan = plan_here(cfg, nproc, starts=True, gpu=gpu)
    if gpu is not None and nproc is None:
        nproc = _fewest_processes(plan)
        plan = in_processes(cfg, plan, nproc)
        notes.append(f"Without --nproc the check is for the fewest processes of a run, {nproc}.")
    findings = _findings(plan, known)
    if shape is not None:
        findings = [f for f in findings if f.keys != ("model.path",)]  # a shape, not a path
        notes.append(f"Sizes are those of the shape {shape}; a run needs a model in model.path.")
    notes = [*notes, *_unknown_sizes(plan), *_walls(cfg)]
    if as_json:
        _print_json(cfg, plan, findings, notes)
    else:
        _print_tables(cfg, plan, findings, [f"Checked for `hone {command}`.", *notes])
    return 2 if any(finding.level == "error" for finding in findings) else 0


def _fewest_processes(plan: RunPlan) -> int:
    """The fewest processes that divide every role of a run on shared devices as its recipe says."""
    return math.lcm(*(role.axes.world for role in plan.roles.values()))


def _require_public(shape: str) -> None:
    """Raise UserError for an unknown shape."""
    if public_shape(shape.lower()) is None:
        question = f"; {near}" if (near := near_name(shape)) else "."
        raise UserError(
            f"--model.shape {shape} is no public shape that hone knows{question} "
            f"Known are {', '.join(public_configs())}. For another model give the folder with its "
            "config.json as --model.path."
        )


def _load(command: str, words: Sequence[str]) -> tuple[Command, list[str]]:
    """Load a recipe and flags of a command. Where only sources to train on are missing, which no
    number depends on, the configuration has none, and a rule reports it."""
    tree = RECIPE_TREES[command]
    try:
        return load_arguments(tree, words, starts=True)
    except UserError as error:
        keys = _given_keys(words)
        if not any(path[:2] == _SOURCES[: len(path)] for path in keys):
            with suppress(UserError):
                return load_arguments(tree, [*words, f"--{'.'.join(_SOURCES)}=[]"], starts=True)
        if any(path == _MODEL for path in keys) or ".".join(_MODEL) not in f"{error}":
            raise
        raise UserError(
            f"{error}\nWithout a model the numbers come from a public one of its sizes: "
            "--model.shape qwen3-8b, for instance."
        ) from error


def _command_of(words: Sequence[str], *, has_pairs: bool = False) -> str:
    """The command to which a recipe and flags belong: `rl` if several fit and its data are not
    pairs."""
    return command_of(_given_keys(words), has_pairs=has_pairs)


def _given_keys(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The paths of all keys in a recipe and flags."""
    recipe, flags = split(words)
    values = {} if recipe is None else read_recipe(recipe).values
    named = [word.removeprefix("--").partition("=")[0] for word in flags if word.startswith("--")]
    in_flags = (tuple(name.replace("-", "_").split(".")) for name in named)
    return [*key_paths(values, into_lists=True), *in_flags]


def _has_pairs(cfg: Section) -> bool:
    """Whether the first training row has the columns of a pair. Only for a local file whose rows
    are read one by one. Errors in the file are reported later."""
    sources = cfg.data.train if isinstance(cfg, RLConfig | SFTConfig) else ()
    for source in sources[:1]:
        path = local_path(source.path)
        if path.is_file() and data_suffix(path) and not is_json_array(path):
            with suppress(UserError):
                return {"chosen", "rejected"} <= next(iter_source(source)).columns.keys()
    return False


def _findings(plan: RunPlan, known: Known) -> list[Finding]:
    """Findings on a plan. If the run could take place on another machine, too little memory or disk
    on this host is only a warning."""
    results = check_plan(plan, **known)
    if _calls_flash4(plan) and (problem := flash4.import_problem()):
        results.append(Finding("error", ("model.path",), problem))
    if plan.config.run.device != "auto" or not plan.is_on_cpu:
        return results
    here = "without a GPU here, run.device auto is a run on this host's CPU, and "
    on_cpu = {*check_host(plan), *check_run_disk(plan)}
    return [
        replace(finding, level="warning", message=here + finding.message)
        if finding in on_cpu
        else finding
        for finding in results
    ]


def _calls_flash4(plan: RunPlan) -> bool:
    """Whether FlashAttention 4 is installed here and used in training on this host's GPUs."""
    devices, shape = plan.devices, plan.shape
    return (
        plan.trainer is not None
        and plan.device == "cuda"
        and devices.per_node is not None
        and devices.gpu is not None
        and devices.gpu.capability[0] in flash4.ARCHITECTURES
        and shape is not None
        and flash4.serves(shape.head_dim)
        and compute_dtype(plan.config.model.dtype, "cuda") == "bfloat16"
        and flash4.is_installed()
    )


def _unknown_sizes(plan: RunPlan) -> Iterator[str]:
    """Note that memory was not checked, if the sizes of the model are unknown here."""
    path, facts = plan.config.model.path, plan.model
    if path is None:
        return
    if facts is not None and facts.lacks is not None:
        yield f"{facts.lacks} So memory was not checked for model.path '{path}'."
    elif facts is None and not (Path(path).exists() or must_be_local(path)):
        text = (
            f"The sizes of model.path '{path}' are not known here, so memory was not checked: run "
            f"`hf download {path} config.json`, or name a folder with that file."
        )
        yield f"{text} {near_name(path).capitalize()}".rstrip()


def _walls(cfg: Command) -> Iterator[str]:
    """Sandbox walls around programs that a recipe runs, on this machine."""
    reward = getattr(cfg, "reward", None)
    if not isinstance(reward, RewardConfig):
        return
    if not any(function.fn == "code_tests" for function in reward.functions):
        return
    missing = missing_walls()
    yield (
        "Walls around programs of `code_tests` on this machine: "
        + (
            f"all but {', '.join(missing)}, so programs can {'; '.join(missing.values())} "
            "(SECURITY.md)."
            if missing
            else "all are up."
        )
    )


def _planned_for(plan: RunPlan) -> str:
    """The devices for which the numbers hold, as a sentence."""
    number, gpu = plan.devices_of_roles(), plan.devices.gpu
    if plan.is_on_cpu and plan.config.run.device == "cpu":
        return "Planned for this host's CPU (run.device cpu)."
    if plan.is_on_cpu:
        return (
            "Planned for this host's CPU, where a run would be: no GPU is here. --gpu NAME (h200, "
            "a100-40g, 4090, ...) plans for GPUs."
        )
    if gpu is not None:
        return f"Planned for {number} x {gpu.name} of {gpu.memory_gib} GiB."
    if plan.devices.per_node is not None:
        return "Planned for the GPUs of this host, of which hone knows nothing; --gpu NAME does."
    return (
        "Planned for GPUs (run.device cuda), though this host has none: --gpu NAME (h200, "
        "a100-40g, 4090, ...) says which."
    )


def _print_json(cfg: Command, plan: RunPlan, findings: list[Finding], notes: list[str]) -> None:
    outcome = {
        "notes": notes,
        "findings": [asdict(finding) for finding in findings],
        "derived": {row.name: row.value for row in plan_lines(plan)},
        "planned_for": _planned_for(plan),
        "config": cfg.model_dump(mode="json"),
    }
    sys.stdout.write(json.dumps(outcome, indent=2) + "\n")


def _print_tables(cfg: Command, plan: RunPlan, findings: list[Finding], notes: list[str]) -> None:
    """Print settings, numbers, notes, warnings, and last the errors. A line before the numbers
    names the errors' keys, since a table may be longer than a screen."""
    lines = plan_lines(plan)
    errors = [finding for finding in findings if finding.level == "error"]
    console = Console(highlight=False)
    console.print(Text("What differs from the defaults", style="bold"))
    console.print(to_yaml(cfg.model_dump(mode="json", exclude_defaults=True)), markup=False)
    if lines:
        if errors:
            keys = dict.fromkeys(key for error in errors for key in error.keys[:1])
            text = f"errors: {len(errors)}, of {', '.join(keys)}; they stand below the numbers"
            console.print(Text(text, style="bold red"))
        console.print(_table(lines))
    console.print()
    for note in [*notes, _planned_for(plan)]:
        console.print(Text(printable(note), style="dim"))
    if plan.world_size is None:
        hint = "What depends on the number of processes is not checked: add --nproc N (1 for one)."
        console.print(Text(hint, style="dim"))
    for finding in sorted(findings, key=lambda finding: finding.level == "error"):
        style = "bold red" if finding.level == "error" else "yellow"
        console.print(Text.assemble((f"{finding.level}: ", style), printable(finding.message)))
    summary = f"errors: {len(errors)}, warnings: {len(findings) - len(errors)}"
    console.print(Text(summary, style="bold red" if errors else "bold green"))


def _table(lines: list[Line]) -> Table:
    table = Table(title="Derived numbers", title_justify="left", title_style="bold", box=None)
    table.add_column("name", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("from")
    for row in lines:
        value = f"{row.value:,}" if isinstance(row.value, int) else str(row.value)
        table.add_row(row.name, value, row.how)
    return table
