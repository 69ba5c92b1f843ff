"""Rows of text for benchmarks of reading: demonstrations out of the sources of Python's library."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

from hone.models.tiny import make_bpe_tokenizer

__all__ = ["make_tokenizer", "write_rows"]

VOCAB_SIZE = 16_384


def library_text() -> str:
    """The text of Python's library, about 10 million characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("**/*.py") if "site-packages" not in path.parts)
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a twentieth of the text."""
    draw = random.Random(0)
    starts = [draw.randrange(len(text)) for _ in range(len(text) // 20 // 2000)]
    return make_bpe_tokenizer([text[start : start + 2000] for start in starts], VOCAB_SIZE)


def rows_of(text: str, num_rows: int, num_chars: int) -> Iterator[dict[str, str]]:
    """Rows with a prompt and a completion, three times as long, of `num_chars` in the mean."""
    draw = random.Random(1)
    for _ in range(num_rows):
        length = draw.randint(num_chars // 4, num_chars * 7 // 4)
        start = draw.randrange(len(text) - length)
        middle = start + length // 4
        yield {"prompt": text[start:middle], "completion": text[middle : start + length]}


def write_rows(
    folder: Path, kind: str, text: str, *, num_rows: int, num_chars: int, num_files: int = 4
) -> list[Path]:
    """Write rows into files, Parquet in row groups of 1,000. Returns their paths."""
    folder.mkdir(parents=True)
    rows = list(rows_of(text, num_rows, num_chars))
    paths: list[Path] = []
    for number in range(num_files):
        own = rows[number * num_rows // num_files : (number + 1) * num_rows // num_files]
        paths.append(folder / f"part-{number}.{kind}")
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(own), paths[-1], row_group_size=1000)
        else:
            lines = (json.dumps(row) + "\n" for row in own)
            paths[-1].write_text("".join(lines), encoding="utf-8")
    return paths
