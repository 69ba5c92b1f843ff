"""Indexes of sources: blocks whose rows are those of the files, kept in a file, made once."""

import errno
import gzip
import json
import multiprocessing
import os
import random
import re
import string
import time
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hone.data import blocks, index, parquet
from hone.data.index import BLOCK, SourceIndex
from hone.data.settings import SourceConfig
from hone.data.sources import iter_source, read_source
from hone.errors import UserError
from hone.observe.disk import DiskError
from tests.observe.test_disk import largest_file
from tests.tables import table

ROWS = [{"prompt": f"question {i}", "answer": str(i), "extra": {"n": i}} for i in range(50)]


def source(path, **settings):
    return SourceConfig(path=str(path), **settings)


def rows_of(found):
    return [row for number in range(len(found.blocks)) for row in found.rows(number)]


def expect_same(path, expected, cache=None, **settings):
    """Every way of reading gives the rows `expected`: lists of columns, by locations."""
    asked = source(path, **settings)
    found = SourceIndex.build(asked, cache)
    to_walk = SourceIndex.to_walk(asked, None if cache is None else cache / "walked")
    assert to_walk.num_rows == found.num_rows == len(expected)
    walked = list(iter_source(asked))
    assert [(row.columns, row.location) for row in walked] == expected
    assert rows_of(found) == walked
    for start in {0, len(expected) // 3, len(expected) // 2, len(expected) - 1}:
        assert list(to_walk.walk(start)) == walked[start:]
    # In another order, some rows of a block at a time, as if nothing had been read before.
    found = SourceIndex.build(asked, cache, max_open_bytes=1)
    draw = random.Random(0)
    firsts = np.cumsum(found.blocks["num_rows"]) - found.blocks["num_rows"]
    for number in draw.sample(range(len(firsts)), len(firsts)):
        size = int(found.blocks["num_rows"][number])
        chosen = [draw.randrange(size) for _ in range(min(size, 5))]
        assert found.rows(number, chosen) == [walked[firsts[number] + x] for x in chosen]
    return found


# --------------------------------------------------------------------------- JSON lines


def random_lines(draw):
    """The bytes of a file of JSON lines, and its rows by plain means: number of line and value."""
    end = draw.choice([b"\n", b"\r\n"])
    lines, rows = [], []
    for number in range(1, draw.randrange(1, 60)):
        if draw.random() < 0.2:
            lines.append(draw.choice([b"", b"  ", b"\t", "\u00a0".encode(), b"\x0b"]))
            continue
        text = "".join(
            draw.choices(string.printable + "ä\u2028\x85 \U0001f600", k=draw.randrange(200))
        )
        value = {"a": text, "n": draw.choice([None, 1, 1.5, [1, {"b": None}], float("inf")])}
        line = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        lines.append(draw.choice([b"", b" "]) + line)
        rows.append((number, json.loads(json.dumps(value))))
    data = draw.choice([b"", b"\xef\xbb\xbf"]) + end.join(lines) + draw.choice([b"", end])
    return data, rows


def check_random_lines(folder):
    for seed in range(60):
        draw = random.Random(seed)
        data, rows = random_lines(draw)
        suffix = draw.choice([".jsonl", ".json", ".jsonl.gz", ".json.gz"])
        path = folder / f"{seed}{suffix}"
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        expected = [(value, f"{path}, line {number}") for number, value in rows]
        if expected:
            expect_same(path, expected)
        else:
            with pytest.raises(UserError, match="holds no rows"):
                SourceIndex.build(source(path))


@pytest.fixture
def small_blocks(monkeypatch):
    pytest.importorskip("indexed_gzip")
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 300)


def test_random_lines_in_small_blocks(tmp_path, small_blocks):
    check_random_lines(tmp_path)


PLANTED = {
    "a block begins a byte late": (
        blocks.LineBlocks,
        "_read",
        lambda real: (
            lambda self, block: real(self, block._replace(place=block.place + (block.place > 0)))
        ),
    ),
    "a block ends a byte early": (
        blocks.LineBlocks,
        "_read",
        lambda real: lambda self, block: real(self, block)[:-2],
    ),
    "the first line of the second block is lost": (
        blocks.LineBlocks,
        "_lines",
        lambda real: lambda self, block: (real(self, block)[0][block.place > 0 :], 0),
    ),
    "lines are counted without blank ones": (
        blocks.LineBlocks,
        "scan",
        lambda real: lambda self: (x._replace(line=x.row + 1) for x in real(self)),
    ),
    "a wrong block is taken for the one asked for": (
        blocks.OpenBlocks,
        "get",
        lambda real: lambda self, key, unpack: real(self, (key[0], 0), unpack),
    ),
}


@table("mistake", PLANTED)
def test_planted_mistakes_turn_red(tmp_path, monkeypatch, small_blocks, mistake):
    owner, name, wrong = PLANTED[mistake]
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    with pytest.raises((AssertionError, UserError, IndexError, AttributeError)):
        check_random_lines(tmp_path)


def test_a_line_longer_than_a_block(tmp_path, small_blocks):
    values = [{"a": "x"}, {"a": "y" * 5000}, {"a": "z"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, values)))
    found = expect_same(path, [(x, f"{path}, line {n}") for n, x in enumerate(values, 1)])
    assert found.blocks["num_bytes"].max() > 5000


def test_only_the_rows_asked_for_are_parsed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\nnot json\n{"a": 3}\n')
    found = SourceIndex.build(source(path))
    assert [row.columns for row in found.rows(0, [2, 0])] == [{"a": 3}, {"a": 1}]
    with pytest.raises(UserError, match=r"a.jsonl, line 2: not valid JSON"):
        found.rows(0)
    with pytest.raises(IndexError, match="row 3 of block 0, which has 3"):
        found.rows(0, [3])


def test_the_first_rows_alone_are_indexed(tmp_path, small_blocks):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "not json\n")
    for most in (1, 3, 4, 5, 17, 50):
        rows = [(x, f"{path}, line {n}") for n, x in enumerate(ROWS[:most], 1)]
        expect_same(path, rows, max_rows=most)


@table(
    "damage, message",
    [
        (lambda data: data[:-20], r"cannot unpack .*a.jsonl.gz: .*end.of.stream"),
        (lambda data: data + data[:30], r"cannot unpack .*a.jsonl.gz"),
        (lambda data: data[:-8] + bytes(8), r"cannot unpack .*a.jsonl.gz: CRC"),
        (lambda data: b'{"a": 1}\n', r"cannot unpack .*a.jsonl.gz: Not a gzipped"),
    ],
)
def test_a_damaged_compressed_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(json.dumps(ROWS[0]).encode() + b"\n" * 99)))
    for read in (read_source, SourceIndex.to_walk, SourceIndex.build):
        with pytest.raises(UserError, match=message):
            read(source(path))


def test_a_compressed_file_of_several_members(tmp_path, small_blocks):
    path = tmp_path / "a.jsonl.gz"
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    path.write_bytes(b"".join(gzip.compress(b"".join(lines[n : n + 7])) for n in range(0, 50, 7)))
    expected = [(x, f"{path}, line {n}") for n, x in enumerate(ROWS, 1)]
    expect_same(path, expected)
    expect_same(path, expected, cache=tmp_path)


def test_an_index_of_a_compressed_file_says_which_package_it_needs(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    monkeypatch.setattr("hone.extras.is_installed", lambda package: False)
    assert len(read_source(source(path))) == 1
    assert len(list(SourceIndex.to_walk(source(path), tmp_path / "kept").walk())) == 1
    with pytest.raises(UserError, match=r"an index of .*a.jsonl.gz needs .*'indexed-gzip>=1.9'"):
        SourceIndex.build(source(path)).rows(0)


# --------------------------------------------------------------------------- Parquet

ODD_COLUMNS = {
    "nested nulls": [{"a": {"b": None}}, {"a": None}, {"a": {"b": [1, None]}}, {"a": {"b": []}}],
    "messages": [{"m": [{"role": "user", "content": "x"}]}, {"m": None}, {"m": []}],
    "decimals": [{"a": Decimal("1.50")}, {"a": Decimal("-22.25")}, {"a": None}],
    "dates": [{"a": date(2020, 2, 29), "b": datetime(1999, 1, 1, 3, 4, 5, 6)}] * 3,
    "times with a zone": [{"a": datetime(2020, 2, 29, tzinfo=UTC)}, {"a": None}],
    "bytes": [{"a": b"\xff\x00"}, {"a": b""}, {"a": None}],
    "no columns filled": [{"a": None}, {"a": None}],
}


@table("case", ODD_COLUMNS)
def test_odd_columns_of_parquet(tmp_path, case):
    rows = ODD_COLUMNS[case]
    plain = pyarrow.Table.from_pylist(rows)
    for size in (1, 2, 100):
        path = tmp_path / f"{size}.parquet"
        pyarrow.parquet.write_table(plain, path, row_group_size=size)
        oracle = pyarrow.parquet.read_table(path).to_pylist()
        assert oracle == plain.to_pylist()
        expect_same(path, [(x, f"{path}, row {n}") for n, x in enumerate(oracle, 1)])


def test_not_a_number_stays_one(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [float("nan"), 1.0]}), path)
    (nan, one) = SourceIndex.build(source(path)).rows(0)
    assert np.isnan(nan.columns["a"])
    assert one.columns == {"a": 1.0}


@table("group", [1, 7, 50])
def test_max_rows_inside_of_a_row_group(tmp_path, group):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=group)
    for most in (1, 7, 8, 50):
        expected = [(x, f"{path}, row {n}") for n, x in enumerate(ROWS[:most], 1)]
        expect_same(path, expected, max_rows=most)


def test_of_a_large_row_group_rows_are_read_up_to_the_one_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    rows = [{"a": f"{n:05}" * 40} for n in range(5000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, use_dictionary=False)
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 50_000)
    found = SourceIndex.build(source(path), max_open_bytes=100_000)
    footer = pyarrow.parquet.ParquetFile(path).metadata
    batches = []
    real = pyarrow.parquet.ParquetFile.iter_batches

    def count(self, *args, **settings):
        for batch in real(self, *args, **settings):
            batches.append(len(batch))
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", count)
    assert footer.num_row_groups == 1
    assert [row.columns for row in found.rows(0, [700, 3])] == [rows[700], rows[3]]
    assert 700 < sum(batches) < 1500
    assert [row.columns for row in found.rows(0)] == rows
    assert [row.columns for row in iter_source(source(path))] == rows


def test_shards_whose_columns_differ_are_read_each_by_its_own(tmp_path):
    """What a column must hold is decided where it is used: there a text beside a list is refused by
    row, and a number is as good as its text."""
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": ["x"]}), tmp_path / "1.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"a": ["2"]}), tmp_path / "2.parquet")
    paths = (tmp_path / "1.parquet", tmp_path / "2.parquet")
    rows = ({"a": 1, "b": "x"}, {"a": "2"})
    expected = [(row, f"{path}, row 1") for path, row in zip(paths, rows, strict=True)]
    expect_same(tmp_path, expected)


# --------------------------------------------------------------------------- other sources


def test_shards_of_all_formats_with_empty_ones(tmp_path, small_blocks):
    shards = [ROWS[:20], [], ROWS[20:21], ROWS[21:]]
    lines = ["".join(json.dumps(row) + "\n" for row in rows) for rows in shards]
    schema = pyarrow.Table.from_pylist(ROWS).schema
    (tmp_path / "part-1.jsonl").write_text(lines[0])
    (tmp_path / "part-2.jsonl").write_text("")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([], schema), tmp_path / "part-3.parquet")
    (tmp_path / "part-4.json").write_text("[]")
    (tmp_path / "part-5.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "part-6.json").write_text(json.dumps(shards[2]))
    (tmp_path / "part-10.jsonl.gz").write_bytes(gzip.compress(lines[3].encode()))
    places = [f"part-1.jsonl, line {n}" for n in range(1, 21)] + ["part-6.json, row 1"]
    places += [f"part-10.jsonl.gz, line {n}" for n in range(1, 30)]
    expected = [(x, f"{tmp_path}/{place}") for x, place in zip(ROWS, places, strict=True)]
    found = expect_same(tmp_path, expected)
    assert [Path(file.name).name for file in found.files][-1] == "part-10.jsonl.gz"
    assert expect_same(tmp_path, expected, cache=tmp_path / "c").fingerprint == found.fingerprint


def test_reading_agrees_with_streams_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    lines, tables = [], []
    for number in range(3):
        shard = ROWS[number * 10 : number * 10 + 10]
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in shard))
        lines.append(str(path))
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(shard), tmp_path / f"{number}.parquet", row_group_size=4
        )
        tables.append(str(tmp_path / f"{number}.parquet"))
    for kind, paths in (("json", lines), ("parquet", tables)):
        stream = datasets.load_dataset(
            kind, data_files=paths, split="train", streaming=True, cache_dir=str(tmp_path / "cache")
        )
        suffix = paths[0].rpartition(".")[2]
        found = SourceIndex.build(source(tmp_path / f"*.{suffix}"))
        assert [row.columns for row in rows_of(found)] == list(stream)


def test_a_saved_data_set_behind_the_same_interface(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("hone.data.tables._BLOCK_ROWS", 7)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    path = tmp_path / "saved"
    found = expect_same(path, [(x, f"{path}, row {n}") for n, x in enumerate(ROWS, 1)], tmp_path)
    assert len(found.blocks) == 8
    assert SourceIndex.build(source(path)).fingerprint == found.fingerprint
    datasets.Dataset.from_list(ROWS[::-1]).save_to_disk(tmp_path / "other")
    other = SourceIndex.build(source(tmp_path / "other"))
    assert other.fingerprint != found.fingerprint


# --------------------------------------------------------------------------- kept indexes


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        lines = (json.dumps(row) + "\n" for row in ROWS[number * 10 : number * 10 + 10])
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


def scans(monkeypatch):
    """The files that have been scanned from now on."""
    scanned = []
    real = blocks.LineBlocks.scan

    def scan(self):
        scanned.append(Path(self.file.name).name)
        return real(self)

    monkeypatch.setattr(blocks.LineBlocks, "scan", scan)
    return scanned


def test_an_index_is_kept_and_made_anew_when_files_change(shards, tmp_path, monkeypatch):
    cache = tmp_path / "run"
    scanned = scans(monkeypatch)
    first = SourceIndex.build(source(shards), cache)
    again = SourceIndex.build(source(shards), cache)
    assert scanned == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert again.fingerprint == first.fingerprint
    assert rows_of(first) == rows_of(again)
    late = SourceIndex.build(source(shards), cache)
    assert again.blocks.dtype == BLOCK
    assert BLOCK.itemsize <= 50
    SourceIndex.build(source(shards, max_rows=12), cache)
    assert scanned[3:] == ["0.jsonl", "1.jsonl"]
    (shards / "1.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match=r"1.jsonl has changed since it was indexed"):
        late.rows(1)
    assert len(late.rows(2)) == 10
    changed = SourceIndex.build(source(shards), cache)
    assert len(scanned) == 8
    assert changed.fingerprint != first.fingerprint
    assert changed.num_rows == 21


def test_a_damaged_kept_index_is_made_anew(shards, tmp_path, monkeypatch, caplog):
    first = SourceIndex.build(source(shards), tmp_path / "run")
    (kept,) = (tmp_path / "run").glob("*.npz")
    whole = kept.read_bytes()
    for damage in (b"", b"no archive", whole[: len(whole) // 2]):
        kept.write_bytes(damage)
        caplog.clear()
        assert SourceIndex.build(source(shards), tmp_path / "run").fingerprint == first.fingerprint
        assert "is damaged" in caplog.text
        assert kept.read_bytes()[:2] == b"PK"
    assert not list((tmp_path / "run").glob("*.partial"))


def test_names_of_folders_are_no_part_of_the_fingerprint(shards, tmp_path):
    first = SourceIndex.build(source(shards)).fingerprint
    shards.rename(tmp_path / "elsewhere")
    assert SourceIndex.build(source(tmp_path / "elsewhere")).fingerprint == first
    (tmp_path / "elsewhere" / "2.jsonl").rename(tmp_path / "elsewhere" / "3.jsonl")
    assert SourceIndex.build(source(tmp_path / "elsewhere")).fingerprint != first


def _build(path, make, cache, barrier, log):
    real = blocks.LineBlocks.scan

    def scan(self):
        with open(log, "a") as file:
            file.write(f"{Path(self.file.name).name}\n")
        time.sleep(0.1)  # meanwhile the others come to the lock
        return real(self)

    blocks.LineBlocks.scan = scan
    barrier.wait()
    found = make(source(path), cache)
    assert found.num_rows == 30
    assert [row.columns for row in found.walk(7)] == ROWS[7:30]


@pytest.mark.parametrize("make", [SourceIndex.build, SourceIndex.to_walk])
def test_eight_processes_of_a_host_make_one_pass(shards, tmp_path, make):
    context = multiprocessing.get_context("fork")
    barrier, log = context.Barrier(8), tmp_path / "log"
    workers = [
        context.Process(target=_build, args=(shards, make, tmp_path / "run", barrier, log))
        for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert log.read_text() == "0.jsonl\n1.jsonl\n2.jsonl\n"


def test_planted_an_index_without_a_lock_is_made_more_than_once(shards, tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *args: None)
    real, barrier = index._read, multiprocessing.get_context("fork").Barrier(8)

    def reads_late(*args, **settings):
        found = real(*args, **settings)
        barrier.wait()  # all have looked before one writes
        return found

    monkeypatch.setattr(index, "_read", reads_late)
    with pytest.raises(AssertionError):
        test_eight_processes_of_a_host_make_one_pass(shards, tmp_path, SourceIndex.build)


@pytest.mark.parametrize(
    ("make", "key"), [(SourceIndex.build, "run.dir"), (SourceIndex.to_walk, "output")]
)
def test_an_index_that_cannot_be_kept_names_its_place(shards, tmp_path, make, key):
    """The folder cannot be made, and the file does not fit."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError) as caught:
        make(source(shards), tmp_path / "file" / "indexes")
    assert str(caught.value).startswith(f"Could not write {tmp_path / 'file/indexes'} ({key}): ")
    assert str(caught.value).endswith(f"Set {key} to a place that can be written.")
    with largest_file(100), pytest.raises(DiskError) as caught:
        make(source(shards), tmp_path / "run")
    told = rf"Could not write {tmp_path}/run/index-\w+\.npz \({key}\): .* it needs [0-9,]+ bytes"
    assert re.match(told, str(caught.value))
    assert [path.suffix for path in (tmp_path / "run").iterdir()] == [".lock"]
    make(source(shards), tmp_path / "run")


def test_without_locks_each_process_makes_the_index(shards, tmp_path, monkeypatch, caplog):
    """As on Lustre without `-o flock`, or in a bucket that is mounted as a folder."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    expected = SourceIndex.build(source(shards)).fingerprint
    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):
        assert SourceIndex.to_walk(source(shards), tmp_path / "run").fingerprint == expected
    assert f"the file system of '{tmp_path / 'run'}' has no locks" in caplog.text
    assert [path.suffix for path in (tmp_path / "run").iterdir()].count(".npz") == 1


def test_a_slow_pass_says_its_rate(shards, monkeypatch, caplog, small_blocks):
    """Once while it goes on, and at the end; a short one only at its end, if it has many bytes."""
    caplog.set_level("INFO", logger="hone")
    SourceIndex.build(source(shards))
    assert not [text for text in caplog.messages if "MB/s" in text]
    monkeypatch.setattr(index, "_SHOWN_BYTES", 100)
    for settings in ({}, {"max_rows": 12}):
        caplog.clear()
        SourceIndex.build(source(shards, **settings))
        (told,) = (text for text in caplog.messages if "MB/s" in text)
        assert told.startswith(f"{shards}: found where its rows begin, in 0.")
    monkeypatch.setattr(index, "_PROGRESS_S", -1.0)
    caplog.clear()
    SourceIndex.build(source(shards))
    told = [text for text in caplog.messages if "MB/s" in text]
    assert [text.partition("begin, ")[0] for text in told] == [
        f"{shards}: finding where its rows ",
        f"{shards}: found where its rows ",
    ]


def test_unpacked_blocks_are_bounded(tmp_path, small_blocks):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = SourceIndex.build(source(path), max_open_bytes=3000)
    rows_of(found)
    opened = found._opened
    assert 1000 < opened.num_bytes <= 3000
    assert sum(num_bytes for _, num_bytes in opened._held.values()) == opened.num_bytes
    assert found.rows(0) == found.rows(0)


def test_a_large_row_group_is_read_in_pages(tmp_path, monkeypatch):
    """A whole column of it is never in memory."""
    path = tmp_path / "a.parquet"
    values = [random.Random(n).randbytes(4000) for n in range(5000)]
    pyarrow.parquet.write_table(pyarrow.table({"a": values}), path, use_dictionary=False)
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 2**20)
    monkeypatch.setitem(parquet._IN_PAGES, "buffer_size", 2**18)
    before = pyarrow.total_allocated_bytes()
    found = SourceIndex.build(source(path), max_open_bytes=2**20)
    for number, row in enumerate(found._parts[0].walk()):
        assert row.columns == {"a": values[number]}
        if number % 500 == 0:
            assert pyarrow.total_allocated_bytes() - before < 8 * 2**20
    assert number == 4999
