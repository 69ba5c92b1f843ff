"""Parts of an output: whatever kills what when, each group is there once, in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.errors import UserError
from hone.observe.resumable_jsonl import PartFileWriter, locked_parts, merge_parts, parts_folder

NUM_GROUPS = 30


def rows_of(group: int) -> list[bytes]:
    """Of every third group nothing is kept."""
    return [f'{{"id": "{group}/{index}"}}\n'.encode() for index in range(group % 3)]


def write(output: Path, size: int, budgets: list[int], torn: int) -> None:
    """Writers that are killed after so many groups, `torn` bytes into the next one's rows."""
    with locked_parts(output) as parts:
        for rank in range(size):
            writer = PartFileWriter(output, rank, size)
            own = [
                group
                for group in range(NUM_GROUPS)
                if group % size == rank and not any(part.has(group) for part in parts)
            ]
            for group in own[: budgets[rank]]:
                writer.append(group, [], rows_of(group))
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


def test_two_may_not_write_at_once(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with locked_parts(output), pytest.raises(UserError, match="another process writes output"):
        write(output, 1, [1], 0)
