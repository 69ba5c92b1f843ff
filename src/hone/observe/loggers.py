"""Where metrics, events and samples go. Everything lands in the run folder first.

    with RunLog(run_dir, cfg.log, resume_step=start) as log:
        log.log(step, to_scalars(metrics))
        log.event("alarm", step=step, metric="train/grad_norm")
        log.samples(step, groups)

The run folder holds `metrics.jsonl` (one row a step), `events.jsonl` and `samples.jsonl`; each row
is written and flushed at once, so that a killed run keeps every finished step. When a run resumes
at step s, rows of steps >= s are cut off: they are about to be computed again.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from hone.config.extras import import_extra
from hone.config.run import LogConfig
from hone.observe.disk import AppendedFile, writing
from hone.observe.whole_file import whole_file
from hone.types import Group, Sample

__all__ = ["RunLog", "TensorBoardLogger", "append_event", "json_line", "sample_row"]


class Tracker(Protocol):
    """A destination of scalars besides the run folder; events and samples stay there."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and release; the tracker is not used afterwards."""
        ...


_KEY = "run.dir"


class _JsonLines:
    """An append-only file of JSON rows; opening it cuts off the steps that are computed again."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        if path.exists():
            with writing(path, _KEY):
                _cut(path, resume_step)
        self._file = AppendedFile(path, _KEY)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json_line(row))

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, resume_step: int | None) -> None:
    """Keep the rows of steps < `resume_step`, atomically. None keeps nothing.

    A row without a step stays; a torn last line (the process died while writing) goes.
    """
    with whole_file(path) as kept, path.open(encoding="utf-8", errors="replace") as rows:
        for line in rows:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if resume_step is not None and row.get("step", -1) < resume_step:
                kept.write(line if line.endswith("\n") else line + "\n")


def json_line(row: Mapping[str, Any]) -> bytes:
    """A row of a JSONL file, with its end of line."""
    text = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode(errors="backslashreplace")


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(held) for key, held in value.items()}
        case list() | tuple():
            return [_finite(held) for held in value]
        case _:
            return value


def append_event(run_dir: Path, kind: str, **fields: Any) -> None:
    """Add an event to a run folder whose log is closed, or was never opened.

    Raises DiskError where it cannot be written.
    """
    events = AppendedFile(run_dir / "events.jsonl", _KEY)
    events.write(json_line(_event(kind, fields)))
    events.close()


def _event(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "timestamp_s": time.time(), **fields}


class TensorBoardLogger:
    """A TensorBoard event file in `<run_dir>/tensorboard`.

    Written here, and not by TensorBoard's own writer, whose thread prints a traceback where the
    disk is full and loses the error.
    """

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        records = import_extra(
            "tensorboard",
            module="tensorboard.summary.writer.record_writer",
            needed_by="tensorboard in log.to",
        )
        self._event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(run_dir / "tensorboard" / name, _KEY)
        self._records = records.RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if resume_step is not None:  # what earlier launches wrote of these steps is not shown
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=resume_step, session_log=start)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()
        ]
        self._write(step=step, summary=self._summary(value=values))

    def _write(self, **fields: Any) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


class _WandbLogger:
    """Weights & Biases, or Trackio, which has the same calls."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb(run_dir: Path, resume_step: int | None, **settings: Any) -> _WandbLogger:
    """A resumed run goes on under the id kept in the run folder."""
    id_file = run_dir / "wandb_id.txt"
    if resume_step is None or not id_file.exists():
        id_file.write_text(uuid.uuid4().hex)
    run_id = id_file.read_text()
    init = _import_tracker("wandb").init
    return _WandbLogger(init(id=run_id, resume="allow", dir=str(run_dir), **settings))


def _trackio(resume_step: int | None, **settings: Any) -> _WandbLogger:
    """A resumed run goes on under its name."""
    resume = "never" if resume_step is None else "allow"
    return _WandbLogger(_import_tracker("trackio").init(resume=resume, **settings))


class _MLflowLogger:
    """An MLflow run in the experiment `project`."""

    def __init__(self, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._mlflow = _import_tracker("mlflow")
        self._mlflow.set_experiment(project)
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_dict(config, "config.json")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # MLflow names may hold letters, digits, and "_-. /:" only: pass@1 is not one.
        rows = {name.replace("@", "_at_"): value for name, value in scalars.items()}
        self._mlflow.log_metrics(rows, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _import_tracker(name: str) -> Any:
    return import_extra(name, needed_by=f"{name} in log.to")


class RunLog:
    """The files of a run folder, and the trackers that are switched on.

    `resume_step` is the first step that will be computed; None starts the folder's files afresh.
    `config` is the resolved configuration, shown by trackers. Raises UserError where a tracker is
    switched on whose package is missing or broken.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: LogConfig,
        *,
        resume_step: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._trackers: list[Tracker] = []
        settings: dict[str, Any] = {
            "project": cfg.project,
            "name": run_dir.name,
            "config": dict(config or {}),
        }
        self._metrics, self._events, self._samples = (
            _JsonLines(run_dir / f"{name}.jsonl", resume_step)
            for name in ("metrics", "events", "samples")
        )
        if "tensorboard" in cfg.to:
            self._trackers.append(TensorBoardLogger(run_dir, resume_step))
        if "wandb" in cfg.to:
            self._trackers.append(_wandb(run_dir, resume_step, **settings))
        if "trackio" in cfg.to:
            self._trackers.append(_trackio(resume_step, **settings))
        if "mlflow" in cfg.to:
            self._trackers.append(_MLflowLogger(**settings))
        self._samples_per_step = cfg.samples_per_step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        self._metrics.write({"step": step, "timestamp_s": time.time(), **scalars})
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def event(self, kind: str, **fields: Any) -> None:
        """Record something that happened: an alarm, a drop, a checkpoint."""
        self._events.write(_event(kind, fields))

    def samples(
        self,
        step: int,
        groups: Sequence[Group],
        *,
        advantages: Mapping[str, float] | None = None,
        split: str = "train",
        failed_first: bool = False,
    ) -> None:
        """Write `log.samples_per_step` samples, spread evenly over the step's groups; with
        `failed_first` others only where fewer have failed.

        `advantages` maps sample ids to the advantage each was trained with.
        """
        failed: list[Sample] = []
        others: list[Sample] = []
        for sample in (sample for group in groups for sample in group.samples):
            (failed if failed_first and sample.failure is not None else others).append(sample)
        chosen = _spread(failed, self._samples_per_step)
        for sample in chosen + _spread(others, self._samples_per_step - len(chosen)):
            row = {"step": step, "split": split, **sample_row(sample)}
            if advantages is not None:
                row["advantage"] = advantages.get(sample.id)
            self._samples.write(row)

    def close(self) -> None:
        """Flush and release all of them."""
        for destination in (self._metrics, self._events, self._samples, *self._trackers):
            destination.close()


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most `count` of them, evenly."""
    count = min(count, len(samples))
    return [samples[position * len(samples) // count] for position in range(count)]


def sample_row(sample: Sample) -> dict[str, Any]:
    """Everything needed to find a sample again and to recompute its metrics, ready for JSON."""
    return {
        "id": sample.id,
        "prompt_id": sample.prompt.id,
        "task": sample.prompt.task,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "text": sample.text,
        "prompt_token_ids": list(sample.prompt.token_ids),
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "weight_versions": sample.weight_versions,
        "loss_mask": [int(trained) for trained in sample.loss_mask],
        "stop_reason": str(sample.stop_reason),
        "reward": None if sample.reward is None else sample.reward.total,
        "reward_parts": {} if sample.reward is None else dict(sample.reward.parts),
        "failure": None if sample.failure is None else str(sample.failure),
        "failure_detail": sample.failure_detail,
    }
