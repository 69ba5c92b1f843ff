"""Run a program that a model wrote against tests, in processes of its own.

    count_passed("def f(x): return x + 1", ["assert f(1) == 2"], deadline=monotonic() + 5)

Each process has an empty folder to work in, an empty environment (no keys of trackers or hubs), no
network where Linux lets a user make a namespace without one, files of 64 MiB at most and no core
dumps. Memory and descendants are bounded by the reward worker around it. It does not hide files:
what this user can read and write, the program can. Where that matters, run hone in a container.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

__all__ = ["Example", "count_passed", "program_in", "read_tests"]

_FENCED = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)

# argv[1] is the program. With a file of tests, which is deleted before the program runs, each that
# passes writes the secret to the standard output, which the program has not. Without, the program
# reads and writes what it likes.
_RUNNER = """
import ctypes, json, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
if sys.platform == "linux":
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET
with open(sys.argv[1], encoding="utf-8") as file:
    program = file.read()
def run(program, secret, tests):
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    names = {"__name__": "program"}
    exec(compile(program, "program.py", "exec"), names)
    for test in tests:
        try:
            exec(compile(test, "test.py", "exec"), names)
        except BaseException:
            continue
        os.write(out, secret)
if len(sys.argv) > 2:
    with open(sys.argv[2], encoding="utf-8") as file:
        job = json.load(file)
    os.remove(sys.argv[2])
    run(program, job["secret"].encode(), job["tests"])
else:
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True)
class Example:
    """A test of a whole program: what it reads, and what it must write."""

    stdin: str
    stdout: str


def program_in(completion: str) -> str:
    """The last fenced block of Python, or the whole completion where there is none."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def read_tests(text: str) -> list[str] | list[Example]:
    """Tests as data sets have them: Python with assertions; a JSON list of such texts, as in MBPP's
    `test_list`; or a JSON object with the lists `inputs` and `outputs`, as in APPS and TACO.

    Raises ValueError for anything else.
    """
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = [text]
    if isinstance(found, dict):
        return _examples(found)
    if not isinstance(found, list) or not found or not all(isinstance(x, str) for x in found):
        raise ValueError(
            "the tests are no Python text, no JSON list of texts, and no JSON object with `inputs` "
            "and `outputs`"
        )
    for test in found:
        try:
            compile(test, "test.py", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"a test is not Python: {error}") from None
    return found


def _examples(found: Mapping[str, Any]) -> list[Example]:
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("tests in a JSON object need the lists `inputs` and `outputs`")
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} `inputs` and {len(outputs)} `outputs`")
    pairs = zip(inputs, outputs, strict=True)
    return [Example(_joined(given), _joined(wanted)) for given, wanted in pairs]


def _joined(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def count_passed(program: str, tests: Sequence[str] | Sequence[Example], deadline: float) -> int:
    """How many tests pass before `deadline`, a time of `time.monotonic`. Assertions share one
    process, in order; every example has one."""
    passed = 0
    with tempfile.TemporaryDirectory(prefix="hone-code-") as folder:
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
        texts = [test for test in tests if isinstance(test, str)]
        if texts:
            secret = secrets.token_hex(16)
            job = {"secret": secret, "tests": texts}
            (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
            written = _run(folder, ["job.json"], "", deadline)
            passed += min(written.count(secret), len(texts))
        for test in tests:
            if isinstance(test, Example) and monotonic() < deadline:
                passed += _lines(_run(folder, [], test.stdin, deadline)) == _lines(test.stdout)
    return passed


def _lines(text: str) -> list[str]:
    """Without blanks at line ends and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run(folder: str, files: Sequence[str], stdin: str, deadline: float) -> str:
    """What a process has written until its end or the deadline, at which it is killed."""
    place = Path(folder)
    (place / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
    command = [sys.executable, "-I", "-c", _RUNNER, "program.py", *files]
    env = {"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"}
    with (
        (place / "stdin").open("rb") as given,
        (place / "stdout").open("wb") as written,
        subprocess.Popen(
            command,
            stdin=given,
            stdout=written,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=env,
            start_new_session=True,
        ) as process,
    ):
        try:
            process.wait(max(deadline - monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill(process)
    return (place / "stdout").read_text(encoding="utf-8", errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
