"""Reading a run back: whatever is there, of one that ends, goes on, or died.

A run is a folder: of training, of `hone eval`, or of both; or the JSONL file that `hone generate`
has written.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hone.errors import UserError
from hone.paths import settings_file

__all__ = [
    "CONFIG",
    "ENVIRONMENT",
    "EVAL_CONFIG",
    "EVAL_ENVIRONMENT",
    "EVAL_METRICS",
    "EVAL_SAMPLES",
    "LOCK",
    "MANIFEST_NAME",
    "METRICS",
    "Kind",
    "RunFolder",
    "is_locked",
    "read_config",
    "sample_files",
    "training_command",
]

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.json"
EVAL_CONFIG = "eval_config.yaml"
EVAL_METRICS = "eval.json"
EVAL_ENVIRONMENT = "eval_environment.json"
EVAL_SAMPLES = "eval_samples.jsonl"
"""Those of `hone eval`, whose folder may be that of a training run."""
MANIFEST_NAME = "hone_manifest.json"
"""Of a checkpoint or a model, what makes its folder whole."""
LOCK = ".lock"
"""A run holds a lock on this file of its folder as long as it is at work."""
_EVAL_FILES = (EVAL_CONFIG, EVAL_METRICS, EVAL_SAMPLES)
_FILES = (CONFIG, METRICS, "events.jsonl", *_EVAL_FILES)
"""What a folder is known by as one of a run: it has one of them."""

_LANES_BYTES = 1 << 20
"""Of the file's end that are read."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML was built with it: ten times as fast."""
_ENDS = ("error", "interrupted", "finished")
"""Kinds of the events that end a launch."""

Trains = Literal["rl", "sft", "dpo", "reward-model"]
Kind = Trains | Literal["eval", "generate"]
"""The command that has made a run."""


def training_command(config: Mapping[str, Any]) -> Trains:
    """Which command trains by a whole configuration."""
    if "rollout" in config:
        return "rl"
    if "algorithm" not in config:
        return "sft"
    return "reward-model" if "center_coef" in config["algorithm"] else "dpo"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run, parsed; samples are not, of which there may be many."""

    path: Path
    name: str
    """Of the folder or file."""
    rows: Sequence[Mapping[str, Any]]
    """One row a step, ascending, merged where a step was logged twice."""
    events: Sequence[Mapping[str, Any]]
    config_text: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    """Versions and devices; empty where none were recorded."""
    evaluation: Mapping[str, float]
    """What `hone eval` has measured."""
    is_running: bool

    @classmethod
    def read(cls, path: Path, *, has_ended: bool = False) -> RunFolder:
        """Read what exists; missing files count as empty. `has_ended` is for a process of the run
        itself: another one may still hold the folder's lock.

        Raises UserError when `path` is no run, or its configuration cannot be read.
        """
        if path.is_file() and settings_file(path).is_file():
            text, config = _read_yaml(settings_file(path))
            return cls(path, path.name, [], [], text, config, {}, {}, is_running=False)
        if not _is_run(path):
            raise UserError(
                f"{path} is no run: give the folder that `run.dir` named, or a file that `hone "
                f"generate` has written.{_runs_inside(path)}"
            )
        merged: dict[int, dict[str, Any]] = {}
        for row in _json_rows(path / METRICS):
            merged.setdefault(int(row["step"]), {}).update(row)
        is_trained = (path / CONFIG).is_file() or bool(merged)
        text, config = _read_yaml(path / (CONFIG if is_trained else EVAL_CONFIG))
        return cls(
            path=path,
            name=path.resolve().name,
            rows=[merged[step] for step in sorted(merged)],
            events=list(_json_rows(path / "events.jsonl")),
            config_text=text,
            config=config,
            environment=_read_json(path / (ENVIRONMENT if is_trained else EVAL_ENVIRONMENT)),
            evaluation=_read_json(path / EVAL_METRICS),
            is_running=not has_ended and is_locked(path),
        )

    @property
    def kind(self) -> Kind:
        """By what the configuration has and which files there are."""
        if self.path.is_file():
            return "generate"
        if "rollout" in self.config or "trainer" in self.config:
            return training_command(self.config)
        if not self.rows and any((self.path / name).is_file() for name in _EVAL_FILES):
            return "eval"
        return "rl" if self.values("reward/mean") or not self.rows else "sft"

    @property
    def sample_files(self) -> Mapping[str, Path]:
        """Files of samples that exist, by the split of rows that name none."""
        return sample_files(self.path)

    def histograms(self) -> list[dict[str, Any]]:
        """Rows of `histograms.jsonl`."""
        return list(_json_rows(self.path / "histograms.jsonl"))

    def newest_lanes(self, num_steps: int) -> list[dict[str, Any]]:
        """The last rows of `lanes.jsonl`, of which a long run has many."""
        path = self.path / "lanes.jsonl"
        if not path.is_file():
            return []
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _LANES_BYTES, 0))
            lines = file.read().split(b"\n")
        whole = lines[:-1] if size <= _LANES_BYTES else lines[1:-1]
        return [json.loads(line) for line in whole[-num_steps:]]

    def setting(self, dotted: str) -> Any:
        """A configuration value by its dotted name, or None."""
        value: Any = self.config
        for name in dotted.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def values(self, metric: str) -> list[float]:
        """The metric over the steps that have a finite value of it."""
        held = (row.get(metric) for row in self.rows)
        return [value for value in held if isinstance(value, int | float)]

    @property
    def metric_names(self) -> list[str]:
        """Every metric of any step, sorted."""
        names = {name for row in self.rows for name in row}
        return sorted(names - {"step", "timestamp_s"})

    @property
    def status(self) -> str:
        """`running` while a run holds the folder's lock, else `failed` where an error ended it,
        `finished`, `stopped`, or `empty`."""
        if self.kind == "generate":
            return "finished"
        if self.is_running and self.rows:
            return "running"
        if self.error is not None:
            return "failed"
        if not self.rows:
            if self.evaluation:
                return "finished"
            end = None if self.is_running else self.end
            return "stopped" if end is not None and end["kind"] == "interrupted" else "empty"
        num_steps = self.setting("run.steps")
        is_done = num_steps is not None and self.rows[-1]["step"] >= num_steps
        return "finished" if is_done else "stopped"

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The event of the error that ended the run, unless the run was resumed since."""
        if self.is_running:
            return None
        if self.kind == "eval" and not self.evaluation:
            failed = [event for event in self.events if event.get("kind") == "eval_error"]
            return failed[-1] if failed else None
        end = self.end
        return end if end is not None and end["kind"] == "error" else None

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The last event that ended a launch, of kind `error`, `interrupted` or `finished`, unless
        a step has been recorded since."""
        newest_s = self.rows[-1].get("timestamp_s", 0.0) if self.rows else 0.0
        ends = [
            event
            for event in self.events
            if event.get("kind") in _ENDS and event.get("timestamp_s", 0.0) >= newest_s
        ]
        return ends[-1] if ends else None


def sample_files(run: Path) -> Mapping[str, Path]:
    """As `RunFolder.sample_files`, of a run that may go on."""
    if run.is_file():
        return {"generated": run}
    named = {"train": run / "samples.jsonl", "hone eval": run / EVAL_SAMPLES}
    return {split: file for split, file in named.items() if file.is_file()}


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _FILES) or is_locked(path)


def _runs_inside(path: Path) -> str:
    """What to tell of the runs in a folder that is none."""
    inside = sorted(each.parent for name in _FILES for each in path.glob(f"*/{name}"))
    inside = list(dict.fromkeys(inside))
    more = f" and {len(inside) - 5} more" * (len(inside) > 5)
    return f" It holds runs: {', '.join(map(str, inside[:5]))}{more}." if inside else ""


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The configuration in a run folder, as text and as a tree; empty where there is none.

    Raises UserError where the file is damaged.
    """
    return _read_yaml(folder / CONFIG)


def _read_yaml(file: Path) -> tuple[str, dict[str, Any]]:
    if not file.is_file():
        return "", {}
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.load(text, Loader=_LOADER)
        if not isinstance(tree, dict | None):
            raise ValueError(f"it holds a {type(tree).__name__} where keys are expected")
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{file} is damaged ({' '.join(str(error).split())}). Put back the configuration of "
            "the run, remove the file where the run may go on without it, or name another folder."
        ) from error
    return text, tree or {}


def is_locked(folder: Path) -> bool:
    """Whether a run is at work in the folder."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run has been here, or the file system has no locks
        return False
    return False


def _read_json(path: Path) -> dict[str, Any]:
    """An object; empty where there is none, or a process died while it wrote."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file; the last may be half written while the run goes on."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
