"""A JSONL file in the making that a kill at any moment does not harm.

Each of n writers has a part of its own in the folder `<output>.parts` and appends what it makes of
the groups r, r + n, r + 2n, ... in this order. Beside a part lies how far it is done: first the
rows are written, then that. Rows behind it, whole or half, are of no group that is done, and are
cut off when the writing goes on, by as many writers as there are then. Once all groups are done the
parts become the output, in the order of the groups.

    folder/out.jsonl.parts/0-of-2.jsonl         {"id": "0/0", ...}  {"id": "2/0", ...}
                           0-of-2.done.json     {"end": 3, "num_bytes": 5120, ...}

A row begins with `"id": "<group>/<index>"`.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.errors import UserError
from hone.observe.disk import AppendedFile, writing
from hone.observe.whole_file import whole_file
from hone.types import Sample

__all__ = [
    "Done",
    "Part",
    "PartWriter",
    "finish_parts",
    "parts_folder",
    "read_parts",
    "taken_parts",
]

_NAME = re.compile(r"(\d+)-of-(\d+)\.jsonl")
_GROUP = re.compile(r'\{"id": "(\d+)/')
_STATE_BYTES = 256
"""Less than a page: a process that is killed has written all of it or nothing."""


@dataclass(frozen=True, slots=True)
class Done:
    """How far a part is done. Counts are of all groups before `end`."""

    end: int = 0
    """Number of the group behind the last that is done."""
    num_groups: int = 0
    num_bytes: int = 0
    num_rows: int = 0
    num_samples: int = 0
    """Completions that were drawn, kept or not."""
    num_failed: int = 0
    """Of these, without a reward."""
    reward_sum: float = 0.0
    """Of the others."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one of `size` writers has done."""

    path: Path
    rank: int
    size: int
    done: Done

    def has(self, group: int) -> bool:
        """Whether the group is done here. That of another part is done there, or was before this
        one began."""
        return group < self.done.end and group % self.size == self.rank


class PartWriter:
    """Appends what a writer makes to its part, and goes on behind what is done there."""

    def __init__(self, output: Path, rank: int, size: int) -> None:
        path = parts_folder(output) / f"{rank}-of-{size}.jsonl"
        self.done = _read_done(path)
        self._rows = AppendedFile(path, "output")
        self._state = _state_file(path)
        with writing(self._state, "output"):
            self._state.touch()
            self._state_io = self._state.open("r+b", buffering=0)

    def append(self, number: int, samples: Sequence[Sample], rows: Sequence[bytes]) -> None:
        """Write the rows of a group, and then that it is done. Raises DiskError."""
        text = b"".join(rows)
        rewards = [sample.reward.total for sample in samples if sample.reward is not None]
        before = self.done
        done = Done(
            end=number + 1,
            num_groups=before.num_groups + 1,
            num_bytes=before.num_bytes + len(text),
            num_rows=before.num_rows + len(rows),
            num_samples=before.num_samples + len(samples),
            num_failed=before.num_failed + len(samples) - len(rewards),
            reward_sum=before.reward_sum + sum(rewards),
        )
        if text:
            self._rows.write(text)
        self._note(done)

    def _note(self, done: Done) -> None:
        text = json.dumps(asdict(done)).encode().ljust(_STATE_BYTES)
        with writing(self._state, "output", len(text)):
            os.pwrite(self._state_io.fileno(), text, 0)
        self.done = done

    def close(self) -> None:
        self._rows.close()
        self._state_io.close()


def parts_folder(output: Path) -> Path:
    """Where the parts of an output lie."""
    return output.with_name(f"{output.name}.parts")


def read_parts(output: Path) -> list[Part]:
    """The parts that there are, as far as they are done."""
    found: list[Part] = []
    for path in sorted(parts_folder(output).glob("*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            found.append(Part(path, int(match[1]), int(match[2]), _read_done(path)))
    return found


@contextmanager
def taken_parts(output: Path) -> Generator[list[Part]]:
    """The parts, without what was written and is not done; nobody else may take them meanwhile.

    Raises UserError where somebody has.
    """
    folder = parts_folder(output)
    with writing(folder, "output"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process writes output '{output}'. Wait for its end, or name another."
            ) from error
        parts = read_parts(output)
        for part in parts:
            with writing(part.path, "output"):
                os.truncate(part.path, part.done.num_bytes)
        yield parts


def finish_parts(output: Path) -> None:
    """Put the parts together as the output, and take their folder away. Raises DiskError."""
    parts = read_parts(output)
    with writing(output, "output"):
        if len(parts) == 1:
            os.replace(parts[0].path, output)
        else:
            _merge(parts, output)
        shutil.rmtree(parts_folder(output))


def _merge(parts: Sequence[Part], output: Path) -> None:
    with ExitStack() as stack:
        files = [stack.enter_context(part.path.open(encoding="utf-8")) for part in parts]
        merged = stack.enter_context(whole_file(output))
        merged.writelines(heapq.merge(*files, key=_group_of))


def _group_of(line: str) -> int:
    match = _GROUP.match(line)
    assert match is not None, line[:80]
    return int(match[1])


def _state_file(part: Path) -> Path:
    return part.with_suffix(".done.json")


def _read_done(part: Path) -> Done:
    """Nothing where no group was ever done."""
    try:
        held = json.loads(_state_file(part).read_text())
    except (FileNotFoundError, ValueError):
        return Done()
    return Done(**held)
