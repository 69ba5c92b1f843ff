"""Reading a run folder back: whatever is there, of a run that ends, goes on, or died."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.config.errors import UserError

__all__ = ["CONFIG", "LOCK", "METRICS", "RunFolder", "is_locked", "read_config"]

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
LOCK = ".lock"
"""A run holds a lock on this file of its folder as long as it is at work."""
_FILES = (CONFIG, METRICS, "events.jsonl")
"""What a folder is known by as one of a run: it has one of them."""

_ENDS = ("error", "interrupted", "finished")
"""Kinds of the events that end a launch."""

_STEP = re.compile(rb'\{"step": (\d+),')


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of a run, parsed."""

    path: Path
    rows: Sequence[Mapping[str, Any]]
    """One row a step, ascending, merged where a step was logged twice."""
    events: Sequence[Mapping[str, Any]]
    config_text: str
    config: Mapping[str, Any]
    is_running: bool

    @classmethod
    def read(cls, path: Path, *, has_ended: bool = False) -> RunFolder:
        """Read what exists; missing files count as empty. `has_ended` is for a process of the run
        itself: another one may still hold the folder's lock.

        Raises UserError when `path` is no folder of a run, or its configuration cannot be read.
        """
        if not any((path / name).is_file() for name in _FILES):
            raise UserError(f"{path} is not a run folder: give the folder that `run.dir` named.")
        merged: dict[int, dict[str, Any]] = {}
        for row in _json_rows(path / METRICS):
            merged.setdefault(int(row["step"]), {}).update(row)
        config_text, config = read_config(path)
        return cls(
            path=path,
            rows=[merged[step] for step in sorted(merged)],
            events=list(_json_rows(path / "events.jsonl")),
            config_text=config_text,
            config=config,
            is_running=not has_ended and is_locked(path),
        )

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
        if self.is_running and self.rows:
            return "running"
        if self.error is not None:
            return "failed"
        if not self.rows:
            return "empty"
        num_steps = self.setting("run.steps")
        is_done = num_steps is not None and self.rows[-1]["step"] >= num_steps
        return "finished" if is_done else "stopped"

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The event of the error that ended the run, unless the run was resumed since."""
        if self.is_running:
            return None
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

    def samples(self, *, num_steps: int, per_step: int) -> list[dict[str, Any]]:
        """Samples of the newest, the first, and steps evenly between; newest first.

        Only these rows are parsed, so a file with every sample of a long run costs one scan.
        """
        path = self.path / "samples.jsonl"
        if not path.exists():
            return []
        offsets: dict[int, list[int]] = {}
        with path.open("rb") as file:
            while line := file.readline():
                if (found := _STEP.match(line)) and line.endswith(b"\n"):
                    offsets.setdefault(int(found[1]), []).append(file.tell() - len(line))
            steps = sorted(offsets)
            last = len(steps) - 1
            chosen = {steps[i * last // max(num_steps - 1, 1)] for i in range(num_steps) if steps}
            rows: list[dict[str, Any]] = []
            for step in sorted(chosen, reverse=True):
                for offset in offsets[step][:per_step]:
                    file.seek(offset)
                    rows.append(json.loads(file.readline()))
        return rows


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The configuration in a run folder, as text and as a tree; empty where there is none.

    Raises UserError where the file is damaged.
    """
    file = folder / CONFIG
    if not file.is_file():
        return "", {}
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
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
