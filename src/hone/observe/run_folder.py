"""Reading a run folder back: whatever is there, of a run that ends, goes on, or died."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.config.errors import UserError

__all__ = ["RunFolder"]

_FILES = ("config.yaml", "metrics.jsonl", "events.jsonl")
"""What a folder is known by as one of a run: it has one of them."""

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

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read what exists; missing files count as empty.

        Raises UserError when `path` is no folder of a run.
        """
        if not any((path / name).is_file() for name in _FILES):
            raise UserError(f"{path} is not a run folder: give the folder that `run.dir` named.")
        merged: dict[int, dict[str, Any]] = {}
        for row in _json_rows(path / "metrics.jsonl"):
            merged.setdefault(int(row["step"]), {}).update(row)
        config_file = path / "config.yaml"
        config_text = config_file.read_text(encoding="utf-8") if config_file.exists() else ""
        config = yaml.safe_load(config_text)
        return cls(
            path=path,
            rows=[merged[step] for step in sorted(merged)],
            events=list(_json_rows(path / "events.jsonl")),
            config_text=config_text,
            config=config if isinstance(config, dict) else {},
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
        """`finished`, `running`, `stopped`, or `empty`.

        Judged by the steps done, then by a recorded interruption that no later step follows, then,
        for a run that says nothing, by the age of its newest row.
        """
        if not self.rows:
            return "empty"
        num_steps = self.setting("run.steps")
        if num_steps is not None and self.rows[-1]["step"] >= num_steps:
            return "finished"
        newest_s = self.rows[-1]["timestamp_s"]
        interruptions = [event for event in self.events if event.get("kind") == "interrupted"]
        if interruptions and interruptions[-1]["timestamp_s"] >= newest_s:
            return "stopped"
        times = self.values("time/step_s")
        patience_s = 60 + 10 * (sum(times) / len(times) if times else 60)
        return "running" if time.time() - newest_s < patience_s else "stopped"

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
