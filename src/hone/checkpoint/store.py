"""The checkpoints of a run: saved whole, found by listing, refused when anything is missing.

    store = CheckpointStore("runs/a/checkpoints", keep_last=2, keep_best=True)
    store.save(100, {"model": tensors, "optimizer": state, "data": {"cursor": 6400}}, metric=0.7)
    parts = store.load("latest", required=["model", "optimizer", "data"]).parts

A checkpoint is the folder `step_<N>` with each part's files (`checkpoint.tree`) and the manifest of
`checkpoint.atomic`. There is no pointer file: which one is the latest or the best follows from what
is there. Latest is what was saved last, also after a run went back to an earlier step.

Several processes write one checkpoint together: each what it holds of the tensors, in files of its
own; the first that has a part everything else of it; the first of all the manifest, once the others
have reported theirs. They meet in the folder itself, so that writing needs no collectives and can
go on behind the training.
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
from hone.config.parallel import AxisSizes
from hone.distributed.mesh import Mesh

__all__ = ["Checkpoint", "CheckpointStore"]

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"step_(\d+)|\.step_(\d+)\.(partial|retired)")
_PART = re.compile(r"[a-z][a-z0-9_]*")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, with what was asked for of its content."""

    step: int
    path: Path
    metric: float | None
    saved_at: float
    """Seconds since the epoch, by the first process's clock."""
    written_by: AxisSizes
    """The processes that wrote it."""
    order: int = 1
    """Counts saves: 1 for the first."""
    names: tuple[str, ...] = ()
    """Of all parts."""
    parts: Mapping[str, Tree] = field(default_factory=dict[str, Tree])
    """Those that were loaded; tensors in them are `StoredTensor`s."""
    skipped: tuple[str, ...] = ()
    """Why newer checkpoints could not be used, one sentence each."""


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
        tensor. Processes may have different parts; of those that have one the first writes what is
        no DTensor. `metric` is larger for better models; NaN counts as none. A checkpoint of the
        same step is replaced.

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
        together(self._mesh, written.result)

    @property
    def is_empty(self) -> bool:
        """No checkpoint has ever been published here, complete or damaged since."""
        return not self._folders()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in the order in which they were saved.

        Complete means that every file is there with its size; checksums are verified by `load`.
        """
        return [found.step for found in self._scan()[0]]

    def best_metric(self) -> float:
        """The largest metric of the complete checkpoints; -inf when none has one."""
        best = _best(self._scan()[0])
        return -math.inf if best is None or best.metric is None else best.metric

    def load(
        self, step: int | Literal["latest"] = "latest", *, required: Iterable[str] | None = None
    ) -> Checkpoint:
        """Read a checkpoint, every file against its checksum.

        `"latest"` takes the newest one that proves intact and warns of those it had to skip; a
        step takes that one or none. `required` names the parts to read, all by default.

        Raises CheckpointError naming what is missing or damaged.
        """
        complete, damaged = self._mesh.gather(self._scan())[0]
        steps = ", ".join(str(found.step) for found in complete)
        if step != "latest":
            if step in damaged:
                raise CheckpointError(damaged[step])
            complete = [found for found in complete if found.step == step]
        skipped = list(damaged.values())
        for found in reversed(complete):
            names = found.names if required is None else tuple(required)
            if missing := [name for name in names if name not in found.names]:
                raise CheckpointError(
                    f"{found.path} has no {', '.join(missing)}; it holds {', '.join(found.names)}"
                )
            try:
                parts = together(self._mesh, partial(self._read, found.path, names))
            except CheckpointError as error:
                skipped.append(str(error))
                continue
            for reason in skipped:
                logger.warning("Skipped an incomplete checkpoint. %s", reason)
            return replace(found, parts=parts, skipped=tuple(skipped))
        wanted = "checkpoint" if step == "latest" else f"checkpoint of step {step}"
        reasons = "".join(f"\n  {reason}" for reason in skipped)
        remedy = f"go on from one of the steps {steps}" if steps else "remove it to start over"
        raise CheckpointError(
            f"{self.folder} has no complete {wanted}; {remedy}, or take another folder.{reasons}"
        )

    def _read(self, path: Path, names: tuple[str, ...]) -> dict[str, Tree]:
        """Parts of a checkpoint. Each process verifies the checksums of a share of the files."""
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
        leads = {name: i for i, held in reversed([*enumerate(holders)]) for name in held}
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
        """Make the empty folder to write into; leaving `publishing` publishes it."""
        path = self._path(step)
        self._clean()
        complete, damaged = self._scan()
        if step in damaged:
            discard(path)
        metadata = {
            "step": step,
            "order": 1 + max((found.order for found in complete), default=0),
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
        """Write the first process's part, await the others', publish, and delete what is old."""
        with publishing:
            try:
                publication.files |= _write_own(publication.folder, trees, 0)
            finally:  # nobody writes into a folder that is removed
                others = self._reports(publication.folder)
            publication.files |= others
        self._prune()

    def _report(self, folder: Path, trees: Mapping[str, SplitTree]) -> None:
        """Write this process's part, and tell the first one so, or why not."""
        rank = self._mesh.world.rank
        files: dict[str, FileRecord] = {}
        failure: str | None = None
        try:
            files = _write_own(folder, trees, rank)
        except Exception as error:  # a bug as well: the first must not publish without this part
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            path = _report_file(folder, rank)
            aside = path.with_suffix(".aside")  # what the first process finds is whole
            if folder.exists():
                aside.write_text(json.dumps({"files": files, "error": failure}))
                aside.rename(path)

    def _reports(self, folder: Path) -> dict[str, FileRecord]:
        """The files of the other processes, once they are written. Raises CheckpointError naming a
        process that failed or did not report in time."""
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
        """Complete checkpoints in the order of saving, and by step why the others are not."""
        complete: list[Checkpoint] = []
        damaged: dict[int, str] = {}
        for step, path in self._folders().items():
            try:
                complete.append(_read_metadata(step, path))
            except CheckpointError as error:
                damaged[step] = str(error)
        return sorted(complete, key=lambda found: found.order), damaged

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
        complete, _ = self._scan()
        kept = {found.step for found in complete[-self.keep_last :]}
        if self.keep_best and (best := _best(complete)):
            kept.add(best.step)
        for found in complete:
            if found.step not in kept:
                discard(found.path)


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
    """The largest metric, the newest of equals."""
    rated = [(found.metric, found.order, found) for found in complete if found.metric is not None]
    return max(rated)[2] if rated else None
