"""Trackers get metrics, tables of groups and histograms. Each is tried for real where it is
installed, without a network."""

import csv
import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hone.config.run import LogConfig
from hone.observe.loggers import RunLog
from hone.types import Group
from tests.observe.fake_run import make_group

NAMES = ["tensorboard", "wandb", "mlflow", "trackio"]


def groups_of(step: int) -> list[Group]:
    return [make_group(step, index, np.random.default_rng(index)) for index in range(3)]


def write(
    folder: Path, name: str, steps: range, *, resume_step: int | None = None, **more: float
) -> None:
    cfg = LogConfig.model_validate({"to": [name], "project": "sums", "samples_per_step": 8})
    config = {"run": {"seed": 3}, "data": {"train": [{"path": "a.jsonl"}]}}
    with RunLog(folder, cfg, resume_step=resume_step, config=config) as log:
        for step in steps:
            log.samples(step, groups_of(step), split="eval")  # as a run does it
            log.log(step, {"reward/mean": step / 4, "eval/pass@1": 0.5, **more})
            log.samples(step, groups_of(step), advantages={})
            log.event("checkpoint", step=step)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_missing_tracker_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    cfg = LogConfig.model_validate({"to": [name]})
    with pytest.raises(ValueError, match=rf"{name} in log.to needs .*pip install '{name}>="):
        RunLog(tmp_path, cfg)


def test_tensorboard_has_scalars_samples_and_histograms(tmp_path: Path) -> None:
    write(tmp_path, "tensorboard", range(1, 4))
    write(tmp_path, "tensorboard", range(3, 5), resume_step=3)
    sizes = {"histograms": 0, "tensors": 0}
    held = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance=sizes).Reload()
    scalars = held.Scalars("reward/mean")
    assert [(event.step, event.value) for event in scalars] == [(n, n / 4) for n in range(1, 5)]
    for split in ("train", "eval"):
        found = held.Histograms(f"{split}/reward")[-1]
        assert (found.step, found.histogram_value.num) == (4, 11), "one of 12 samples has failed"
        assert held.Histograms(f"{split}/completion_tokens")[-1].histogram_value.num == 12
        (table,) = held.Tensors(f"{split}/samples/text_summary")[-1].tensor_proto.string_val
        assert table.decode().count("\n| gsm8k:") == 8
        assert "| reward/correct | reward/format |" in table.decode()
        assert b"&lt;think>" in table, "what models write is no HTML"


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """What a `.wandb` file holds: LevelDB's log format behind 7 bytes of its own."""
    position, whole = 7, b""
    while position + 7 <= len(data):
        if (left := -position % 32768) and left < 7:  # no header fits into the rest of a block
            position += left
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last of several parts
            yield whole
            whole = b""


def wandb_history(folder: Path, proto: Any) -> list[tuple[str, dict[str, Any]]]:
    """Run id and row of what was logged, run by run."""
    seen: list[tuple[str, dict[str, Any]]] = []
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        run_id = ""
        for data in leveldb_records(file.read_bytes()):
            record = proto.Record.FromString(data)
            if record.HasField("run"):
                run_id = record.run.run_id
                assert record.run.project == "sums"
            if record.HasField("history"):
                items = record.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                seen.append((run_id, row))
    return seen


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, "wandb", range(1, 3), late=math.inf)
    write(tmp_path, "wandb", range(2, 4), resume_step=2)
    seen = wandb_history(tmp_path, proto)
    deadline = time.monotonic() + 120
    while max(row["_step"] for _, row in seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)  # a process of its own writes the file
        seen = wandb_history(tmp_path, proto)
    assert len({run_id for run_id, _ in seen}) == 1, "a resumed run keeps its id"
    last = max((row for _, row in seen), key=lambda row: row["_step"])
    assert (last["_step"], last["reward/mean"]) == (3, 0.75)
    for split in ("train", "eval"):
        assert last[f"{split}/samples/_type"] == "table-file"
        assert last[f"{split}/samples/nrows"] == 8
        assert sum(last[f"{split}/reward/values"]) == 11


def test_trackio_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    for module in [held for key, held in sys.modules.items() if key.startswith("trackio")]:
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    folder = tmp_path / "run"
    write(folder, "trackio", range(1, 3))
    write(folder, "trackio", range(3, 4), resume_step=3)
    rows: list[Mapping[str, Any]] = storage.SQLiteStorage.get_logs("sums", "run")
    assert [row["reward/mean"] for row in rows if "reward/mean" in row] == [0.25, 0.5, 0.75]
    tables = [row["train/samples"] for row in rows if "train/samples" in row]
    assert len(tables) == 3
    assert tables[0]["_type"] == "trackio.table"
    assert sum("train/reward" in row for row in rows) == 3


def test_mlflow_with_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    write(tmp_path / "run", "mlflow", range(1, 3))
    write(tmp_path / "run", "mlflow", range(3, 4), resume_step=3)
    (run,) = mlflow.search_runs(experiment_names=["sums"], output_format="list")
    assert (run.info.run_name, run.data.params["data.train.0.path"]) == ("run", "a.jsonl")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.data.metrics["eval/pass_at_1"] == 0.5
    artifact = f"runs:/{run.info.run_id}/samples/train/step_000003.csv"
    table = list(csv.DictReader(mlflow.artifacts.load_text(artifact).splitlines()))
    assert len(table) == 8
    assert {row["reward/correct"] for row in table} <= {"0.0", "1.0", ""}


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("wandb", {"WANDB_MODE": "online"}),
        (
            "mlflow",
            {
                "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            },
        ),
    ],
)
def test_a_tracker_that_cannot_start_says_what_to_do(
    tmp_path: Path, name: str, variables: dict[str, str]
) -> None:
    """W&B without a key, MLflow without a server: in a process that has not used them before."""
    pytest.importorskip(name)
    script = (
        "import sys; from pathlib import Path; from hone.config.run import LogConfig\n"
        "from hone.observe.loggers import RunLog\n"
        f"RunLog(Path(sys.argv[1]), LogConfig(to=({name!r},)))"
    )
    known = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=tmp_path,
        env=known | {"HOME": str(tmp_path)} | variables,  # where nobody has logged in
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr[done.stderr.index("UserError: ") :]
    assert f"{name} in log.to cannot start: " in last
    assert ("WANDB_MODE=offline" if name == "wandb" else "MLFLOW_TRACKING_URI") in last
