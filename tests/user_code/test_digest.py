"""Two versions of a function differ by what they do, not by where they are written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hone.user_code.digest import code_digest
from hone.user_code.inherited import inheriting
from tests.tables import table

FIRST = "def f(completion, scale=1):\n    return [len(x) * scale for x in completion]\n"
SAME = {
    "elsewhere": f"x = 3\n\n\n{FIRST}",
    "with a comment": FIRST.replace("return", "# the length\n    return"),
}
HELPED = "SCALE = 2\ndef helper(x):\n    return SCALE * x\n" + FIRST.replace("len(x)", "helper(x)")
CLASSY = "class H:\n    def go(self, x):\n        return x\n" + FIRST.replace("len(x)", "H().go(x)")
CLOSED = (
    "def make(k):\n    def f(x):\n        return g(x) * k\n    def g(x):\n        return x\n"
    "    return f\nf = make(1)\n"
)
ENVIRONMENT = (
    "class f:\n    TURNS = 2\n    def step(self, episode):\n        return helper(self.TURNS)\n"
    "def helper(x):\n    return x\n"
)
USES = [
    # a program, and what is changed in it
    (HELPED, "SCALE * x", "SCALE + x"),
    (HELPED, "SCALE = 2", "SCALE = 3"),
    (CLASSY, "return x\n", "return -x\n"),
    (CLOSED, "make(1)", "make(2)"),
    (CLOSED, "return x", "return -x"),
    (ENVIRONMENT, "TURNS = 2", "TURNS = 3"),
    (ENVIRONMENT, "return helper", "return -helper"),
    (ENVIRONMENT, "return x", "return -x"),
]
OTHER = {
    "a default": FIRST.replace("scale=1", "scale=2"),
    "inside a comprehension": FIRST.replace("len(x)", "hash(x)"),
    "a constant": FIRST.replace("* scale", "* scale + 1"),
    "a default by name": FIRST.replace("completion, scale", "completion, *, scale"),
    "an instance": "class F:\n    def __call__(self, completion):\n        return 1.0\nf = F()\n",
}


def digest(source: str, wrap: Any = None) -> str | None:
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<cell {len(source)}>", "exec"), namespace)
    function = namespace["f"] if wrap is None else wrap(namespace["f"])
    with inheriting({"__main__:f": function}):
        return code_digest("__main__:f")


@pytest.mark.parametrize("change", SAME)
def test_the_same_code_has_the_same_digest(change: str) -> None:
    assert digest(SAME[change]) == digest(FIRST)


@table("change", OTHER)
def test_other_code_has_another(change: str) -> None:
    assert digest(OTHER[change]) != digest(FIRST)


@table("program, old, new", USES)
def test_what_it_uses_of_its_module_belongs_to_it(program: str, old: str, new: str) -> None:
    changed = program.replace(old, new, 1)
    assert digest(changed) != digest(program) == digest(f"unused = 1\n{program}")


def test_functions_that_call_each_other() -> None:
    program = "def f(x):\n    return g(x)\ndef g(x):\n    return f(x) + f(1)\n"
    assert digest(program) == digest(program) != digest(program.replace("f(1)", "f(2)"))


def test_bound_arguments_belong_to_it() -> None:
    one, other = (digest(FIRST, lambda f, n=n: partial(f, scale=n)) for n in (1, 2))
    assert one != other


def test_of_a_file_its_content_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(FIRST)
    first = code_digest("rewards.py:f")
    assert first == code_digest("rewards:f") is not None
    Path("rewards.py").write_text(OTHER["a constant"])
    assert code_digest("rewards.py:f") != first
    assert code_digest("exact_match") is code_digest("json:dumps") is None
    Path("http.py").write_text(FIRST)
    assert code_digest("http://localhost") is None
