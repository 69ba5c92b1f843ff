"""Do stale samples cost learning? The same task, the same updates, in every mode of sampling.

    python benchmarks/learning.py --seeds 3 --steps 150
    python benchmarks/learning.py --task chain --device cuda --parallel 9 --steps 120

A tiny model learns a task by imitation, as far as its teachers are right. From there reinforcement
learning goes on in turns, with samples carried over, and ahead of the training by 1, 2 and 4
updates, with the ratios of older weights corrected (`tis`) or not. Tasks:

    sums     the three digits of `hone quickstart`; answers of 2 tokens
    chain    15 to 30 sums in a row, each of digits and a carry of the sums before it; answers of
             160 to 325 tokens, all of which must be right, of a teacher who forgets one carry in
             ten

Every run is a process of its own, and engines apart are threads of it, or on a GPU a further
process on the same GPU: runs share what there is, and the time of a step says nothing. What is
compared is the reward after the same number of updates. Further flags are settings of `hone rl`,
`--trainer.optimizer.lr 1e-4`. Prints a table of held-out accuracy, writes the curves, and draws
them with `--plot`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import string
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

Row = dict[str, float]
Curves = dict[str, list[list[Row]]]

START = "supervised"
"""The run that all others start from."""
NUM_TRAIN, NUM_HELD_OUT = 20_000, 200
CARELESS = 0.1
SHORTEST, LONGEST = 15, 30
"""Sums in a row. Their names count down, `c`, `b`, `a`, so that the prompt says how many."""
NAMES = string.ascii_letters[:LONGEST]
PROGRESS_S = 20.0


def ahead(updates: int, correction: str, in_flight: str = "pause") -> list[str]:
    """Flags of a run that samples so many updates ahead."""
    return [
        "--cluster.num_engines=1",
        f"--pipeline.max_staleness={updates}",
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


def make_sums(folder: Path, seed: int) -> None:
    """The inputs of the quick start."""
    from hone.cli.quickstart import make_inputs

    make_inputs(folder, seed)


def make_chain(folder: Path, seed: int) -> None:
    """A model of 0.8 M random weights, and chains by a careful and by a careless teacher."""
    from hone.data.arithmetic import write_jsonl
    from hone.models.tiny import make_char_tokenizer, make_tiny_model

    draw = random.Random(seed)
    starts = list(range(10**4 * (LONGEST - SHORTEST + 1)))
    draw.shuffle(starts)
    rows = (chain_row(start, draw) for start in starts)
    held_out = list(islice(rows, NUM_HELD_OUT))
    # The end of a chain is another one where nothing is carried into it.
    hidden = {row["prompt"] + "+0" for row in held_out}
    train = list(islice((row for row in rows if not begins_of_chains(row) & hidden), NUM_TRAIN))
    write_jsonl(folder / "eval.jsonl", held_out)
    for name in ("demonstrations", "train"):
        write_jsonl(folder / f"{name}.jsonl", train)
    tokenizer = make_char_tokenizer(string.ascii_letters + string.digits + "+=;")
    make_tiny_model(folder / "model", tokenizer=tokenizer, seed=seed)


def chain_row(start: int, draw: random.Random) -> dict[str, str]:
    """The first name and four digits as the prompt, such as `c3828`, the careless teacher's chain
    as the completion, and the careful one's, `+0=11;b8281+1=10;a2810+1=03;`, as the answer."""
    length, digits = SHORTEST + start // 10**4, f"{start % 10**4:04}"
    return {
        "prompt": f"{NAMES[length - 1]}{digits}",
        "completion": chain(length, digits, lambda: draw.random() < CARELESS),
        "answer": chain(length, digits, lambda: False),
    }


def begins_of_chains(row: dict[str, str]) -> set[str]:
    """Names, digits and carries of all lines that a row shows."""
    lines = f"{row['prompt']}{row['completion']};{row['prompt']}{row['answer']}".split(";")
    return {line.partition("=")[0] for line in lines}


def chain(length: int, digits: str, forgets: Callable[[], bool]) -> str:
    """Add the first and the last digit and the carry, `length` times; the sum's ones then become
    the last digit in place of the first. `forgets` is asked of every carry whether it is lost.

    An add-with-carry generator of lags 4 and 1 (Marsaglia and Zaman, 1991): all that a line
    needs is in the one before it, which a tiny model learns to find within minutes."""
    lines, carry = list[str](), 0
    for name in reversed(NAMES[:length]):
        if carry and forgets():
            carry = 0
        total = int(digits[0]) + int(digits[-1]) + carry
        lines.append(f"{name}{digits}+{carry}={total:02};")
        carry, digits = total // 10, digits[1:] + str(total % 10)
    return "".join(lines)[5:]  # the prompt is the rest of the first line


@dataclass(frozen=True)
class Task:
    """What is learned, and what it changes in the recipes of the quick start."""

    title: str
    make_inputs: Callable[[Path, int], None]
    sft: list[str] = field(default_factory=list[str])
    rl: list[str] = field(default_factory=list[str])


TASKS = {
    "sums": Task("Three digits added at once", make_sums),
    "chain": Task(
        "Chains of 15 to 30 sums, 160 to 325 tokens",
        make_chain,
        sft=["--run.steps=1000", "--data.max_prompt_tokens=5", "--data.max_tokens=332"],
        rl=[
            "--data.max_prompt_tokens=5",
            "--rollout.max_completion_tokens=327",
            "--eval.max_completion_tokens=327",
            "--engine.kv_cache_gib=1",
            "--reward.num_workers=2",
            "--trainer.optimizer.lr=5e-5",
        ],
    ),
}


@dataclass
class Run:
    """One process of training, from the task's supervised model or up to it."""

    mode: str
    seed: int
    task_folder: Path

    @property
    def title(self) -> str:
        return f"{self.mode}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """What all runs of a seed share."""
        return self.task_folder / f"seed-{self.seed}"

    @property
    def dir(self) -> Path:
        name = "sft" if self.mode == START else self.mode.replace(" ", "-").replace(",", "")
        return self.folder / name

    def rows(self) -> list[Row]:
        """What it has measured so far."""
        metrics = self.dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def imitate(run: Run, task: Task, args: argparse.Namespace) -> None:
    """The model that all modes start from."""
    from hone.cli import quickstart
    from hone.cli.main import main

    if not (run.folder / "train.jsonl").exists():
        task.make_inputs(run.folder, run.seed)
    flags = [f"--run.seed={run.seed}", f"--run.device={args.device}", *task.sft]
    code = main(["sft", "quickstart-sft", *quickstart.paths(run.folder, "sft"), *flags])
    sys.exit(code)


def reinforce(run: Run, task: Task, args: argparse.Namespace, settings: list[str]) -> None:
    """One mode, from the supervised model."""
    from engine_process import process_pools
    from hone.cli import quickstart
    from hone.cli.command import quiet_transformers
    from hone.config.load import load_config, resolve_recipe
    from hone.config.tree import RLConfig
    from hone.loops import reinforce
    from hone.loops.workers import thread_pools

    flags = {
        "run.dir": run.dir,
        "run.steps": args.steps,
        "run.seed": run.seed,
        "run.device": args.device,
        "eval.every_n_steps": max(args.steps // 10, 1),
        "checkpoint.every_n_steps": 0,
        "log.to": "[]",
    }
    words = [*quickstart.paths(run.folder, "rl"), *task.rl, *MODES[run.mode]]
    words += [*(f"--{key}={value}" for key, value in flags.items()), *settings]
    cfg = load_config(RLConfig, resolve_recipe("quickstart-rl"), words)
    pools = thread_pools if args.device == "cpu" else process_pools
    quiet_transformers()
    reinforce.run(cfg, pools)


def run_all(
    runs: Iterable[Run], args: argparse.Namespace, settings: list[str]
) -> Generator[tuple[Run, int]]:
    """Let all runs happen, some at a time, and say how they go; yields each with its exit code."""
    waiting = deque(runs)
    running: dict[int, tuple[Run, subprocess.Popen[bytes], float]] = {}
    begun = told = time.monotonic()
    try:
        while waiting or running:
            for slot in range(args.parallel):
                if waiting and slot not in running:
                    run = waiting.popleft()
                    running[slot] = run, start(run, slot, args, settings), time.monotonic()
            time.sleep(0.2)
            now = time.monotonic()
            for slot, (run, process, since) in list(running.items()):
                if process.poll() is None and now - since < args.seconds:
                    continue
                if process.poll() is None:
                    process.kill()  # its engine and reward workers see that it is gone
                code = process.wait()
                del running[slot]
                print(outcome(run, code, now - since), flush=True)
                yield run, code
            if now - told > PROGRESS_S:
                told = now
                at = ", ".join(f"{r.mode} {len(r.rows())}" for r, _, _ in running.values())
                print(f"   {now - begun:4.0f} s: updates of {at}", flush=True)
    finally:
        for _, process, _ in running.values():
            process.kill()


def start(
    run: Run, slot: int, args: argparse.Namespace, settings: list[str]
) -> subprocess.Popen[bytes]:
    """Begin a run; what it says goes into a file beside its folder."""
    told = ["--task", args.task, "--device", args.device, "--steps", str(args.steps)]
    told += ["--folder", str(args.folder), "--run", run.mode, str(run.seed), *settings]
    environment = dict(os.environ)
    if args.parallel > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    if args.device == "cuda":
        gpus = visible_gpus()
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    run.dir.parent.mkdir(parents=True, exist_ok=True)
    with run.dir.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, __file__, *told], env=environment, stdout=log, stderr=log
        )


def visible_gpus() -> list[str]:
    import torch

    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


def outcome(run: Run, code: int, seconds: float) -> str:
    """How a run has ended, in a line; of one that failed also its last words."""
    scores = accuracies(run.rows())
    learned = f", accuracy {scores[0]:.3f} to {scores[-1]:.3f}" if scores else ""
    if code == 0:
        return f"-- {run.title}: {seconds:.0f} s{learned}"
    log = run.dir.with_suffix(".log")
    words = log.read_text(errors="replace").splitlines()[-20:]
    return f"!! {run.title}: ended by {code} after {seconds:.0f} s{learned}; {log} ends with\n" + (
        "\n".join(f"     {line}" for line in words)
    )


def accuracies(rows: Iterable[Row]) -> list[float]:
    return [row["eval/reward/mean"] for row in rows if "eval/reward/mean" in row]


def table(curves: Curves) -> str:
    """Held-out accuracy at the end and on the way, mean and range over seeds."""
    lines = [
        "| mode | updates | accuracy before | half-way | at the end | tokens | mean staleness |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mode, runs in curves.items():
        scored = [accuracies(rows) for rows in runs]
        ends, halves = [s[-1] for s in scored], [s[len(s) // 2] for s in scored]
        trained = [row for rows in runs for row in rows if row["step"] > 0]
        stale = [row.get("rollout/staleness/mean", 0.0) for row in trained]
        tokens = [row["rollout/completion_tokens/mean"] for row in trained]
        lines.append(
            f"| {mode} | {min(int(rows[-1]['step']) for rows in runs)} | "
            f"{statistics.mean(s[0] for s in scored):.3f} | {statistics.mean(halves):.3f} | "
            f"{statistics.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f}) | "
            f"{statistics.mean(tokens):.0f} | {statistics.mean(stale):.2f} |"
        )
    return "\n".join(lines)


def plot(title: str, curves: Curves, path: Path) -> None:
    """Over updates, the means over seeds: held-out accuracy, and how far the policy had moved on
    when it was trained on its samples."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4))
    figure.suptitle(title)
    for panel, (label, key) in zip(
        panels,
        {
            "share of right answers, held out": "eval/reward/mean",
            "KL of the trained from the sampling policy, nats per token": "off_policy/kl",
        }.items(),
        strict=True,
    ):
        panel.set(title=label, xlabel="updates")
        for mode, runs in curves.items():
            points: dict[int, list[float]] = {}
            for row in (row for rows in runs for row in rows if key in row):
                points.setdefault(int(row["step"]), []).append(row[key])
            steps = sorted(points)
            panel.plot(steps, [statistics.mean(points[step]) for step in steps], label=mode)
    panels[0].legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", default="sums", choices=list(TASKS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", type=Path, help="unset: runs/learning-TASK")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=3600, help="that a run may take")
    parser.add_argument("--output", type=Path, default=Path("learning.json"))
    parser.add_argument("--plot", action="store_true", help="needs matplotlib")
    parser.add_argument("--run", nargs=2, metavar=("MODE", "SEED"), help=argparse.SUPPRESS)
    args, settings = parser.parse_known_args()
    args.folder = args.folder or Path(f"runs/learning-{args.task}")
    task = TASKS[args.task]
    if args.run:
        run = Run(args.run[0], int(args.run[1]), args.folder)
        if run.mode == START:
            imitate(run, task, args)
        else:
            reinforce(run, task, args, settings)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end the runs
    starts = [Run(START, seed, args.folder) for seed in range(args.seeds)]
    missing = [run for run in starts if not (run.dir / "model").exists()]
    codes = [code for _, code in run_all(missing, args, settings)]
    if any(codes):
        sys.exit("there is no supervised model to start from")
    runs = [Run(mode, start.seed, args.folder) for start in starts for mode in args.modes]
    curves: Curves = {}
    failed: list[str] = []
    for ended, code in run_all(runs, args, settings):
        if code:
            failed.append(ended.title)
        if accuracies(rows := ended.rows()):
            curves.setdefault(ended.mode, []).append(rows)
        curves = {mode: curves[mode] for mode in MODES if mode in curves}
        args.output.write_text(json.dumps(curves))
    print(table(curves))
    if args.plot:
        plot(task.title, curves, args.output.with_suffix(".svg"))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
