"""How well a model of random weights learns word problems on one GPU, with hone alone.

    python benchmarks/word_problems.py --seeds 0 1 --plot

For each seed `python -m hone.recipes.word_problems` writes problems and a model of 84 M random
weights, `hone sft word-problems-sft` warms it up on problems of two to four steps with their
solutions, and `hone rl word-problems-rl` goes on with rewards alone, on problems of two to six.
Held-out problems are answered greedily. Prints for each seed the wall time of each
command, with its start and compilation, and the minutes of `hone rl`, with its evaluations, until
GOAL of what it gains; where it gains nothing the table has no time. `--rl` and `--sft` give flags
to a half. A run that has left its `result.json` is read and not repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

GOAL = 0.9
KINDS = {
    "short": "two to four steps",
    "five-steps": "five steps, never shown",
    "six-steps": "six steps, never shown",
}
HALVES = ("sft", "rl")


def run(folder: Path, seed: int, flags: dict[str, str]) -> dict[str, Any]:
    """Run one seed, or read its result: wall seconds of each command, and curves of `hone rl`."""
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    seconds = {"inputs": command(folder, "hone.recipes.word_problems", "--seed", str(seed))}
    for half in HALVES:
        words = (half, f"word-problems-{half}", f"--run.seed={seed}", "--log.to=[]")
        seconds[half] = command(folder, "hone", *words, *shlex.split(flags[half]))
    rows = [json.loads(line) for line in (folder / metrics("rl")).open()]
    start_s = rows[0]["timestamp_s"] - rows[0]["time/step_s"]
    curves = {
        kind: [
            (row["step"], row["timestamp_s"] - start_s, row[f"eval/held-out-{kind}/reward/mean"])
            for row in rows
            if f"eval/held-out-{kind}/reward/mean" in row
        ]
        for kind in KINDS
    }
    found = {"seed": seed, "seconds": seconds, "curves": curves, "gpu": device()}
    result.write_text(json.dumps(found))
    return found


def metrics(half: str) -> str:
    return f"runs/word-problems/{half}/metrics.jsonl"


def command(folder: Path, module: str, *words: str) -> float:
    """Run a module in the folder, and return the seconds that it took. Its output goes to a file,
    whose end is shown where the module fails."""
    begin = perf_counter()
    with (folder / "log.txt").open("a") as log:
        log.write(f"$ python -m {module} {shlex.join(words)}\n")
        log.flush()
        done = subprocess.run(
            [sys.executable, "-m", module, *words], cwd=folder, stdout=log, stderr=log
        )
    if done.returncode:
        text = (folder / "log.txt").read_text()
        sys.exit(f"{module} {shlex.join(words)}\nended by {done.returncode}:\n{text[-2000:]}")
    return perf_counter() - begin


def device() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}"


def until_goal(curve: list[tuple[int, float, float]]) -> str:
    """Say how many steps and minutes of `hone rl` the curve takes to most of what it gains."""
    first, last = curve[0][2], curve[-1][2]
    for step, seconds, accuracy in curve:
        if last > first and accuracy >= first + GOAL * (last - first):
            return f"{step} steps, {seconds / 60:.1f} min"
    return ""


def table(found: list[dict[str, Any]]) -> str:
    until = f"until {GOAL} of the gain"
    columns = ["seed", "inputs, sft, rl: min", "held out", "before rl", "after", until]
    lines = [columns, ["---"] * len(columns)]
    for one in found:
        times = ", ".join(f"{seconds / 60:.1f}" for seconds in one["seconds"].values())
        for kind, curve in one["curves"].items():
            accuracies = [f"{curve[0][2]:.3f}", f"**{curve[-1][2]:.3f}**"]
            lines.append([str(one["seed"]), times, KINDS[kind], *accuracies, until_goal(curve)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy over the minutes of the second half."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7, 4), layout="constrained")
    panel.set(xlabel="minutes of `hone rl` on one GPU", ylabel="share of right answers, held out")
    panel.set_ylim(0, 1)
    for number, (kind, what) in enumerate(KINDS.items()):
        for one in found:
            minutes = [seconds / 60 for _, seconds, _ in one["curves"][kind]]
            accuracies = [accuracy for _, _, accuracy in one["curves"][kind]]
            label = what if one is found[0] else None
            panel.plot(minutes, accuracies, color=f"C{number}", marker=".", label=label)
    panel.legend(loc="center right")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/word-problems-result"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    for half in HALVES:
        parser.add_argument(f"--{half}", default="", help=f"further flags of `hone {half}`")
    parser.add_argument("--output", type=Path, default=Path("word_problems.json"))
    parser.add_argument("--plot", action="store_true", help="needs matplotlib")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for seed in args.seeds:
        found.append(run(args.folder / f"seed-{seed}", seed, vars(args)))
        args.output.write_text(json.dumps(found))
        print(table(found), flush=True)
    if args.plot:
        plot(found, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
