"""Tokens/s of every mode of `hone rl` on two GPUs, beside what the simulator predicts.

    python benchmarks/modes.py --output modes.json
    python benchmarks/modes.py --dry                        # a tiny model on a CPU: does it run?
    python benchmarks/modes.py --again modes.json           # the tables of former runs

Trainer and engine take turns on both GPUs (colocated), or have one each (separate), in turns or
with the engine ahead of the training (async). Weights are random, so that no completion ends by
itself: each request is given a length of its own, log-normal with a long tail, the same in every
mode. Further flags are settings, `--algorithm.kl.coef 0.001`.

The prediction is that of `hone plan`, with the lengths that were drawn and the rates that it
assumes of the GPU. Tokens are those of completions that are trained, over wall time. The first
steps compile kernels; they are not counted, and the simulator gets the trainer's times for them.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mode_predictions import summary_of_rows, tables
from mode_runs import GRACE_S, MODES, completion_length, measure

LEAST_S = 40.0
"""A mode for which less is left is not started."""


def told(name: str, result: dict[str, Any], work: dict[str, Any]) -> str:
    """A mode in a line, as soon as it is done."""
    rows = result["rows"]
    counted = rows[result["num_warmup"] :]
    if not counted:
        return f"{name}: {len(rows)} steps, too few to count, in {result['seconds']:.0f} s"
    drawn = [e for e in result["events"] if e[0] == "end"]
    num_early = sum(e[4] < completion_length(e[2], e[3], work) for e in drawn)
    measured = summary_of_rows(counted)
    return (
        f"{name}: {measured['tokens_per_s']:,.0f} tokens/s, {measured['step_s']:.2f} s a step over "
        f"{len(counted)} steps; start-up {result['start_up_s']:.0f} s, "
        f"{result['seconds']:.0f} s in all; {num_early} of {len(drawn)} samples ended early"
    )


def save(saved: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(saved))


def run_modes(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Run the modes one after the other, as far as the time goes."""
    from rl_step import interrupt, make_inputs

    signal.signal(signal.SIGTERM, interrupt)  # so that nothing is left running
    work, begun_s = saved["work"], time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        inputs = {"prompts": 4 * args.prompts, "prompt_tokens": args.prompt_tokens}
        make_inputs(folder, argparse.Namespace(shape=args.shape, **inputs))
        saved["config"] = json.loads((folder / "model" / "config.json").read_text())
        for name in args.modes:
            left_s = args.seconds - (time.monotonic() - begun_s)
            if left_s < LEAST_S:
                print(f"{name}: left out, {max(left_s, 0):.0f} of {args.seconds} s are left")
                continue
            limit_s = min(left_s - GRACE_S, args.mode_seconds)
            saved["results"][name] = measure(folder, name, work, limit_s)
            print(told(name, saved["results"][name], work), flush=True)
            save(saved, args.output)


def main() -> None:
    from hone.hardware import GPUS

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--shape", default="qwen3-1.7b", help="a shape of models.tiny, or tiny")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of a mode")
    parser.add_argument("--warmup", type=int, default=2, help="not counted, beside max_staleness")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--median", type=float, default=300.0, help="of the completion lengths")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--longest", type=int, default=3072, help="where they are cut")
    parser.add_argument("--gpu", default="H200", choices=[x.name for x in GPUS])
    parser.add_argument("--seconds", type=float, default=420, help="for all modes together")
    parser.add_argument("--mode-seconds", type=float, default=180, help="for one mode at most")
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")
    parser.add_argument("--again", type=Path, nargs="+", help="such files, in place of runs")
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU, two steps")
    args, settings = parser.parse_known_args()
    if args.again:
        former = [json.loads(path.read_text()) for path in args.again]
        results = {name: result for each in former for name, result in each["results"].items()}
        print(tables(former[0] | {"results": results}))
        return
    if args.dry:
        args.shape, args.steps, args.warmup, args.prompts, args.group = "tiny", 2, 1, 4, 4
        args.prompt_tokens, args.median, args.longest = 16, 16.0, 96
        settings = ["--engine.max_num_seqs=64", *settings]
    names = "steps warmup prompts group prompt_tokens median sigma longest shape"
    work = {name: getattr(args, name) for name in names.split()}
    work |= {"device": "cpu" if args.dry else "cuda", "settings": settings}
    saved: dict[str, Any] = {"work": work, "gpu": args.gpu, "results": {}}
    run_modes(args, saved)
    print(f"\n{args.shape}, {args.prompts} x {args.group} samples a step, 2 x {saved['gpu']}")
    print(f"settings: {' '.join(settings) or 'defaults'}\n")
    print(tables(saved))
    save(saved, args.output)
    failed = [name for name in args.modes if name not in saved.get("summary", {})]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
