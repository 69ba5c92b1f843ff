"""Rows/s and tokens/s of hone's reader beside `datasets` with `streaming=True`, on the same files.

    python -m benchmarks.vs_datasets --rows 40000 --chars 1600

Demonstrations of text in four files, as Parquet and as JSON lines, in the order of the files: first
the rows alone, then rendered and tokenised by the same tokenizer. `datasets` gives batches of 256
rows; prompts, and prompts with their completion, are tokenised as TRL does it. The sides take
turns, each in a process of its own, as often as `--repeats` says; figures are medians. That both
have the same rows in the same order is checked by a digest of all of them, whose time does not
count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil
from benchmarks.text_rows import library_text, make_tokenizer, write_rows
from transformers import AutoTokenizer, PreTrainedTokenizerBase

BATCH = 256
"""Rows that are taken at once."""
SIDES = ("hone", "datasets")
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def hone_rows(folder: Path, num_rows: int) -> Iterator[list[dict[str, Any]]]:
    from hone.data.index import SourceIndex
    from hone.data.order import BlockSizes
    from hone.data.settings import SourceBase

    index = SourceIndex.build(SourceBase(path=str(folder)), None)
    sizes: BlockSizes = index.sizes
    for block in range(len(sizes.num_rows)):
        for start in range(0, int(sizes.num_rows[block]), BATCH):
            numbers = range(start, min(start + BATCH, int(sizes.num_rows[block])))
            yield [dict(row.columns) for row in index.rows(block, numbers)]


def datasets_rows(folder: Path, num_rows: int) -> Iterator[list[dict[str, Any]]]:
    from datasets import load_dataset

    files = sorted(map(str, folder.iterdir()))
    kind = "parquet" if files[0].endswith(".parquet") else "json"
    rows = load_dataset(kind, data_files=files, split="train", streaming=True)
    for batch in rows.iter(BATCH):
        names = list(batch)
        values = zip(*batch.values(), strict=True)
        yield [dict(zip(names, row, strict=True)) for row in values]


def hone_examples(
    folder: Path, num_rows: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[tuple[list[int], int]]]:
    """Ids of each row, with the number of those of its prompt."""
    from hone.config.tree import SFTDataConfig
    from hone.data.settings import SourceConfig
    from hone.data.sft import load_sft

    cfg = SFTDataConfig(
        train=(SourceConfig(path=str(folder)),),
        shuffle=False,
        shuffle_window=num_rows,
        chat="never",
        max_prompt_tokens=100_000,
        max_tokens=100_000,
    )
    train = load_sft(cfg, tokenizer, seed=0).train
    for start in range(0, num_rows, BATCH):
        rows = train.take(min(BATCH, num_rows - start), step=1 + start // BATCH)
        yield [(list(row.token_ids), list(row.loss_mask).index(True)) for row in rows]


def datasets_examples(
    folder: Path, num_rows: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[tuple[list[int], int]]]:
    for rows in datasets_rows(folder, num_rows):
        asked = encoded(tokenizer, [row["prompt"] for row in rows])
        whole = encoded(tokenizer, [row["prompt"] + row["completion"] for row in rows])
        batch: list[tuple[list[int], int]] = []
        for row, prompt, ids in zip(rows, asked, whole, strict=True):
            if ids[: len(prompt)] != prompt:  # a token spans the border
                ids = [*prompt, *encoded(tokenizer, [row["completion"]])[0]]
            batch.append(([*ids, tokenizer.eos_token_id], len(prompt)))
        yield batch


def encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    made = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return made["input_ids"]


READERS: Mapping[str, Callable[..., Iterator[list[Any]]]] = {
    "hone rows": hone_rows,
    "datasets rows": datasets_rows,
    "hone tokens": hone_examples,
    "datasets tokens": datasets_examples,
}


def read(what: str, folder: Path, num_rows: int, model: Path) -> dict[str, Any]:
    """Read all rows in this process: seconds to the first and to all, tokens, memory, digest."""
    tokenized = what.endswith("tokens")
    arguments = [AutoTokenizer.from_pretrained(model)] if tokenized else []
    digest, num_tokens, found = blake2b(digest_size=16), 0, 0
    process = psutil.Process()
    before, most, checking_s = process.memory_info().rss, 0, 0.0
    cpu_s = -time.process_time()
    start = time.perf_counter()
    first_s = 0.0
    for batch in READERS[what](folder, num_rows, *arguments):
        begin, own_s = time.perf_counter(), time.thread_time()
        first_s = first_s or begin - start
        found += len(batch)
        digest.update("".join(f"{json.dumps(row)}\n" for row in batch).encode())
        num_tokens += sum(len(ids) for ids, _ in batch) if tokenized else 0
        most = max(most, process.memory_info().rss)
        checking_s += time.perf_counter() - begin
        cpu_s -= time.thread_time() - own_s
    seconds = time.perf_counter() - start - checking_s
    cpu_s += time.process_time()
    assert found == num_rows, f"{found=} {num_rows=}"
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "first_s": first_s,
        "num_tokens": num_tokens,
        "mib": most / 2**20,
        "more_mib": (most - before) / 2**20,
        "digest": digest.hexdigest(),
    }


def in_process(what: str, folder: Path, num_rows: int, model: Path) -> dict[str, Any]:
    """What `read` tells, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.vs_datasets", "--read", what, "--folder"]
    command += [str(folder), "--rows", str(num_rows), "--model", str(model)]
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=OFFLINE).stdout
    )


def medians(outputs: list[dict[str, Any]]) -> dict[str, float]:
    return {
        key: statistics.median(output[key] for output in outputs)
        for key in outputs[0]
        if key != "digest"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--chars", type=int, default=1600, help="of a row, in the mean")
    parser.add_argument("--repeats", type=int, default=3)
    for name in ("--read", "--folder", "--model"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read, Path(args.folder), args.rows, Path(args.model))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), library_text()
        make_tokenizer(text).save_pretrained(folder / "model")
        print(
            "| files | read | by | rows/s | tokens/s | CPU us a row | first batch s | "
            "MiB in all, of reading |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for kind in ("parquet", "jsonl"):
            write_rows(folder / kind, kind, text, num_rows=args.rows, num_chars=args.chars)
            for what in ("rows", "tokens"):
                found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
                for _ in range(args.repeats):
                    for side, outputs in found.items():
                        own = in_process(
                            f"{side} {what}", folder / kind, args.rows, folder / "model"
                        )
                        outputs.append(own)
                digests = {own["digest"] for outputs in found.values() for own in outputs}
                assert len(digests) == 1, "the rows differ"
                for side, outputs in found.items():
                    own = medians(outputs)
                    seconds = own["seconds"]
                    tokens = f"{own['num_tokens'] / seconds:,.0f}" if own["num_tokens"] else ""
                    print(
                        f"| {kind} | {what} | {side} | {args.rows / seconds:,.0f} | {tokens} | "
                        f"{1e6 * own['cpu_s'] / args.rows:,.0f} | "
                        f"{own['first_s']:.2f} | {own['mib']:,.0f}, {own['more_mib']:,.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
