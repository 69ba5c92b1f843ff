"""The checkpoints of a run: saved atomically, found by listing, and refused when incomplete.

    store = CheckpointStore("runs/a/checkpoints", keep_last=2, keep_best=True)
    store.save(100, {"model": tensors, "optimizer": state, "data": {"cursor": 6400}}, metric=0.7)
    parts = store.load("latest", required=["model", "optimizer", "data"]).parts

A checkpoint is the folder `step_<N>` with the files of each part (`checkpoint.tree`), such as the
model or the optimizer, and the manifest of `checkpoint.atomic`. There is no pointer file: the
latest and the best checkpoint are found from the folders. The latest is the one saved last, also
after a run went back to an earlier step.

Several processes write one checkpoint together. Each writes its shards of the tensors into its own
files; the first process that has a part also writes the rest of that part; rank 0 writes the
manifest, once the other ranks have put their reports into the folder. So writing needs no
collectives and runs in the background of training.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from hone.checkpoint.atomic import (
    CheckpointError,
    FileRecord,
    Publication,
    clean_leftovers,
    discard,
    partial_name,
    publish_folder,
    read_manifest,
    together,
    verify_file,
)
from hone.checkpoint.tree import SplitTree, Tree, is_file_of, read_tree, split_tree, write_tree
from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes

__all__ = ["Checkpoint", "CheckpointStore"]

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"step_(\d+)|\.step_(\d+)\.(partial|retired)")
_PART = re.compile(r"[a-z][a-z0-9_]*")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, with the parts that were loaded."""

    step: int
    path: Path
    metric: float | None
    saved_at: float
    """Seconds since the epoch, by the clock of rank 0."""
    written_by: AxisSizes
    """Mesh sizes of the processes that wrote it."""
    order: int = 1
    """Number of the save; the first is 1."""
    names: tuple[str, ...] = ()
    """Names of all parts."""
    parts: Mapping[str, Tree] = field(default_factory=dict[str, Tree])
    """The loaded parts; their tensors are `StoredTensor`s."""
    skipped: tuple[str, ...] = ()
    """Why newer checkpoints could not be used, a sentence for each."""


class CheckpointStore:
    """The checkpoints in one folder, which the processes of one run write.

    The newest `keep_last` checkpoints are kept and, with `keep_best`, the one with the largest
    metric. With a mesh, `save`, `save_in_background`, `is_written`, `wait` and `load` are
    collective, and all processes must see the folder.
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
        """`timeout_s` is how long rank 0 waits for the files of the others."""
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
        """Write a checkpoint, publish it, then delete checkpoints that need not be kept.

        `parts` are trees (`checkpoint.tree`) by name, with DTensors for sharded tensors. Processes
        may have different parts; the first process that has a part writes everything in it that is
        not a DTensor. `metric` is larger for better models; NaN counts as none. A checkpoint of the
        same step is replaced.

        Raises CheckpointError on every process where it cannot be written (no partial folder
        stays), and ValueError for a part that cannot be stored.
        """
        self._begin(step, parts, metric, copy=False)
        self.wait()
        return self._path(step)

    def save_in_background(
        self, step: int, parts: Mapping[str, Tree], *, metric: float | None = None
    ) -> None:
        """Like `save`, but return as soon as the tensors are copied to host memory.

        It first waits for a running save. Errors of writing are raised by `wait`, which the next
        save calls too.
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
        """On rank 0: whether the running save has been published, or is within a second, while
        older checkpoints may still be deleted. False where it failed. Not collective."""
        if self._written is None:
            return False
        done, _ = futures.wait([self._written], timeout=1.0)
        return bool(done) and self._written.exception() is None

    def wait(self) -> None:
        """Return when nothing is being written. Raises CheckpointError where a save has failed."""
        if self._written is None:
            return
        written, self._written = self._written, None
        together(self._mesh, written.result)

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no published checkpoint, complete or damaged."""
        return not self._folders()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in the order in which they were saved.

        Complete means that every file is there with its size; checksums are verified by `load`.
        """
        return [checkpoint.step for checkpoint in self._scan()[0]]

    def best_metric(self) -> float:
        """The largest metric of the complete checkpoints; -inf when none has one."""
        best = _best(self._scan()[0])
        return -math.inf if best is None or best.metric is None else best.metric

    def load(
        self, step: int | Literal["latest"] = "latest", *, required: Iterable[str] | None = None
    ) -> Checkpoint:
        """Read a checkpoint and verify the checksum of every file.

        `"latest"` takes the newest intact checkpoint, and warns of those it skips; a step takes
        that checkpoint only. `required` names the parts to read, all by default.

        Raises CheckpointError naming what is missing or damaged.
        """
        complete, damaged = self._mesh.gather(self._scan())[0]
        steps = ", ".join(str(checkpoint.step) for checkpoint in complete)
        if step != "latest":
            if step in damaged:
                raise CheckpointError(damaged[step])
            complete = [checkpoint for checkpoint in complete if checkpoint.step == step]
        skipped = list(damaged.values())
        for checkpoint in reversed(complete):
            names = checkpoint.names if required is None else tuple(required)
            if missing := [name for name in names if name not in checkpoint.names]:
                raise CheckpointError(
                    f"{checkpoint.path} has no {', '.join(missing)}; it holds "
                    f"{', '.join(checkpoint.names)}"
                )
            try:
                parts = together(self._mesh, partial(self._read, checkpoint.path, names))
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            for reason in skipped:
                logger.warning("Skipped an incomplete checkpoint. %s", reason)
            return replace(checkpoint, parts=parts, skipped=tuple(skipped))
        wanted = "checkpoint" if step == "latest" else f"checkpoint of step {step}"
        reasons = "".join(f"\n  {reason}" for reason in skipped)
        remedy = f"go on from one of the steps {steps}" if steps else "remove it to start over"
        raise CheckpointError(
            f"{self.folder} has no complete {wanted}; {remedy}, or take another folder.{reasons}"
        )

    def _read(self, path: Path, names: tuple[str, ...]) -> dict[str, Tree]:
        """Read parts of a checkpoint. Each process verifies the checksums of some of the files."""
        world, manifest = self._mesh.world, read_manifest(path)
        files = [file for file in manifest.files if any(is_file_of(name, file) for name in names)]
        for file in files[world.rank :: world.size]:
            verify_file(path, file, manifest)
        return {name: read_tree(path, name) for name in names}

    def _begin(
        self, step: int, parts: Mapping[str, Tree], metric: float | None, *, copy: bool
    ) -> None:
        self.wait()
        for name in parts:
            if not _PART.fullmatch(name):
                raise ValueError(f"part {name!r}: names are lower-case letters, digits and '_'")
        rank = self._mesh.rank
        holders = self._mesh.gather(list(parts))
        leads = {name: i for i, names in reversed([*enumerate(holders)]) for name in names}
        trees = {
            name: split_tree(tree, name, is_first=leads[name] == rank, copy=copy)
            for name, tree in parts.items()
        }
        own = sum(tree.num_bytes for tree in trees.values() if tree.is_first)
        num_bytes = sum(self._mesh.gather(own))
        publishing = ExitStack()
        publication = together(
            self._mesh,
            lambda: (
                self._open(step, [*leads], num_bytes, metric, publishing)
                if self._mesh.is_first
                else None
            ),
        )
        if publication is None:
            folder = partial_name(self._path(step))
            self._written = self._writer.submit(self._report, folder, trees)
        else:
            self._written = self._writer.submit(self._publish, publication, trees, publishing)

    def _open(
        self,
        step: int,
        parts: Sequence[str],
        num_bytes: int,
        metric: float | None,
        publishing: ExitStack,
    ) -> Publication:
        """Make the empty folder to write into; closing `publishing` publishes it."""
        path = self._path(step)
        self._clean()
        complete, damaged = self._scan()
        if step in damaged:
            discard(path)
        metadata = {
            "step": step,
            "order": 1 + max((checkpoint.order for checkpoint in complete), default=0),
            "metric": None if metric is None or math.isnan(metric) else metric,
            "parts": list(parts),
            "saved_at": time.time(),
            "mesh": asdict(self._mesh.sizes),
        }
        return publishing.enter_context(
            publish_folder(path, metadata=metadata, num_bytes=num_bytes)
        )

    def _publish(
        self, publication: Publication, trees: Mapping[str, SplitTree], publishing: ExitStack
    ) -> None:
        """Write the files of rank 0, wait for the other ranks, publish, and delete old ones."""
        with publishing:
            try:
                publication.files |= _write_own(publication.folder, trees, 0)
            finally:  # also after an error: the folder is removed only when no rank writes into it
                others = self._reports(publication.folder)
            publication.files |= others
        self._prune()

    def _report(self, folder: Path, trees: Mapping[str, SplitTree]) -> None:
        """Write the files of this rank, and report them, or the error, to rank 0."""
        rank = self._mesh.world.rank
        files: dict[str, FileRecord] = {}
        failure: str | None = None
        try:
            files = _write_own(folder, trees, rank)
        except Exception as error:  # also for bugs: rank 0 must not publish without these files
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            path = _report_file(folder, rank)
            temporary = path.with_suffix(".aside")  # renamed when whole, so rank 0 reads no half
            if folder.exists():
                temporary.write_text(json.dumps({"files": files, "error": failure}))
                temporary.rename(path)

    def _reports(self, folder: Path) -> dict[str, FileRecord]:
        """Wait for the reports of the other ranks, and return the records of their files. Raises
        CheckpointError naming a rank that failed or did not report in time."""
        deadline = time.monotonic() + self._timeout_s
        files: dict[str, FileRecord] = {}
        failures: list[str] = []
        for rank in range(1, self._mesh.world.size):
            path = _report_file(folder, rank)
            while not path.exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"process {rank} has not written its part of {folder} within "
                        f"{self._timeout_s:.0f} s; the checkpoint was given up"
                    )
                time.sleep(_POLL_S)
            report = json.loads(path.read_text())
            path.unlink()
            files |= {name: FileRecord(*record) for name, record in report["files"].items()}
            if report["error"] is not None:
                failures.append(f"process {rank} could not write: {report['error']}")
        if failures:
            raise CheckpointError(failures[0])
        return files

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def _scan(self) -> tuple[list[Checkpoint], dict[int, str]]:
        """Complete checkpoints in the order of saving, and for damaged ones the reason by step."""
        complete: list[Checkpoint] = []
        damaged: dict[int, str] = {}
        for step, path in self._folders().items():
            try:
                complete.append(_read_metadata(step, path))
            except CheckpointError as error:
                damaged[step] = str(error)
        return sorted(complete, key=lambda checkpoint: checkpoint.order), damaged

    def _folders(self) -> dict[int, Path]:
        """Published folders by step, including one whose replacement was interrupted."""
        folders: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else []:
            match = _FOLDER.fullmatch(path.name)
            if match and match[1]:
                folders[int(match[1])] = path
            elif match and match[3] == "retired":
                folders.setdefault(int(match[2]), path)
        return folders

    def _clean(self) -> None:
        for path in list(self.folder.iterdir()) if self.folder.exists() else []:
            match = _FOLDER.fullmatch(path.name)
            if match and match[2]:
                clean_leftovers(self.folder / f"step_{match[2]}")

    def _prune(self) -> None:
        complete, _ = self._scan()
        kept = {checkpoint.step for checkpoint in complete[-self.keep_last :]}
        if self.keep_best and (best := _best(complete)):
            kept.add(best.step)
        for checkpoint in complete:
            if checkpoint.step not in kept:
                discard(checkpoint.path)


def _read_metadata(step: int, path: Path) -> Checkpoint:
    data = read_manifest(path).metadata
    if data["step"] != step:
        raise CheckpointError(f"{path} holds step {data['step']}: it has been renamed")
    return Checkpoint(
        step=step,
        path=path,
        metric=data["metric"],
        saved_at=data["saved_at"],
        written_by=AxisSizes(**data["mesh"]),
        order=data["order"],
        names=tuple(data["parts"]),
    )


def _write_own(folder: Path, trees: Mapping[str, SplitTree], rank: int) -> dict[str, FileRecord]:
    files: dict[str, FileRecord] = {}
    for name, tree in trees.items():
        files |= write_tree(folder, name, tree, rank)
    return files


def _report_file(folder: Path, rank: int) -> Path:
    return folder / f"report.rank{rank}.json"


def _best(complete: Iterable[Checkpoint]) -> Checkpoint | None:
    """The checkpoint with the largest metric; the newest of several."""
    rated = [
        (checkpoint.metric, checkpoint.order, checkpoint)
        for checkpoint in complete
        if checkpoint.metric is not None
    ]
    return max(rated)[2] if rated else None
