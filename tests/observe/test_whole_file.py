"""A text file appears whole or not at all, and nothing is left beside it."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from hone.observe.whole_file import whole_file

Kind = Callable[[Path], AbstractContextManager]


def write(kind: Kind, path: Path, *, error: BaseException | None = None) -> None:
    before = path.read_bytes() if path.exists() else None
    with kind(path) as file:
        file.write("caf\u00e9\n" * 10_000)
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == before, "seen half written"
        if error is not None:
            raise error


def check_whole_or_not_at_all(kind: Kind, folder: Path, error: BaseException) -> None:
    path = folder / "deep" / "a.txt"
    with pytest.raises(type(error)):
        write(kind, path, error=error)
    assert list(path.parent.iterdir()) == []
    write(kind, path)
    assert path.read_text(encoding="utf-8") == "caf\u00e9\n" * 10_000
    path.write_text("older")
    with pytest.raises(type(error)):
        write(kind, path, error=error)
    assert path.read_text() == "older"
    assert list(path.parent.iterdir()) == [path]
    write(kind, path)
    assert path.read_text(encoding="utf-8") == "caf\u00e9\n" * 10_000
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), GeneratorExit()])
def test_whole_or_not_at_all(tmp_path, error):
    check_whole_or_not_at_all(whole_file, tmp_path, error)


def test_a_file_that_cannot_take_its_place_leaves_nothing(tmp_path):
    path = tmp_path / "a.txt"
    path.mkdir()
    with pytest.raises(OSError), whole_file(path) as file:  # noqa: PT011 - the system's own text
        file.write("x")
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def in_place(path: Path):
    """The file has its name from the start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        yield file


@contextmanager
def leaves_the_unfinished(path: Path):
    """An error leaves the unfinished file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        yield file
    os.replace(unfinished, path)


@contextmanager
def always_in_place_at_the_end(path: Path):
    """Half a file takes its place after an error, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
    finally:
        os.replace(unfinished, path)


@pytest.mark.parametrize("bug", [in_place, leaves_the_unfinished, always_in_place_at_the_end])
def test_planted_bugs_turn_the_check_red(bug, tmp_path):
    with pytest.raises(AssertionError):
        check_whole_or_not_at_all(bug, tmp_path, OSError("disk full"))
