"""The walls around programs: what each of them keeps a program from, with the others refused."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

import pytest

from hone.rewards import builtin, jail, walls
from hone.rewards.builtin import CodeTests
from hone.rewards.code import count_passed
from hone.rewards.jail import Jail, JailError, remove_tree
from hone.rewards.walls import Walls
from tests.rewards import attempts
from tests.rewards.attempts import ATTEMPTS, Outcome, outcome_of
from tests.tables import table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these walls")

SYSTEM_PYTHON = "/usr/bin/python3"
"""One that any user can read."""

BY_FILTER = (
    "new namespaces", "a lease, which stops who opens the file", "what others do in a folder",
)  # fmt: skip
MODES: dict[str, tuple[str, ...]] = {
    "all that this machine has": (),
    "no namespaces, as in most containers": ("namespaces",),
    "no namespaces and no Landlock": ("namespaces", "landlock"),
    "no namespaces and no filter": ("namespaces", "seccomp"),
    "namespaces alone": ("landlock", "seccomp"),
}


@pytest.mark.parametrize("python", [sys.executable, SYSTEM_PYTHON])
@table("mode", MODES)
def test_a_program_reaches_nothing_that_a_wall_is_said_to_keep_it_from(
    mode: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a Python that any user can read, programs of root's runs are another user."""
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    monkeypatch.setattr(sys, "executable", python)
    _check_outcome(MODES[mode], outcome_of(MODES[mode], tmp_path))


def _check_outcome(refused: Sequence[str], outcome: Outcome) -> None:
    reached = {name for name in outcome.reached if ATTEMPTS[name][0] not in outcome.missing}
    assert not reached
    by_filter = BY_FILTER if "seccomp" in refused else ()
    assert set(outcome.always_reached) <= set(by_filter)
    assert outcome.is_alive or "signals" in outcome.missing
    assert not outcome.has_written or "files" in outcome.missing


NOBODY = 65534
OF_NOBODY: dict[str, tuple[tuple[str, ...], set[str] | None]] = {
    "all that this machine has": ((), None),
    "no namespaces, as in most containers": (("namespaces",), {"disk", "forks"}),
    "no namespaces and no Landlock": (
        ("namespaces", "landlock"), {"secrets", "files", "disk", "forks"},
    ),
    "nothing": (
        ("namespaces", "landlock", "seccomp"),
        {"secrets", "signals", "network", "files", "disk", "forks"},
    ),
}  # fmt: skip
"""What is refused, and what SECURITY.md says is then missing for a user who is not root."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@table("mode", OF_NOBODY)
def test_a_user_who_is_not_root_has_the_walls_that_are_said(mode: str) -> None:
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"there is no {SYSTEM_PYTHON}")
    refused, missing = OF_NOBODY[mode]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy_source(folder)
        os.chown(folder, NOBODY, NOBODY)
        done = subprocess.run(
            [SYSTEM_PYTHON, folder / "attempts.py", folder, *refused],
            env={"PATH": os.defpath, "PYTHONPATH": name, "SECRET_KEY": "hunter2"},
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            stdout=subprocess.PIPE,
            check=True,
        )
    outcome = Outcome(**json.loads(done.stdout))
    _check_outcome(refused, outcome)
    if missing is not None:
        assert set(outcome.missing) == missing
    for wall in {"secrets", "signals", "network", "files"}.intersection(outcome.missing):
        assert any(ATTEMPTS[name][0] == wall for name in outcome.reached), f"{wall} is there"


def _copy_source(folder: Path) -> None:
    """What another user needs, who may be kept from where this file lies."""
    shutil.copytree(Path(walls.__file__).parent, folder / "hone" / "rewards")
    (folder / "hone" / "__init__.py").touch()
    shutil.copy(Path(attempts.__file__), folder)


def test_what_is_missing_is_said_for_each_wall() -> None:
    def missing(*refused: str) -> Mapping[str, str]:
        jail = Jail(refused=refused)
        jail.close()
        return jail.missing

    everything = missing("user", "namespaces", "landlock", "seccomp")
    assert set(everything) == {"secrets", "signals", "network", "files", "disk", "forks"}
    assert "files" in missing("user", "namespaces", "seccomp"), "permissions, for one"
    assert "network" in missing("seccomp"), "sockets that are files, for one"
    assert "files" in missing("landlock")


@pytest.mark.parametrize(
    ("up", "is_missing"),
    [
        (Walls(namespaces=True), False),
        (Walls(seccomp=True), True),
        (Walls(landlock=1, seccomp=True), False),
        (Walls(outranked=True, is_root=True, seccomp=True), False),
        (Walls(is_root=True, seccomp=True), True),
        (Walls(user=True), False),
        (Walls(landlock=1), True),
        (Walls(outranked=True, is_root=True), True),
    ],
)
def test_secrets_are_said_to_be_open_where_nothing_hides_them(up: Walls, is_missing: bool) -> None:
    """The last column of its row in SECURITY.md, case by case."""
    assert ("secrets" in up.missing) == is_missing


def test_one_warning_says_what_programs_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "Jail", lambda folder: Jail(folder, ["landlock"]))
    reward = CodeTests()
    assert "read and write the files that your user can" in list(reward.settle(tmp_path))
    assert reward._jail is not None
    reward._jail.close()


BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
LEAVES = "import os\nos.makedirs('a/b')\nos.chmod('a', 0)\nif os.fork(): 0\nwhile True: pass"


@table("mode", MODES)
def test_nothing_is_left_of_a_program_that_is_killed(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path(SYSTEM_PYTHON).exists():
        monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
    jail = Jail(refused=MODES[mode])
    folder = jail._folder
    try:
        assert count_passed(LEAVES, ["assert True"], monotonic() + 0.3, jail) == 0
        if "forks" not in jail.missing:
            assert count_passed(BOMB, ["assert True"], monotonic() + 0.3, jail) == 0
        assert [one.name for one in folder.iterdir()] == ["program"]
        assert not list((folder / "program").iterdir())
        assert count_passed("x = 1", ["assert x == 1"], monotonic() + 60, jail) == 1
    finally:
        jail.close()
    assert not folder.exists()


def test_a_launcher_that_is_lost_is_an_error_and_the_next_call_has_another() -> None:
    reward = CodeTests()
    assert reward(completion="x = 1", answer="assert x == 1") == 1.0
    lost = reward._jail
    assert lost is not None
    lost._process.kill()
    lost._process.wait()
    with pytest.raises(JailError, match="is lost"):
        reward(completion="x = 1", answer="assert x == 1")
    assert reward(completion="x = 1", answer="assert x == 1") == 1.0
    assert reward._jail is not None
    reward._jail.close()
    lost.close()


def test_a_launcher_that_cannot_end_its_programs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its late answer would be read as the next program's."""
    walled = Jail()
    monkeypatch.setattr(jail, "_END_S", 0.0)
    with pytest.raises(JailError, match="cannot end what it has started"), walled.run():
        pass
    assert walled._process.returncode is not None
    assert not walled._folder.exists()


def test_a_folder_is_removed_whatever_a_program_has_made_of_it(tmp_path: Path) -> None:
    root = tmp_path / "folder"
    at = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("folder", dir_fd=at)
    for name in ("folder", *(["x" * 50] * 200)):  # deeper than a path may be long
        inner = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
        os.mkdir("x" * 50, dir_fd=at)
        os.close(os.open("file", os.O_CREAT, dir_fd=at))
    os.chmod(at, 0)
    os.close(at)
    (root / "link").symlink_to(tmp_path)
    (tmp_path / "kept").touch()
    root.chmod(0)
    remove_tree(root)
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    remove_tree(root)
