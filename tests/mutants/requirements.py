"""Which tests hold up each requirement, and which planted mistakes show that they do.

    python -m tests.mutants.requirements

A test names its requirements: `test_R8_...`, or `R8` in its docstring or its file's. The exit
status is 1 where a requirement has no test, or no mistake is planted for it: neither in the
catalogue nor by a test that plants its own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.run import CATALOGUE, ROOT, load

NUMBERS = range(1, 26)
_NAMED = re.compile(r"\bR(\d+)\b")
_PLANTED = re.compile(r"planted|_catches")
_IN_A_NAME = re.compile(r"_R(\d+)(?=_)")


def requirements_of(tests: Path) -> dict[str, set[int]]:
    """The requirements of each test file or test, by its node id relative to the repository."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in sorted(tests.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(tests.parent).as_posix()
        found[name] |= _numbers(_NAMED, ast.get_docstring(tree) or "")
        for node in _functions(tree):
            test = f"{name}::{node.name}"
            found[test] |= _numbers(_IN_A_NAME, node.name)
            found[test] |= _numbers(_NAMED, ast.get_docstring(node) or "")
    return {name: numbers for name, numbers in found.items() if numbers}


def _numbers(pattern: re.Pattern[str], text: str) -> set[int]:
    return {int(number) for number in pattern.findall(text)} & {*NUMBERS}


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


def mutants_of(requirements: dict[str, set[int]]) -> dict[int, list[str]]:
    """The mutants that a requirement's tests kill."""
    found: dict[int, list[str]] = {number: [] for number in NUMBERS}
    for mutant in load(CATALOGUE):
        numbers: set[int] = set()
        for test in mutant.killed_by:
            file = test.partition("::")[0]
            plain = test.partition("[")[0]
            for name, own in requirements.items():
                if name in (file, plain) or (plain == file and name.startswith(f"{file}::")):
                    numbers |= own
        for number in numbers:
            found[number].append(mutant.id)
    return found


def main() -> int:
    requirements = requirements_of(ROOT / "tests")
    mutants = mutants_of(requirements)
    status = 0
    for number in NUMBERS:
        tests = sorted(name for name, own in requirements.items() if number in own)
        planted = [name for name in tests if _PLANTED.search(name)]
        sys.stdout.write(
            f"R{number}: {len(tests)} tests, {len(mutants[number])} mutants, "
            f"{len(planted)} tests that plant mistakes themselves\n"
        )
        sys.stdout.write("".join(f"    {test}\n" for test in tests))
        sys.stdout.write("".join(f"    kills {mutant}\n" for mutant in mutants[number]))
        status |= not (tests and (mutants[number] or planted))
    return status


if __name__ == "__main__":
    sys.exit(main())
