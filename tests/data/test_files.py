"""Files of a source: their names, their order, what changes, and servers that fail."""

import gzip
import io
import json
import os
import re

import pyarrow
import pyarrow.parquet
import pytest

from hone.data import files
from hone.data.files import DataFile, find_files, look_at, natural_order, require_unchanged
from hone.data.index import SourceIndex
from hone.data.settings import SourceConfig
from hone.data.sources import read_source, short_name
from hone.errors import UserError
from tests.data.file_server import serving
from tests.data.support import write_rows
from tests.tables import table

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(40)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def parquet_bytes(rows, **settings):
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), content, **settings)
    return content.getvalue()


def names(path, **settings):
    return [file.name for file in find_files(SourceConfig(path=str(path), **settings))]


def columns(path, **settings):
    return [row.columns for row in read_source(SourceConfig(path=str(path), **settings))]


@pytest.fixture
def memory():
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(files, "_WAITS_S", (0.0, 0.0, 0.0, 0.0))
    with serving() as found:
        yield found


# --------------------------------------------------------------------------- names on this host


def test_numbers_in_names_are_compared_as_numbers():
    ordered = ["a", "a1/z", "a2/b-9", "a2/b-10", "a10/b", "b"]
    assert sorted(sorted(ordered), key=natural_order) == ordered != sorted(ordered)


def test_shards_come_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, 1):
        write_rows(tmp_path / f"part-{number}.jsonl", [{"n": number}])
    assert columns(tmp_path) == columns(tmp_path / "*.jsonl") == [{"n": 1}, {"n": 2}, {"n": 10}]


def test_a_pattern_reads_data_files_alone_and_no_split(tmp_path):
    for name in ("train-1.jsonl", "test.jsonl", "deep/er/x.jsonl", "deep/y.json", "deep/z.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / "folder.jsonl").mkdir()
    inside = [os.path.relpath(name, tmp_path) for name in names(tmp_path / "**" / "*")]
    assert inside == [
        "deep/er/x.jsonl",
        "deep/y.json",
        "deep/z.parquet",
        "test.jsonl",
        "train-1.jsonl",
    ]
    assert names(tmp_path / "t*") == [str(tmp_path / "test.jsonl"), str(tmp_path / "train-1.jsonl")]
    assert names(tmp_path / "deep/[yz].*") == [
        str(tmp_path / f"deep/{x}") for x in ("y.json", "z.parquet")
    ]
    with pytest.raises(UserError, match=r"no .jsonl, .*file matches .*\*.csv"):
        names(tmp_path / "*.csv")


def test_a_file_with_brackets_in_its_name_is_no_pattern(tmp_path):
    path = write_rows(tmp_path / "a[1].jsonl", ROWS)
    assert names(path) == [str(path)]
    assert short_name(SourceConfig(path=str(path))) == "a[1]"


@table(
    "path, name",
    [
        ("shards/*.parquet", "shards"),
        ("a/train.jsonl.gz", "train"),
        ("s3://bucket/set/train.parquet", "train"),
        ("s3://bucket/set/**/*.parquet", "set"),
        ("https://x.org/rows.jsonl?token=a*b", "rows"),
        ("hf://datasets/owner/name/", "name"),
    ],
)
def test_names_of_rows_come_from_the_last_plain_part(path, name):
    assert short_name(SourceConfig(path=path)) == name


def test_a_local_path_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_file_system", lambda url: pytest.fail(f"asked for {url}"))
    monkeypatch.setattr("hone.data.tables.unreachable", lambda: pytest.fail("asked the hub"))
    write_rows(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.parquet").write_bytes(parquet_bytes(ROWS))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    for path in (tmp_path, tmp_path / "*"):
        assert columns(path) == ROWS * 3


def test_a_changed_file_is_refused_by_name(tmp_path):
    path = tmp_path / "a.jsonl"
    write_rows(path, ROWS)
    before = look_at(str(path))
    require_unchanged(before)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match=r"a.jsonl has changed .* tag was \d+ and is 1\. Put"):
        require_unchanged(before)
    path.write_bytes(LINES[:100])
    with pytest.raises(UserError, match=r"a.jsonl has changed .* had [\d,]+ bytes and has 100"):
        require_unchanged(before)
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl: No such file"):
        require_unchanged(before)


def test_planted_a_tag_that_is_not_compared_turns_red(tmp_path, monkeypatch):
    monkeypatch.setattr(DataFile, "__eq__", lambda self, other: self.size == other.size)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_changed_file_is_refused_by_name(tmp_path)


# --------------------------------------------------------------------------- at URLs


def test_the_memory_file_system_of_fsspec(memory):
    memory.pipe("/set/train-10.jsonl", LINES)
    memory.pipe("/set/train-9.parquet", parquet_bytes(ROWS[:3]))
    memory.pipe("/set/test.jsonl.gz", gzip.compress(LINES))
    memory.pipe("/set/README.md", b"no data")
    assert columns("memory://set") == columns("memory://set/train*") == ROWS[:3] + ROWS
    assert columns("memory://set/", split="test") == columns("memory://set/test.jsonl.gz") == ROWS
    assert names("memory://**/*.parquet") == ["memory://set/train-9.parquet"]
    assert SourceIndex.build(SourceConfig(path="memory://set/*")).num_rows == 83
    (row,) = read_source(SourceConfig(path="memory://set/train-10.jsonl", max_rows=1))
    assert (row.location, row.folder) == ("memory://set/train-10.jsonl, line 1", None)
    with pytest.raises(
        UserError, match=r"no file for the split 'dev'; found: test.jsonl.gz, train-9"
    ):
        columns("memory://set", split="dev")
    with pytest.raises(UserError, match="no such file or folder: memory://nowhere"):
        columns("memory://nowhere")
    with pytest.raises(UserError, match=r"no .* file matches memory://set/\*.csv"):
        columns("memory://set/*.csv")
    with pytest.raises(UserError, match=r"README.md: its suffix must be one of"):
        columns("memory://set/README.md")
    memory.pipe("/set/state.json", b"{}")
    with pytest.raises(UserError, match="saved by `datasets`, which is read from this machine"):
        columns("memory://set")


def test_a_remote_file_that_changes_is_refused(memory):
    memory.pipe("/a.jsonl", LINES)
    index = SourceIndex.build(SourceConfig(path="memory://a.jsonl"))
    memory.pipe("/a.jsonl", LINES)
    with pytest.raises(UserError, match=r"memory://a.jsonl has changed since it was indexed"):
        index.rows(0)


def test_what_a_file_system_remembers_of_a_file_is_not_believed(memory, monkeypatch):
    remembered = {}
    real = type(memory).info

    def info(self, path, **settings):
        return remembered.setdefault(path, real(self, path, **settings))

    monkeypatch.setattr(type(memory), "info", info)
    monkeypatch.setattr(type(memory), "invalidate_cache", lambda self, path: remembered.clear())
    memory.pipe("/a.jsonl", LINES)
    before = look_at("memory://a.jsonl")
    memory.pipe("/a.jsonl", LINES[:100])
    with pytest.raises(UserError, match=r"a.jsonl has changed .* has 100"):
        require_unchanged(before)


@pytest.mark.parametrize("num_cut", [2, 5])
def test_an_answer_that_is_cut_off_is_asked_for_again(memory, monkeypatch, num_cut):
    monkeypatch.setattr(files, "_WAITS_S", (0.0, 0.0, 0.0, 0.0))
    memory.pipe("/a.jsonl", LINES)
    real, answers = type(memory).cat_file, []

    def cat_file(self, path, **part):
        answers.append(real(self, path, **part))
        return answers[-1][:-1] if len(answers) <= num_cut else answers[-1]

    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    if num_cut < 5:
        assert columns("memory://a.jsonl") == ROWS
        assert len(answers) == num_cut + 1
        return
    told = r"at byte 0: 5 attempts failed .* [\d,]+ bytes came of [\d,]+\. Start again"
    with pytest.raises(UserError, match=told):
        columns("memory://a.jsonl")


@table(
    "url, message",
    [
        ("s3://b/a.jsonl", r"reading s3://b/a.jsonl needs the `s3fs` .* pip install 's3fs>="),
        ("gs://b/*.parquet", r"needs the `gcsfs` library, which is not installed"),
        ("nosuch://b/a.jsonl", "cannot read nosuch://b/a.jsonl: .*nosuch"),
    ],
)
def test_a_protocol_says_which_package_it_needs(url, message, monkeypatch):
    monkeypatch.setattr("hone.extras.is_installed", lambda package: False)
    with pytest.raises(UserError, match=message):
        columns(url)


def test_the_hub_that_cannot_be_reached_is_told(monkeypatch):
    monkeypatch.setattr(files, "unreachable", lambda: "no route to it")
    with pytest.raises(UserError, match=r"cannot read hf://datasets/a/b/c.jsonl: no route to it"):
        columns("hf://datasets/a/b/c.jsonl")


def test_a_server_that_fails_every_third_read(server, caplog):
    server.fails = lambda number: None if number % 3 else (503, "cut off")[number // 3 % 2]
    server.files = {
        "a.jsonl": LINES,
        "a.jsonl.gz": gzip.compress(LINES),
        "a.parquet": parquet_bytes(ROWS, row_group_size=7),
        "a.json": json.dumps(ROWS).encode(),
    }
    with caplog.at_level("INFO", logger="hone"):
        for _ in range(4):
            for name in server.files:
                assert columns(server.url(name)) == ROWS, name
                index = SourceIndex.build(SourceConfig(path=server.url(name)))
                rows = [row for block in range(len(index.blocks)) for row in index.rows(block)]
                assert [row.columns for row in rows] == ROWS, name
                walked = SourceIndex.to_walk(SourceConfig(path=server.url(name))).walk(17)
                assert [row.columns for row in walked] == ROWS[17:], name
    told = "\n".join(caplog.messages)
    assert re.search(r"a.jsonl at byte 0: .*503.*; asking again", told)
    assert re.search(r"; asking again", told)


def test_a_server_that_always_fails(server):
    server.files = {"a.jsonl": LINES, "a.jsonl.gz": LINES, "a.parquet": parquet_bytes(ROWS)}
    server.fails = lambda number: 500
    for name in server.files:
        url, server.num_reads = server.url(name), 0
        told = rf"cannot read {url} at byte [\d,]+: 5 attempts failed .*500"
        with pytest.raises(UserError, match=told):
            columns(url)
        assert server.num_reads == 5, name


def test_the_place_of_a_failure_is_told(server):
    server.files = {"a.jsonl": LINES}
    index = SourceIndex.build(SourceConfig(path=server.url("a.jsonl")))
    index.blocks["place"][0] = 17
    index.blocks["num_bytes"][0] = 20
    server.fails = lambda number: "cut off"
    with pytest.raises(UserError, match=r"a.jsonl at byte 17: 5 attempts failed .* the last with"):
        index.rows(0)


def test_a_refusal_is_not_repeated(server):
    server.files = {"a.jsonl": LINES}
    server.fails = lambda number: 403
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl at byte 0: .*403"):
        columns(server.url("a.jsonl"))
    assert server.num_reads == 1
    with pytest.raises(UserError, match=r"no such file or folder: .*b.jsonl"):
        columns(server.url("b.jsonl"))


def test_a_server_without_parts_is_refused(server):
    server.files, server.serves_parts = {"a.jsonl": LINES}, False
    index = SourceIndex.build(SourceConfig(path=server.url("a.jsonl")))
    index.blocks["num_bytes"][0] = 20
    with pytest.raises(UserError, match=r"gives no parts of files; download it"):
        index.rows(0)


def test_an_etag_that_changes_is_refused(server):
    server.files = {"a.jsonl": LINES}
    index = SourceIndex.build(SourceConfig(path=server.url("a.jsonl")))
    assert [row.columns for row in index.rows(0)] == ROWS
    looks = server.num_looks
    assert len(index.rows(0, [3])) == 1
    assert server.num_looks == looks
    server.etags["a.jsonl"] = "second"
    other = SourceIndex.build(SourceConfig(path=server.url("a.jsonl")))
    assert other.fingerprint != index.fingerprint
    with pytest.raises(UserError, match="tag was first and is second"):
        require_unchanged(index.files[0])


def test_only_what_is_asked_for_is_fetched(server):
    """Of a Parquet file its footer and the columns of a row group, not the other groups."""
    rows = [{"a": os.urandom(50_000)} for _ in range(20)]
    server.files = {"a.parquet": parquet_bytes(rows, row_group_size=1)}
    index = SourceIndex.build(SourceConfig(path=server.url("a.parquet")))
    fetched = []
    real = files._fetch

    def fetch(file, offset, num_bytes):
        fetched.append(num_bytes)
        return real(file, offset, num_bytes)

    files._fetch = fetch
    try:
        assert index.rows(13)[0].columns == rows[13]
    finally:
        files._fetch = real
    assert 50_000 <= sum(fetched) < 200_000
