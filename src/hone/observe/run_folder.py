"""Reads the files of a run that has ended, is running, or died.

A run is a folder (of training, of `hone eval`, or of both), or the JSONL file of `hone generate`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from hone.errors import UserError
from hone.observe.locks import is_taken
from hone.paths import settings_file

__all__ = [
    "CONFIG",
    "ENVIRONMENT",
    "EVAL_CONFIG",
    "EVAL_ENVIRONMENT",
    "EVAL_METRICS",
    "EVAL_SAMPLES",
    "IMAGES",
    "INDEXES",
    "LOCK",
    "METRICS",
    "PICTURE_TYPES",
    "Kind",
    "Picture",
    "RunFolder",
    "is_locked",
    "lock_holder",
    "read_config",
    "read_picture",
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
"""Samples of `hone eval`, whose folder may be that of a training run."""
IMAGES = "images"
"""Folder with small pictures of the images that samples name."""
PICTURE_TYPES = {".png": "image/png", ".jpg": "image/jpeg"}
"""Media types of pictures, by the suffix of their files."""
INDEXES = "indexes"
"""Folder with the indexes of large sources."""
LOCK = ".lock"
"""File that a run locks in its folder while it is running."""
_EVAL_FILES = (EVAL_CONFIG, EVAL_METRICS, EVAL_SAMPLES)
_FILES = (CONFIG, METRICS, "events.jsonl", *_EVAL_FILES)
"""Files that identify a run folder: it has at least one of them."""

_LANES_BYTES = 1 << 20
"""Bytes that are read at the end of `lanes.jsonl`."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader if PyYAML was built with it: ten times as fast."""
_HASH = re.compile("[0-9a-f]{1,128}")
_ENDS = ("error", "interrupted", "finished")
"""Kinds of events that end a launch."""

Trains = Literal["rl", "sft", "dpo", "reward-model"]
Kind = Trains | Literal["eval", "generate"]
"""The command of a run."""


def training_command(config: Mapping[str, Any]) -> Trains:
    """The training command to which a complete configuration belongs."""
    if "rollout" in config:
        return "rl"
    if "algorithm" not in config:
        return "sft"
    return "reward-model" if "center_coef" in config["algorithm"] else "dpo"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The parsed files of a run. Samples are not read, since there may be many."""

    path: Path
    name: str
    """Name of the folder or file."""
    rows: Sequence[Mapping[str, Any]]
    """One row per step, ascending. Rows of a step that was logged twice are merged."""
    events: Sequence[Mapping[str, Any]]
    config_text: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    """Versions and devices. Empty if none were recorded."""
    evaluation: Mapping[str, float]
    """Metrics of `hone eval`."""
    is_running: bool

    @classmethod
    def read(cls, path: Path, *, has_ended: bool = False) -> RunFolder:
        """Read the existing files; missing ones count as empty. A process of the run itself passes
        `has_ended`, since another process of the run may still hold the folder's lock.

        Raises UserError if `path` is no run or its configuration cannot be read.
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
        """The kind of run, derived from its configuration and files."""
        if self.path.is_file():
            return "generate"
        if "rollout" in self.config or "trainer" in self.config:
            return training_command(self.config)
        if not self.rows and any((self.path / name).is_file() for name in _EVAL_FILES):
            return "eval"
        return "rl" if self.values("reward/mean") or not self.rows else "sft"

    @property
    def sample_files(self) -> Mapping[str, Path]:
        """Existing sample files. The key is the split of the rows in a file that name no split."""
        return sample_files(self.path)

    def histograms(self) -> list[dict[str, Any]]:
        """Rows of `histograms.jsonl`."""
        return list(_json_rows(self.path / "histograms.jsonl"))

    def newest_lanes(self, num_steps: int) -> list[dict[str, Any]]:
        """The last rows of `lanes.jsonl`, which is large in a long run."""
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
        """Values of a metric over the steps in which it is finite."""
        held = (row.get(metric) for row in self.rows)
        return [value for value in held if isinstance(value, int | float)]

    @property
    def metric_names(self) -> list[str]:
        """Names of all metrics, sorted."""
        names = {name for row in self.rows for name in row}
        return sorted(names - {"step", "timestamp_s"})

    @property
    def status(self) -> str:
        """`running` while a run holds the folder's lock; otherwise `failed` after an error,
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
        """The event of the error that ended the run, or None. It is None too if the run was resumed
        afterwards."""
        if self.is_running:
            return None
        if self.kind == "eval" and not self.evaluation:
            failed = [event for event in self.events if event.get("kind") == "eval_error"]
            return failed[-1] if failed else None
        end = self.end
        return end if end is not None and end["kind"] == "error" else None

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The last event that ended a launch (`error`, `interrupted` or `finished`), or None if a
        later launch has recorded a step."""
        newest_s = self.rows[-1].get("timestamp_s", 0.0) if self.rows else 0.0
        ends = [
            event
            for event in self.events
            if event.get("kind") in _ENDS and event.get("timestamp_s", 0.0) >= newest_s
        ]
        return ends[-1] if ends else None


def sample_files(run: Path) -> Mapping[str, Path]:
    """The result of `RunFolder.sample_files` for a run whose other files are not read."""
    if run.is_file():
        return {"generated": run}
    named = {"train": run / "samples.jsonl", "hone eval": run / EVAL_SAMPLES}
    return {split: file for split, file in named.items() if file.is_file()}


class Picture(NamedTuple):
    """The small picture of an image."""

    data: bytes
    media_type: str


def read_picture(run: Path, name: str) -> Picture | None:
    """The picture of an image in a run folder, by the image's hash; None where there is none. No
    other file is read, whatever the name is, which a request may have made up."""
    if not _HASH.fullmatch(name):
        return None
    folder = run / IMAGES
    for suffix, media_type in PICTURE_TYPES.items():
        file = folder / f"{name}{suffix}"
        if file.is_file() and file.resolve().parent == folder.resolve():
            try:
                return Picture(file.read_bytes(), media_type)
            except FileNotFoundError:  # the run has removed it since, for newer ones
                return None
    return None


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _FILES) or is_locked(path)


def _runs_inside(path: Path) -> str:
    """A hint that names the runs inside a folder that is no run itself."""
    inside = sorted(each.parent for name in _FILES for each in path.glob(f"*/{name}"))
    inside = list(dict.fromkeys(inside))
    more = f" and {len(inside) - 5} more" * (len(inside) > 5)
    return f" It holds runs: {', '.join(map(str, inside[:5]))}{more}." if inside else ""


def read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """The configuration in a run folder, as text and as a tree. Empty if there is none. Raises
    UserError if the file is damaged."""
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
    """Whether a run is running in the folder."""
    return is_taken(folder / LOCK)


def lock_holder(folder: Path) -> str | None:
    """The id of the process that last locked the folder, as text; None without one."""
    try:
        return (folder / LOCK).read_text(errors="replace").strip() or None
    except OSError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Empty if the file is missing or a process died while writing it."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file. The last one may be incomplete while the run goes on."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
