"""Reading rows: every format, every mistake."""

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hone.data import blocks, tables
from hone.data.rows import parse_json
from hone.data.settings import SourceConfig
from hone.data.sources import SourceRow, read_source, shorten, source_names
from hone.errors import UserError
from tests.data.support import write_rows
from tests.tables import table

ROWS = [{"prompt": f"question {i}", "answer": str(i), "extra": {"n": i}} for i in range(5)]


def columns(path, **settings):
    return [row.columns for row in read_source(SourceConfig(path=str(path), **settings))]


# --------------------------------------------------------------------------- formats


def test_jsonl_rows_carry_their_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n  \n{"a": "\u2028 is no line end"}')
    rows = read_source(SourceConfig(path=str(path)))
    assert rows == [
        SourceRow({"a": 1}, f"{path}, line 1", tmp_path),
        SourceRow({"a": "\u2028 is no line end"}, f"{path}, line 4", tmp_path),
    ]


def test_json_may_be_an_array_or_lines(tmp_path):
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=1))
    write_rows(tmp_path / "lines.json", ROWS)
    assert columns(tmp_path / "array.json") == columns(tmp_path / "lines.json") == ROWS


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)
    rows = read_source(SourceConfig(path=str(path)))
    assert [row.columns for row in rows] == ROWS
    assert rows[3].location == f"{path}, row 4"


def test_max_rows_reads_no_further(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\nnot json')
    assert columns(path, max_rows=2) == [{"a": 1}, {"a": 2}]


def test_folder_is_read_in_order_of_names(tmp_path):
    write_rows(tmp_path / "b.jsonl", ROWS[2:])
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:2]))
    (tmp_path / "README.md").write_text("no data")
    assert columns(tmp_path) == ROWS


@table("name", ["train.jsonl", "train-00000-of-00001.jsonl", "train_0.jsonl"])
def test_folder_with_splits_gives_one_of_them(tmp_path, name):
    write_rows(tmp_path / name, ROWS[:3])
    write_rows(tmp_path / "test.jsonl", ROWS[3:])
    assert columns(tmp_path) == ROWS[:3]
    assert columns(tmp_path, split="test") == ROWS[3:]
    with pytest.raises(UserError, match=r"no file for the split 'dev'; found: .*test.jsonl"):
        columns(tmp_path, split="dev")


def test_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "both")
    assert columns(tmp_path / "one", split="whatever") == ROWS
    assert columns(tmp_path / "both", split="test") == ROWS[1:2]
    assert read_source(SourceConfig(path=str(tmp_path / "one")))[1].location.endswith("one, row 2")
    with pytest.raises(UserError, match="no split 'dev'; found: train, test"):
        columns(tmp_path / "both", split="dev")


def test_hub_names_go_to_the_datasets_library(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, subset, split):
        asked.append((path, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert columns("openai/gsm8k", subset="main", split="test") == ROWS
    assert asked == [("openai/gsm8k", "main", "test")]


def test_names_are_short_and_unique():
    paths = ["a/train.jsonl", "b/train.jsonl", "openai/gsm8k", "data/", "c/train.parquet"]
    names = source_names([SourceConfig(path=path) for path in paths])
    assert names == ["train", "train~2", "gsm8k", "data", "train~3"]


def test_a_file_may_have_the_name_that_a_repeated_one_would_get():
    paths = ["a/x.jsonl", "b/x.jsonl", "x~2.jsonl", "x~2~2.jsonl", "c/x.jsonl"]
    names = source_names([SourceConfig(path=path) for path in paths])
    assert names == ["x", "x~2", "x~2~2", "x~2~2~2", "x~3"]


# --------------------------------------------------------------------------- mistakes (R22)

BAD_FILES = {
    "not json": ("a.jsonl", b'{"a": 1}\n{"a" 2}\n', r"a.jsonl, line 2: not valid JSON .*\"a\" 2"),
    "after a blank line": ("a.jsonl", b'{"a": 1}\n\n\noops\n', r"a.jsonl, line 4: .*near: oops"),
    "cut off": ("a.jsonl", b'{"a": 1}\n{"a": [1, 2', r"a.jsonl, line 2: not valid JSON"),
    "ends early": (
        "a.jsonl",
        b'{"a": [1, 2\n{"a": 1}\n',
        r"a.jsonl, line 1: not valid JSON \([^)]* at column 12\)",
    ),
    "an array in lines": (
        "a.jsonl",
        b'[\n {"a": 1}\n]\n',
        r"not valid JSON .* ends in .json: rename",
    ),
    "a list": ("a.jsonl", b'{"a": 1}\n[1, 2]\n', r"a.jsonl, line 2: a row must be .* list: \[1, 2"),
    "a number": ("a.json", b'[{"a": 1}, {"a": 2}, 7]', r"a.json, row 3: .* got int: 7"),
    "array cut off": (
        "a.json",
        b'[{"a": 1},\n{"a": 2',
        r"a.json: not valid JSON .* line 2, column",
    ),
    "not text": ("a.jsonl", b'{"a": 1}\n{"a": "\xff\xfe"}\n', r"a.jsonl, line 2: not UTF-8"),
    "no parquet": ("a.parquet", b"PAR1 or not", r"cannot read .*a.parquet as Parquet"),
    "empty": ("a.jsonl", b"", r"a.jsonl holds no rows"),
    "only blanks": ("a.jsonl", b"\n \n", r"a.jsonl holds no rows"),
    "empty array": ("a.json", b"[]", r"a.json holds no rows"),
    "other format": ("a.csv", b"a,b\n1,2\n", r"suffix must be one of .jsonl, .json, .parquet"),
}


def check_bad_file(folder, case):
    name, content, message = BAD_FILES[case]
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        columns(folder / name)
    assert re.search(message, str(caught.value)), str(caught.value)


@table("case", BAD_FILES)
def test_R22_a_bad_file_names_the_place(tmp_path, case):
    check_bad_file(tmp_path, case)


def test_R22_planted_counting_without_blank_lines_turns_red(tmp_path, monkeypatch):
    def skips_blanks(self, on_bad=None):
        path = Path(self.file.name)
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        for number, line in enumerate(lines, start=1):
            location = f"{path}, line {number}"
            yield SourceRow(parse_json(line, location), location)

    monkeypatch.setattr(blocks.LineBlocks, "walk", skips_blanks)
    with pytest.raises(AssertionError):
        check_bad_file(tmp_path, "after a blank line")


def test_long_rows_are_shown_shortened(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "' + "x" * 10_000 + '" oops}')
    with pytest.raises(UserError) as caught:
        columns(path)
    assert len(str(caught.value)) < 300 + len(str(path))
    assert "oops" in str(caught.value)
    assert shorten("a\n  b" + "c" * 100, 10) == "a bcccc..."


@table("path", ["nowhere.jsonl", "./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c"])
def test_missing_files_are_not_looked_for_on_the_hub(path):
    with pytest.raises(UserError, match="no such file or folder: "):
        columns(path)


def test_folder_without_data(tmp_path):
    with pytest.raises(UserError, match=r"holds no .jsonl, .json, .parquet, .* files"):
        columns(tmp_path)


# --------------------------------------------------------------------------- the optional library


def test_datasets_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no such file .* pip install 'datasets>=4\.7,<6'"):
        columns("openai/gsm8k")


def test_a_folder_called_datasets_is_not_the_library(tmp_path, monkeypatch):
    (tmp_path / "datasets").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="is not installed"):
        columns("openai/gsm8k")


def test_datasets_installed_but_broken(tmp_path, monkeypatch):
    (tmp_path / "datasets.py").write_text("import a_module_that_is_missing")
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"is installed but broken: .*a_module_that_is_missing"):
        columns("openai/gsm8k")


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("Unknown split")])
def test_hub_failures_are_told(monkeypatch, error):
    datasets = pytest.importorskip("datasets")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(tables, "unreachable", lambda: None)
    with pytest.raises(UserError, match=f"no local file or folder.* from the hub failed: {error}"):
        columns("no-one/nothing")


def test_files_need_no_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_import_datasets", lambda: pytest.fail("imported"))
    assert columns(write_rows(tmp_path / "a.jsonl", ROWS)) == ROWS
