"""The walls around programs: what each of them keeps a program from, with the others refused."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic

import pytest

from hone.rewards import builtin
from hone.rewards.builtin import CodeTests
from hone.rewards.code import count_passed
from hone.rewards.jail import Jail, JailError, remove_tree
from tests.tables import check_rows, table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these walls")

SYSTEM_PYTHON = "/usr/bin/python3"
"""One that any user can read."""


# What a program tries, by the wall that keeps it from it: `reaches` says whether it has worked.
ATTEMPTS: dict[str, tuple[str, str]] = {
    "the environment of another process": (
        "secrets",
        "def reaches(): return b'hunter2' in open('/proc/{pid}/environ', 'rb').read()",
    ),
    "the environment of any process": (
        "secrets",
        "import os\ndef reaches():\n    held = b''\n    for pid in os.listdir('/proc'):\n"
        "        try: held += open(f'/proc/{{pid}}/environ', 'rb').read()\n"
        "        except OSError: pass\n    return b'hunter2' in held",
    ),
    "the memory of another process": (
        "secrets",
        "def reaches(): return bool(open('/proc/{pid}/mem', 'rb'))",
    ),
    "a kill": ("signals", "import os\ndef reaches():\n    os.kill({pid}, 9)\n    return True"),
    "a signal that only asks": (
        "signals",
        "import os\ndef reaches():\n    os.kill({pid}, 0); return True",
    ),
    "a kill by way of a pipe": (
        "signals",
        "import fcntl, os\ndef reaches():\n    read, write = os.pipe()\n"
        "    fcntl.fcntl(read, fcntl.F_SETOWN, {pid}); fcntl.fcntl(read, 10, 9)\n"
        "    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC); os.write(write, b'x')\n"
        "    return False  # whether the other process is still there says more",
    ),
    "the limits of another process": (
        "signals",
        "import resource\ndef reaches():\n"
        "    resource.prlimit({pid}, resource.RLIMIT_CORE, (0, 0)); return True",
    ),
    "the cores of another process": (
        "signals",
        "import os\ndef reaches():\n    os.sched_setaffinity({pid}, [0]); return True",
    ),
    "a connection": (
        "network",
        "import socket\ndef reaches():\n"
        "    return bool(socket.create_connection(('127.0.0.1', {port}), 1))",
    ),
    "a file to read": (
        "files",
        "def reaches(): return open({folder!r} + '/answers').read() == '42'",
    ),
    "a socket that is a file": (
        "network",
        "import socket\ndef reaches():\n"
        "    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "    return one.sendto(b'x', {folder!r} + '/log') == 1",
    ),
    "memory that other processes share": (
        "secrets",
        "import ctypes\ndef reaches():\n    shmat = ctypes.CDLL(None).shmat\n"
        "    shmat.restype = ctypes.c_ssize_t\n    return shmat({memory}, None, 0) != -1",
    ),
    **{
        name: ("files", f"import os\nplace = {{folder!r}} + '/answers'\ndef reaches():\n    {text}")
        for name, text in {
            "the permissions of a file": "os.chmod(place, 0o4777); return True",
            "the times of a file": "os.utime(place, (0, 0)); return True",
            "the attributes of a file": "os.setxattr(place, 'user.x', b''); return True",
            "the length of a file": "os.truncate(place, 1); return True",
        }.items()
    },
    "a file to write": (
        "files",
        "def reaches(): return open({folder!r} + '/left', 'w').write('x') == 1",
    ),
    "a full disk": (
        "disk",
        "import os\ndef reaches():\n    for number in range(5):\n"
        "        os.posix_fallocate(os.open(str(number), os.O_CREAT | os.O_WRONLY), 0, 1 << 26)\n"
        "    return True",
    ),
    "processes": (
        "forks",
        "import os, time\ndef reaches():\n    for _ in range(100):\n"
        "        if not os.fork(): time.sleep(60)\n    return True",
    ),
}
ALWAYS = {
    "a large file": (
        "import os\nfile = os.open('x', os.O_CREAT | os.O_WRONLY)\n"
        "def reaches(): return os.write(file, bytes((1 << 26) + 1)) > 1 << 26"
    ),
    "new namespaces": (
        "import ctypes\ndef reaches(): return ctypes.CDLL(None).unshare(0x10000000) == 0"
    ),
    "another user": "import os\ndef reaches():\n    os.setuid(1); return True",
    "a lease, which stops who opens the file": (
        "import fcntl, os\ndef reaches():\n    file = os.open(os.__file__, os.O_RDONLY)\n"
        "    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK); return True"
    ),
    "what others do in a folder": (
        "import ctypes\ndef reaches():\n    libc = ctypes.CDLL(None)\n"
        "    return libc.inotify_add_watch(libc.inotify_init(), b'/', 0xfff) >= 0"
    ),
    "a device": "import os\ndef reaches():\n    os.mknod('x', 0o60666, 2048); return True",
    "variables": "import os\ndef reaches(): return 'SECRET_KEY' in os.environ",
    "a trace of its parent": (
        "import ctypes, os\ndef reaches(): return ctypes.CDLL(None).ptrace(16, os.getppid()) == 0"
    ),
    "the process that started it": (
        "import os\ndef reaches():\n"
        "    return any(bool(open(f'/proc/{{pid}}/mem', 'rb'))\n"
        "        for pid in os.listdir('/proc') if pid == str(os.getppid()))"
    ),
}
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


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Mapping[str, object]]:
    """What the attempts name: a process of this user with a key in its environment, as the
    trainer's, memory that processes of this user share, a port of this host that accepts
    connections, and a socket in `folder` that takes messages."""
    libc = ctypes.CDLL(None)
    memory = libc.shmget(0, 1, 0o1600)
    environment = {**os.environ, "SECRET_KEY": "hunter2"}
    with (
        subprocess.Popen(["sleep", "600"], env=environment) as process,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log,
    ):
        log.bind(str(tmp_path / "log"))
        threading.Thread(target=server.accept, daemon=True).start()
        yield {
            **{"pid": process.pid, "port": server.getsockname()[1]},
            **{"memory": memory, "folder": str(tmp_path)},
        }
        process.kill()
        libc.shmctl(memory, 0, None)


@pytest.mark.parametrize("python", [sys.executable, SYSTEM_PYTHON])
@table("mode", MODES)
def test_a_program_reaches_nothing_that_a_wall_is_said_to_keep_it_from(
    mode: str,
    python: str,
    words: Mapping[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a Python that any user can read, programs of root's runs are another user."""
    if not Path(python).exists():
        pytest.skip(f"there is no {python}")
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    monkeypatch.setattr(sys, "executable", python)
    (tmp_path / "answers").write_text("42")
    jail = Jail(refused=MODES[mode])

    def check(name: str) -> None:
        wall, program = ATTEMPTS[name]
        program = program.format(**words)
        if wall not in jail.missing:
            assert not reaches(jail, program)
        assert Path(f"/proc/{words['pid']}/exe").exists() or "signals" in jail.missing

    def check_always(name: str) -> None:
        is_open = name in BY_FILTER and "seccomp" in MODES[mode]
        assert is_open or not reaches(jail, ALWAYS[name])

    try:
        check_rows(list(ATTEMPTS), check)
        check_rows(list(ALWAYS), check_always)
        assert not (tmp_path / "left").exists() or "files" in jail.missing
    finally:
        jail.close()


def reaches(jail: Jail, program: str) -> bool:
    """What `reaches` of a program gives; an exception is a no."""
    tests = ["assert reaches()", "assert True"]
    passed = count_passed(program, tests, monotonic() + 60, jail)
    assert passed > 0, "the program and its judge have run"
    return passed == 2


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
