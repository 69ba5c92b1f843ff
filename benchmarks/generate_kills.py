"""`hone generate` killed again and again: is the output that of an unbroken run, is memory flat?

    python benchmarks/generate_kills.py [--rows 20000] [--kills 20] [--folder /tmp/kills]

A tiny model with random weights and completions of four tokens, so that a run is short and a kill
falls often into a write. `kill -9` comes when the rows on disk have passed a random size, and a
random moment later. Prints what was found, and fails where rows are lost, doubled or others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from hone.data.arithmetic import ALPHABET, generate, write_jsonl
from hone.models.tiny import make_char_tokenizer, make_tiny_model

OUTPUT = "completions.jsonl"


def command(rows: str) -> list[str]:
    flags = f"""--model.path=model --run.device=cpu --data.train.0.path={rows} --data.chat=never
        --data.max_prompt_tokens=12 --generation.max_completion_tokens=4 --engine.max_num_seqs=64"""
    return [sys.executable, "-m", "hone", "generate", *flags.split()]


def unbroken(folder: Path, rows: str) -> tuple[list[str], float]:
    """The lines of a run that nobody kills, and its largest resident memory in MiB."""
    (folder / OUTPUT).unlink(missing_ok=True)
    (folder / f"{OUTPUT}.config.yaml").unlink(missing_ok=True)
    process = subprocess.Popen(command(rows), cwd=folder, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    return (folder / OUTPUT).read_text().splitlines(), usage.ru_maxrss / 1024


def killed(folder: Path, rows: str, size: int, num_kills: int) -> tuple[list[str], int]:
    """The lines of a run that is killed so often, and how many kills left half a line."""
    (folder / OUTPUT).unlink()
    chance, part = random.Random(0), folder / f"{OUTPUT}.parts" / "0-of-1.jsonl"
    num_torn = 0
    for point in sorted(chance.uniform(0, 0.97 * size) for _ in range(num_kills)):
        process = subprocess.Popen(command(rows), cwd=folder, stderr=subprocess.DEVNULL)
        while not part.exists() or part.stat().st_size < point:
            assert process.poll() is None, process.returncode
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        process.wait()
        num_torn += part.stat().st_size > 0 and not part.read_bytes().endswith(b"\n")
        print(f"killed at {part.stat().st_size:,} of {size:,} bytes", flush=True)
    subprocess.run(command(rows), cwd=folder, check=True, stderr=subprocess.DEVNULL)
    return (folder / OUTPUT).read_text().splitlines(), num_torn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/hone-kills"))
    given = parser.parse_args()
    folder: Path = given.folder
    shutil.rmtree(folder, ignore_errors=True)
    make_tiny_model(
        folder / "model",
        tokenizer=make_char_tokenizer(ALPHABET),
        num_layers=1,
        hidden_size=32,
        max_position_embeddings=64,
    )
    rows = generate(given.rows, 0, high=999)
    write_jsonl(folder / "rows.jsonl", rows)
    write_jsonl(folder / "tenth.jsonl", rows[: given.rows // 10])
    _, few = unbroken(folder, "tenth.jsonl")
    begun = time.monotonic()
    expected, many = unbroken(folder, "rows.jsonl")
    print(f"unbroken: {len(expected):,} rows in {time.monotonic() - begun:.1f} s")
    print(f"largest resident memory: {few:.0f} MiB for a tenth of the rows, {many:.0f} MiB for all")
    size = (folder / OUTPUT).stat().st_size
    found, num_torn = killed(folder, "rows.jsonl", size, given.kills)
    differing = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    for pair in differing:
        row, other = map(json.loads, pair)
        both = zip(row.pop("logprobs"), other.pop("logprobs"), strict=True)
        assert row == other, "another row"
        assert max(abs(one - two) for one, two in both) < 1e-5, "other log-probabilities"
    print(f"{given.kills} kills, {num_torn} in a line: {len(found):,} rows, each once, in order")
    print(f"{len(differing)} rows differ, in the last bits of log-probabilities alone")


if __name__ == "__main__":
    main()
