"""Parts of an output: whatever kills what when, each group is there once, in order."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.errors import UserError
from hone.observe.resumable_jsonl import (
    PartFile,
    PartFileWriter,
    PartProgress,
    locked_parts,
    merge_parts,
    parts_folder,
    start_of,
)

NUM_GROUPS = 30


def rows_of(group: int) -> list[bytes]:
    """Of every third group nothing is kept."""
    return [f'{{"id": "{group}/{index}"}}\n'.encode() for index in range(group % 3)]


def row_of(group: int) -> int:
    """Every second row of the data is dropped, and some more."""
    return 2 * group + group // 7


def write(output: Path, size: int, budgets: list[int], torn: int) -> None:
    """Writers that are killed after so many groups, `torn` bytes into the next one's rows."""
    with locked_parts(output) as parts:
        first, row = start_of(parts)
        assert row == row_of(first)
        assert all(any(part.has(group) for part in parts) for group in range(first))
        for rank in range(size):
            writer = PartFileWriter(output, rank, size)
            own = [
                group
                for group in range(first, NUM_GROUPS)
                if group % size == rank and not any(part.has(group) for part in parts)
            ]
            for group in own[: budgets[rank]]:
                writer.append(group, [], rows_of(group), row=row_of(group))
            writer.close()
            rest = b"".join(rows_of(group)[0] for group in own[budgets[rank] :] if rows_of(group))
            with (parts_folder(output) / f"{rank}-of-{size}.jsonl").open("ab") as file:
                file.write(rest[:torn])


SESSIONS = st.tuples(
    st.integers(1, 4), st.lists(st.integers(0, 8), min_size=4, max_size=4), st.integers(0, 40)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sessions=st.lists(SESSIONS, max_size=5), last=st.integers(1, 4))
def test_every_group_is_there_once_in_order(
    sessions: list[tuple[int, list[int], int]], last: int, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    output.unlink(missing_ok=True)
    for session in sessions:
        write(output, *session)
    write(output, last, [NUM_GROUPS] * last, 0)
    merge_parts(output)
    assert output.read_bytes() == b"".join(b"".join(rows_of(n)) for n in range(NUM_GROUPS))
    assert not parts_folder(output).exists()


def test_the_state_says_what_is_done(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    write(output, 1, [5], 0)
    state = json.loads((parts_folder(output) / "0-of-1.done.json").read_text())
    assert (state["end"], state["num_groups"], state["num_rows"]) == (5, 5, 4)


PARTS = st.integers(1, 6).flatmap(
    lambda size: st.tuples(
        st.integers(0, size - 1), st.just(size), st.integers(0, 40), st.booleans()
    )
)


@settings(deadline=None)
@given(st.lists(PARTS, max_size=8))
def test_the_start_is_the_last_known_group_before_which_all_is_done(
    drawn: list[tuple[int, int, int, bool]],
) -> None:
    """Also where releases that wrote no rows have made some parts."""
    parts = [
        PartFile(Path(), rank, size, PartProgress(end, row=row_of(end - 1) if is_known else None))
        for rank, size, turns, is_known in drawn
        if (end := turns * size + rank + 1 if turns else 0) or not is_known
    ]
    undone = next(n for n in range(300) if not any(part.has(n) for part in parts))
    known = [part.done.end - 1 for part in parts if part.done.row is not None]
    group = max((group for group in known if group <= undone), default=0)
    assert start_of(parts) == (group, row_of(group))


def test_parts_of_releases_that_wrote_no_rows_are_read_from_the_beginning(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    write(output, 1, [5], 0)
    state = parts_folder(output) / "0-of-1.done.json"
    known = json.loads(state.read_text())
    assert known.pop("row") == row_of(4)
    state.write_text(json.dumps(known))
    with locked_parts(output) as parts:
        assert start_of(parts) == (0, 0)
        assert parts[0].done.num_groups == 5


def test_a_state_stays_within_its_bytes(tmp_path: Path) -> None:
    """A shorter one would not cover the end of one that is longer."""
    output, most = tmp_path / "out.jsonl", 10**15
    with locked_parts(output):
        writer = PartFileWriter(output, 0, 1)
        writer.done = PartProgress(*[most] * 6, reward_sum=-1 / 3 * most)
        writer.append(most, [], [], row=most)
        writer.close()
    assert (parts_folder(output) / "0-of-1.done.json").stat().st_size == 512


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre without `-o flock`, or a bucket that is mounted as a folder."""

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    output = tmp_path / "out.jsonl"
    with (
        pytest.raises(UserError, match=rf"output '{output}' has no locks.*No locks.*flock.*name"),
        locked_parts(output),
    ):
        pass


def test_two_may_not_write_at_once(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with locked_parts(output), pytest.raises(UserError, match="another process writes output"):
        write(output, 1, [1], 0)
