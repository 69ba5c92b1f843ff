"""`hone bench train` on one GPU for four public shapes: `python -m tests.gpu.bench_train_check`.

Rows of 2,048 tokens, two micro-batches of 16,384 a step, in the settings that fit one H200. Checks
that the counted kinds of memory are what was planned and that the record of allocations adds up to
what torch's allocator reports; prints last the share of the matrix rate and how far the planned
peak was off.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hone.cli.main import main

GIB = 1 << 30
FULL = ("--trainer.recompute=full", "--steps=1")
SHAPES = {
    "qwen3-0.6b": (),
    "qwen3-1.7b": (),
    "qwen3-4b": FULL,
    "qwen3-8b": (*FULL, "--trainer.optimizer.state_dtype=bfloat16"),
}
BASE = ("--rows.tokens=2048", "--rows.per_step=16", "--steps=3", "--warmup_steps=1")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(shape: str, flags: tuple[str, ...], folder: Path) -> str:
    output = folder / f"{shape}.json"
    start = time.perf_counter()
    code = main(["bench", "train", f"--model.shape={shape}", f"--output={output}", *BASE, *flags])
    seconds = time.perf_counter() - start
    gc.collect()
    torch.cuda.empty_cache()
    if code != 0:
        return f"{shape:12} FAILED with code {code}"
    found = json.loads(output.read_text())
    memory, speed = found["memory"], found["speed"]
    played, planned = memory["played_back"], memory["planned"]
    for kind in ("weights", "masters", "gradients", "optimizer"):
        off = played["largest"][kind] / planned[kind] - 1
        if abs(off) > 1e-3:
            say(f"{shape}: {kind} {played['largest'][kind]:,} measured, {planned[kind]:,} planned")
    shares = speed["utilisation"]
    kept, expected = played["largest"]["activations"], planned["activations"]
    return (
        f"{shape:12} {speed['tokens_per_s']:9,.0f} {1e3 * speed['forward_backward_s']:8.0f} "
        f"{1e3 * speed['optimizer_s']:7.0f} {shares['forward_backward']['of_measured']:9.3f} "
        f"{shares['step']['of_measured']:6.3f} {shares['step']['of_datasheet']:6.3f} "
        f"{memory['peak'] / GIB:8.2f} {played['peak'] / GIB:8.2f} {planned['peak'] / GIB:8.2f} "
        f"{planned['peak'] / memory['peak'] - 1:+7.1%} {kept / GIB:7.2f} {expected / GIB:7.2f} "
        f"{played['phase']:>9} {speed['first_step_s']:7.1f} {seconds:6.0f}"
    )


def run() -> None:
    names = sys.argv[1:] or list(SHAPES)
    lines = [
        f"{'shape':12} {'tokens/s':>9} {'f+b ms':>8} {'opt ms':>7} {'f+b share':>9} {'step':>6} "
        f"{'sheet':>6} {'peak':>8} {'played':>8} {'planned':>8} {'off':>7} {'kept':>7} {'plan':>7} "
        f"{'peak in':>9} {'first s':>7} {'all s':>6}"
    ]
    with TemporaryDirectory() as folder:
        lines += [measure(name, SHAPES[name], Path(folder)) for name in names]
    say("\n".join(lines))


if __name__ == "__main__":
    run()
