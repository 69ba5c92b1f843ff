"""The base is found in every state that a clone is in, and CI's record outlives the clone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.selection import __main__
from tests.selection.change import (
    STATE_VARIABLE,
    Record,
    read_change,
    read_record,
    state_file,
    write_record,
)

Git = Callable[..., str]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits on `main`."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@localhost")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.delenv("BASE", raising=False)
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "first.py")
    commit(folder, "second.py")
    return folder


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, name: str) -> str:
    (folder / name).write_text(name)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", name)
    return git(folder, "rev-parse", "HEAD")


def test_a_branch_is_compared_with_the_commit_where_it_left_the_default_one(
    repository: Path, tmp_path: Path
) -> None:
    fork = git(repository, "rev-parse", "HEAD")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    commit(repository, "landed_by_others.py")
    commit(clone, "third.py")
    commit(clone, "fourth.py")
    git(clone, "fetch", "-q")
    (clone / "first.py").write_text("changed")
    (clone / "new.py").write_text("")
    found = read_change(clone, Record())
    assert found.base == fork
    assert found.files == {"first.py", "third.py", "fourth.py", "new.py"}
    assert found.number == 4


def test_the_default_branch_is_compared_with_the_last_commit_that_passed(repository: Path) -> None:
    passed = git(repository, "rev-parse", "HEAD")
    commit(repository, "third.py")
    found = read_change(repository, Record(passed))
    assert (found.base, found.files) == (passed, {"third.py"})


def test_no_base_is_made_up(repository: Path, tmp_path: Path) -> None:
    for record in (Record(), Record("0" * 40)):
        found = read_change(repository, record)
        assert (found.base, found.files) == (None, None)
    assert read_change(tmp_path, Record()).why == "this is no git repository"


def test_without_a_record_what_is_not_committed_is_the_change(repository: Path) -> None:
    (repository / "first.py").write_text("changed")
    (repository / "new.py").write_text("")
    assert read_change(repository, Record()).files == {"first.py", "new.py"}


def test_a_base_that_is_named_wins(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE", "HEAD~1")
    assert read_change(repository, Record()).files == {"second.py"}
    monkeypatch.setenv("BASE", "nowhere")
    with pytest.raises(ValueError, match="BASE=nowhere names no commit"):
        read_change(repository, Record())


def test_a_file_that_was_moved_or_deleted_has_changed(repository: Path) -> None:
    passed = git(repository, "rev-parse", "HEAD")
    git(repository, "mv", "first.py", "moved.py")
    (repository / "second.py").unlink()
    found = read_change(repository, Record(passed))
    assert found.files == {"first.py", "moved.py", "second.py"}


def test_the_record_outlives_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state" / "ci.json"))
    assert read_record(state_file()) == Record()
    write_record(state_file(), "abc", 7, ["one", "two"])
    write_record(state_file(), "def", 9, ["two"])
    assert read_record(state_file()) == Record("def", {"one": 7, "two": 9})
    state_file().write_text("no record")
    assert read_record(state_file()) == Record()


def test_what_passed_is_noted_with_the_commit_on_which_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state" / "ci.json"))
    monkeypatch.setattr(__main__, "RAN", tmp_path / "ran.json")
    ran = {"commit": "abc", "number": 7, "units": ["one"]}
    __main__.RAN.write_text(json.dumps(ran))
    __main__.passed()
    assert read_record(state_file()) == Record("abc", {"one": 7})
    __main__.RAN.write_text(json.dumps(ran | {"commit": None}))
    with pytest.raises(SystemExit, match="this is no git repository"):
        __main__.passed()
    __main__.RAN.write_text(json.dumps(ran))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "ran.json" / "ci.json"))
    with pytest.raises(SystemExit, match=r"cannot be written: .*Let HONE_CI_STATE name a file"):
        __main__.passed()
