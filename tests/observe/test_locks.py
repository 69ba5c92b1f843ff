"""Locks of files: who has them, who waits, and where there are none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Thread

import pytest

from hone.observe.locks import NoLocksError, is_taken, take_lock


def test_a_lock_is_one_process_s_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert not is_taken(path)
    with path.open("a") as first, path.open("a") as second:
        take_lock(first, "run.dir 'x'")
        assert is_taken(path)
        with pytest.raises(BlockingIOError):
            take_lock(second, "run.dir 'x'")
        first.close()
        assert not is_taken(path)
        take_lock(second, "run.dir 'x'")
        assert is_taken(path)


def test_who_waits_gets_it_when_the_other_is_done(tmp_path: Path) -> None:
    path, order = tmp_path / ".lock", list[str]()
    with path.open("a") as first, path.open("a") as second:

        def wait() -> None:
            take_lock(second, "output 'x'", waits=True)
            order.append("taken")

        take_lock(first, "output 'x'")
        waiting = Thread(target=wait)
        waiting.start()
        order.append("given back")
        first.close()
        waiting.join()
    assert order == ["given back", "taken"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("waits", [True, False])
def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, *, waits: bool
) -> None:
    """What was got, where, by which key, and what to change."""

    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with (tmp_path / ".lock").open("a") as file, pytest.raises(NoLocksError) as caught:
        take_lock(file, "output 'out.jsonl'", waits=waits)
    assert str(caught.value) == (
        f"the file system of output 'out.jsonl' has no locks ([Errno {number}] "
        f"{os.strerror(number)}), which keep other processes out. Mount it with locks (Lustre: "
        "-o flock), or name a place on another file system."
    )
    assert not is_taken(tmp_path / ".lock")
