"""Crash-safe JSONL writer: an output that several processes write, and that a kill cannot damage.

Writer r of n appends the rows of the groups r, r + n, r + 2n, ... in this order to its own part
file in the folder `<output>.parts`. A state file next to it says which groups are done; it is
written after the rows. Rows beyond the state, complete or not, belong to an unfinished group and
are cut off on resume, which may use another number of writers. Once all groups are done, the part
files are merged into the output in the order of the groups.

    folder/out.jsonl.parts/0-of-2.jsonl         {"id": "0/0", ...}  {"id": "2/0", ...}
                           0-of-2.done.json     {"end": 3, "num_bytes": 5120, "row": 4, ...}
                           indexes/             of the data, for the next run

A row begins with `"id": "<group>/<index>"`. Groups are counted over the rows of the data that are
kept, so the state also has the row of its last group: from one such pair on, the next run counts
the groups again without what lies before.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.errors import UserError
from hone.observe.disk import AppendedFile, writing
from hone.observe.locks import take_lock
from hone.observe.whole_file import whole_file
from hone.types import Sample

__all__ = [
    "PartFile",
    "PartFileWriter",
    "PartProgress",
    "indexes_folder",
    "locked_parts",
    "merge_parts",
    "parts_folder",
    "read_parts",
    "start_of",
]

_NAME = re.compile(r"(\d+)-of-(\d+)\.jsonl")
_GROUP = re.compile(r'\{"id": "(\d+)/')
_STATE_BYTES = 512
"""Less than a page, so that a killed process has written all of it or nothing."""


@dataclass(frozen=True, slots=True)
class PartProgress:
    """Progress of a part file. Counts cover all its groups before `end`."""

    end: int = 0
    """Number of the last finished group, plus 1."""
    num_groups: int = 0
    num_bytes: int = 0
    num_rows: int = 0
    num_samples: int = 0
    """Sampled completions, whether kept or not."""
    num_failed: int = 0
    """Completions without a reward."""
    reward_sum: float = 0.0
    """Sum of the other completions' rewards."""
    row: int | None = None
    """Row of the last finished group in the data; None before the first, and in parts of releases
    that did not write it."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """Part file of writer `rank` of `size`, with its progress."""

    path: Path
    rank: int
    size: int
    done: PartProgress

    def has(self, group: int) -> bool:
        """Whether this part file has the finished group. Groups of other part files are not
        counted."""
        return group < self.done.end and group % self.size == self.rank


class PartFileWriter:
    """Appends rows to a writer's part file, after the groups that are already done."""

    def __init__(self, output: Path, rank: int, size: int) -> None:
        path = parts_folder(output) / f"{rank}-of-{size}.jsonl"
        self.done = _read_done(path)
        self._rows = AppendedFile(path, "output")
        self._state = _state_file(path)
        with writing(self._state, "output"):
            self._state.touch()
            self._state_io = self._state.open("r+b", buffering=0)

    def append(
        self, number: int, samples: Sequence[Sample], rows: Sequence[bytes], *, row: int
    ) -> None:
        """Write the rows of a group, which was made from this `row` of the data, then its state.
        Raises DiskError."""
        text = b"".join(rows)
        rewards = [sample.reward.total for sample in samples if sample.reward is not None]
        before = self.done
        done = PartProgress(
            end=number + 1,
            num_groups=before.num_groups + 1,
            num_bytes=before.num_bytes + len(text),
            num_rows=before.num_rows + len(rows),
            num_samples=before.num_samples + len(samples),
            num_failed=before.num_failed + len(samples) - len(rewards),
            reward_sum=before.reward_sum + sum(rewards),
            row=row,
        )
        if text:
            self._rows.write(text)
        self._note(done)

    def _note(self, done: PartProgress) -> None:
        text = json.dumps(asdict(done)).encode().ljust(_STATE_BYTES)
        with writing(self._state, "output", len(text)):
            os.pwrite(self._state_io.fileno(), text, 0)
        self.done = done

    def close(self) -> None:
        self._rows.close()
        self._state_io.close()


def parts_folder(output: Path) -> Path:
    """Folder of the part files of an output."""
    return output.with_name(f"{output.name}.parts")


def indexes_folder(output: Path) -> Path:
    """Folder for indexes of the data of an output, which is removed with the part files."""
    return parts_folder(output) / "indexes"


def read_parts(output: Path) -> list[PartFile]:
    """Existing part files with their progress."""
    parts: list[PartFile] = []
    for path in sorted(parts_folder(output).glob("*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            parts.append(PartFile(path, int(match[1]), int(match[2]), _read_done(path)))
    return parts


def start_of(parts: Sequence[PartFile]) -> tuple[int, int]:
    """A group and its row of the data, before which all groups are finished: the last such group
    that a part file names, else the first group."""
    unfinished = _first_unfinished(parts)
    known = [(part.done.end - 1, part.done.row) for part in parts]
    starts = [(group, row) for group, row in known if row is not None and group <= unfinished]
    return max(starts, default=(0, 0))


def _first_unfinished(parts: Sequence[PartFile]) -> int:
    """The number of the first group that no part file has."""
    start = 0
    for end in sorted({part.done.end for part in parts}):
        # Up to here the same part files have groups, which repeat with the product of their sizes.
        own = [part for part in parts if part.done.end >= end]
        period = math.lcm(*(part.size for part in own))
        for group in range(start, min(end, start + period)):
            if not any(part.has(group) for part in own):
                return group
        start = end
    return start


@contextmanager
def locked_parts(output: Path) -> Generator[list[PartFile]]:
    """Context manager that locks the part files of an output, cuts off rows of unfinished groups,
    and yields them.

    Raises UserError if another process has the lock, or the file system has none.
    """
    folder = parts_folder(output)
    with writing(folder, "output"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    with file:
        try:
            take_lock(file, f"output '{output}'")
        except BlockingIOError as error:
            raise UserError(
                f"another process writes output '{output}'. Wait for its end, or name another."
            ) from error
        parts = read_parts(output)
        for part in parts:
            with writing(part.path, "output"):
                os.truncate(part.path, part.done.num_bytes)
        yield parts


def merge_parts(output: Path) -> None:
    """Merge the part files into the output and remove their folder. Raises DiskError."""
    parts = read_parts(output)
    with writing(output, "output"):
        if len(parts) == 1:
            os.replace(parts[0].path, output)
        else:
            _merge(parts, output)
        shutil.rmtree(parts_folder(output))


def _merge(parts: Sequence[PartFile], output: Path) -> None:
    with ExitStack() as stack:
        files = [stack.enter_context(part.path.open(encoding="utf-8")) for part in parts]
        merged = stack.enter_context(whole_file(output, "output"))
        merged.writelines(heapq.merge(*files, key=_group_of))


def _group_of(line: str) -> int:
    match = _GROUP.match(line)
    assert match is not None, line[:80]
    return int(match[1])


def _state_file(part: Path) -> Path:
    return part.with_suffix(".done.json")


def _read_done(part: Path) -> PartProgress:
    """Read the progress. Empty if no group was finished."""
    try:
        state = json.loads(_state_file(part).read_text())
    except (FileNotFoundError, ValueError):
        return PartProgress()
    return PartProgress(**state)
