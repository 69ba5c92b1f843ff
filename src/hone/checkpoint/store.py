"""The checkpoints of a run: saved whole, found by listing, refused when anything is missing.

    store = CheckpointStore("runs/a/checkpoints", keep_last=2, keep_best=True)
    store.save(100, {"model": tensors, "optimizer": state, "data": {"cursor": 6400}}, metric=0.7)
    parts = store.load("latest", required=["model", "optimizer", "data"]).parts

A checkpoint is the folder `step_<N>` with each part's JSON and safetensors and the manifest of
`checkpoint.atomic`. There is no pointer file: which one is the latest or the best follows from what
is there. Latest is what was saved last, also after a run went back to an earlier step.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hone.checkpoint.atomic import (
    CheckpointError,
    FolderManifest,
    clean_leftovers,
    discard,
    publish_folder,
    read_manifest,
    verify_file,
)
from hone.checkpoint.tree import Tree, read_tree, split_tree, tree_files, write_tree

__all__ = ["Checkpoint", "CheckpointStore"]

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"step_(\d+)|\.step_(\d+)\.(partial|retired)")
_PART = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint."""

    step: int
    path: Path
    parts: Mapping[str, Tree]
    metric: float | None
    skipped: tuple[str, ...]
    """Why other checkpoints could not be used, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A folder whose manifest is intact and whose files have their sizes."""

    step: int
    path: Path
    manifest: FolderManifest
    order: int
    """Counts saves: 1 for the first."""
    metric: float | None
    parts: tuple[str, ...]


class CheckpointStore:
    """The checkpoints in one folder, which one process writes.

    `keep_last` newest ones are kept and, with `keep_best`, the one with the largest metric.
    """

    def __init__(self, folder: Path | str, *, keep_last: int = 2, keep_best: bool = True) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best

    def save(self, step: int, parts: Mapping[str, Tree], *, metric: float | None = None) -> Path:
        """Write a checkpoint, publish it, then delete those that need not be kept.

        `parts` are trees (`checkpoint.tree`) by name. `metric` is larger for better models; NaN
        counts as none. A checkpoint of the same step is replaced.

        Raises CheckpointError when it cannot be written (nothing half-written stays) and ValueError
        for a part that cannot be stored.
        """
        for name in parts:
            if not _PART.fullmatch(name):
                raise ValueError(f"part {name!r}: names are lower-case letters, digits and '_'")
        trees = {name: split_tree(tree, name) for name, tree in parts.items()}
        path = self.folder / f"step_{step}"
        self._clean()
        entries, damaged = self._scan()
        if step in damaged:
            discard(path)
        metadata = {
            "step": step,
            "order": 1 + max((entry.order for entry in entries), default=0),
            "metric": None if metric is None or math.isnan(metric) else metric,
            "parts": list(parts),
        }
        num_bytes = sum(tree.num_bytes for tree in trees.values())
        with publish_folder(path, metadata=metadata, num_bytes=num_bytes) as folder:
            for name, tree in trees.items():
                write_tree(folder, name, tree)
        self._prune()
        return path

    @property
    def is_empty(self) -> bool:
        """No checkpoint has ever been published here, complete or damaged since."""
        return not self._folders()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in the order in which they were saved."""
        return [entry.step for entry in self._scan()[0]]

    def latest(self) -> int | None:
        """Step of the complete checkpoint that was saved last; None when there is none.

        Complete means that every file is there with its size; hashes are checked by `load`.
        """
        entries, damaged = self._scan()
        _warn(damaged.values())
        return entries[-1].step if entries else None

    def best(self) -> int | None:
        """Step of the complete checkpoint with the largest metric; None when none has one."""
        best = _best(self._scan()[0])
        return best.step if best else None

    def best_metric(self) -> float:
        """The largest metric of the complete checkpoints; -inf when none has one."""
        best = _best(self._scan()[0])
        return -math.inf if best is None or best.metric is None else best.metric

    def load(
        self, step: int | Literal["latest"] = "latest", *, required: Iterable[str] | None = None
    ) -> Checkpoint:
        """Read a checkpoint, every file against its hash.

        `"latest"` takes the newest one that proves intact and warns of those it had to skip; a
        step takes that one or none. `required` names the parts to read, all by default.

        Raises CheckpointError naming what is missing or damaged.
        """
        entries, damaged = self._scan()
        if step != "latest":
            if step in damaged:
                raise CheckpointError(damaged[step])
            entries = [entry for entry in entries if entry.step == step]
        skipped = list(damaged.values())
        for entry in reversed(entries):
            names = entry.parts if required is None else tuple(required)
            if missing := [name for name in names if name not in entry.parts]:
                raise CheckpointError(
                    f"{entry.path} has no {', '.join(missing)}; it holds {', '.join(entry.parts)}"
                )
            try:
                parts = {name: _read_part(entry, name) for name in names}
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            _warn(skipped)
            return Checkpoint(
                step=entry.step,
                path=entry.path,
                parts=parts,
                metric=entry.metric,
                skipped=tuple(skipped),
            )
        wanted = "checkpoint" if step == "latest" else f"checkpoint of step {step}"
        reasons = "".join(f"\n  {reason}" for reason in skipped)
        raise CheckpointError(f"{self.folder} has no complete {wanted}.{reasons}")

    def _scan(self) -> tuple[list[_Entry], dict[int, str]]:
        """Complete checkpoints in the order of saving, and by step why the others are not."""
        entries: list[_Entry] = []
        damaged: dict[int, str] = {}
        for step, path in self._folders().items():
            try:
                entries.append(_read_entry(step, path))
            except CheckpointError as error:
                damaged[step] = str(error)
        return sorted(entries, key=lambda entry: entry.order), damaged

    def _folders(self) -> dict[int, Path]:
        """Published folders by step. One that was about to be replaced still counts."""
        found: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else []:
            match = _FOLDER.fullmatch(path.name)
            if match and match[1]:
                found[int(match[1])] = path
            elif match and match[3] == "retired":
                found.setdefault(int(match[2]), path)
        return found

    def _clean(self) -> None:
        for path in list(self.folder.iterdir()) if self.folder.exists() else []:
            match = _FOLDER.fullmatch(path.name)
            if match and match[2]:
                clean_leftovers(self.folder / f"step_{match[2]}")

    def _prune(self) -> None:
        entries, _ = self._scan()
        kept = {entry.step for entry in entries[-self.keep_last :]}
        if self.keep_best and (best := _best(entries)):
            kept.add(best.step)
        for entry in entries:
            if entry.step not in kept:
                discard(entry.path)


def _read_entry(step: int, path: Path) -> _Entry:
    manifest = read_manifest(path)
    data = manifest.metadata
    if data["step"] != step:
        raise CheckpointError(f"{path} holds step {data['step']}: it has been renamed")
    return _Entry(
        step=step,
        path=path,
        manifest=manifest,
        order=data["order"],
        metric=data["metric"],
        parts=tuple(data["parts"]),
    )


def _read_part(entry: _Entry, name: str) -> Tree:
    for file in tree_files(name):
        if file in entry.manifest.files:
            verify_file(entry.path, file, entry.manifest)
    return read_tree(entry.path, name)


def _best(entries: Iterable[_Entry]) -> _Entry | None:
    """The largest metric, the newest of equals."""
    rated = [(entry.metric, entry.order, entry) for entry in entries if entry.metric is not None]
    return max(rated)[2] if rated else None


def _warn(reasons: Iterable[str]) -> None:
    for reason in reasons:
        logger.warning("Skipped an incomplete checkpoint. %s", reason)
