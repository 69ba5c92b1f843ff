"""The checkpoints of a run: saved whole, found by listing, refused when anything is missing.

    store = CheckpointStore("runs/a/checkpoints", keep_last=2, keep_best=True)
    store.save(100, {"model": tensors, "optimizer": state, "data": {"cursor": 6400}}, metric=0.7)
    parts = store.load("latest", required=["model", "optimizer", "data"]).parts

A checkpoint is the folder `step_<N>` with each part's JSON and safetensors and the manifest of
`checkpoint.atomic`. There is no pointer file: which one is the latest or the best follows from what
is there. Latest is what was saved last, also after a run went back to an earlier step.

Several processes write one checkpoint together: each what it holds of the tensors, in files of its
own; the first one everything else, and the manifest once all others have reported theirs. They meet
in the folder itself, so that writing needs no collectives and can go on behind the training.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from safetensors import SafetensorError

from hone.checkpoint.atomic import (
    CheckpointError,
    FileRecord,
    FolderManifest,
    clean_leftovers,
    discard,
    publish_folder,
    read_manifest,
    record_file,
    verify_file,
)
from hone.checkpoint.sharded import Region
from hone.checkpoint.tree import (
    Shards,
    SplitTree,
    Tree,
    is_file_of,
    read_tree,
    split_tree,
    write_index,
    write_shards,
    write_tree,
)
from hone.config.parallel import AxisSizes
from hone.distributed.mesh import Mesh

__all__ = ["Checkpoint", "CheckpointStore"]

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"step_(\d+)|\.step_(\d+)\.(partial|retired)")
_PART = re.compile(r"[a-z][a-z0-9_]*")
_POLL_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint."""

    step: int
    path: Path
    parts: Mapping[str, Tree]
    metric: float | None
    skipped: tuple[str, ...]
    """Why other checkpoints could not be used, one sentence each."""
    saved_at: float | None
    """Seconds since the epoch, by the first process's clock; None where that was not recorded."""
    written_by: AxisSizes | None
    """The processes that wrote it; None where they were not recorded."""


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
    saved_at: float | None
    written_by: AxisSizes | None


class CheckpointStore:
    """The checkpoints in one folder, which the processes of one run write.

    `keep_last` newest ones are kept and, with `keep_best`, the one with the largest metric. With a
    mesh, `save`, `save_in_background`, `is_written`, `wait` and `load` are collective, and the
    folder is one that all processes see.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        mesh: Mesh | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """`timeout_s` is how long the first process waits for the others' files."""
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._mesh = mesh or Mesh.alone("cpu")
        self._timeout_s = timeout_s
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def save(self, step: int, parts: Mapping[str, Tree], *, metric: float | None = None) -> Path:
        """Write a checkpoint, publish it, then delete those that need not be kept.

        `parts` are trees (`checkpoint.tree`) by name, with DTensors where processes hold parts of a
        tensor. `metric` is larger for better models; NaN counts as none. A checkpoint of the same
        step is replaced.

        Raises CheckpointError when it cannot be written (nothing half-written stays), on every
        process, and ValueError for a part that cannot be stored.
        """
        self._begin(step, parts, metric, copy=False)
        self.wait()
        return self._path(step)

    def save_in_background(
        self, step: int, parts: Mapping[str, Tree], *, metric: float | None = None
    ) -> None:
        """As `save`, but return as soon as the tensors are copied to host memory.

        A save still under way is waited for first. Errors of the writing are raised by `wait`,
        which the next save calls as well.
        """
        self._begin(step, parts, metric, copy=True)

    def is_written(self) -> bool:
        """Whether every save is published by now. Raises CheckpointError where one has failed.
        Collective."""
        is_done = self._written is None or self._written.done()
        if not all(self._mesh.gather(is_done)):
            return False
        self.wait()
        return True

    def has_published(self) -> bool:
        """On the first process, whether the save under way has become a checkpoint, or does within
        a second: older ones may be on their way out still. Raises nothing where it failed, and is
        not collective."""
        if self._written is None:
            return False
        done, _ = futures.wait([self._written], timeout=1.0)
        return bool(done) and self._written.exception() is None

    def wait(self) -> None:
        """Return when nothing is being written. Raises CheckpointError where a save has failed."""
        if self._written is None:
            return
        written, self._written = self._written, None
        self._together(written.result)

    def _begin(
        self, step: int, parts: Mapping[str, Tree], metric: float | None, *, copy: bool
    ) -> None:
        self.wait()
        for name in parts:
            if not _PART.fullmatch(name):
                raise ValueError(f"part {name!r}: names are lower-case letters, digits and '_'")
        trees = {
            name: split_tree(tree, name, is_first=self._mesh.is_first, copy=copy)
            for name, tree in parts.items()
        }
        publishing, recorded = ExitStack(), dict[str, FileRecord]()
        if self._mesh.is_first:
            opened = self._together(lambda: self._open(step, trees, metric, recorded, publishing))
        else:
            opened = self._together(lambda: None)
        folder = self._partial(step) if opened is None else opened
        self._written = self._writer.submit(self._write, folder, trees, recorded, publishing)

    def _open(
        self,
        step: int,
        trees: Mapping[str, SplitTree],
        metric: float | None,
        recorded: Mapping[str, FileRecord],
        publishing: ExitStack,
    ) -> Path:
        """The empty folder to write into; leaving `publishing` publishes it."""
        path = self._path(step)
        self._clean()
        entries, damaged = self._scan()
        if step in damaged:
            discard(path)
        metadata = {
            "step": step,
            "order": 1 + max((entry.order for entry in entries), default=0),
            "metric": None if metric is None or math.isnan(metric) else metric,
            "parts": list(trees),
            "saved_at": time.time(),
            "mesh": asdict(self._mesh.sizes),
        }
        num_bytes = sum(tree.num_bytes for tree in trees.values())
        return publishing.enter_context(
            publish_folder(path, metadata=metadata, num_bytes=num_bytes, recorded=recorded)
        )

    def _write(
        self,
        folder: Path,
        trees: Mapping[str, SplitTree],
        recorded: dict[str, FileRecord],
        publishing: ExitStack,
    ) -> None:
        """What this process contributes; on the first one also the publication."""
        if self._mesh.world.size == 1:
            with publishing:
                for name, tree in trees.items():
                    write_tree(folder, name, tree)
        elif self._mesh.is_first:
            with publishing:
                try:
                    own = _write_own(folder, trees, 0)
                finally:
                    others = self._reports(folder)  # nobody writes into a folder that is removed
                reports = [own, *others]
                for name, tree in trees.items():
                    write_index(folder, name, tree, [report.shards[name] for report in reports])
                for report in reports:
                    recorded.update(report.files)
        else:
            _report_own(folder, trees, self._mesh.world.rank)
        if self._mesh.is_first:
            self._prune()

    def _reports(self, folder: Path) -> list[_Report]:
        """What the other processes have written, once they have. Raises CheckpointError naming one
        that failed or did not report in time."""
        deadline = time.monotonic() + self._timeout_s
        reports: list[_Report] = []
        failure: CheckpointError | None = None
        for rank in range(1, self._mesh.world.size):
            path = _report_file(folder, rank)
            while not path.exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"process {rank} has not written its part of {folder} within "
                        f"{self._timeout_s:.0f} s; the checkpoint was given up"
                    )
                time.sleep(_POLL_S)
            document = json.loads(path.read_text())
            path.unlink()
            if "error" not in document:
                reports.append(_Report.from_json(document))
            elif failure is None:
                failure = CheckpointError(f"process {rank} could not write: {document['error']}")
        if failure is not None:
            raise failure
        return reports

    def _together(self, work: Callable[[], T]) -> T:
        """Do `work`; an OSError of one process is a CheckpointError of all."""
        result: T | None = None
        error: OSError | SafetensorError | None = None
        try:
            result = work()
        except (OSError, SafetensorError) as raised:  # a full disk may be either
            error = raised
        failures = self._mesh.gather(None if error is None else str(error))
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint in {self.folder} failed: {error}") from error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(f"process {rank}: {failure}")
        return result  # pyright: ignore[reportReturnType]  None only where T is

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def _partial(self, step: int) -> Path:
        return self.folder / f".step_{step}.partial"

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
        entries, damaged = self._mesh.gather(self._scan())[0]
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
                parts = self._together(partial(self._read, entry, names))
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
                saved_at=entry.saved_at,
                written_by=entry.written_by,
            )
        wanted = "checkpoint" if step == "latest" else f"checkpoint of step {step}"
        reasons = "".join(f"\n  {reason}" for reason in skipped)
        raise CheckpointError(f"{self.folder} has no complete {wanted}.{reasons}")

    def _read(self, entry: _Entry, names: tuple[str, ...]) -> dict[str, Tree]:
        """Parts of a checkpoint. Each process checks the hashes of a share of the files."""
        world = self._mesh.world
        files = [f for f in entry.manifest.files if any(is_file_of(name, f) for name in names)]
        for file in files[world.rank :: world.size]:
            verify_file(entry.path, file, entry.manifest)
        return {name: read_tree(entry.path, name) for name in names}

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
        saved_at=data.get("saved_at"),
        written_by=AxisSizes(**data["mesh"]) if "mesh" in data else None,
    )


@dataclass(frozen=True, slots=True)
class _Report:
    """What one process has written."""

    files: Mapping[str, FileRecord]
    shards: Mapping[str, Shards]
    """By part."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> _Report:
        return cls(
            files={name: FileRecord(**record) for name, record in document["files"].items()},
            shards={
                part: {
                    key: Region(tuple(region["offsets"]), tuple(region["shape"]))
                    for key, region in shards.items()
                }
                for part, shards in document["shards"].items()
            },
        )


def _write_own(folder: Path, trees: Mapping[str, SplitTree], rank: int) -> _Report:
    files: dict[str, FileRecord] = {}
    shards: dict[str, Shards] = {}
    for name, tree in trees.items():
        path, shards[name] = write_shards(folder, name, tree, rank)
        if path is not None:
            files[path.name] = record_file(path)
    return _Report(files, shards)


def _report_own(folder: Path, trees: Mapping[str, SplitTree], rank: int) -> None:
    """Write this process's part, and tell the first one so, or why not."""
    path = _report_file(folder, rank)
    try:
        document: dict[str, Any] = _write_own(folder, trees, rank).to_json()
    except (OSError, SafetensorError) as error:
        if folder.exists():
            _appear(path, {"error": str(error)})
        raise
    _appear(path, document)


def _appear(path: Path, document: Mapping[str, Any]) -> None:
    """Write a file that another process waits for: it is there whole or not at all."""
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps(document))
    aside.rename(path)


def _report_file(folder: Path, rank: int) -> Path:
    return folder / f"report.rank{rank}.json"


def _best(entries: Iterable[_Entry]) -> _Entry | None:
    """The largest metric, the newest of equals."""
    rated = [(entry.metric, entry.order, entry) for entry in entries if entry.metric is not None]
    return max(rated)[2] if rated else None


def _warn(reasons: Iterable[str]) -> None:
    for reason in reasons:
        logger.warning("Skipped an incomplete checkpoint. %s", reason)
