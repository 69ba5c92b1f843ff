"""Tokens/s of `hone generate` beside `hone bench engine` on the same requests, one after the other.

    python benchmarks/generate_speed.py --shape qwen3-0.6b --rows 4096 --tokens 512
    python benchmarks/generate_speed.py --shape tiny --rows 256 --tokens 128 --device cpu

Random weights; prompts of about 250 tokens, a sample each, up to `--tokens` long. The benchmark is
given the prompts' ids and what each completion came to, so that both sample as much. What `hone
generate` does besides is to read and tokenise rows, spell tokens, write rows and note what is done.
Each is measured once warm: the one by what it logs at its end, the other by its report. CPU
seconds are of whole processes, less those of an eighth of the rows, so that starting does not
count. Further flags are settings of both, such as `--engine.max_num_seqs 512`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from hone.models.tiny import make_bpe_tokenizer, make_model_folder, make_tiny_model

_TOLD = re.compile(r"([\d,]+) tokens in ([\d.]+) s, ([\d.]+)% of it in the engine")


def make_inputs(folder: Path, shape: str, num_rows: int) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abdegiklmnoprstuz", k=draw.randint(2, 7))) for _ in range(600)]
    tokenizer = make_bpe_tokenizer([" ".join(draw.choices(words, k=4000))], vocab_size=1024)
    if shape == "tiny":
        make_tiny_model(
            folder / "model", tokenizer=tokenizer, weights=False, max_position_embeddings=1024
        )
    else:
        make_model_folder(folder / "model", shape, tokenizer=tokenizer)
    for name, number in (("rows", num_rows), ("few", num_rows // 8)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(number):
                ids = tokenizer.encode(" ".join(draw.choices(words, k=250)))[:250]
                file.write(json.dumps({"prompt": tokenizer.decode(ids)}) + "\n")


def timed(command: list[str], folder: Path) -> tuple[str, float]:
    """What a command of hone logs, and its CPU seconds."""
    log = folder / "log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hone", *command], stderr=file, cwd=folder
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text(encoding="utf-8")
    if process.returncode != 0:
        sys.exit(text)
    return text, usage.ru_utime + usage.ru_stime


def generate(
    folder: Path, rows: str, tokens: int, settings: list[str]
) -> tuple[int, float, float, float]:
    """Tokens, seconds, share of these in the engine, and CPU seconds."""
    (folder / f"{rows}.out.jsonl").unlink(missing_ok=True)
    flags = f"""generate --model.path=model --model.init=random --data.chat=never
        --data.train.0.path={rows}.jsonl --data.max_prompt_tokens=300 --output={rows}.out.jsonl
        --generation.max_completion_tokens={tokens}"""
    text, cpu_s = timed([*shlex.split(flags), *settings], folder)
    found = _TOLD.search(text)
    assert found is not None, text
    num_tokens = int(found[1].replace(",", ""))
    return num_tokens, float(found[2]), float(found[3]) / 100, cpu_s


def bench(folder: Path, rows: str, settings: list[str]) -> tuple[float, float]:
    """Tokens/s, and CPU seconds, on what `generate` has made of the rows."""
    with (folder / f"{rows}.requests.jsonl").open("w", encoding="utf-8") as file:
        for line in (folder / f"{rows}.out.jsonl").open(encoding="utf-8"):
            row = json.loads(line)
            asked = {"prompt_ids": row["prompt_token_ids"], "max_tokens": len(row["token_ids"])}
            file.write(json.dumps(asked) + "\n")
    flags = f"""bench engine --model.path=model --model.init=random --output=bench.json
        --workload={rows}.requests.jsonl"""
    _, cpu_s = timed([*shlex.split(flags), *settings], folder)
    report = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    return report["engines"]["hone"]["summary"]["tokens_per_s"], cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    args, settings = parser.parse_known_args()
    settings.append(f"--run.device={args.device}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make_inputs(folder, args.shape, args.rows)
        few, *_, few_cpu_s = generate(folder, "few", args.tokens, settings)
        number, seconds, in_engine, cpu_s = generate(folder, "rows", args.tokens, settings)
        _, few_bench_s = bench(folder, "few", settings)
        rate, bench_s = bench(folder, "rows", settings)
    own_us = 1e6 * (cpu_s - few_cpu_s) / (number - few)
    bench_us = 1e6 * (bench_s - few_bench_s) / (number - few) / 2  # it warms up on as many
    print(
        f"RESULT {args.shape}: generate {number / seconds:,.0f} tokens/s ({number:,} tokens, "
        f"{in_engine:.1%} of the time in the engine), bench engine {rate:,.0f}: "
        f"{number / seconds / rate:.3f}; CPU {own_us:.2f} and {bench_us:.2f} us a token"
    )


if __name__ == "__main__":
    main()
