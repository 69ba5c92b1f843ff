"""Sources in a bucket, through `s3fs` and the protocol of S3, served on this host by `moto`.

Its packages take some 110 MB and are not among those for development:

    pip install 's3fs>=2025.3' 'moto[s3]>=5.1' flask flask-cors
    python -m pytest tests/data/test_s3.py
"""

from __future__ import annotations

import gzip
import io
import json
import re
import urllib.request
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hone.data import files
from hone.data.files import find_files, require_unchanged
from hone.data.index import SourceIndex
from hone.data.settings import SourceConfig
from hone.data.sources import read_source
from hone.errors import UserError

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")
serving = pytest.importorskip("werkzeug.serving")

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(2000)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


class Bucket:
    """A server with the bucket `rows`. `fails` says of each read of a file, counted from 1, how it
    fails: with a status, or cut off."""

    def __init__(self) -> None:
        self._app = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self.server = serving.make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.parts: list[str] = []
        """What was read of files: the `Range` of each read."""
        self.fails = lambda number: None
        self.writer: Any = None

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def _answer(self, environ: dict[str, Any], start: Any) -> Any:
        is_read = environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].count("/") > 1
        if not is_read or not environ["PATH_INFO"].strip("/").partition("/")[2]:
            return self._app(environ, start)
        self.parts.append(environ.get("HTTP_RANGE", ""))
        failure = self.fails(len(self.parts))
        if isinstance(failure, int):
            start(f"{failure} No", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self._app(environ, start))
        return [body[: len(body) // 2] if failure == "cut off" else body]

    def put(self, name: str, data: bytes) -> None:
        """Write a file by a client of its own, so that the one that reads does not know of it."""
        self.writer.pipe(f"rows/{name}", data)


@pytest.fixture
def bucket(monkeypatch) -> Iterator[Bucket]:
    monkeypatch.setattr(files, "_WAITS_S", (0.0, 0.0, 0.0, 0.0))
    made = Bucket()
    thread = Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": made.url(),
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # which waits for seconds
    s3fs.S3FileSystem.clear_instance_cache()
    made.writer = s3fs.S3FileSystem(skip_instance_cache=True)
    made.writer.mkdir("rows")
    yield made
    s3fs.S3FileSystem.clear_instance_cache()
    urllib.request.urlopen(urllib.request.Request(f"{made.url()}/moto-api/reset", method="POST"))
    made.server.shutdown()
    thread.join()


def parquet_bytes(rows: list[dict[str, Any]], **settings: Any) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content, **settings)
    return content.getvalue()


def columns(path: str, **settings: Any) -> list[dict[str, Any]]:
    return [row.columns for row in read_source(SourceConfig(path=path, **settings))]


def fill(bucket: Bucket) -> None:
    bucket.put("set/train-10.jsonl", LINES)
    bucket.put("set/train-9.parquet", parquet_bytes(ROWS[:30], row_group_size=7))
    bucket.put("set/deep/er/train.json", json.dumps(ROWS[:5]).encode())
    bucket.put("set/test.jsonl.gz", gzip.compress(LINES))
    bucket.put("set/README.md", b"no data")


def test_files_folders_and_patterns(bucket):
    fill(bucket)
    assert columns("s3://rows/set") == columns("s3://rows/set/train*") == ROWS[:30] + ROWS
    assert columns("s3://rows/set/", split="test") == columns("s3://rows/set/test.jsonl.gz") == ROWS
    found = find_files(SourceConfig(path="s3://rows/**/*"))
    names = ["deep/er/train.json", "test.jsonl.gz", "train-9.parquet", "train-10.jsonl"]
    assert [file.name for file in found] == [f"s3://rows/set/{name}" for name in names]
    assert all(re.fullmatch(r'"?[0-9a-f]{32}"?', file.tag) for file in found), found
    listed = {file.name: file for file in find_files(SourceConfig(path="s3://rows/set"))}
    for name, file in listed.items():
        assert find_files(SourceConfig(path=name)) == [file], "the list and the file differ"
    with pytest.raises(UserError, match="no such file or folder: s3://rows/nowhere"):
        columns("s3://rows/nowhere.jsonl")
    with pytest.raises(UserError, match=r"no .* file matches s3://rows/set/\*.csv"):
        columns("s3://rows/set/*.csv")
    with pytest.raises(UserError, match=r"no such file or folder: s3://other/a.jsonl"):
        columns("s3://other/a.jsonl")


@pytest.mark.parametrize("name", ["train-10.jsonl", "train-9.parquet", "test.jsonl.gz"])
def test_rows_of_an_index_in_any_order(bucket, name, monkeypatch, tmp_path):
    if name.endswith(".gz"):
        pytest.importorskip("indexed_gzip")
    monkeypatch.setattr("hone.data.blocks._BLOCK_BYTES", 20_000)
    fill(bucket)
    source = SourceConfig(path=f"s3://rows/set/{name}")
    index = SourceIndex.build(source, tmp_path)
    expected = ROWS[:30] if "parquet" in name else ROWS
    found: dict[int, list[dict[str, Any]]] = {}
    for block in reversed(range(len(index.blocks))):
        found[block] = [row.columns for row in index.rows(block)]
    assert len(found) > 3
    assert [row for block in sorted(found) for row in found[block]] == expected
    assert [row.columns for row in SourceIndex.to_walk(source).walk(17)] == expected[17:]


def test_only_parts_are_fetched(bucket):
    rows = [{"a": f"{n}" * 50_000} for n in range(20)]
    content = parquet_bytes(rows, row_group_size=1, use_dictionary=False, compression="none")
    bucket.put("a.parquet", content)
    index = SourceIndex.build(SourceConfig(path="s3://rows/a.parquet"))
    del bucket.parts[:]
    assert index.rows(13)[0].columns == rows[13]
    bounds = [re.fullmatch(r"bytes=(\d+)-(\d+)", part) for part in bucket.parts]
    assert all(bounds), bucket.parts
    fetched = sum(int(x[2]) - int(x[1]) + 1 for x in bounds)
    assert 50_000 <= fetched < len(content) / 4


def test_a_server_that_fails_every_third_read(bucket, caplog):
    fill(bucket)
    bucket.fails = lambda number: None if number % 3 else (503, "cut off", 500)[number // 3 % 3]
    with caplog.at_level("INFO", logger="hone"):
        for _ in range(3):
            assert columns("s3://rows/set") == ROWS[:30] + ROWS
            assert columns("s3://rows/set/test.jsonl.gz") == ROWS
            index = SourceIndex.build(SourceConfig(path="s3://rows/set"))
            blocks = range(len(index.blocks))
            assert [row.columns for block in blocks for row in index.rows(block)] == (
                ROWS[:30] + ROWS
            )
    told = "\n".join(caplog.messages)
    assert len(bucket.parts) > 20
    assert re.search(r"s3://rows/set/train-10.jsonl at byte 0: .*; asking again", told)
    assert re.search(r"s3://rows/set/train-9.parquet at byte [\d,]+: .*; asking again", told)


def test_a_server_that_always_fails(bucket):
    fill(bucket)
    index = SourceIndex.build(SourceConfig(path="s3://rows/set/train-10.jsonl"))
    bucket.fails = lambda number: 503
    told = r"cannot read s3://rows/set/train-10.jsonl at byte 0: 5 attempts failed"
    with pytest.raises(UserError, match=told):
        index.rows(0)


def test_a_refusal_is_not_repeated(bucket):
    fill(bucket)
    index = SourceIndex.build(SourceConfig(path="s3://rows/set/train-10.jsonl"))
    bucket.fails, bucket.parts = lambda number: 403, []
    with pytest.raises(
        UserError, match=r"cannot read s3://rows/set/train-10.jsonl at byte 0: Perm"
    ):
        index.rows(0)
    assert len(bucket.parts) == 1


def test_missing_credentials_are_told_at_once(bucket, monkeypatch):
    fill(bucket)
    monkeypatch.setattr(files, "_WAITS_S", (100.0,))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match=r"cannot read s3://rows/set: .*locate credentials$"):
        columns("s3://rows/set")


def test_a_shard_that_changes_is_refused_by_name(bucket, tmp_path):
    fill(bucket)
    source = SourceConfig(path="s3://rows/set")
    index = SourceIndex.build(source, tmp_path)
    walked = SourceIndex.to_walk(source, tmp_path)
    assert walked.fingerprint == index.fingerprint
    bucket.put("set/train-10.jsonl", LINES.replace(b"question 1", b"question 2"))
    told = r"s3://rows/set/train-10.jsonl has changed since it was indexed: .* tag was"
    with pytest.raises(UserError, match=told):
        index.rows(len(index.blocks) - 1)
    with pytest.raises(UserError, match=told):
        list(walked.walk(40))
    with pytest.raises(UserError, match=told):
        SourceIndex.to_walk(source, tmp_path, must_be_same=True)
    assert SourceIndex.build(source).fingerprint != index.fingerprint
    bucket.put("set/train-10.jsonl", LINES)
    require_unchanged(index.files[-1])  # an etag is a digest of the content
