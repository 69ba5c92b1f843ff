"""Prompts of `hone generate`: from any row on as from the beginning, without what lies before."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hone.data import blocks, files, reading
from hone.data.chat import Renderer
from hone.data.reading import PromptReader
from hone.data.settings import DataConfig, SourceConfig
from hone.errors import UserError
from hone.loops.generation import _Unfinished
from hone.observe.resumable_jsonl import (
    PartFileWriter,
    indexes_folder,
    locked_parts,
    merge_parts,
    start_of,
)
from tests.data.support import char_tokenizer, write_rows
from tests.tables import table

TOKENIZER = char_tokenizer()
KINDS = ("lines", "compressed lines", "parquet", "array", "saved")
ROW = [{"prompt": "1=", "answer": "1"}]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(reading, "BLOCK_ROWS", 8)


def random_rows(draw: random.Random, num: int) -> list[dict[str, Any]]:
    """Rows of which a third is too long for a limit of 6 tokens; the first is not."""
    return [
        {"prompt": f"{draw.randrange(10 ** draw.randrange(1, 8)) if n else 1}=", "answer": f"{n}"}
        for n in range(num)
    ]


def write(folder: Path, kind: str, data: list[dict[str, Any]], num_files: int = 3) -> str:
    """The rows in several files, Parquet in row groups of 10; a saved data set in one."""
    folder.mkdir()
    if kind == "saved":
        pytest.importorskip("datasets").Dataset.from_list(data).save_to_disk(folder)
        return str(folder)
    size = -(-len(data) // num_files)
    for number in range(num_files):
        part, path = data[number * size : (number + 1) * size], folder / f"part-{number}"
        if kind == "parquet":
            pq.write_table(
                pa.Table.from_pylist(part), path.with_suffix(".parquet"), row_group_size=10
            )
        elif kind == "array":
            path.with_suffix(".json").write_text(json.dumps(part))
        else:
            text = "\n".join(map(json.dumps, part)).encode()
            is_compressed = kind == "compressed lines"
            suffix = ".jsonl.gz" if is_compressed else ".jsonl"
            path.with_suffix(suffix).write_bytes(gzip.compress(text) if is_compressed else text)
    return str(folder)


def reader(*paths: str, cache: Path | None = None, must_be_same=False, max_rows=None, **settings):
    sources = tuple(SourceConfig(path=path, max_rows=max_rows) for path in paths)
    cfg = DataConfig(train=sources, max_prompt_tokens=6, **settings)
    return PromptReader(
        cfg, TOKENIZER, seed=0, max_prompt_tokens=400, cache=cache, must_be_same=must_be_same
    )


@table("kind", KINDS)
@table("settings", [{}, {"eval_fraction": 0.3}, {"max_rows": 47}])
def test_from_any_row_on_it_is_the_rest(tmp_path, kind, settings):
    """Over two sources, of which rows are dropped as too long and held out."""
    draw = random.Random(f"{kind} {settings}")
    data = [random_rows(draw, 90), random_rows(draw, 60)]
    paths = [write(tmp_path / f"{n}", kind, rows) for n, rows in enumerate(data)]
    whole = list(reader(*paths, **settings).read())
    most = settings.get("max_rows", 90)
    rows = [*data[0][:most], *data[1][:most]]
    assert [prompt.text for _, prompt in whole] == [rows[row]["prompt"] for row, _ in whole]
    kept = [row for row, _ in whole]
    short = [n for n, row in enumerate(rows) if len(row["prompt"]) < 6]
    assert kept == (short if "eval_fraction" not in settings else sorted({*short} & {*kept}))
    assert len(kept) < len(rows)
    for place in [0, len(whole) - 1, *draw.sample(range(len(whole)), 6)]:
        again = reader(*paths, cache=tmp_path / "indexes", must_be_same=place > 0, **settings)
        assert again.num_rows == len(rows)
        assert list(again.read(kept[place])) == whole[place:], place


@table("kind", KINDS)
def test_filters_leave_the_same_rows_out_where_it_goes_on(tmp_path, kind):
    """Those that repeat a row before the one it begins with, too."""
    draw = random.Random(kind)
    data = random_rows(draw, 60)
    data += [{**draw.choice(data[1:]), "answer": draw.choice(["0", "", "1"])} for _ in range(60)]
    data = [row | {"answer": "0"} if row["answer"] not in ("", "1") else row for row in data]
    path = write(tmp_path / "a", kind, data)
    (tmp_path / "keep.py").write_text("def keep(row): return row['prompt'][0] != '3'\n")
    settings = {
        "duplicates": "drop",
        "missing_answers": "drop",
        "filter": f"{tmp_path / 'keep.py'}:keep",
    }
    whole = list(reader(path, **settings).read())
    seen, expected = set(), []
    for number, row in enumerate(data):
        if row["prompt"][0] != "3" and row["answer"]:
            is_new = (content := (row["prompt"], row["answer"])) not in seen
            seen.add(content)
            if is_new and len(row["prompt"]) < 6:
                expected.append(number)
    assert [row for row, _ in whole] == expected
    assert 20 < len(whole) < 70
    for place in range(0, len(whole), 3):
        again = reader(path, **settings)
        assert list(again.read(whole[place][0])) == whole[place:], place


def test_what_lies_before_is_not_read(tmp_path, monkeypatch):
    """But for the first rows of a source, from which its columns are chosen."""
    draw = random.Random(0)
    path = write(tmp_path / "a", "lines", random_rows(draw, 300))
    table_path = write(tmp_path / "b", "parquet", random_rows(draw, 300))
    whole = list(reader(path, table_path).read())
    opened, parsed, groups, rendered = [], [], [], []
    line, batches, prompts = blocks.LineBlocks._row, pq.ParquetFile.iter_batches, Renderer.prompts

    def count_line(self, number, text):
        parsed.append((Path(self.file.name).name, number))
        return line(self, number, text)

    def count_batches(self, *args, row_groups, **settings):
        groups.append((self.metadata.num_rows, *row_groups))
        return batches(self, *args, row_groups=row_groups, **settings)

    def count_prompts(self, examples, **settings):
        rendered.extend(example.id for example in examples)
        return prompts(self, examples, **settings)

    opens = blocks.open_file
    monkeypatch.setattr(blocks.LineBlocks, "_row", count_line)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", count_batches)
    monkeypatch.setattr(Renderer, "prompts", count_prompts)
    reader(path, cache=tmp_path / "kept")
    monkeypatch.setattr(
        blocks, "open_file", lambda file, **s: opened.append(file.name) or opens(file, **s)
    )
    # In the last file of lines, in the middle of a block of its index.
    start = next(row for row, _ in whole if row >= 257)
    again = reader(path, cache=tmp_path / "kept", must_be_same=True)
    assert opened == []
    assert list(again.read(start)) == [item for item in whole if start <= item[0] < 300]
    assert {Path(name).name for name in opened} == {"part-0.jsonl", "part-2.jsonl"}
    assert [number for name, number in parsed if name == "part-0.jsonl"] == [*range(1, 9)]
    lines = [number for name, number in parsed if name == "part-2.jsonl"]
    assert start - 200 - 12 < lines[0] <= start - 200 + 1
    assert lines == [*range(lines[0], 101)]
    assert rendered == [f"a:{row + 1}" for row in range(start, 300)]
    # In the last file of Parquet; lines are passed by the number of their rows alone.
    del parsed[:], opened[:], rendered[:]
    start = next(row for row, _ in whole if row >= 585)
    both = reader(path, table_path, cache=tmp_path / "kept")
    del parsed[:], opened[:]
    assert list(both.read(start)) == [item for item in whole if item[0] >= start]
    assert (parsed, opened) == ([], [])
    assert groups == [(100, 0), *((100, n) for n in range((start - 500) // 10, 10))]
    assert rendered == [f"b:{row + 1 - 300}" for row in range(start, 600)]


def test_only_what_follows_is_fetched_of_a_remote_file(tmp_path, monkeypatch):
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.store.clear()
    text = "\n".join(map(json.dumps, random_rows(random.Random(0), 300))).encode()
    system.pipe("/a.jsonl", text)
    whole = list(reader("memory://a.jsonl", cache=tmp_path).read())
    monkeypatch.setattr(files, "_REQUEST_BYTES", 1000)
    fetched, fetch = [], files._fetch

    def count(file, offset, num_bytes):
        fetched.append((offset, num_bytes))
        return fetch(file, offset, num_bytes)

    monkeypatch.setattr(files, "_fetch", count)
    start = whole[-10][0]
    again = reader("memory://a.jsonl", cache=tmp_path, must_be_same=True)
    assert list(again.read(start)) == whole[-10:]
    assert sum(num_bytes for _, num_bytes in fetched) < 4000 < len(text) / 2
    system.pipe("/a.jsonl", text.replace(b"1", b"2", 1))
    with pytest.raises(UserError, match=r"memory://a.jsonl has changed since it was indexed"):
        reader("memory://a.jsonl", cache=tmp_path, must_be_same=True)
    system.store.clear()


def rewritten(folder: Path, kind: str):
    path = next(path for path in sorted(folder.iterdir()) if "1" in path.name)
    path.write_bytes(path.read_bytes())


def longer(folder: Path, kind: str):
    path = folder / "part-1.jsonl"
    path.write_bytes(path.read_bytes() + b"\n" + json.dumps(ROW[0]).encode())


@table(
    "change, message",
    [
        (longer, r"a/part-1.jsonl has changed since it was indexed: it had [\d,]+ bytes"),
        (rewritten, r"a/part-1.jsonl has changed .* as many bytes, but its tag was"),
        (
            lambda folder, kind: (folder / "part-2.jsonl").unlink(),
            r"a/part-2.jsonl was there when its source was indexed, and nothing is in its place",
        ),
        (
            lambda folder, kind: (folder / "part-1.jsonl").rename(folder / "part-5.jsonl"),
            r"a/part-1.jsonl was there .*, and .*a/part-2.jsonl is in its place",
        ),
        (
            lambda folder, kind: write_rows(folder / "part-3.jsonl", ROW),
            r"a/part-3.jsonl was not there when its source was indexed",
        ),
    ],
)
def test_a_file_that_has_changed_is_refused_by_name(tmp_path, change, message):
    folder, cache = tmp_path / "a", tmp_path / "kept"
    path = write(folder, "lines", random_rows(random.Random(0), 60))
    before = reader(path, cache=cache)
    change(folder, "lines")
    with pytest.raises(UserError, match=message):
        reader(path, cache=cache, must_be_same=True)
    with pytest.raises(UserError, match=message):
        reader(path, cache=cache, must_be_same=True)  # what is kept is that of before
    assert list(reader(path, cache=cache).read()) != []
    assert before.num_rows == 60


def test_a_saved_data_set_that_has_changed_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = random_rows(random.Random(0), 60)
    path = write(tmp_path / "a", "saved", data)
    reader(path, cache=tmp_path / "kept")
    datasets.Dataset.from_list(data[::-1]).save_to_disk(tmp_path / "a")
    with pytest.raises(UserError, match=r"a has changed since it was indexed: .* tag was"):
        reader(path, cache=tmp_path / "kept", must_be_same=True)


def test_the_kinds_of_the_first_rows_are_known_where_it_goes_on(tmp_path):
    """What an unbroken run refuses is refused by one that goes on."""
    rows = [{"prompt": "1="}] * 20 + [{"prompt": [{"role": "user", "content": "1="}]}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    for start in (0, 13):
        with pytest.raises(UserError, match=r"line 21: column 'prompt' holds .* in .*line 1;"):
            list(reader(str(path)).read(start))


def test_a_source_without_a_prompt_is_an_error_unless_some_came_before(tmp_path):
    rows = [{"prompt": "1="}] + [{"prompt": "1234567="}] * 20
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    long = str(write_rows(tmp_path / "long.jsonl", rows[1:]))
    assert [row for row, _ in reader(path).read(0)] == [0]
    told = r"0 of 20 rows kept; 20 dropped as too long: data.max_prompt_tokens = 6\. Raise"
    with pytest.raises(UserError, match=told):
        list(reader(path, long).read(0))
    with pytest.raises(
        UserError, match=r"a.jsonl, line 2: 9 tokens, but data.max_prompt_tokens = 6; raise"
    ):
        list(reader(path, long, overlong_prompts="error").read(0))


def generate(output: Path, path: str, size: int, budgets: list[int]) -> bool:
    """A run on `size` hosts that end after so many prompts each: the rows of a prompt are its text.
    Returns whether all are done."""
    left = 0
    with locked_parts(output) as parts:
        goes_on = any(part.done.num_groups for part in parts)
        for rank in range(size):
            read = reader(path, cache=indexes_folder(output), must_be_same=goes_on)
            group, row = start_of(parts)
            unfinished = _Unfinished(rank, size, parts)
            writer = PartFileWriter(output, rank, size)
            for number, prompt in unfinished.of(enumerate(read.read(row), start=group)):
                if budgets[rank] == 0:
                    left += 1
                    break
                budgets[rank] -= 1
                line = json.dumps({"id": f"{number}/0", "row": prompt.id}).encode() + b"\n"
                row = unfinished.rows.pop(number)
                writer.append(number, [], [line], row=row)
            writer.close()
    return left == 0


@pytest.mark.parametrize("seed", range(12))
def test_hosts_that_are_interrupted_make_what_an_unbroken_run_makes(tmp_path, seed):
    draw = random.Random(seed)
    path = write(tmp_path / "a", draw.choice(KINDS[:3]), random_rows(draw, draw.randrange(1, 250)))
    output, whole = tmp_path / "out.jsonl", list(reader(path).read())
    while not generate(
        output,
        path,
        size := draw.randrange(1, 5),
        [draw.randrange(0, 200 // size) for _ in range(size)],
    ):
        pass
    merge_parts(output)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert found == [
        {"id": f"{number}/0", "row": prompt.id} for number, (_, prompt) in enumerate(whole)
    ]
