"""Tests programs that a model wrote.

    count_passed("def f(x): return x + 1", ["assert f(1) == 2"], monotonic() + 5, jail)

The program runs in a jail (`jail.py`) and returns values; the expected values are never in its
process. A second process of the jail (`verdicts.py`) evaluates assertions and the values of calls.
The output of whole programs is compared in this process.
"""

from __future__ import annotations

import ast
import json
import re
import socket
import tempfile
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

from hone.rewards.jail import Jail
from hone.rewards.verdicts import Call

__all__ = ["Call", "Example", "count_passed", "program_in", "read_tests"]

_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)[ \t]*")
_PYTHON = ("python", "python3", "py")


_MAX_BLANK_BYTES = 1 << 20
"""Bytes that a program may write beyond twice the expected output. A right answer can exceed it
only by blanks; more counts as wrong, since reading it would take the worker seconds."""
_TESTS_NOTHING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign),
)
"""Statements that test nothing, so that every program passes them."""


@dataclass(frozen=True, slots=True)
class Example:
    """A test of a whole program: its input, and the expected output."""

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
        tagged = [lines for tag, lines in blocks if tag in tags]
        if tagged:
            return "".join(tagged[-1])
    return completion


def read_tests(text: str) -> list[str] | list[Example] | list[Call]:
    """Tests in the formats of data sets: Python with assertions; a JSON list of such texts, as in
    MBPP's `test_list`; or a JSON object with the lists `inputs` and `outputs`, as in APPS and TACO.
    Such an object tests a whole program, or the function `fn_name`, whose arguments are the items
    of `inputs`.

    Raises ValueError for anything else.
    """
    try:
        tests: Any = json.loads(text)
    except ValueError:
        tests = [text]
    if isinstance(tests, dict):
        return _examples(tests)
    if not isinstance(tests, list) or not tests or not all(isinstance(x, str) for x in tests):
        raise ValueError(
            "the tests are no Python text, no JSON list of texts, and no JSON object with `inputs` "
            "and `outputs`"
        )
    for test in tests:
        try:
            statements = ast.parse(test, "test.py").body
            with warnings.catch_warnings(action="ignore"):
                compile(test, "test.py", "exec", dont_inherit=True)  # such as a `return` by itself
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = str(error) or type(error).__name__
            raise ValueError(f"a test is not Python: {why}") from None
        if all(isinstance(statement, _TESTS_NOTHING) for statement in statements):
            raise ValueError(
                "a test only defines things, so every program would pass it; append a call, such "
                "as `check(add)` in data sets like HumanEval"
            )
    return tests


def _examples(tests: Mapping[str, Any]) -> list[Example] | list[Call]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("tests in a JSON object need the lists `inputs` and `outputs`")
    if len(inputs) != len(outputs):
        raise ValueError(f"the tests have {len(inputs)} `inputs` and {len(outputs)} `outputs`")
    pairs = zip(inputs, outputs, strict=True)
    name = tests.get("fn_name")
    if name is not None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"`fn_name` of the tests is {name!r}, which is no name of a function")
        return [_call(name, given, wanted) for given, wanted in pairs]
    return [Example(_joined(given), _joined(wanted)) for given, wanted in pairs]


def _call(name: str, given: Any, wanted: Any) -> Call:
    """A test of a call. `given` is a list of arguments, or, as in LiveCodeBench, a text with one
    JSON value a line; then `wanted` is a JSON text too."""
    is_text = isinstance(given, str)
    if is_text:
        try:
            given = [json.loads(line) for line in given.splitlines() if line.strip()]
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            raise ValueError(
                f"`inputs` of tests with `fn_name` are lists of arguments, or texts with one JSON "
                f"value a line: {error}"
            ) from None
    if not isinstance(given, list):
        raise ValueError(
            f"`inputs` of tests with `fn_name` are lists of arguments, and one is {given!r}"
        )
    return Call(name, given, wanted, may_be_wrapped=not is_text)


def _joined(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def count_passed(
    program: str,
    tests: Sequence[str] | Sequence[Example] | Sequence[Call],
    deadline: float,
    jail: Jail,
) -> int:
    """The number of tests that pass before `deadline`, a time of `time.monotonic`. All assertions
    run in one process of the program, in order, and so do all calls. Each example has its own
    process and folder, so that it finds no files of another one."""
    texts = [test for test in tests if isinstance(test, str)]
    calls = [asdict(test) for test in tests if isinstance(test, Call)]
    passed = _count_judged(program, "judge", texts, deadline, jail) if texts else 0
    passed += _count_judged(program, "calls", calls, deadline, jail) if calls else 0
    for test in tests:
        if isinstance(test, Example) and monotonic() < deadline:
            passed += _passes(program, test, deadline, jail)
    return passed


def _count_judged(
    program: str, role: str, tests: Sequence[Any], deadline: float, jail: Jail
) -> int:
    """The number of tests that pass, counted by a judging process that the program cannot reach.
    That process also reads what the program sends, so a flood of output cannot slow this one."""
    with (
        jail.run() as programs,
        _file_of(program) as text,
        _file_of(json.dumps(tests)) as asked,
        _linked() as (of_program, of_judge),
        _linked() as (ours, verdicts),
    ):
        programs.start("serve", [text, of_program.fileno()])
        programs.start(role, [asked, of_judge.fileno(), verdicts.fileno()])
        for end in (of_program, of_judge, verdicts):
            end.close()  # else `_receive` would not notice that the judge has ended
        passed = 0
        with suppress(TimeoutError):
            while piece := _receive(ours, deadline):
                passed += piece.count(b"1")
        return min(passed, len(tests))


def _passes(program: str, test: Example, deadline: float, jail: Jail) -> bool:
    """Whether a program writes the expected output and ends without an error."""
    with (
        jail.run() as programs,
        _file_of(program) as text,
        _file_of(test.stdin) as given,
        tempfile.TemporaryFile() as written,  # without a name: the program cannot remove it
    ):
        process = programs.start("script", [text, given, written.fileno()])
        if programs.wait(process, deadline) != 0:
            return False
        written.seek(0)
        most = 2 * len(test.stdout.encode(errors="replace")) + _MAX_BLANK_BYTES
        text = written.read(most + 1)
        return len(text) <= most and _lines(text.decode(errors="replace")) == _lines(test.stdout)


def _lines(text: str) -> list[str]:
    """The lines of a text, without blanks at line ends and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


@contextmanager
def _file_of(text: str) -> Generator[int]:
    """The descriptor of an unnamed temporary file with this text."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="replace"))
        file.flush()
        file.seek(0)
        yield file.fileno()


@contextmanager
def _linked() -> Generator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def _receive(sock: socket.socket, deadline: float) -> bytes:
    """The next bytes of a socket. Raises TimeoutError at the deadline."""
    sock.settimeout(max(deadline - monotonic(), 0.001))
    return sock.recv(1 << 12)
