"""`code_tests`: what passes, what does not, and what a program cannot do."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from hone.rewards import code
from hone.rewards.builtin import CodeTests, build
from hone.rewards.code import Example, count_passed, program_in, read_tests

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(0, -1) == -1"]
SUMS = json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]})
READ_ALL = "import sys\nprint(sum(int(x) for x in sys.stdin.read().split()))"


def score(completion: str, answer: str, **args: object) -> float:
    return build("code_tests", args)(completion=completion, answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "all_passed", "share"),
    [
        (f"Here:\n```python\n{ADD}```\nDone.", json.dumps(ASSERTS), 1.0, 1.0),
        (f"```\nnonsense(\n```\nbetter:\n```py\n{ADD}```", "\n".join(ASSERTS), 1.0, 1.0),
        (ADD, json.dumps([*ASSERTS, "assert add(1, 1) == 3"]), 0.0, 2 / 3),
        (ADD, json.dumps(["assert add(1, 1) == 3", ASSERTS[0]]), 0.0, 1 / 2),
        ("def add(a, b): return a - b", json.dumps(ASSERTS), 0.0, 0.0),
        ("def add(", json.dumps(ASSERTS), 0.0, 0.0),
        ("", json.dumps(ASSERTS), 0.0, 0.0),
        ("import os\nos._exit(0)", json.dumps(ASSERTS), 0.0, 0.0),
        ("raise SystemExit(0)", json.dumps(ASSERTS), 0.0, 0.0),
        (f"print('passed' * 99)\n{ADD}", json.dumps(ASSERTS), 1.0, 1.0),
        (READ_ALL, SUMS, 1.0, 1.0),
        (f"{READ_ALL}\nsys.exit(1)", SUMS, 0.0, 0.0),
        (f"```python\n{ADD}```\nOutput:\n```\n42\n```", json.dumps(ASSERTS), 1.0, 1.0),
        (f"```bash\nls\n```\nNow:\n```python3\n{ADD}```", json.dumps(ASSERTS), 1.0, 1.0),
        (f"import os\nos.fork()\n{ADD}", json.dumps([*ASSERTS, "assert 0"]), 0.0, 2 / 3),
        ("print(3)", SUMS, 0.0, 1 / 2),
        ("import sys\nsys.stdout.write('3  \\n\\n')", SUMS, 0.0, 1 / 2),
    ],
)
def test_what_passes(completion: str, answer: str, all_passed: float, share: float) -> None:
    assert score(completion, answer) == all_passed
    assert score(completion, answer, partial_credit=True) == pytest.approx(share)


REMEMBERS = """
import pathlib
kept = pathlib.Path("answer")
if kept.exists():
    print(kept.read_text())
else:
    a, b = map(int, input().split())
    kept.write_text(str(a + b))
    print(a + b)
"""


def test_an_example_does_not_find_what_another_one_has_left() -> None:
    twice = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
    assert score(REMEMBERS, twice) == 1.0


def test_what_a_program_does_to_its_folder_is_no_error_of_ours() -> None:
    rude = "import os, shutil\nprint(7)\nshutil.rmtree(os.getcwd())"
    assert score(rude, SUMS, partial_credit=True) == 1 / 2


@pytest.mark.parametrize(
    "endless",
    ["while True: pass", "import time\ntime.sleep(99)", "import os\nos.fork()\nwhile 1: 0"],
)
def test_what_never_ends_fails_at_the_deadline(endless: str) -> None:
    for answer in (json.dumps(ASSERTS), SUMS):
        assert score(endless, answer, timeout_s=0.5) == 0.0


def test_what_has_passed_before_the_deadline_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline comes when the third test has begun, which never ends."""
    began = tmp_path / "began"

    def deadline_has_come() -> float:
        while not began.exists():
            time.sleep(0.01)
        return 60.0

    endless = f"open({str(began)!r}, 'w').close()\nwhile True: pass"
    monkeypatch.setattr(code, "monotonic", deadline_has_come)
    assert count_passed(ADD, [*ASSERTS, endless], deadline=60.0) == 2


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("add(1, 2) is 3 of course", "a test is not Python"),
        ("[]", "no JSON list of texts"),
        ("def check(add):\n    assert add(1, 2) == 3\n", "only defines things"),
        ("[1, 2]", "no JSON list of texts"),
        ('{"inputs": []}', "need the lists `inputs` and `outputs`"),
        ('{"inputs": ["1"], "outputs": []}', "have 1 `inputs` and 0 `outputs`"),
    ],
)
def test_tests_that_cannot_be_read_are_errors_of_the_data(answer: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        score(ADD, answer)


def test_tests_are_read_in_three_layouts() -> None:
    assert read_tests("assert True\nassert 1") == ["assert True\nassert 1"]
    assert read_tests(json.dumps(ASSERTS)) == ASSERTS
    assert read_tests(SUMS) == [Example("1 2\n", "3\n"), Example("3\n4", "7")]
    assert program_in("no fence") == "no fence"


@pytest.fixture
def listening() -> Iterator[int]:
    """A port of this host that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.accept, daemon=True).start()
        yield server.getsockname()[1]


def test_a_program_has_no_network_no_environment_and_a_folder_of_its_own(
    listening: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    program = (
        "import os, socket\n"
        "def connects():\n"
        f"    try: socket.create_connection(('127.0.0.1', {listening}), 1); return True\n"
        "    except OSError: return False\n"
    )
    deadline = monotonic() + 60
    if count_passed("", [_NAMESPACES], deadline):  # not in every container
        assert count_passed(program, ["assert not connects()"], deadline) == 1
    here = ["assert 'SECRET_KEY' not in os.environ", f"assert os.getcwd() != {os.getcwd()!r}"]
    assert count_passed(program, [*here, "assert 'job.json' not in os.listdir('.')"], deadline) == 3


_NAMESPACES = """
import os
assert os.readlink("/proc/self/ns/net") != "%s"
""" % (os.readlink("/proc/self/ns/net") if Path("/proc/self/ns/net").exists() else "")


def test_files_are_bounded(tmp_path: Path) -> None:
    large = f"open({str(tmp_path / 'x')!r}, 'wb').write(bytes(1 << 27))"
    assert count_passed("", [large], monotonic() + 60) == 0
    assert (tmp_path / "x").stat().st_size <= 1 << 26


def test_the_setting_is_checked() -> None:
    with pytest.raises(ValueError, match=r"no setting 'timeout'.*timeout_s"):
        build("code_tests", {"timeout": 3})
    assert CodeTests().isolated
