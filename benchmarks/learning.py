"""Do stale samples cost learning? The same task, the same updates, in every mode of sampling.

    python benchmarks/learning.py --seeds 3 --steps 150 --output learning.json

The model and the sums of `hone quickstart`, from the same supervised start: reinforcement learning
in turns, with samples carried over, and ahead of the training by 1, 2 and 4 updates, with the
ratios of older weights corrected (`tis`) or not. Engines are threads of this process, so that the
time of a step says nothing; what is compared is the reward after the same number of updates. Prints
a table of held-out accuracy, and writes all curves and a plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any


def ahead(updates: int, correction: str, in_flight: str = "pause") -> list[str]:
    """Flags of a run that samples so many updates ahead."""
    return [
        "--cluster.num_engines=1",
        "--pipeline.enabled=true",
        f"--pipeline.max_staleness={updates}",
        f"--pipeline.async_queue_size={updates}",
        f"--pipeline.in_flight={in_flight}",
        f"--algorithm.correction.kind={correction}",
    ]


MODES: dict[str, list[str]] = {
    "in turns": [],
    "carried over": ["--rollout.oversample_prompts=16", "--algorithm.correction.kind=tis"],
    "ahead by 1": ahead(1, "none"),
    "ahead by 1, tis": ahead(1, "tis"),
    "ahead by 1, tis, abort": ahead(1, "tis", "abort"),
    "ahead by 2": ahead(2, "none"),
    "ahead by 2, tis": ahead(2, "tis"),
    "ahead by 4": ahead(4, "none"),
    "ahead by 4, tis": ahead(4, "tis"),
}
COLOURS = ["#1f77b4", "#9edae5", "#98df8a", "#2ca02c", "#bcbd22", "#ffbb78", "#ff7f0e", "#ff9896"]
COLOURS += ["#d62728"]


def run(folder: Path, mode: str, seed: int, steps: int) -> list[dict[str, float]]:
    """The rows of one run, from the supervised model in `folder`."""
    from hone.config.load import load_config, resolve_recipe
    from hone.config.tree import RLConfig
    from hone.loops import reinforce
    from hone.loops.hosting import local_engines

    place = folder / mode.replace(" ", "-").replace(",", "")
    flags = {
        "run.dir": place,
        "run.steps": steps,
        "run.seed": seed,
        "run.device": "cpu",
        "model.path": folder / "sft" / "model",
        "data.train.0.path": folder / "train.jsonl",
        "data.eval.0.path": folder / "eval.jsonl",
        "eval.every_n_steps": max(steps // 10, 1),
        "checkpoint.every_n_steps": 0,
        "log.report": "false",
        "log.tensorboard": "false",
    }
    words = [f"--{key}={value}" for key, value in flags.items()] + MODES[mode]
    cfg = load_config(RLConfig, resolve_recipe("quickstart-rl"), words)
    reinforce.run(cfg, local_engines if cfg.cluster.num_engines else None)
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


def supervised(folder: Path, seed: int) -> None:
    """The inputs of the quick start and its first half, unless they are there."""
    from hone.cli import quickstart
    from hone.cli.main import main

    if (folder / "sft" / "model").exists():
        return
    if not folder.exists():
        quickstart.make_inputs(folder, seed)
    main(["sft", "quickstart-sft", *quickstart.paths(folder, "sft"), f"--run.seed={seed}"])


def table(curves: dict[str, list[list[dict[str, float]]]]) -> str:
    """Held-out accuracy at the end and on the way, mean and range over seeds."""
    lines = [
        "| mode | accuracy at the end | half-way | mean staleness |",
        "| --- | --- | --- | --- |",
    ]
    for mode, runs in curves.items():
        scored = [[r["eval/reward/mean"] for r in rows if "eval/reward/mean" in r] for rows in runs]
        ends, halves = [s[-1] for s in scored], [s[len(s) // 2] for s in scored]
        trained = [[row for row in rows if row["step"] > 0] for rows in runs]
        stale = [r.get("rollout/staleness/mean", 0.0) for rows in trained for r in rows]
        lines.append(
            f"| {mode} | {statistics.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f}) | "
            f"{statistics.mean(halves):.3f} | {statistics.mean(stale):.2f} |"
        )
    return "\n".join(lines)


def plot(curves: dict[str, list[list[dict[str, float]]]]) -> str:
    """Held-out accuracy over updates, the mean over seeds."""
    from hone.bench.plot import Panel, Series, svg

    drawn: list[Series] = []
    for (mode, runs), colour in zip(curves.items(), COLOURS, strict=False):
        points: dict[int, list[float]] = {}
        for rows in runs:
            for row in rows:
                if "eval/reward/mean" in row:
                    points.setdefault(int(row["step"]), []).append(row["eval/reward/mean"])
        line = [(float(step), statistics.mean(values)) for step, values in sorted(points.items())]
        drawn.append(Series(mode, colour, line))
    return svg("Held-out accuracy", [Panel("share of right answers", "updates", drawn)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--output", type=Path, default=Path("learning.json"))
    args = parser.parse_args()
    curves: dict[str, list[Any]] = {mode: [] for mode in args.modes}
    for seed in range(args.seeds):
        folder = args.folder / f"seed-{seed}"
        supervised(folder, seed)
        for mode in args.modes:
            print(f"-- {mode}, seed {seed}", flush=True)
            curves[mode].append(run(folder, mode, seed, args.steps))
        args.output.write_text(json.dumps(curves))
        args.output.with_suffix(".svg").write_text(plot(curves))
    print(table(curves))


if __name__ == "__main__":
    main()
