"""`hone quickstart [--seed N] [--dir DIR]`: trains a tiny model on this machine.

It uses no special code: it writes a model folder and three JSONL files, and then calls `hone sft`
and `hone rl` with recipes that come with hone.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from hone.cli.command import quiet_transformers, say_loading
from hone.config.rules.files import unwritable
from hone.distributed.openmp import set_up_openmp
from hone.errors import UserError
from hone.families.shape import ModelShape
from hone.observe.disk import writing

__all__ = ["make_inputs", "paths", "run"]

DEFAULT_FOLDER = Path("runs/quickstart")
NUM_PROBLEMS, NUM_HELD_OUT = 950, 200
_SHAPE = ModelShape(
    family="qwen3",
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    vocab_size=0,  # set from the tokenizer
    tied=True,
)


def run(argv: Sequence[str]) -> int:
    """Make the inputs, train in two stages, and print the result."""
    parser = ArgumentParser(
        prog="hone quickstart",
        description="A tiny language model learns to add three digits: first from two teachers, "
        "one of whom writes his answers backwards, then by reinforcement from the right number "
        "alone. Takes one to two minutes on an idle CPU core and needs no network.",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (0)")
    parser.add_argument("--dir", type=Path, default=DEFAULT_FOLDER, help="folder to work in")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.dir
    # Before torch is loaded, which making the model does.
    set_up_openmp("auto", _SHAPE)
    if _inputs_are_made(folder, arguments.seed):
        _say(f"Resuming the quick start in {folder}; remove the folder to start afresh")
    else:
        with writing(folder, "--dir"):
            make_inputs(folder, arguments.seed)
    shared = ["--run.seed", str(arguments.seed)]
    code = _call("sft", ["quickstart-sft", *paths(folder, "sft"), *shared])
    if code == 0:
        code = _call("rl", ["quickstart-rl", *paths(folder, "rl"), *shared])
    if code == 0:
        _conclude(folder)
    return code


def _inputs_are_made(folder: Path, seed: int) -> bool:
    """Whether the folder holds the inputs of this seed. Raises UserError if it holds others."""
    if not os.path.exists(folder):
        if (problem := unwritable(folder)) is not None:
            raise UserError(f"--dir '{folder}' {problem}. Name another folder.")
        return False
    marker = folder / "quickstart.json"
    held = json.loads(marker.read_text()) if marker.exists() else None
    if held == {"seed": seed}:
        return True
    raise UserError(
        f"{folder} exists and "
        + (f"holds a quick start of seed {held['seed']}" if held else "is not a whole quick start")
        + ". Remove the folder, or choose another --dir."
    )


def make_inputs(folder: Path, seed: int) -> None:
    """Write the model folder and the problems: training, held-out, and demonstrations of the
    training ones."""
    from hone.data.arithmetic import (
        ALPHABET,
        generate,
        two_teachers,
        write_jsonl,
    )

    _say(f"Making a model of 0.4 M random weights and {NUM_PROBLEMS} sums in {folder}")
    say_loading()
    from hone.models.tiny import make_char_tokenizer, make_tiny_model

    quiet_transformers()
    make_tiny_model(
        folder / "model",
        tokenizer=make_char_tokenizer(ALPHABET),
        num_layers=_SHAPE.num_layers,
        hidden_size=_SHAPE.hidden_size,
        num_heads=_SHAPE.num_heads,
        num_kv_heads=_SHAPE.num_kv_heads,
        head_dim=_SHAPE.head_dim,
        intermediate_size=_SHAPE.intermediate_size,
        seed=seed,
    )
    rows = generate(NUM_PROBLEMS, seed, high=9, num_operands=3)
    train, held_out = rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "eval.jsonl", held_out)
    demonstrations = two_teachers(train, seed, num_copies=4, backwards=0.8)
    write_jsonl(folder / "demonstrations.jsonl", demonstrations)
    # Written last: marks the folder as complete.
    (folder / "quickstart.json").write_text(json.dumps({"seed": seed}))


def paths(folder: Path, command: str) -> list[str]:
    """Flags that move a recipe's files into `folder`."""
    moved = {
        "run.dir": folder / command,
        "model.path": folder / ("model" if command == "sft" else "sft/model"),
        "data.train.0.path": folder
        / ("demonstrations.jsonl" if command == "sft" else "train.jsonl"),
        "data.eval.0.path": folder / "eval.jsonl",
    }
    return [part for key, path in moved.items() for part in (f"--{key}", str(path))]


def _call(command: str, arguments: list[str]) -> int:
    """Run another hone command, and show how to type it."""
    from hone.cli.main import main

    _say(f"\n$ hone {command} {' '.join(arguments)}")
    return main([command, *arguments])


def _conclude(folder: Path) -> None:
    run_dir = folder / "rl"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open(encoding="utf-8")]
    scores = [row["eval/reward/mean"] for row in rows if "eval/reward/mean" in row]
    _say(
        f"\nHeld-out accuracy {scores[0]:.3f} before reinforcement learning, {scores[-1]:.3f} "
        f"after.\nReport: {run_dir / 'report.html'}\nModel:  {run_dir / 'model'}\n\nNext, for "
        "example:"
    )
    for command in _next_steps(folder):
        _say(f"  {_program()} {shlex.join(command)}")


def _program() -> str:
    """How to call this program from this folder: `make quickstart` activates no environment."""
    return "hone" if shutil.which("hone") else os.path.relpath(Path(sys.executable).parent / "hone")


def _next_steps(folder: Path) -> list[list[str]]:
    """Suggested next commands for the folder."""
    if folder == DEFAULT_FOLDER:
        flags: dict[str, list[str]] = {"eval": [], "generate": []}
    else:
        model, problems = str(folder / "rl" / "model"), str(folder / "eval.jsonl")
        flags = {
            "eval": ["--run.dir", str(folder / "eval"), "--data.eval.0.path", problems],
            "generate": [
                "--output",
                str(folder / "completions.jsonl"),
                "--data.train.0.path",
                problems,
            ],
        }
        flags = {name: ["--model.path", model, *others] for name, others in flags.items()}
    return [
        *([name, f"quickstart-{name}", *others] for name, others in flags.items()),
        ["report", str(folder / "rl")],
        ["rl", "--help", "rollout"],
    ]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
