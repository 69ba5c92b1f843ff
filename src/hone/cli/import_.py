"""`hone import FRAMEWORK SCRIPT`: converts a script of another framework to a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hone.cli.command import take_word
from hone.config.aliases import FRAMEWORKS
from hone.errors import UserError
from hone.observe.printable import printable
from hone.observe.whole_file import whole_file, write_whole
from hone.tools.imports.convert import convert
from hone.tools.imports.frameworks import read_command, read_file
from hone.tools.imports.write import counts, recipe

__all__ = ["run"]

_USAGE = """\
usage: hone import {openrlhf,verl,relax,trl} FILE [--output RECIPE.yaml]
       hone import {openrlhf,verl,relax,trl} [--output RECIPE.yaml] -- COMMAND ...

Makes a recipe of what a script or a command of another framework sets, for
`hone check` and then `hone rl`, `sft`, `dpo` or `reward-model`. FILE is a shell
script, a YAML file of settings, or for trl a Python script; none is run.
Variables, arrays, functions and sourced files of a shell script are followed;
NAME=value before `hone import` sets what it reads from the environment.

With --output, reward functions, tools and environments of a Python script that a
run must not import, since it trains, are copied with what they use to a file
beside the recipe.

Each value of the recipe says where it comes from. Comments list what is not
served, what means something else here, what nothing is to be set for, and what
is left to be filled in. Settings that are not given count as their framework
has them.

examples:
  hone import openrlhf train_ppo_ray_hybrid_engine.sh --output mine.yaml
  hone import openrlhf -- python3 -m openrlhf.cli.train_dpo --pretrain M --beta 0.1
  hone import verl run_qwen3-8b.sh --output mine.yaml
  hone import verl -- python3 -m verl.trainer.main_ppo data.train_files=d.parquet
  hone import relax run-qwen3-4B-8xgpu.sh
  hone import trl grpo.py
  hone import trl -- trl grpo --config grpo.yaml --learning_rate 1e-6
"""


def run(argv: Sequence[str]) -> int:
    """Print a recipe, or write it to a file. Raises UserError if the input cannot be read or the
    output exists."""
    words = list(argv)
    command = words[words.index("--") + 1 :] if "--" in words else []
    words = words[: words.index("--")] if "--" in words else words
    if not words or any(word in ("-h", "--help") for word in words):
        sys.stdout.write(_USAGE)
        return 0
    framework, *words = words
    if framework not in FRAMEWORKS:
        raise UserError(
            f"there is nothing to import from '{framework}'. There are {', '.join(FRAMEWORKS)}."
        )
    given, words = take_word("--output", words)
    if (
        bool(command) == bool(words)
        or len(words) > 1
        or given == ""
        or any(word.startswith("-") for word in words)
    ):
        raise UserError(
            f"`hone import {framework}` takes one file, or a command behind `--`; got "
            f"{' '.join(words) or 'neither'}. `hone import --help` has examples."
        )
    output = None if given is None else Path(given)
    if output is not None and output.exists():
        raise UserError(f"'{output}' exists. Name another file, or remove it.")
    if command:
        source, origin = read_command(framework, command), "A command"
    else:
        source, origin = read_file(framework, Path(words[0]), os.environ), words[0]
    imported = convert(source, output or Path("RECIPE.yaml"))
    copied = imported.taken_out
    if output is None and copied is not None:
        imported.to_do.append(f"{copied.path}: --output FILE also writes the file of functions")
    if output is not None and copied is not None and copied.path.exists():
        raise UserError(
            f"'{copied.path}' exists, and {', '.join(copied.names)} would be written there. Name "
            "another output, or remove it."
        )
    lines = [counts(imported), *(f"not followed: {note}" for note in source.notes)]
    text = recipe(imported, origin, str(output or "RECIPE.yaml"))
    if output is None:
        sys.stdout.write(printable(text))
    else:
        with whole_file(output, "--output", len(text.encode())) as file:
            file.write(text)
            file.flush()
            if copied is not None:  # a recipe without its functions would not run
                write_whole(copied.path, copied.text, "--output")
        if copied is not None:
            lines.append(f"{', '.join(copied.names)} copied to {copied.path}, which a run imports")
        lines.append(f"written to {output}; its comments say what to check")
    sys.stderr.write(printable("".join(f"{line}\n" for line in lines)))
    return 0
