"""`hone env try` and `hone env check`: an environment without a model and a trainer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone.cli.arguments import Actions, run_action, take_number
from hone.cli.command import quiet_transformers, say_loading, split, take_word
from hone.config.env_try import EnvTryConfig
from hone.config.load import load_noted
from hone.distributed.openmp import set_up_openmp
from hone.errors import UserError
from hone.observe.disk import AppendedFile
from hone.observe.loggers import PER_TOKEN, json_line, sample_row
from hone.observe.printable import printable
from hone.tools.env_try.check import Checked, check, not_loaded
from hone.tools.env_try.language import Language, plain_language
from hone.tools.env_try.play import Say, Stage, scorer_of
from hone.tools.env_try.policy import Script, typed_line
from hone.tools.env_try.show import LABEL_WIDTH, Shown
from hone.types import Sample

__all__ = ["run"]

_USAGE = """\
usage: hone env try RECIPE_OR_PATH [--rows N] [--script FILE] [--turns N] [--raw]
                    [--json FILE] [--section.key VALUE ...]
       hone env check RECIPE_OR_PATH [--section.key VALUE ...]

`try` plays episodes of an environment and prints them turn by turn; no model is
loaded, and nothing is trained. You type the policy's turns (a line each; one that
ends with \\ goes on in the next, Ctrl-D ends the episode), or --script FILE has
them: JSON, a list of texts for every episode, or an object with such a list for
each id of a row. Workers, deadlines, templates and rewards are those of training.
`check` loads the environment in a worker, starts an episode, answers one turn, and
says what a run would refuse, with remedies, and how long each call took.

RECIPE_OR_PATH is a recipe with `env`, `data` and `reward`, or the environment
alone, as in env.path: path/to/file.py:Class. Without data prompts are empty, and an
environment that leaves the reward to a function needs --reward.functions.0.fn.
Where model.path or model.tokenizer is set, prompts and observations are rendered
with its chat template, and tokens are counted.

  --rows N       episodes, one for each of the first N rows (try: 3)
  --script FILE  the policy's turns
  --turns N      most turns of an episode, in place of env.max_turns
  --raw          show the exact text that goes before each turn
  --json FILE    also write the episodes, in the format of samples.jsonl

Exit code: 1 where an episode failed, or a run would refuse the environment.
"""
_ROWS = 3


def run(argv: Sequence[str]) -> int:
    """Run `hone env try` or `hone env check`."""
    return run_action("hone env", _ACTIONS, _USAGE, argv)


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of `hone env try`."""

    cfg: EnvTryConfig
    num_rows: int
    script: Script | None
    output: Path | None
    is_raw: bool


def _try(words: list[str]) -> int:
    given = _given(words)
    if given.script is None and not sys.stdin.isatty():
        raise UserError(
            "nobody says what the policy says: there is no terminal to type at. Give its turns in "
            '--script FILE, a JSON list of texts such as ["look", "go north"]'
        )
    language = _language(given.cfg, given.num_rows)
    if given.script is not None:
        given.script.require(language.prompts)
    console = Console(highlight=False)
    _note(console, language)
    shown = Shown(console, language, is_raw=given.is_raw, is_typed=given.script is None)
    say: Say = given.script.text if given.script is not None else _typed
    output = None if given.output is None else AppendedFile(given.output, "--json")
    samples: list[Sample] = []
    with scorer_of(given.cfg, language) as scorer:
        for sample in Stage(given.cfg, language, scorer, say, shown).play():
            samples.append(sample)
            if output is not None:
                output.write(json_line(_row(sample, language)))
    if output is not None:
        output.close()
    failed = sum(sample.failure is not None for sample in samples)
    rewards = [sample.reward.total for sample in samples if sample.reward is not None]
    console.print()
    summary = f"{len(samples)} episodes"
    summary += f", mean reward {sum(rewards) / len(rewards):.4g}" if rewards else ""
    summary += f", {failed} failed" if failed else ""
    console.print(Text(summary, style="bold red" if failed else "bold green"))
    return 1 if failed else 0


def _typed(row_id: str, turn: int) -> str | None:
    del row_id
    return typed_line(f"{f'policy {turn + 1}':<{LABEL_WIDTH}}> ")


def _row(sample: Sample, language: Language) -> dict[str, object]:
    """The row of a sample; without a tokenizer its ids say nothing, and are left out."""
    row = sample_row(sample, with_times=True)
    names = list(row)
    kept = names if language.has_tokens else names[: names.index(PER_TOKEN)]
    return {name: row[name] for name in kept}


def _check(words: list[str]) -> int:
    cfg = _config(words)
    console = Console(highlight=False)
    try:
        language = _language(cfg, 1)
    except UserError:
        raise
    except ValueError as error:  # the environment, which is asked for its tools
        _print_checked(console, cfg, not_loaded(error))
        return 1
    checked = check(cfg, language)
    _print_checked(console, cfg, checked)
    _note(console, language)
    return 1 if checked.has_errors else 0


def _print_checked(console: Console, cfg: EnvTryConfig, checked: Checked) -> None:
    kinds = {
        "session": "a live object for each episode (session)",
        "stateless": "stateless: one object answers all episodes, whose memory is their `state`",
        "": "unknown, since it cannot be loaded",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    named = [*([cfg.env.path] if cfg.env.path is not None else []), *cfg.env.tools]
    table.add_row("environment", "", printable(", ".join(named)))
    table.add_row("kind", "", kinds[checked.kind])
    if checked.shape not in ("", "hone", "stateless", "tools"):
        table.add_row("shape", "", f"that of {checked.shape}")
    if checked.tools:
        table.add_row("tools", "", printable(", ".join(checked.tools)))
    for name, seconds in checked.times_s.items():
        table.add_row(name, f"{seconds:.3f} s", Text(printable(checked.said.get(name, ""))))
    console.print(table)
    console.print()
    for problem in sorted(checked.problems, key=lambda problem: problem.is_error):
        level, style = ("error", "bold red") if problem.is_error else ("warning", "yellow")
        console.print(Text.assemble((f"{level}: ", style), printable(problem.what)))
        console.print(Text(f"  {printable(problem.remedy)}", style="dim"))
    errors = sum(problem.is_error for problem in checked.problems)
    summary = f"errors: {errors}, warnings: {len(checked.problems) - errors}"
    console.print(Text(summary, style="bold red" if errors else "bold green"))


def _note(console: Console, language: Language) -> None:
    if language.note:
        console.print(Text(f"note: {printable(language.note)}", style="dim"))


def _given(words: list[str]) -> _Given:
    num_rows, words = take_number("--rows", words, _ROWS)
    script, words = take_word("--script", words)
    turns, words = take_number("--turns", words, None)
    output, words = take_word("--json", words)
    if turns is not None:
        words = [*words, f"--env.max_turns={turns}"]
    if output is not None and Path(output).exists():
        raise UserError(f"--json {output} exists; remove it, or name another file")
    return _Given(
        cfg=_config([word for word in words if word != "--raw"]),
        num_rows=num_rows,
        script=None if script is None else Script.read(Path(script)),
        output=None if output is None else Path(output),
        is_raw="--raw" in words,
    )


def _config(words: list[str]) -> EnvTryConfig:
    """The configuration of a recipe, or of an environment that is named alone, with flags."""
    words = list(words)
    if words and ":" in words[0] and "=" not in words[0] and not Path(words[0]).is_file():
        words[0] = f"--env.path={words[0]}"
    recipe, flags = split(words)
    cfg = load_noted(EnvTryConfig, recipe, flags)[0]
    if cfg.env.harness.command is not None:
        raise UserError(
            f"env.harness.command is '{cfg.env.harness.command}', and a program that plays "
            "episodes by itself has no environment that could be tried with typed turns. Play a "
            "few episodes with `hone eval RECIPE --data.eval.0.max_rows 2`"
        )
    return cfg


def _language(cfg: EnvTryConfig, num_rows: int) -> Language:
    """The model's language, or the plain one where no model is named or its tokenizer is not
    here."""
    if not cfg.model.path and cfg.model.tokenizer is None:
        note = "no model is named, so texts are shown without a chat template and tokens"
        return plain_language(cfg, num_rows, note)
    set_up_openmp("cpu", None)
    say_loading()
    from hone.tools.env_try.tokens import model_language

    quiet_transformers()
    try:
        return model_language(cfg, num_rows)
    except FileNotFoundError as error:
        note = f"texts are shown without a chat template and tokens, since {error}"
        return plain_language(cfg, num_rows, note)


_ACTIONS: Actions = {"try": _try, "check": _check}
