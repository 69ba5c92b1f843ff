"""Does an agent learn the same, whichever way its environment is written?

    python benchmarks/agent_learning.py --seeds 0 1 2 --jobs 8
    python benchmarks/agent_learning.py --tasks guessing --forms trl --seeds 0

Trains the recipes `calculator-rl` and `guessing-rl` on each seed in each form:

    shipped    as in the recipe: a function as a tool, a session
    trl        the same environment as a class with `reset`, tools as methods, and `get_reward`
    harness    the guessing game alone: a program that plays by itself, and asks over HTTP

A form is one function below with `@form`: it says what changes in a recipe. Each run is a process
of its own with one thread, `--jobs` of them at a time; a run that is complete in `--folder` is not
run again. Further flags are settings of `hone rl`, such as `--run.steps 10`. Prints a table of
held-out accuracy before and after by seed and form, and writes the curves to `curves.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKS = ("calculator", "guessing")

Form = Callable[[str, Path], list[str]]
"""`form(task, folder)`: the flags of `hone rl` that differ from the recipe. `folder` has the inputs
of the task (`model`, `train.jsonl`, `eval.jsonl`), to which it may add its own."""

FORMS: dict[str, Form] = {}


def form(make: Form) -> Form:
    """Add a form, under the name of its function."""
    FORMS[make.__name__] = make
    return make


@form
def shipped(task: str, folder: Path) -> list[str]:
    """The recipe as it is."""
    return []


@form
def trl(task: str, folder: Path) -> list[str]:
    """The classes of `agent_forms.py`."""
    if task == "calculator":
        return [f"--env.path={HERE / 'agent_forms.py'}:Calculator", "--env.tools=[]"]
    from agent_forms import CALLS
    from hone.data.arithmetic import write_jsonl
    from hone.models.tiny import make_char_tokenizer, make_tiny_model
    from hone.recipes.turns import CHAT_TEMPLATE

    # Every turn must be a call, which random weights cannot spell: so a call is one token.
    tokenizer = make_char_tokenizer("?<>=", [*CALLS, "guess"])
    tokenizer.chat_template = CHAT_TEMPLATE
    make_tiny_model(
        folder / "trl" / "model", tokenizer=tokenizer, num_layers=2, hidden_size=64, num_heads=2,
        num_kv_heads=1, intermediate_size=192, max_position_embeddings=64, seed=seed_of(folder),
        initializer_range=0.1,
    )  # fmt: skip
    for number, (name, num) in enumerate((("train", 64), ("eval", 140))):
        rows = ({"prompt": "?", "game": 1000 * number + game} for game in range(num))
        write_jsonl(folder / "trl" / f"{name}.jsonl", rows)
    return [
        f"--model.path={folder / 'trl/model'}",
        f"--data.train.0.path={folder / 'trl/train.jsonl'}",
        f"--data.eval.0.path={folder / 'trl/eval.jsonl'}",
        "--data.chat=always",
        "--data.max_prompt_tokens=8",
        f"--env.path={HERE / 'agent_forms.py'}:Guessing",
        "--env.args={}",
        "--env.tool_format=pythonic",
        "--env.max_turns=4",  # calls of the last turn are not made
        f"--rollout.stop={json.dumps(CALLS)}",
        "--rollout.max_completion_tokens=28",
        "--eval.max_completion_tokens=28",
    ]


@form
def harness(task: str, folder: Path) -> list[str]:
    """The program of `agent_harness.py`, which plays the guessing game over HTTP."""
    from agent_harness import harness as flags_of

    return flags_of(task, folder)


@dataclass(frozen=True)
class Run:
    """One process of training."""

    task: str
    form: str
    seed: int
    top: Path

    @property
    def title(self) -> str:
        return f"{self.task}, {self.form}, seed {self.seed}"

    @property
    def inputs(self) -> Path:
        """What all forms of a task and a seed share."""
        return inputs_of(self.top, self.task, self.seed)

    @property
    def dir(self) -> Path:
        return self.inputs / f"rl-{self.form}"

    def accuracies(self) -> list[float]:
        """Held-out accuracy so far."""
        metrics = self.dir / "metrics.jsonl"
        rows = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ()
        return [row["eval/reward/mean"] for row in rows if "eval/reward/mean" in row]


def inputs_of(top: Path, task: str, seed: int) -> Path:
    """The folder of a task and a seed."""
    return top / task / f"seed-{seed}"


def seed_of(folder: Path) -> int:
    """The seed in the name of such a folder."""
    return int(folder.name.partition("-")[2])


def prepare(task: str, seed: int, top: Path) -> None:
    """Write the inputs of a task, and let the calculator's model imitate its teachers. Raises
    RuntimeError where that failed."""
    from hone.cli.command import quiet_transformers
    from hone.recipes.agent_inputs import make_calculator, make_guessing

    folder = inputs_of(top, task, seed)
    quiet_transformers()
    if not (folder / "eval.jsonl").exists():
        {"calculator": make_calculator, "guessing": make_guessing}[task](folder, seed)
    if task == "calculator" and not (folder / "sft/model").exists():
        train(
            ["sft", "calculator-sft", f"--run.dir={folder / 'sft'}", f"--run.seed={seed}",
             f"--model.path={folder / 'model'}",
             f"--data.train.0.path={folder / 'demonstrations.jsonl'}"],
            folder / "sft.log",
        )  # fmt: skip


def reinforce(run: Run, flags: Sequence[str], settings: Sequence[str]) -> None:
    """Train one run, where it is not complete. Raises RuntimeError where it failed."""
    if (run.dir / "model").exists():
        return
    model = "sft/model" if run.task == "calculator" else "model"
    where = {"run.dir": run.dir, "run.seed": run.seed, "model.path": run.inputs / model,
             "data.train.0.path": run.inputs / "train.jsonl",
             "data.eval.0.path": run.inputs / "eval.jsonl", "log.to": "[]"}  # fmt: skip
    words = [f"--{key}={value}" for key, value in where.items()]
    log = run.dir.with_suffix(".log")
    train(["rl", f"{run.task}-rl", *words, *flags, *settings], log)


def train(words: Sequence[str], log: Path) -> None:
    """Run a command of hone with one thread; what it says goes into `log`. Raises RuntimeError
    with its last words where it failed."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "hone", *words], env=environment, stdout=file, stderr=file,
            check=False,
        )  # fmt: skip
    if done.returncode != 0:
        last = "\n     ".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"ended by {done.returncode}; {log} ends with\n     {last}")


def attempt(title: str, work: Callable[[], None]) -> bool:
    """Do one piece of work and say how it went. Returns whether it succeeded."""
    begun = time.monotonic()
    try:
        work()
    except RuntimeError as error:
        print(f"!! {title}: {error}", flush=True)
        return False
    print(f"-- {title}: {time.monotonic() - begun:.0f} s", flush=True)
    return True


def table(runs: Sequence[Run]) -> str:
    """Held-out accuracy before and after, by task, form and seed, with the means of seeds."""
    lines = ["| task | form | seed | before | after |", "| --- | --- | --- | --- | --- |"]
    for task, name in dict.fromkeys((run.task, run.form) for run in runs):
        own = [run for run in runs if (run.task, run.form) == (task, name)]
        scored = [(run.seed, scores) for run in own if (scores := run.accuracies())]
        lines += [f"| {task} | {name} | {seed} | {scores[0]:.3f} | {scores[-1]:.3f} |"
                  for seed, scores in scored]  # fmt: skip
        if len(scored) > 1:
            first, last = (statistics.mean(s[end] for _, s in scored) for end in (0, -1))
            lines.append(f"| {task} | {name} | mean of {len(scored)} | {first:.3f} | {last:.3f} |")
    return "\n".join(lines)


def main() -> int:
    """Train, and print the table. Returns 1 where a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--folder", type=Path, default=Path("runs/agent_learning"))
    args, settings = parser.parse_known_args()
    top: Path = args.folder.resolve()
    pairs = [(task, seed) for seed in args.seeds for task in args.tasks]
    runs = [
        Run(task, name, seed, top)
        for task, seed in pairs
        for name in args.forms
        if name != "harness" or task == "guessing"  # there is no program for the other one
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        ready = pool.map(
            lambda pair: attempt(
                f"{pair[0]}, inputs, seed {pair[1]}", partial(prepare, *pair, top)
            ),
            pairs,
        )
        is_ready = dict(zip(pairs, ready, strict=True))
        # Forms write inputs, which takes seconds; one after another, as they use one random state.
        work = {run: partial(reinforce, run, FORMS[run.form](run.task, run.inputs), settings)
                for run in runs if is_ready[run.task, run.seed]}  # fmt: skip
        done = list(pool.map(lambda run: attempt(run.title, work[run]), work))
    print(table([run for run in runs if run in work]))
    curves = {run.title: run.accuracies() for run in work}
    (top / "curves.json").write_text(json.dumps(curves, indent=1))
    return 0 if all(done) and all(is_ready.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
