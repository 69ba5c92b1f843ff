"""What a thread that prepares rows ahead is worth: how long steps wait for their demonstrations.

    python -m benchmarks.rows_ahead --rows 40000 --chars 1600 --per-step 128 --step-ms 300

A step takes its rows and then works for `--step-ms`: for the share `--python` of it in Python,
which holds the interpreter as the loop of a run does, else with products of matrices. On a machine
with a GPU these run there, and the interpreter waits for them. With and without the thread take
turns, each in a process of its own. What is told of waiting is the time of `take`, without that of
the first step; the digest of all rows must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.text_rows import library_text, make_tokenizer, write_rows
from transformers import AutoTokenizer

from hone.config.tree import SFTDataConfig
from hone.data.settings import SourceConfig
from hone.data.sft import load_sft
from hone.data.streamed import StreamedRows


def work(step_s: float, python: float) -> None:
    """A step's work, which releases the interpreter for a part of it."""
    on_gpu = torch.cuda.is_available()
    matrix = torch.rand(4096 if on_gpu else 256, 256, device="cuda" if on_gpu else "cpu")
    until = time.perf_counter() + step_s * python
    while time.perf_counter() < until:
        pass
    until = time.perf_counter() + step_s * (1 - python)
    while time.perf_counter() < until:
        for _ in range(10):
            torch.mm(matrix.T, matrix)
        if on_gpu:
            torch.cuda.synchronize()


def run(args: argparse.Namespace) -> dict[str, Any]:
    folder = Path(args.folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    cfg = SFTDataConfig(
        train=(SourceConfig(path=str(folder / "rows")),),
        shuffle_window=16_384,
        chat="never",
        max_prompt_tokens=100_000,
        max_tokens=100_000,
    )
    train = load_sft(cfg, tokenizer, seed=0).train
    (source,) = train.sources
    assert isinstance(source, StreamedRows)
    if args.read == "without":
        source._thread = None
    waits, num_tokens, digest = list[float](), 0, blake2b(digest_size=8)
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        rows = train.take(args.per_step, step=step)
        waits.append(time.perf_counter() - start)
        num_tokens += sum(len(row.token_ids) for row in rows)
        digest.update(repr([(row.id, row.token_ids[::7]) for row in rows]).encode())
        if step == 1:
            begin, num_tokens = time.perf_counter(), 0
        work(args.step_ms / 1e3, args.python)
    return {
        "seconds": time.perf_counter() - begin,
        "num_tokens": num_tokens,
        "wait": statistics.mean(waits[1:]),
        "most": max(waits[1:]),
        "first": waits[0],
        "mib": psutil.Process().memory_info().rss / 2**20,
        "digest": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--chars", type=int, default=1600, help="of a row, in the mean")
    parser.add_argument("--per-step", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-ms", type=float, default=300)
    parser.add_argument("--python", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=3)
    for name in ("--read", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(run(args)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), library_text()
        make_tokenizer(text).save_pretrained(folder / "model")
        write_rows(folder / "rows", "parquet", text, num_rows=args.rows, num_chars=args.chars)
        found: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
        for _ in range(args.repeats):
            for side, outputs in found.items():
                command = [sys.executable, "-m", "benchmarks.rows_ahead", *sys.argv[1:]]
                command += ["--read", side, "--folder", name]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                outputs.append(json.loads(output))
        digests = {output["digest"] for outputs in found.values() for output in outputs}
        assert len(digests) == 1, "the rows differ"
        print("| thread | tokens/s | wait of a step ms, most | first step ms | MiB |")
        print("|---|---|---|---|---|")
        for side, outputs in found.items():
            own = {
                key: statistics.median(output[key] for output in outputs)
                for key in outputs[0]
                if key != "digest"
            }
            print(
                f"| {side} | {own['num_tokens'] / own['seconds']:,.0f} | {1e3 * own['wait']:.0f}, "
                f"{1e3 * own['most']:.0f} | {1e3 * own['first']:.0f} | {own['mib']:,.0f} |"
            )


if __name__ == "__main__":
    main()
