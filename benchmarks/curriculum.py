"""Does a curriculum save updates? The quick start's sums among others that the model cannot learn.

    python benchmarks/curriculum.py --plot
    python benchmarks/curriculum.py --task plain --seeds 1

The model is that of `hone quickstart`: trained by imitation on sums of three digits, most of which
had the answer backwards. `hone rl quickstart-rl` goes on from there in several ways, with the same
settings but for which prompts it draws, and is evaluated on the quick start's held-out sums every
five updates. Tasks, by the data that it trains on:

    plain    the 750 training sums of the quick start
    wrong    the same, and three times each with a wrong answer, which no sample ever gives
    few      300 of them among 900 sums with a wrong answer
    long     all 750 among 2,250 sums of three numbers of two digits, which the model has never
             seen and solves by chance alone

Prints the updates until the held-out accuracy reaches 0.9, writes the curves, and draws them with
`--plot`. Runs are made one after the other, each on one core for about a minute; those whose folder
exists are read.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from itertools import cycle
from pathlib import Path

Curve = list[tuple[int, float]]
"""Updates, and the held-out accuracy after them."""
Curves = dict[str, list[Curve]]
"""By way, one curve a seed."""

GOAL = 0.9
EVERY = 5
REST = "--data.curriculum.pass_rate=[0, 1]"
WAYS: dict[str, list[str]] = {
    "shuffled": [],
    "easiest first": ["--data.train.0.columns.difficulty=difficulty"],
    "resting": [REST],
    "resting from the start": ["--data.train.0.columns.pass_rate=rate", REST],
}
"""Flags of each way. The last one has rates of the first model, from `hone eval` with 8 samples."""
TASKS = {"plain": (750, 0), "wrong": (750, 2250), "few": (300, 900), "long": (750, 2250)}
"""How many sums can be learned, and how many cannot."""


def make_inputs(folder: Path, seed: int) -> None:
    """The quick start's model and data, and the model after imitation."""
    from hone.cli import quickstart

    if (folder / "sft" / "model").exists():
        return
    quickstart.make_inputs(folder, seed)
    words = ["quickstart-sft", *quickstart.paths(folder, "sft"), f"--run.seed={seed}"]
    hone("sft", *words, log=folder / "sft.log")


def make_task(folder: Path, task: str, seed: int) -> Path:
    """The training data of a task, in random order, each row with the rate of the first model."""
    from hone.data.arithmetic import generate, write_jsonl

    if (file := folder / f"{task}.jsonl").exists():
        return file
    num_easy, num_hard = TASKS[task]
    lines = (folder / "train.jsonl").read_text().splitlines()
    easy = [json.loads(line) for line in lines[:num_easy]]
    if task == "long":
        hard = generate(num_hard, seed + 100, low=10, high=99, num_operands=3)
    elif task == "few":
        sums = generate(num_hard, seed + 100, high=9, num_operands=3)
        hard = [row | {"answer": str(int(row["answer"]) + 100)} for row in sums]
    else:
        wrong_by = [100 * (1 + i // num_easy) for i in range(num_hard)]
        hard = [
            row | {"answer": str(int(row["answer"]) + by)}
            for row, by in zip(cycle(easy), wrong_by, strict=False)
        ]
    random.Random(seed).shuffle(rows := easy + hard)
    write_jsonl(plain := folder / f"{task}-plain.jsonl", rows)
    profile = folder / f"{task}-profile"
    words = [f"--model.path={folder / 'sft' / 'model'}", f"--data.eval.0.path={plain}"]
    words += [f"--run.dir={profile}", "--eval.n_samples_per_prompt=8", f"--run.seed={seed}"]
    hone("eval", "quickstart-eval", *words, log=profile.with_suffix(".log"))
    rewards: dict[str, list[float]] = {}
    for line in (profile / "eval_samples.jsonl").open():
        sample = json.loads(line)
        rewards.setdefault(sample["prompt_id"], []).append(sample["reward"])
    rates = [statistics.mean(rewards[f"{plain.stem}:{n}"]) for n in range(1, len(rows) + 1)]
    columns = [{"rate": rate, "difficulty": 1 - rate} for rate in rates]
    write_jsonl(file, [row | more for row, more in zip(rows, columns, strict=True)])
    return file


def reinforce(
    folder: Path, way: str, seed: int, args: argparse.Namespace, settings: list[str]
) -> Path:
    """One run; its folder."""
    from hone.cli import quickstart

    run = folder / f"{args.task}-{way.replace(', ', '-').replace(' ', '-')}"
    if (run / "model").exists():
        return run
    flags = {
        "run.dir": run,
        "run.steps": args.steps,
        "run.seed": seed,
        "data.train.0.path": make_task(folder, args.task, seed),
        "eval.every_n_steps": EVERY,
        "eval.n_samples_per_prompt": 4,
        "checkpoint.every_n_steps": 0,
        "log.to": "[]",
    }
    own = [*quickstart.paths(folder, "rl"), *(f"--{key}={value}" for key, value in flags.items())]
    hone("rl", "quickstart-rl", *own, *WAYS[way], *settings, log=run.with_suffix(".log"))
    return run


def hone(*words: str, log: Path) -> None:
    """A command; what it says goes into a file, whose end an error shows."""
    with log.open("w") as file:
        code = subprocess.run([sys.executable, "-m", "hone", *words], stdout=file, stderr=file)
    if code.returncode:
        sys.exit(f"hone {' '.join(words)}\nended by {code.returncode}:\n{log.read_text()[-2000:]}")


def curve_of(run: Path) -> Curve:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [(row["step"], row["eval/reward/mean"]) for row in rows if "eval/reward/mean" in row]


def updates_until(curve: Curve, goal: float) -> int | None:
    """Updates until the first evaluation that reaches the goal; None where none does."""
    return next((step for step, accuracy in curve if accuracy >= goal), None)


def table(curves: Curves) -> str:
    lines = [
        f"| way | updates until {GOAL}, by seed | accuracy at the end, mean |",
        "| --- | --- | --- |",
    ]
    for way, runs in curves.items():
        needed = [updates_until(curve, GOAL) for curve in runs]
        told = ", ".join("not reached" if number is None else f"{number}" for number in needed)
        lines.append(f"| {way} | {told} | {statistics.mean(run[-1][1] for run in runs):.3f} |")
    return "\n".join(lines)


def plot(title: str, curves: Curves, path: Path) -> None:
    """Held-out accuracy over updates: each seed thin, and their mean."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4), layout="constrained")
    panel.set(title=title, xlabel="updates", ylabel="share of right answers, held out")
    panel.axhline(GOAL, color="black", linewidth=0.8, linestyle=":")
    for number, (way, runs) in enumerate(curves.items()):
        for curve in runs:
            panel.plot(*zip(*curve, strict=True), color=f"C{number}", linewidth=0.6, alpha=0.5)
        steps = [step for step, _ in min(runs, key=len)]
        means = [statistics.mean(dict(curve)[step] for curve in runs) for step in steps]
        panel.plot(steps, means, color=f"C{number}", linewidth=2, label=way)
    panel.legend(loc="lower right")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", default="wrong", choices=list(TASKS))
    parser.add_argument(
        "--ways", nargs="*", default=["shuffled", "resting from the start"], choices=WAYS
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/curriculum"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("curriculum.json"))
    parser.add_argument("--plot", action="store_true", help="needs matplotlib")
    args, settings = parser.parse_known_args()
    curves: Curves = {}
    for seed in range(args.seeds):
        folder = args.folder / f"seed-{seed}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_inputs(folder, seed)
        for way in args.ways:
            run = reinforce(folder, way, seed, args, settings)
            curves.setdefault(way, []).append(curve := curve_of(run))
            print(f"{way}, seed {seed}: {updates_until(curve, GOAL)} updates", flush=True)
    args.output.write_text(json.dumps(curves))
    print(table(curves))
    if args.plot:
        num_easy, num_hard = TASKS[args.task]
        title = f"{num_easy} sums that can be learned among {num_hard:,} that cannot"
        plot(title, curves, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
