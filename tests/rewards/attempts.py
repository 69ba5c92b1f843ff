"""What programs try that mean to leave their jail, and which of it works here.

    python attempts.py FOLDER [REFUSED...]

It needs nothing but Python, so that another user can run it with the system's.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from hone.rewards.code import count_passed
from hone.rewards.jail import Jail

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
    "the memory of another process, to write to": (
        "secrets",
        "def reaches(): return bool(open('/proc/{pid}/mem', 'r+b', buffering=0))",
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What has worked of all that was tried."""

    missing: Sequence[str]
    """Names of walls that are said to be missing."""
    reached: Sequence[str]
    """Names of `ATTEMPTS`."""
    always_reached: Sequence[str]
    """Names of `ALWAYS`."""
    is_alive: bool
    """The process that programs tried to end is still there."""
    has_written: bool
    """A file is there that programs tried to write."""


def outcome_of(refused: Sequence[str], folder: Path) -> Outcome:
    """Try all, with these walls refused, on surroundings in `folder`."""
    (folder / "answers").write_text("42")
    with _surroundings(folder) as words:
        jail = Jail(refused=refused)
        try:
            programs = {name: text.format(**words) for name, (_, text) in ATTEMPTS.items()}
            reached = [name for name, program in programs.items() if _reaches(jail, program)]
            always = [name for name, program in ALWAYS.items() if _reaches(jail, program)]
        finally:
            jail.close()
        return Outcome(
            missing=list(jail.missing),
            reached=reached,
            always_reached=always,
            is_alive=os.path.exists(f"/proc/{words['pid']}/exe"),
            has_written=(folder / "left").exists(),
        )


@contextmanager
def _surroundings(folder: Path) -> Generator[Mapping[str, object]]:
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
        log.bind(str(folder / "log"))
        threading.Thread(target=server.accept, daemon=True).start()
        yield {
            **{"pid": process.pid, "port": server.getsockname()[1]},
            **{"memory": memory, "folder": str(folder)},
        }
        process.kill()
        libc.shmctl(memory, 0, None)


def _reaches(jail: Jail, program: str) -> bool:
    """What `reaches` of a program gives; an exception is a no."""
    tests = ["assert reaches()", "assert True"]
    passed = count_passed(program, tests, monotonic() + 60, jail)
    assert passed > 0, "the program and its judge have run"
    return passed == 2


if __name__ == "__main__":
    json.dump(asdict(outcome_of(sys.argv[2:], Path(sys.argv[1]))), sys.stdout)
