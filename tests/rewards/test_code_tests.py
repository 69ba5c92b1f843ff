"""`code_tests`: what passes, what does not, and what a program cannot do."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from time import monotonic, process_time
from typing import Any

import pytest

from hone.rewards import code
from hone.rewards.builtin import CodeTests, build
from hone.rewards.code import Call, Example, count_passed, program_in, read_tests
from hone.rewards.jail import Jail
from hone.rewards.launcher import END
from hone.rewards.peer import Link, RemoteError
from tests.tables import table

ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = ["assert add(1, 2) == 3", "assert add(0, -1) == -1"]
SUMS = json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]})
READ_ALL = "import sys\nprint(sum(int(x) for x in sys.stdin.read().split()))"


@pytest.fixture(scope="module")
def jail() -> Iterator[Jail]:
    jail = Jail()
    yield jail
    jail.close()


@pytest.fixture
def score(jail: Jail) -> Callable[..., float]:
    """What `code_tests` gives, in a jail that lives longer than a test."""

    def score(completion: str, answer: str, **args: object) -> float:
        reward = build("code_tests", args)
        assert isinstance(reward, CodeTests)
        reward._jail = jail
        return reward(completion=completion, answer=answer)

    return score


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
        ("def add(a: Missing, b): return a + b", json.dumps(ASSERTS), 0.0, 0.0),
        ("import os\nos._exit(0)", json.dumps(ASSERTS), 0.0, 0.0),
        ("raise SystemExit(0)", json.dumps(ASSERTS), 0.0, 0.0),
        (f"print('passed' * 99)\n{ADD}", json.dumps(ASSERTS), 1.0, 1.0),
        (READ_ALL, SUMS, 1.0, 1.0),
        (f"{READ_ALL}\nsys.exit(1)", SUMS, 0.0, 0.0),
        (f"```python\n{ADD}```\nOutput:\n```\n42\n```", json.dumps(ASSERTS), 1.0, 1.0),
        (f"```bash\nls\n```\nNow:\n```python3\n{ADD}```", json.dumps(ASSERTS), 1.0, 1.0),
        (f"import os\nif not os.fork(): os._exit(0)\n{ADD}", json.dumps(ASSERTS), 1.0, 1.0),
        ("print(3)", SUMS, 0.0, 1 / 2),
        ("import sys\nsys.stdout.write('3  \\n\\n')", SUMS, 0.0, 1 / 2),
    ],
)
def test_what_passes(
    score: Callable[..., float], completion: str, answer: str, all_passed: float, share: float
) -> None:
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


def test_an_example_does_not_find_what_another_one_has_left(
    score: Callable[..., float],
) -> None:
    twice = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
    assert score(REMEMBERS, twice) == 1.0


def test_what_a_program_does_to_its_folder_is_no_error_of_ours(
    score: Callable[..., float],
) -> None:
    rude = "import os, shutil\nprint(7)\nshutil.rmtree(os.getcwd())"
    assert score(rude, SUMS, partial_credit=True) == 1 / 2


@pytest.mark.parametrize(
    "endless",
    ["while True: pass", "import time\ntime.sleep(99)", "import os\nos.fork()\nwhile 1: 0"],
)
def test_what_never_ends_fails_at_the_deadline(score: Callable[..., float], endless: str) -> None:
    for answer in (json.dumps(ASSERTS), SUMS):
        assert score(endless, answer, timeout_s=0.5) == 0.0


def test_a_program_that_sends_without_end_is_left_at_the_deadline(jail: Jail) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        its.sendall(b"1\n")
        with pytest.raises(RemoteError, match="deadline has passed"):
            Link(ours, deadline=monotonic()).receive()
    jail.send(END)  # which the launcher answers, as it tells of orphans that have ended
    select.select([jail._control], [], [])
    with pytest.raises(TimeoutError):
        jail.receive(deadline=monotonic())
    assert jail.receive(monotonic() + 60) == END


def test_what_has_passed_before_the_deadline_counts(
    jail: Jail, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline comes when two verdicts have, and the third test never ends."""
    receive = code._receive

    def receive_two(sock: Any, deadline: float) -> bytes:
        if len(seen) == 2:
            raise TimeoutError
        found = receive(sock, deadline)
        seen.extend(found)
        return found

    seen: list[int] = []
    monkeypatch.setattr(code, "_receive", receive_two)
    assert count_passed(ADD, [*ASSERTS, "while True: pass"], monotonic() + 60, jail) == 2


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("add(1, 2) is 3 of course", "a test is not Python"),
        ("nonlocal add", "a test is not Python: nonlocal declaration"),
        ("return add(1, 2) == 3", "a test is not Python: 'return' outside function"),
        ("-" * 20_000 + "1", "a test is not Python: (MemoryError|Parser stack overflowed)"),
        ("[]", "no JSON list of texts"),
        ("def check(add):\n    assert add(1, 2) == 3\n", "only defines things"),
        ("[1, 2]", "no JSON list of texts"),
        ('{"inputs": []}', "need the lists `inputs` and `outputs`"),
        ('{"inputs": ["1"], "outputs": []}', "have 1 `inputs` and 0 `outputs`"),
        ('{"fn_name": "a b", "inputs": [[1]], "outputs": [1]}', "no name of a function"),
        ('{"fn_name": "f", "inputs": [1], "outputs": [1]}', "are lists of arguments"),
        ('{"fn_name": "f", "inputs": ["1 2"], "outputs": [1]}', "one JSON value a line"),
    ],
)
def test_tests_that_cannot_be_read_are_errors_of_the_data(
    score: Callable[..., float], answer: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        score(ADD, answer)


def test_tests_are_read_in_three_layouts() -> None:
    assert read_tests("assert True\nassert 1") == ["assert True\nassert 1"]
    assert read_tests(json.dumps(ASSERTS)) == ASSERTS
    assert read_tests(SUMS) == [Example("1 2\n", "3\n"), Example("3\n4", "7")]
    assert program_in("no fence") == "no fence"


def test_the_setting_is_checked() -> None:
    with pytest.raises(ValueError, match=r"no setting 'timeout'.*timeout_s"):
        build("code_tests", {"timeout": 3})
    assert CodeTests().isolated


# Programs and tests that are right and more than numbers: values, objects and exceptions on both
# sides of the judge.
RIGHT = {
    "a list changed in place": (
        "def double(x):\n    for i in range(len(x)): x[i] *= 2",
        "x = [1, 2]\ndouble(x)\nassert x == [2, 4]",
    ),
    "kinds of values": (
        "from collections import Counter, deque\nfrom fractions import Fraction\n"
        "def f(): return (1, 2.5, {3, None}, {(1, 2): b'x'}, Fraction(1, 3), deque([1]), 2**99)",
        "from collections import deque\nfrom fractions import Fraction\n"
        "assert f() == (1, 2.5, {3, None}, {(1, 2): b'x'}, Fraction(1, 3), deque([1]), 2**99)\n"
        "assert type(f()) is tuple",
    ),
    "a subclass of a value": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        "assert f('aab') == {'a': 2, 'b': 1}",
    ),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "the end of a generator": (
        "def f(n):\n    yield n",
        "given = f(3)\nassert next(given) == 3\ntry:\n    next(given)\n"
        "except StopIteration:\n    pass\nelse:\n    assert 0",
    ),
    "an object": (
        "class Stack:\n    def __init__(self): self.held = []\n"
        "    def push(self, x): self.held.append(x)\n    def __len__(self): return len(self.held)",
        "stack = Stack()\nstack.push(3)\nassert len(stack) == 1 and stack.held == [3]\n"
        "assert isinstance(stack, Stack) and not isinstance(3, Stack)",
    ),
    "objects of one program": (
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "    def __add__(self, other): return P(self.x + other.x)",
        "assert P(1) + P(2) == P(3)\nassert P(1) != P(2)",
    ),
    "an exception": (
        "class Bad(ValueError): pass\ndef f(x):\n    raise Bad('no')",
        "try:\n    f(1)\nexcept Bad as error:\n    assert str(error) == 'no'\nelse:\n    assert 0",
    ),
    "a built-in exception": (
        "def f(x): return 1 / x",
        "try:\n    f(0)\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert 0",
    ),
    "a function of the test": (
        "def apply(f, x): return [f(one) for one in x]",
        "assert apply(lambda one: one + 1, [1, 2]) == [2, 3]",
    ),
    "an object of the test": (
        "def length(node):\n    return 0 if node is None else 1 + length(node.next)",
        "class Node:\n    def __init__(self, next): self.next = next\n"
        "assert length(Node(Node(None))) == 2",
    ),
    "a check as HumanEval has it": (
        ADD,
        "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
    ),
    "modules that a test uses without an import": (
        "import math\ndef f(x): return math.sqrt(x)",
        "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)",
    ),
    "a function called as a built-in": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "a well-known function": ("def lcm(a, b): return 12", "assert abs(lcm(4, 6) - 12) < 1e-6"),
    "well-known functions that a test uses without an import": (
        "def f(x): return [x, x]",
        "assert Counter(f(1)) == {1: 2}",
    ),
    "a name that both sides have": (
        "x = 9\ndef f(a):\n    a.append(x)",
        "x = [1]\nf(x)\nassert x == [1, 9]",
    ),
    "numpy": (
        "import numpy as np\ndef f(x): return np.array(x) * 2",
        "assert np.array_equal(f([1, 2]), np.array([2, 4]))\nassert f([1]).sum() == 2",
    ),
}


@table("name", RIGHT)
def test_right_programs_pass_whatever_they_give(jail: Jail, name: str) -> None:
    program, test = RIGHT[name]
    assert count_passed(program, [test], monotonic() + 60, jail) == 1


# Programs that are wrong and mean to pass TESTS.
WRONG = {
    "an object that equals everything": (
        "class Same(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\n"
        "def add(a, b): return Same()"
    ),
    "an object with every operation": (
        "class Same:\n    __eq__ = __ne__ = __sub__ = __rsub__ = lambda *_: True\n"
        "def add(a, b): return Same()"
    ),
    "built-ins that are its own": (
        "def set(x): return 0\nabs = round = set\ndef add(a, b): return 99"
    ),
    "built-ins that are patched": (
        "import builtins, math\nbuiltins.set = builtins.abs = lambda x: 0\n"
        "math.isclose = lambda *_, **__: True\ndef add(a, b): return 99"
    ),
    "a module of its own": (
        "class math:\n    isclose = lambda *_, **__: True\ndef add(a, b): return 99"
    ),
    "frames": (
        "import sys\nframe = sys._getframe()\nheld = ''\nwhile frame:\n"
        "    held += repr(frame.f_locals) + repr(frame.f_globals); frame = frame.f_back\n"
        "def add(a, b): return 7654321 if ''.join(['assert', ' add(']) in held else 0"
    ),
    "all objects": (
        "import gc\ndef add(a, b):\n    wanted = lambda: ''.join(['76543', '21'])\n"
        "    return int(wanted()) if any(wanted() in str(x) for x in gc.get_objects()\n"
        "        if type(x) in (str, bytes, list, tuple, dict)) else 0"
    ),
    "files": (
        "import os\nheld = ''\nfor folder, _, files in os.walk('/proc/self/fd'):\n"
        "    for name in files:\n        try: held += os.readlink(folder + '/' + name)\n"
        "        except OSError: pass\n"
        "def add(a, b): return 7654321 if os.listdir('.') else 0"
    ),
    "inherited descriptors": (
        "import os\nfor number in range(64):\n"
        "    for text in (b'1', b'11', b'{\"value\": true}\\n', b'{\"loaded\": true}\\n'):\n"
        "        try: os.write(number, text)\n        except OSError: pass\n"
        "def add(a, b): return 0"
    ),
    "closed descriptors": "import os\nos.closerange(0, 4096)\ndef add(a, b): return 0",
    "an exit": "import os\nos._exit(0)",
    "an exit when it is called": "import os\ndef add(a, b): os._exit(0)",
    "an exit by an exception": "def add(a, b): raise SystemExit(0)",
    "a signal": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "a signal to its group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "a printed verdict": "print('1' * 99, flush=True)\ndef add(a, b): return 0",
    "an answer that is no value": (
        "import gc\nfrom hone.rewards.peer import Peer\n"
        "Peer.encode = lambda self, value: ['class', 'print']\ndef add(a, b): return 0"
    ),
    "a verdict by another process": (
        "import os\nfor pid in range(1, 300):\n    for number in range(3, 10):\n"
        "        try: os.write(os.open(f'/proc/{pid}/fd/{number}', os.O_WRONLY), b'11111')\n"
        "        except OSError: pass\ndef add(a, b): return 0"
    ),
}
TESTS = [
    "assert add(7000000, 654321) == 7654321",
    "assert set([add(1, 2)]) == set([3])",
    "assert abs(add(1, 2) - 3) < 1e-6",
    "assert math.isclose(add(1, 2), 3)",
    "assert not add(1, 2) != 3",
]


@table("name", WRONG)
def test_wrong_programs_that_mean_to_pass_do_not(jail: Jail, name: str) -> None:
    passed = count_passed(WRONG[name], TESTS, monotonic() + 60, jail)
    assert passed == 0
    assert count_passed(ADD, TESTS, monotonic() + 60, jail) == len(TESTS), "the jail goes on"


# Programs that are wrong, by what they do with names that tests use: program and tests.
NAMES: dict[str, tuple[str, list[str]]] = {
    "built-ins that become its own in a call": (
        "held = globals()\ndef add(a, b):\n    held.pop('add', None)\n"
        "    held['abs'] = lambda x: 0\n    return 9",
        ["assert add(1, 2) == 3", "assert abs(add(1, 2) - 3) < 1e-6"],
    ),
    "built-ins of its own for a value kept": (
        "def add(a, b): return 9\ndef abs(x): return 0",
        ["x = add(1, 2)\nassert x == 3", "assert abs(x - 3) < 1e-6"],
    ),
    "nothing, where a well-known function is tested": ("", ["assert lcm(4, 6) == 12"]),
    "a local name of the test, where one is": (
        "candidate = check = None\ndef lcm(a, b): return 0",
        ["def check(candidate):\n    assert candidate(4, 6) == 12\ncheck(lcm)"],
    ),
    "a built-in of its own, where one is": (
        "def lcm(a, b): return 0\ndef abs(x): return 0",
        ["assert abs(lcm(4, 6) - 12) < 1e-6"],
    ),
    "two well-known functions of its own": (
        "def lcm(a, b): return 0\ndef isclose(a, b): return True",
        ["assert isclose(lcm(4, 6), 12)"],
    ),
}


@table("name", NAMES)
def test_a_wrong_program_does_not_pass_by_names_that_tests_use(jail: Jail, name: str) -> None:
    program, tests = NAMES[name]
    assert count_passed(program, tests, monotonic() + 60, jail) == 0


# What tests test where one of two functions has a well-known name: program, tests, how many pass.
TWO_NAMES: dict[str, tuple[str, list[str], int]] = {
    "both are right": (
        "def product(x): return x[0] * x[1]\n" + ADD,
        ["assert product([2, 3]) == 6", "assert add(1, 2) == 3"],
        2,
    ),
    "in one test": (
        "def product(x): return x[0] * x[1]\n" + ADD,
        ["assert product([2, 3]) == 6\nassert add(1, 2) == 3"],
        1,
    ),
    "the well-known one is wrong": (
        "def gcd(a, b): return 99\n" + ADD,
        ["assert gcd(4, 6) == 2", "assert add(1, 2) == 3"],
        1,
    ),
    "both are well known": (
        "def gcd(a, b): return 2\ndef lcm(a, b): return 12",
        ["assert gcd(4, 6) == 2", "assert lcm(4, 6) == 12"],
        2,
    ),
    "one is imported by the program": (
        "from math import gcd\ndef lcm(a, b): return a * b // gcd(a, b)",
        ["assert lcm(4, 6) == 24 // gcd(4, 6)"],
        1,
    ),
    "a built-in of its own after a well-known one": (
        "from math import isclose\ndef sum(a, b): return a + b",
        ["assert isclose(sum(1, 2), 3)"],
        1,
    ),
    "one that was lent to another test is missing": (
        ADD,
        ["assert add(1, 1) == gcd(4, 6)", "assert gcd(4, 6) == 2"],
        1,
    ),
    "a variable holds what the program gave": (
        "def add(a, b): return 9\ndef abs(x): return 0",
        ["x = []", "x.append(add(1, 2))", "assert abs(x[0] - 3) < 1e-6"],
        2,
    ),
    "a pattern holds what the program gave": (
        "def add(a, b): return [9]\ndef abs(x): return 0",
        ["match add(1, 2):\n    case [x]: pass", "assert abs(x - 3) < 1e-6"],
        1,
    ),
    "tests remove what they were lent": (ADD, ["assert add(len([1]), 2) == 3\ndel len",
                                               "assert add(len([1]), 2) == 3"], 2),
    "a function of the tests calls another one": (
        "def add(a, b): return 9\ndef abs(x): return 0",
        ["assert abs(3) == 0\ndef is_near(a, b): return abs(a - b) < 1e-6",
         "assert is_near(add(1, 2), 3)"],
        1,
    ),
    "a module that tests import ties nothing together": (
        "def gcd(a, b): return 2\ndef half(x): return x / 2",
        ["import math\nassert math.isclose(gcd(4, 6), 2)",
         "import math\nassert math.isclose(half(3), 1.5)"],
        2,
    ),
}  # fmt: skip


@table("name", TWO_NAMES)
def test_which_function_of_two_is_the_programs_own(jail: Jail, name: str) -> None:
    program, tests, passed = TWO_NAMES[name]
    assert count_passed(program, tests, monotonic() + 60, jail) == passed


# Programs that mean to end what a test does, or to catch its failure, and have no right answer.
_OBJECT = "def f(x): return Odd()\nclass Odd:\n    value = 0\n"
_LOOP = "for got in map(f, [1]):\n    assert got == 1"
ENDS: dict[str, tuple[str, str]] = {
    **{
        f"{error} in a loop": (f"def f(x): raise {error}", _LOOP)
        for error in ("StopIteration", "StopAsyncIteration", "GeneratorExit", "IndexError",
                      "KeyboardInterrupt", "SystemExit", "BaseException")
    },
    "an end of its own": ("class End(StopIteration): pass\ndef f(x): raise End", _LOOP),
    "the end of all": ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
    "an attribute": (
        f"{_OBJECT}    def __getattr__(self, name): raise StopIteration",
        "for got in map(lambda x: f(x).other, [1]):\n    assert got == 1",
    ),
    "an operation": (
        f"{_OBJECT}    def __getitem__(self, at): raise StopIteration",
        "for got in map(lambda x: f(x)[0], [1]):\n    assert got == 1",
    ),
    "an object that nothing can be compared with": (
        f"{_OBJECT}    def __bool__(self): raise StopIteration\n    __len__ = __iter__ = __bool__",
        "assert all(map(bool, [f(1), f(2)]))",
    ),
    "the end of an iteration that has no start": (
        f"{_OBJECT}    def __iter__(self): raise StopIteration",
        "for got in map(list, [f(1)]):\n    assert got == [1]",
    ),
    "a context that catches": (
        f"{_OBJECT}    def __enter__(self): return self\n    def __exit__(self, *_): return True",
        "with f(1) as got:\n    assert got.value == 1",
    ),
    "an error that is a number": (
        "from hone.rewards.peer import Peer\n"
        "Peer.encode = lambda self, value: ['error', 7, 'f', 'int']",
        "assert f(1) == 1",
    ),
}  # fmt: skip


@table("name", ENDS)
def test_what_a_program_raises_or_gives_does_not_end_a_test(jail: Jail, name: str) -> None:
    program, test = ENDS[name]
    assert count_passed(program, [test, "assert True"], monotonic() + 60, jail) == 1


# Programs that send much, or what takes long to read.
SENDS: dict[str, tuple[str, list[Any]]] = {
    "values of one hash": (
        "import json, os\nvalues = [['int', hex(k * ((1 << 61) - 1))] for k in range(20_000)]\n"
        'os.write(3, b\'{"loaded": true}\\n{"value": []}\\n\')  # it has no class `Solution`\n'
        "line = json.dumps({'value': ['set', values]}).encode() + b'\\n'\n"
        "while line: line = line[os.write(3, line):]",
        [Call("f", [1], 3)],
    ),
    "lines": ("print('a\\n' * (1 << 24))", [Example("", "3")]),
}


@table("name", SENDS)
def test_what_a_program_sends_costs_the_worker_no_time(jail: Jail, name: str) -> None:
    program, tests = SENDS[name]
    before_s = process_time()
    assert count_passed(program, tests, monotonic() + 1, jail) == 0
    assert process_time() - before_s < 0.25


def test_blanks_at_the_ends_of_lines_are_no_difference_however_many(jail: Jail) -> None:
    program = "print('3' + ' ' * 1000 + '\\n' * 1000)"
    assert count_passed(program, [Example("", "3")], monotonic() + 60, jail) == 1


# Programs that use what the graders of data sets import before them: program and test.
IMPORTED: dict[str, tuple[str, Any]] = {
    "annotations of a method": (
        "class Solution:\n    def most(self, x: List[int]) -> Optional[int]: return max(x)",
        "assert Solution().most([1, 2]) == 2",
    ),
    "a program that reads": (
        "from typing import Any\nx: List[Any] = [*deque(input().split())]\nprint(*x)",
        Example("1 2", "1 2"),
    ),
    "a search": (
        "def place(x: List[int], y): return bisect_left(x, y)",
        Call("place", [[1, 2], 2], 1),
    ),
    "a built-in, and modules": (
        "def f(x): return [pow(x, 2), math.gcd(4, 6), bisect.bisect([1], x), copy.copy(x)]",
        Call("f", [3], [9, 2, 1, 3]),
    ),
    "calls within each other, of a function": (
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)",
        "assert depth(20_000) == 20_000",
    ),
    "calls within each other, of a program that reads": (
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(20_000))",
        Example("", "20000"),
    ),
}


@table("name", IMPORTED)
def test_programs_have_what_graders_of_data_sets_import(jail: Jail, name: str) -> None:
    program, test = IMPORTED[name]
    assert count_passed(program, [test], monotonic() + 60, jail) == 1


@table("test", ["assert gcd(4, 6) == 2", "assert reduce", Call("gcd", [4, 6], 2)])
def test_what_graders_import_is_no_function_of_a_program(jail: Jail, test: Any) -> None:
    assert count_passed("", [test], monotonic() + 60, jail) == 0


# As `fn_name` of APPS and TACO: program, arguments, value in the data, whether that is right.
CALLS: dict[str, tuple[str, Any, Any, bool]] = {
    "a function": (ADD, [1, 2], 3, True),
    "a wrong one": ("def add(a, b): return a - b", [1, 2], 3, False),
    "a value in a list of its own": (ADD, [1, 2], [3], True),
    "a method": ("class Solution:\n    def add(self, a, b): return a + b", [1, 2], [3], True),
    "annotations without imports": (
        "class Solution:\n    def add(self, a: List[int], b: Optional[int]) -> int:\n"
        "        return Counter(a)[b]",
        *([[1, 1, 2], 1], [2], True),
    ),
    "a tuple for a list": ("def add(a, b): return (a, b)", [1, 2], [[1, 2]], True),
    "tuples in a list": ("def add(a, b): return [(a, b)]", [1, 2], [[[1, 2]]], True),
    "an empty list": ("def add(a, b): return []", [1, 2], [], True),
    "text for a number": ("def add(a, b): return '3'", [1, 2], [3], False),
    "keys that JSON made texts": (
        "def add(a, b): return {1: a[7] + b}",
        *([{"7": 1}, 2], [{"1": 3}], True),
    ),
    "a value a line": (ADD, "[1]\n[2]", "[1, 2]", True),
    "the first of a value a line": ("def add(a, b): return 1", "[1]\n[2]", "[1, 2]", False),
    "an exception": ("def add(a, b): raise ValueError", [1, 2], [3], False),
    "an exit": ("def add(a, b): raise SystemExit", [1, 2], [3], False),
    "another name": ("def plus(a, b): return a + b", [1, 2], [3], False),
    "an object that equals everything": (
        "class Same(list):\n    __eq__ = lambda *_: True\ndef add(a, b): return Same([9])",
        *([1, 2], [3], False),
    ),
    "too few arguments": (ADD, [1], [3], False),
}


@table("name", CALLS)
def test_a_function_that_the_tests_name_is_called(jail: Jail, name: str) -> None:
    program, args, wanted, is_right = CALLS[name]
    answer = json.dumps({"fn_name": "add", "inputs": [args, args], "outputs": [wanted, wanted]})
    tests = read_tests(answer)
    assert isinstance(tests[0], Call)
    assert count_passed(program, tests, monotonic() + 60, jail) == 2 * is_right
