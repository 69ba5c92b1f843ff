"""The files of a run folder, what resuming cuts off, and trackers that may be missing."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hone.config.run import LogConfig
from hone.observe.loggers import RunLog
from tests.observe.fake_run import make_group

PLAIN = LogConfig(to=())


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(folder: Path, steps: range, *, resume_step: int | None = None) -> None:
    rng = np.random.default_rng(0)
    with RunLog(folder, PLAIN, resume_step=resume_step) as log:
        for step in steps:
            log.log(step, {"reward/mean": step / 10})
            log.event("alarm", step=step)
            log.samples(step, [make_group(step, 0, rng)])


@pytest.mark.parametrize("name", ["metrics", "events", "samples"])
def test_resuming_cuts_the_steps_that_come_again(tmp_path: Path, name: str) -> None:
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(5, 10), resume_step=5)
    steps = [row["step"] for row in rows(tmp_path / f"{name}.jsonl")]
    assert list(dict.fromkeys(steps)) == list(range(1, 10))
    assert steps == sorted(steps)
    per_step = 4 if name == "samples" else 1
    assert len(steps) == 9 * per_step


def test_a_fresh_run_starts_its_files_afresh(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, range(1, 2))
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    write_steps(tmp_path, range(4, 5), resume_step=4)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_each_row_is_on_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    with RunLog(tmp_path, PLAIN) as log:
        log.log(1, {"good": 1.5, "bad": float("nan"), "worse": float("-inf")})
        log.event("dump", values=[1.0, float("inf")])
        text = (tmp_path / "metrics.jsonl").read_text()
        row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (row["step"], row["good"], row["bad"], row["worse"]) == (1, 1.5, None, None)
        assert rows(tmp_path / "events.jsonl")[0]["values"] == [1.0, None]


def test_samples_are_spread_over_groups_and_complete(tmp_path: Path) -> None:
    groups = [make_group(1, index, np.random.default_rng(index)) for index in range(4)]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=4)) as log:
        log.samples(1, groups, advantages={groups[0].samples[0].id: 0.5})
        log.samples(2, [])
    written = rows(tmp_path / "samples.jsonl")
    assert [row["prompt_id"] for row in written] == [group.prompt.id for group in groups]
    assert [row["advantage"] for row in written] == [0.5, None, None, None]
    sample = groups[0].samples[0]
    assert sample.reward is not None
    first = written[0]
    assert first["token_ids"] == sample.token_ids
    assert first["logprobs"] == sample.logprobs
    assert first["weight_versions"] == sample.weight_versions
    assert first["loss_mask"] == [1] * len(sample.token_ids)
    assert first["prompt_token_ids"] == list(sample.prompt.token_ids)
    assert (first["reward"], first["reward_parts"]) == (sample.reward.total, sample.reward.parts)
    assert (first["stop_reason"], first["failure"]) == ("eos", None)


@pytest.mark.parametrize(("kept", "expected"), [(0, 0), (3, 3), (100, 8)])
def test_samples_per_step(tmp_path: Path, kept: int, expected: int) -> None:
    groups = [make_group(1, index, np.random.default_rng(index)) for index in range(2)]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=kept)) as log:
        log.samples(1, groups)
    ids = [row["id"] for row in rows(tmp_path / "samples.jsonl")]
    assert len(set(ids)) == len(ids) == expected
    failed = [row for row in rows(tmp_path / "samples.jsonl") if row["failure"]]
    assert all(row["reward"] is None and row["failure"] == "timeout" for row in failed)


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    with RunLog(tmp_path, LogConfig()) as log:
        for step in (1, 2):
            log.log(step, {"reward/mean": step / 4})
    accumulator = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = accumulator.Scalars("reward/mean")
    assert [(event.step, event.value) for event in scalars] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_tracker_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    cfg = LogConfig.model_validate({"to": [name]})
    with pytest.raises(ValueError, match=rf"{name} in log.to needs .*hone-rl\[{name}\]"):
        RunLog(tmp_path, cfg)


class FakeTracker(ModuleType):
    """Has the calls of Weights & Biases, Trackio and MLflow that the loggers make."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.settings: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **settings: Any) -> "FakeTracker":
        self.settings.append(settings)
        return self

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self.rows.append((step, scalars))

    def log_metrics(self, scalars: dict[str, float], *, step: int) -> None:
        self.rows.append((step, scalars))

    def finish(self) -> None:
        self.finished += 1

    end_run = finish

    def set_experiment(self, name: str) -> None:
        self.settings.append({"project": name})

    def start_run(self, *, run_name: str) -> None:
        self.settings[-1]["name"] = run_name

    def log_dict(self, values: dict[str, Any], path: str) -> None:
        self.settings[-1]["config"] = values


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_trackers_get_rows_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tracker = FakeTracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    cfg = LogConfig.model_validate({"to": [name], "project": "sums"})
    with RunLog(tmp_path, cfg, config={"run": {"seed": 3}}) as log:
        log.log(4, {"eval/pass@1": 0.5})
        log.event("checkpoint", step=4)
    metric = "eval/pass_at_1" if name == "mlflow" else "eval/pass@1"
    assert tracker.rows == [(4, {metric: 0.5})]
    settings = tracker.settings[0]
    assert (settings["project"], settings["name"]) == ("sums", tmp_path.name)
    assert settings["config"] == {"run": {"seed": 3}}
    assert tracker.finished == 1


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    cfg = LogConfig(to=("wandb",))
    for resume_step in (None, 3, None):
        RunLog(tmp_path, cfg, resume_step=resume_step).close()
    first, resumed, fresh = (settings["id"] for settings in tracker.settings)
    assert first == resumed != fresh
