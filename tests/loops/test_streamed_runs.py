"""Runs over sources that are read while they are drawn from: the same rows however often a run is
started, on one process or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tiny_runs import lines

from hone.data.arithmetic import generate
from hone.errors import UserError
from hone.loops import reinforce


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """Sums in three files of small row groups, some of which are too long."""
    (folder := tmp_path / "sums").mkdir()
    rows = generate(90, seed=1, low=0, high=99)
    for number in range(3):
        table = pa.Table.from_pylist(rows[30 * number : 30 * number + 30])
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=7)
    return {
        "train": [{"path": str(folder)}],
        "eval": [],
        "eval_fraction": 0.2,
        "max_eval_rows": 6,
        "shuffle_window": 20,
        "max_prompt_tokens": 5,
    }


@pytest.fixture
def filtered(data: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The same, with rows that come twice, rows without an answer, and rows that a function leaves
    out."""
    rows = generate(90, seed=1, low=0, high=99)[20:50]
    blank = [{**row, "answer": None} for row in rows[:8]]
    table = pa.Table.from_pylist([*rows, *blank])
    pq.write_table(table, folder_of(data) / "3.parquet", row_group_size=7)
    (tmp_path / "rules.py").write_text("def keep(row):\n    return row['prompt'][0] != '4'\n")
    filters = {
        "missing_answers": "drop",
        "duplicates": "drop",
        "filter": f"{tmp_path}/rules.py:keep",
    }
    return {**data, **filters}


def folder_of(data: dict[str, Any]) -> Path:
    return Path(data["train"][0]["path"])


def test_R18_a_run_goes_on_at_its_row(
    make_config: MakeConfig, tmp_path: Path, data: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {
        "data": data,
        "log": {"samples_per_step": 99},
        "checkpoint": {"every_n_steps": 1},
        "eval": {"every_n_steps": 1},
    }
    whole = make_config(run={"dir": tmp_path / "whole", "steps": 4}, **sections)
    reinforce.run(whole)
    for steps in (1, 3, 4):
        reinforce.run(make_config(run={"dir": tmp_path / "parts", "steps": steps}, **sections))
    assert_same_run(whole.run.dir, tmp_path / "parts")
    (*_, last) = lines(whole.run.dir / "metrics.jsonl")
    assert (
        last["data/rows_read"] == 16 + last["data/skipped_too_long"] + last["data/skipped_held_out"]
    )
    assert last["data/skipped_too_long"] > 0
    drawn: dict[str, set[str]] = {"train": set(), "eval": set()}
    for row in lines(whole.run.dir / "samples.jsonl"):
        drawn[row["split"]].add(row["prompt_id"])
    assert 0 < len(drawn["eval"]) <= 6
    assert not drawn["eval"] & drawn["train"]


def test_a_run_does_not_go_on_with_other_rows(
    make_config: MakeConfig, tmp_path: Path, data: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {"data": data, "checkpoint": {"every_n_steps": 1}}
    reinforce.run(make_config(run={"dir": tmp_path / "run", "steps": 1}, **sections))
    table = pa.Table.from_pylist(generate(30, seed=9, low=0, high=99))
    pq.write_table(table, folder_of(data) / "2.parquet", row_group_size=7)
    with pytest.raises(UserError, match="belongs to other data"):
        reinforce.run(make_config(run={"dir": tmp_path / "run", "steps": 2}, **sections))


def test_a_run_with_filters_goes_on_at_its_row(
    make_config: MakeConfig, tmp_path: Path, filtered: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {
        "data": {**filtered, "max_prompt_tokens": 6, "shuffle_window": 200},
        "log": {"samples_per_step": 99},
        "checkpoint": {"every_n_steps": 1},
    }
    whole = make_config(run={"dir": tmp_path / "whole", "steps": 8}, **sections)
    reinforce.run(whole)
    for steps in (1, 2, 6, 8):
        reinforce.run(make_config(run={"dir": tmp_path / "parts", "steps": steps}, **sections))
    assert_same_run(whole.run.dir, tmp_path / "parts")
    (*_, last) = lines(whole.run.dir / "metrics.jsonl")
    reasons = {key.removeprefix("data/skipped_") for key in last if "data/skipped_" in key}
    assert {"filter", "missing_answer", "duplicate"} <= reasons
    skipped = sum(number for key, number in last.items() if key.startswith("data/skipped_"))
    assert last["data/rows_read"] == 32 + skipped
    drawn = [row["prompt"] for row in lines(whole.run.dir / "samples.jsonl")]
    assert len({*drawn}) == 32
    assert not any(prompt.startswith("4") for prompt in drawn)


@pytest.mark.slow
def test_R18_two_processes_draw_what_one_does(
    make_config: MakeConfig, tmp_path: Path, filtered: dict[str, Any]
) -> None:
    sections: dict[str, Any] = {
        "data": filtered,
        "log": {"samples_per_step": 99},
        "checkpoint": {"every_n_steps": 1},
        "trainer": {"optimizer": {"lr": 1e-3}, "logits_chunk_tokens": 64},
    }
    one = make_config(run={"dir": tmp_path / "one", "steps": 4}, **sections)
    reinforce.run(one)
    first = make_config(run={"dir": tmp_path / "two", "steps": 2}, **sections)
    run_hone("rl", first, tmp_path, "--nproc=2")
    reinforce.run(make_config(run={"dir": tmp_path / "two", "steps": 4}, **sections))
    assert_same_run(one.run.dir, tmp_path / "two")
