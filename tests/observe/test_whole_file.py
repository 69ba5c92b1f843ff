"""A text file appears whole or not at all, and nothing is left beside it."""

from pathlib import Path

import pytest

from hone.observe.disk import DiskError
from hone.observe.whole_file import whole_file


def write(path: Path, *, error: BaseException | None = None) -> None:
    before = path.read_bytes() if path.exists() else None
    with whole_file(path, "output") as file:
        file.write("caf\u00e9\n" * 10_000)
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == before, "seen half written"
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), GeneratorExit()])
def test_whole_or_not_at_all(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "deep" / "a.txt"
    for before in ([], [path]):
        assert list(path.parent.iterdir()) == before if path.parent.exists() else not before
        with pytest.raises(type(error)):
            write(path, error=error)
        assert list(path.parent.iterdir()) == before
        write(path)
        assert path.read_text(encoding="utf-8") == "caf\u00e9\n" * 10_000
        assert list(path.parent.iterdir()) == [path]
        path.write_text("older")


def test_a_file_that_cannot_take_its_place_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.mkdir()
    with pytest.raises(DiskError, match=r"a\.txt \(output\): "), whole_file(path, "output") as file:
        file.write("x")
    assert list(tmp_path.iterdir()) == [path]


def test_processes_that_write_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with whole_file(path, "output") as one, whole_file(path, "output") as other:
        one.write("one")
        other.write("other")
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]
