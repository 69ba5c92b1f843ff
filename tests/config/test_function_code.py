"""Two versions of a function differ by what they do, not by where they are written."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hone.config.function_code import code_digest
from hone.config.inherited import inheriting

FIRST = "def f(completion, scale=1):\n    return [len(x) * scale for x in completion]\n"
SAME = {
    "elsewhere": f"x = 3\n\n\n{FIRST}",
    "with a comment": FIRST.replace("return", "# the length\n    return"),
}
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


@pytest.mark.parametrize("change", OTHER)
def test_other_code_has_another(change: str) -> None:
    assert digest(OTHER[change]) != digest(FIRST)


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
