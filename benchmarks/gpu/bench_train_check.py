"""`hone bench train` on one GPU for four public shapes.

    python -m benchmarks.gpu.bench_train_check [SHAPE ...] [--seconds N]

Rows of 2,048 tokens, two micro-batches of 16,384 a step, in the settings that fit one H200. Prints
the share of the matrix rate and how far the planned peak was off. A row fails where a kind of
memory that can be counted is not what was planned.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from benchmarks.gpu.sections import Run

from hone.cli.main import main as hone

GIB = 1 << 30
FULL = ("--trainer.recompute=full", "--steps=1")
SHAPES: dict[str, tuple[str, ...]] = {
    "qwen3-0.6b": (),
    "qwen3-1.7b": (),
    "qwen3-4b": FULL,
    "qwen3-8b": (*FULL, "--trainer.optimizer.state_dtype=bfloat16"),
}
BASE = ("--rows.tokens=2048", "--rows.per_step=16", "--steps=3", "--warmup_steps=1")
COUNTED = ("weights", "masters", "gradients", "optimizer")
MAX_OFF = 1e-3
COLUMNS = (
    *("tokens/s", "f+b ms", "opt ms", "f+b share", "step share", "of sheet"),
    *("peak GiB", "played", "planned", "off", "activations", "planned"),
    *("peak in", "first s", "all s"),
)


def measure(run: Run, shape: str) -> None:
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        flags = [f"--model.shape={shape}", f"--output={output}", *BASE, *SHAPES[shape]]
        code = hone(["bench", "train", *flags])
        if code != 0:
            run.check(f"{shape}: exit code {code}", False)
            return
        found = json.loads(output.read_text())
    memory, speed = found["memory"], found["speed"]
    played, planned = memory["played_back"], memory["planned"]
    counted = {kind: (played["largest"][kind], planned[kind]) for kind in COUNTED}
    wrong = {k: v for k, v in counted.items() if abs(v[0] - v[1]) > MAX_OFF * max(v)}
    shares = speed["utilisation"]
    run.row("", *COLUMNS)
    run.check(
        shape,
        not wrong,
        *(speed["tokens_per_s"], 1e3 * speed["forward_backward_s"], 1e3 * speed["optimizer_s"]),
        *(shares["forward_backward"]["of_measured"], shares["step"]["of_measured"]),
        shares["step"]["of_datasheet"],
        *(memory["peak"] / GIB, played["peak"] / GIB, planned["peak"] / GIB),
        f"{planned['peak'] / memory['peak'] - 1:+.1%}",
        *(played["largest"]["activations"] / GIB, planned["activations"] / GIB),
        *(played["phase"], speed["first_step_s"], time.perf_counter() - start),
        *([f"measured and planned differ: {wrong}"] if wrong else []),
    )


def main() -> None:
    run = Run(__doc__, tuple(SHAPES), seconds=240)
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    sys.exit(run.go({shape: partial(measure, run, shape) for shape in SHAPES}))


if __name__ == "__main__":
    main()
