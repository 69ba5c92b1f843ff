"""How far `hone plan` is off what configurations take here, and what its pick among them costs.

    python benchmarks/predictions.py --shape qwen3-8b --nproc 2 \
        "" "--trainer.parallel.zero_stage 3" "--engine.tensor_parallel_size 2"

Each argument is the flags of one configuration of `hone rl`, in that order on random weights of the
shape; "" is the recipe as it is: 16 x 8 samples a step of 256 + 512 tokens, in micro-batches of 16
rows. `--each` has flags of all. Every one runs in processes of its own for two steps that do not
count and `--steps` that do. Results are kept in `--folder`, so that the same command goes on.
Predictions use the planner's constants as they are shipped, and what was measured only for lengths
and for the size of a cache.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from pathlib import Path
from time import perf_counter

from hone.cli.command import check_plan, load_arguments, local_gpu, plan_here
from hone.cli.main import main as hone_main
from hone.config.tree import PlanConfig
from hone.errors import UserError
from hone.planner.fitting import rl_config
from hone.planner.run_memory import peak_bytes
from hone.tools.plan.calibration import simulated
from hone.tools.plan.short_runs import Candidate, Result, ShortRuns
from rl_step import make_inputs

GIB = 2**30
ROWS = 16
"""Of a micro-batch."""


def recipe(folder: Path, args: argparse.Namespace) -> list[str]:
    """Flags of the configuration that the others change."""
    reward = f"{Path(__file__).with_name('rl_step.py').resolve()}:reward"
    longest = args.prompt_tokens + 8
    return [
        f"--run.dir={folder / 'run'}",
        f"--model.path={folder / 'model'}",
        "--model.init=random",
        f"--data.train.0.path={folder / 'prompts.jsonl'}",
        "--data.chat=never",
        f"--data.max_prompt_tokens={longest}",
        f"--rollout.prompts_per_step={args.prompts}",
        f"--rollout.n_samples_per_prompt={args.group}",
        f"--rollout.max_completion_tokens={args.completion_tokens}",
        f"--reward.functions.0.fn={reward}",
        f"--trainer.max_tokens_per_microbatch={ROWS * (longest + args.completion_tokens)}",
        f"--engine.max_num_seqs={args.prompts * args.group}",
        *shlex.split(args.each),
    ]


def candidate(words: list[str], flags: str, nproc: int) -> Candidate:
    cfg, _ = load_arguments(PlanConfig, [*words, *shlex.split(flags)], starts=True)
    plain = rl_config(cfg)
    processes = plain.cluster.num_processes if plain.cluster.is_used else nproc
    name = flags.replace("--", "").replace("=", " ") or "as it is"
    return Candidate(name, cfg, nproc, plan_here(plain, processes, starts=True))


def predicted(x: Candidate, result: Result) -> tuple[float, float]:
    """Seconds of a step, tokens a second."""
    assert result.step is not None
    run = simulated(x.cfg.plan, x.plan, result.step.lengths, result.step.num_prompt_tokens)
    return run.step_s, run.tokens_per_s


def report(measured: list[tuple[Candidate, Result]]) -> None:
    """A table, medians, and what the planner's pick costs."""
    print("\n| settings | s a step | predicted | off | GiB | predicted | off | tokens/s |")
    print(f"|{' --- |' * 8}")
    times: list[float] = []
    peaks: list[float] = []
    rates: list[tuple[float, float, str]] = []
    for x, result in measured:
        if result.step is None:
            print(f"| {x.name} | {result.reason} |" + " |" * 6)
            continue
        step_s, rate = predicted(x, result)
        gib = peak_bytes(x.plan) / GIB
        times.append(step_s / result.step.step_s - 1)
        peaks.append(gib / result.peak_gib - 1)
        rates.append((rate, result.tokens_per_s, x.name))
        cells = [
            f"{result.step.step_s:.2f}",
            f"{step_s:.2f}",
            f"{times[-1]:+.1%}",
            f"{result.peak_gib:.1f}",
            f"{gib:.1f}",
            f"{peaks[-1]:+.1%}",
            f"{result.tokens_per_s:,.0f}",
        ]
        print(f"| {x.name} | {' | '.join(cells)} |")
    if not rates:
        return
    for what, off in (("time", times), ("memory", peaks)):
        sizes = [abs(one) for one in off]
        print(f"{what}: {statistics.median(sizes):.1%} off, at most {max(sizes):.1%}")
    best, (_, own, pick) = max(rate for _, rate, _ in rates), max(rates)
    print(f"the pick is {best / own - 1:.1%} behind the best of {len(rates)}: {pick}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configurations", nargs="+", help="flags of each, one argument")
    parser.add_argument("--shape", default="qwen3-0.6b", help="a shape of models.tiny, or tiny")
    parser.add_argument("--layers", type=int, default=0, help="so many; 0: all that it has")
    parser.add_argument("--nproc", type=int, default=1, help="processes of each")
    parser.add_argument("--each", default="", help="flags of all")
    parser.add_argument("--steps", type=int, default=3, help="that count")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path("predictions"), help="for results")
    parser.add_argument("--seconds", type=float, default=3600, help="begin none after so many")
    args = parser.parse_args()
    folder = args.folder / f"{args.shape}-{args.nproc}"
    if not (folder / "prompts.jsonl").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(folder, args)
    words = recipe(folder, args)
    gpu, begun = local_gpu(), perf_counter()
    name = None if gpu is None else gpu.name
    runs = ShortRuns(folder / "results", args.steps, main=hone_main, gpu=name)
    measured: list[tuple[Candidate, Result]] = []
    for x in [candidate(words, flags, args.nproc) for flags in args.configurations]:
        if perf_counter() - begun > args.seconds:
            print(f"no time left for {x.name}")
            continue
        errors = [found.message for found in check_plan(x.plan) if found.level == "error"]
        result = Result(reason=errors[0]) if errors else runs(x)
        measured.append((x, result))
        told = result.reason or f"{result.tokens_per_s:,.0f} tokens/s"
        print(f"{perf_counter() - begun:.0f} s  {x.name}: {told}", flush=True)
    print(f"\n{args.shape}, {args.nproc} processes, {args.prompts} x {args.group} samples")
    report(measured)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
