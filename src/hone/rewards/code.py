"""Run a program that a model wrote against tests, in processes of its own.

    count_passed("def f(x): return x + 1", ["assert f(1) == 2"], deadline=monotonic() + 5)

Each process has a folder of its own to work in, an empty environment (no keys of
trackers or hubs), no network where Linux lets a user make a namespace without one, files of 64 MiB
at most and no core dumps. Memory and descendants are bounded by the reward worker around it. It
does not hide files: what this user can read and write, the program can. Where that matters, run
hone in a container.
"""

from __future__ import annotations

import ast
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

_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)[ \t]*")
_PYTHON = ("python", "python3", "py")

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
    for number, test in enumerate(tests):
        try:
            exec(compile(test, "test.py", "exec"), names)
        except BaseException:
            continue
        os.write(out, b"%s%d\\n" % (secret, number))
if len(sys.argv) > 2:
    with open(sys.argv[2], encoding="utf-8") as file:
        job = json.load(file)
    os.remove(sys.argv[2])
    run(program, job["secret"].encode(), job["tests"])
else:
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
"""


_TESTS_NOTHING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign),
)
"""Statements that no program fails."""


@dataclass(frozen=True, slots=True)
class Example:
    """A test of a whole program: what it reads, and what it must write."""

    stdin: str
    stdout: str


def program_in(completion: str) -> str:
    """The last fenced block that is tagged as Python, else the last without a tag, else the whole
    completion. A block that is never closed ends with the completion."""
    blocks: list[tuple[str, list[str]]] = []
    is_open = False
    for line in completion.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip("\r\n"))
        if fence is not None and (not is_open or not fence[1]):
            is_open = not is_open
            if is_open:
                blocks.append((fence[1].lower(), []))
        elif is_open:
            blocks[-1][1].append(line)
    for tags in (_PYTHON, ("",)):
        found = [lines for tag, lines in blocks if tag in tags]
        if found:
            return "".join(found[-1])
    return completion


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
            statements = ast.parse(test, "test.py").body
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"a test is not Python: {error}") from None
        if all(isinstance(one, _TESTS_NOTHING) for one in statements):
            raise ValueError(
                "a test only defines things, so every program would pass it; append a call, such "
                "as `check(add)` in data sets like HumanEval"
            )
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
    process, in order; every example has one, and a folder, so that none finds what another one has
    left."""
    passed = 0
    texts = [test for test in tests if isinstance(test, str)]
    if texts:
        secret = secrets.token_hex(16)
        job = json.dumps({"secret": secret, "tests": texts})
        written, _ = _run(program, deadline, job=job)
        # Each test once, however many processes the program has made of itself.
        lines = set(written.splitlines())
        passed += sum(f"{secret}{number}" in lines for number in range(len(texts)))
    for test in tests:
        if isinstance(test, Example) and monotonic() < deadline:
            written, has_ended = _run(program, deadline, stdin=test.stdin)
            passed += has_ended and _lines(written) == _lines(test.stdout)
    return passed


def _lines(text: str) -> list[str]:
    """Without blanks at line ends and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run(
    program: str, deadline: float, *, stdin: str = "", job: str | None = None
) -> tuple[str, bool]:
    """What a process has written until its end or the deadline, at which it is killed; and whether
    it ended by itself, without an error. `job` are the tests for its runner."""
    files = {"program.py": program} | ({} if job is None else {"job.json": job})
    with (
        tempfile.TemporaryDirectory(prefix="hone-code-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,  # without names: the program cannot remove them
        tempfile.TemporaryFile() as written,
    ):
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8", errors="replace")
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        with subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, *files],
            stdin=given,
            stdout=written,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        ) as process:
            try:
                process.wait(max(deadline - monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                pass
            finally:
                _kill(process)
            has_ended = process.returncode == 0
        written.seek(0)
        return written.read().decode(errors="replace"), has_ended


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
