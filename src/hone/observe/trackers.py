"""Experiment trackers: TensorBoard, Weights & Biases, Trackio, MLflow.

    trackers = start_trackers(cfg.log, run_dir, resume_step=None, config={...})
    for tracker in trackers:
        tracker.log(step, scalars)
        tracker.samples(step, "train", rows, histograms)

Each receives the metrics, a table of sample groups, and histograms if it can draw them. A resumed
run continues the same run in the tracker.
"""

from __future__ import annotations

import csv
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from hone.config.run import LogConfig
from hone.errors import UserError
from hone.extras import import_extra
from hone.observe.differences import flat
from hone.observe.disk import AppendedFile
from hone.observe.histogram import Histogram
from hone.observe.whole_file import write_whole

__all__ = ["TensorBoardTracker", "Tracker", "start_trackers"]

Rows = Sequence[Mapping[str, Any]]
"""Rows of samples as in `samples.jsonl`."""


class Tracker(Protocol):
    """A destination in addition to the run folder. Events are written to the run folder only."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def samples(
        self, step: int, split: str, rows: Rows, histograms: Mapping[str, Histogram]
    ) -> None:
        """Record some of a step's samples, group by group, and histograms of all of them. `split`
        is `train` or `eval`."""
        ...

    def close(self) -> None:
        """Flush and close. The tracker is not used afterwards."""
        ...


def start_trackers(
    cfg: LogConfig, run_dir: Path, *, resume_step: int | None, config: Mapping[str, Any]
) -> Sequence[Tracker]:
    """Start the trackers of `log.to`.

    `config` is the resolved configuration, `resume_step` the first step that will be computed, or
    None. Raises UserError if a package is missing or broken, or a tracker cannot start.
    """
    settings: dict[str, Any] = {
        "project": cfg.project,
        "name": run_dir.name,
        "config": dict(config),
    }
    started: list[Tracker] = []
    for name in dict.fromkeys(cfg.to):
        match name:
            case "tensorboard":
                started.append(TensorBoardTracker(run_dir, resume_step))
            case "wandb":
                started.append(_wandb(run_dir, resume_step, **settings))
            case "trackio":
                started.append(_trackio(resume_step, **settings))
            case "mlflow":
                started.append(MLflowTracker(run_dir, resume_step, **settings))
    return started


def sample_table(rows: Rows) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table of samples for comparison within a group, with a column per
    reward function. Values of a column have one type or are None."""
    functions = list(dict.fromkeys(name for row in rows for name in row["reward_parts"]))
    plain = ["prompt_id", "index", "prompt", "text", "answer", "reward", "advantage"]
    last = ["num_tokens", "stop_reason", "failure"]
    columns = [*plain, *(f"reward/{name}" for name in functions), *last]
    values = [
        [
            *(row.get(name) for name in plain),
            *(row["reward_parts"].get(name) for name in functions),
            *(row[name] for name in last),
        ]
        for row in rows
    ]
    return columns, values


class TensorBoardTracker:
    """A TensorBoard event file in `<run_dir>/tensorboard`.

    TensorBoard's own writer is not used: on a full disk its thread prints a traceback and the error
    is lost.
    """

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        records = import_extra(
            "tensorboard",
            module="tensorboard.summary.writer.record_writer",
            needed_by="tensorboard in log.to",
        )
        self._event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._make: Any = import_module("torch.utils.tensorboard.summary")
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(run_dir / "tensorboard" / name, "run.dir")
        self._records = records.RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if resume_step is not None:  # hides what earlier launches wrote of these steps
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._write(step=resume_step, session_log=start)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._write(step=step, summary=self._make.scalar(name, value))

    def samples(
        self, step: int, split: str, rows: Rows, histograms: Mapping[str, Histogram]
    ) -> None:
        for name, held in histograms.items():
            edges, counts = held.edges.tolist(), held.counts
            middles = [(low + high) / 2 for low, high in pairwise(edges)]
            weighted = list(zip(counts, middles, strict=True))
            summary = self._make.histogram_raw(
                f"{split}/{name}",
                min=held.low,
                max=held.high,
                num=sum(counts),
                sum=sum(count * middle for count, middle in weighted),
                sum_squares=sum(count * middle**2 for count, middle in weighted),
                bucket_limits=edges[1:],
                bucket_counts=counts,
            )
            self._write(step=step, summary=summary)
        if rows:
            self._write(step=step, summary=self._make.text(f"{split}/samples", _markdown(rows)))

    def _write(self, **fields: Any) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


def _markdown(rows: Rows) -> str:
    """A Markdown table of samples, for TensorBoard's text page."""
    columns, values = sample_table(rows)
    lines = [columns, ["---"] * len(columns), *values]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    for mark, replacement in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(mark, replacement)
    return text


class WandbTracker:
    """Weights & Biases, or Trackio, whose API is the same."""

    def __init__(self, package: Any, run: Any) -> None:
        self._package, self._run = package, run

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def samples(
        self, step: int, split: str, rows: Rows, histograms: Mapping[str, Histogram]
    ) -> None:
        held: dict[str, Any] = {
            f"{split}/{name}": self._package.Histogram(np_histogram=(found.counts, found.edges))
            for name, found in histograms.items()
        }
        if rows:
            columns, data = sample_table(rows)
            held[f"{split}/samples"] = self._package.Table(columns=columns, data=data)
        if held:
            self._run.log(held, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb(run_dir: Path, resume_step: int | None, **settings: Any) -> WandbTracker:
    """Start Weights & Biases. A resumed run continues under the id in the run folder."""
    wandb = _import_tracker("wandb")
    id_file = run_dir / "wandb_id.txt"
    if resume_step is None or not id_file.exists():
        write_whole(id_file, uuid.uuid4().hex, "run.dir")
    run_id = id_file.read_text()
    try:
        run = wandb.init(id=run_id, resume="allow", dir=str(run_dir), **settings)
    except wandb.Error as error:
        raise UserError(
            f"wandb in log.to cannot start: {error} Or set WANDB_MODE=offline in the "
            "environment; `wandb sync` brings up the records later."
        ) from error
    return WandbTracker(wandb, run)


def _trackio(resume_step: int | None, **settings: Any) -> WandbTracker:
    """Start Trackio. A resumed run continues under its name."""
    trackio = _import_tracker("trackio")
    resume = "never" if resume_step is None else "allow"
    return WandbTracker(trackio, trackio.init(resume=resume, **settings))


_MLFLOW_PARAM_CHARS = 500


class MLflowTracker:
    """An MLflow run in the experiment `project`, without histograms. A resumed run continues under
    the id in the run folder."""

    def __init__(
        self,
        run_dir: Path,
        resume_step: int | None,
        *,
        project: str,
        name: str,
        config: Mapping[str, Any],
    ) -> None:
        self._mlflow = _import_tracker("mlflow")
        id_file = run_dir / "mlflow_id.txt"
        known = id_file.read_text() if resume_step is not None and id_file.exists() else None
        try:
            self._mlflow.set_experiment(project)
            run = self._mlflow.start_run(run_id=known, run_name=None if known else name)
        except self._mlflow.exceptions.MlflowException as error:
            raise UserError(
                f"mlflow in log.to cannot start: {error}. MLFLOW_TRACKING_URI in the environment "
                "names the server, or a local store such as sqlite:///mlflow.db."
            ) from error
        write_whole(id_file, run.info.run_id, "run.dir")
        if known is None:
            params = {key: value[:_MLFLOW_PARAM_CHARS] for key, value in flat(config).items()}
            self._mlflow.log_params(params)
        self._mlflow.log_dict(config, "config.json")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # MLflow allows only letters, digits and "_-. /:" in names, so not pass@1.
        rows = {_mlflow_name(name): value for name, value in scalars.items()}
        self._mlflow.log_metrics(rows, step=step)

    def samples(
        self, step: int, split: str, rows: Rows, histograms: Mapping[str, Histogram]
    ) -> None:
        del histograms
        if rows:
            # Not `log_table`, which fails at the length limit of a tag after some hundred calls.
            # MLflow's pages show CSV as a table.
            columns, data = sample_table(rows)
            text = StringIO()
            csv.writer(text).writerows([columns, *data])
            self._mlflow.log_text(text.getvalue(), f"samples/{split}/step_{step:06d}.csv")

    def close(self) -> None:
        self._mlflow.end_run()


def _import_tracker(name: str) -> Any:
    return import_extra(name, needed_by=f"{name} in log.to")


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", name.replace("@", "_at_"))
