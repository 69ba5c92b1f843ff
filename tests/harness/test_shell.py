"""The shell for commands that a model has written."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

import hone
from hone.rewards import shell as shell_module
from hone.rewards.jail import Jail, JailError, Programs
from hone.rewards.shell import Shell
from hone.rewards.walls import MAX_FILE_BYTES
from tests.door.served import PATIENCE_S
from tests.harness.played import played
from tests.tables import table

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these walls")

MODES: dict[str, tuple[str, ...]] = {
    "all that this machine has": (),
    "no namespaces, as in most containers": ("namespaces",),
    "no namespaces and no Landlock": ("namespaces", "landlock"),
}


def python(program: str) -> str:
    return f"{shlex.quote(sys.executable)} -S -c {shlex.quote(program)}"


def refusing(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Leave kinds of walls out of the shells that follow."""
    monkeypatch.setattr(shell_module, "Jail", partial(Jail, refused=kinds))


@table("mode", MODES)
def test_commands_share_files_and_nothing_else(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, *MODES[mode])
    with Shell(required=()) as shell, Shell(required=()) as other:
        folder = shell._jail._folder
        assert shell.run("cd /; x=1; echo 2 > ~/a; echo $x").output == "1\n"
        assert shell.run("cat a; echo [$x]; ls").output == "2\n[]\na\n"
        assert other.run("ls; cat a").exit_code == 1
        shell.run("rm -rf ../*; chmod 0 .")
        assert other.run("echo 3").output == "3\n"
    assert not folder.exists()


@table(
    "command, output, exit_code",
    [
        ("echo out; echo err >&2; exit 3", "out\nerr\n", 3),
        ("cat", "", 0),
        ("kill -9 $$", "", -9),
        ("yes | head -n 1", "y\n", 0),
        ("printf '\\377'", "�", 0),
        ("""echo '{x}' "\\\\" 'é'""", "{x} \\ é\n", 0),
        ("a\0b", "sh: embedded null byte\n", 126),
    ],
)
def test_what_a_command_does_is_said(command: str, output: str, exit_code: int) -> None:
    with Shell() as shell:
        ran = shell.run(command)
    assert (ran.output, ran.exit_code) == (output, exit_code)


@table("mode", MODES)
def test_a_command_ends_at_its_deadline_with_all_that_it_has_started(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, *MODES[mode])
    left = python(
        "import os, time\nif os.fork() == 0:\n os.setsid()\n"
        " while True: open('beats', 'a').write('x'); time.sleep(0.001)\n"
        "while not os.path.exists('beats'): time.sleep(0.001)"
    )
    with Shell(required=(), timeout_s=PATIENCE_S) as shell:
        assert shell.run(left).exit_code == 0
        sizes = [shell.run("wc -c < beats").output for _ in range(3)]
        assert sizes[0] == sizes[1] == sizes[2]
        shell._timeout_s = 0.1
        assert shell.run("echo so far; while :; do :; done").exit_code is None
        shell._timeout_s = PATIENCE_S
        assert shell.run("cat beats > /dev/null; echo on").output == "on\n"


def test_a_command_has_limits() -> None:
    with Shell(max_output_bytes=10, memory_gib=0.5, timeout_s=PATIENCE_S) as shell:
        assert shell.run("yes").output == "y\n" * 5  # it is ended by the largest file
        assert shell.run(python("x = bytearray(1 << 30)")).exit_code == 1
        assert shell.run(python("x = bytearray(1 << 20)")).exit_code == 0
        big = f"import os; print(os.pwrite(1, b'x', {MAX_FILE_BYTES}))"
        assert shell.run(python(big)).exit_code != 0


SECRET = "hunter2"
ATTEMPTS = {
    "the environment": "env | grep {secret}",
    "the environment of its parents": "cat /proc/[0-9]*/environ | tr '\\0' ' ' | grep {secret}",
    "the task": "grep {secret} {folder}/task.json",
    "what lies in the folder of the task": "ls {folder} | grep task",
    "to write outside of its folder": "echo x > {folder}/written && echo {secret}",
    "to remove what lies there": "rm {folder}/removed && echo {secret}",
    "a port of this machine": "{connect} {port} && echo {secret}",
    "to end the process that asks": "kill -0 {pid} && echo {secret}",
}
"""What a command may try; it has worked where the exit code is 0."""
CONNECT = python("import socket, sys\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])))")


@contextmanager
def surroundings(folder: Path) -> Generator[Mapping[str, object]]:
    """A key in this environment, a task in a file, and an open port."""
    (folder / "task.json").write_text(SECRET)
    (folder / "removed").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.accept, daemon=True).start()
        yield {
            **{"secret": SECRET, "folder": folder, "pid": os.getpid()},
            **{"port": server.getsockname()[1], "connect": CONNECT},
        }


@table("attempt", ATTEMPTS)
def test_a_command_reaches_nothing_of_the_program_that_runs_it(
    attempt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command works without walls."""
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with surroundings(tmp_path) as words, Shell(timeout_s=PATIENCE_S) as shell:
        command = ATTEMPTS[attempt].format(**words)
        inside = shell.run(command)
        outside = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=False)
    assert outside.returncode == 0, "the attempt would work"
    assert inside.exit_code not in (0, None)
    assert SECRET not in inside.output


@table("kind", ["secrets", "network", "files"])
def test_a_shell_without_a_wall_that_it_needs_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "user", "namespaces", "landlock", "seccomp")
    with pytest.raises(JailError, match=r"keeps a command from this: .* SECURITY\.md"):
        Shell(required=[kind])
    with Shell(required=()) as shell:
        assert shell.run("echo 1").output == "1\n"


def test_files_are_shared_within_one_run_of_a_jail() -> None:
    with closing(Jail()) as jail:
        for _ in range(2):
            with jail.run(shares_files=True) as programs:
                assert wrote(programs, "open('a', 'x')"), "the folder is empty at first"
                assert wrote(programs, "open('a')")
            with jail.run() as programs:
                assert not wrote(programs, "open('a')")


def wrote(programs: Programs, text: str) -> bool:
    """Whether a program has ended well."""
    with tempfile.TemporaryFile() as file, open(os.devnull, "r+b") as null:
        file.write(text.encode())
        file.seek(0)
        pid = programs.start("script", [file.fileno(), null.fileno(), null.fileno()])
        return programs.wait(pid, monotonic() + PATIENCE_S) == 0


def test_a_command_of_an_episode_reaches_neither_the_door_nor_its_key_nor_the_task(
    tmp_path: Path,
) -> None:
    """What the program itself can do."""
    program = f"""
import subprocess
from urllib.parse import urlsplit
sys.path.insert(0, {str(Path(hone.__file__).parents[1])!r})
from hone.rewards.shell import Shell
answer = chat(TASK["messages"])
folder = os.environ["HONE_EPISODE_DIR"]
with open(os.path.join(folder, "task"), "w") as file:
    json.dump(TASK, file)
attempts = {{
    "door": {CONNECT!r} + f" {{urlsplit(BASE).port}}",
    "environment": f"env | grep {{KEY}}",
    "key": f"tr '\\\\0' ' ' < /proc/{{os.getpid()}}/environ | grep {{KEY}}",
    "any key": f"cat /proc/[0-9]*/environ | tr '\\\\0' ' ' | grep {{KEY}}",
    "task": f"grep {{TASK['answer']}} {{folder}}/task",
    "standard input": f"test -e /proc/{{os.getpid()}}/fd/0",
}}
reached = dict()
with Shell(timeout_s={PATIENCE_S}) as shell:
    for name, command in attempts.items():
        outside = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE)
        reached[name] = (outside.returncode, shell.run(command).exit_code)
with open({str(tmp_path / "reached.json")!r}, "w") as file:
    json.dump(reached, file)
print(1)
"""
    with played(tmp_path, program) as game:
        sample = game.play_one()
    assert sample.failure is None, sample.failure_detail
    reached = json.loads((tmp_path / "reached.json").read_text())
    assert len(reached) == 6
    for name, (outside, inside) in reached.items():
        assert outside == 0, f"{name}: the attempt would work"
        assert inside not in (0, None), name


def test_another_user_may_enter_the_folder_of_an_episode_of_root(tmp_path: Path) -> None:
    """Else its commands, whose folder lies there, could not be another user."""
    program = f"""
answer = chat(TASK["messages"])
with open({str(tmp_path / "mode")!r}, "w") as file:
    file.write(oct(os.stat(os.environ["HONE_EPISODE_DIR"]).st_mode & 0o777))
print(1)
"""
    with played(tmp_path, program) as game:
        assert game.play_one().failure is None
    expected = 0o711 if os.geteuid() == 0 else 0o700
    assert (tmp_path / "mode").read_text() == oct(expected)
