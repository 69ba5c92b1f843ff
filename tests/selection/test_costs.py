"""The table of costs names the tests of the tree. These tests have a file of their own, which is
cheap and so runs always: any change of a test file can make an entry wrong."""

from __future__ import annotations

from pathlib import Path

from tests.selection import plan, plugin
from tests.selection.plan import Costs, file_of

WRITES_SUITES = Path(__file__).with_name("test_plugin.py")


def test_costs_name_tests_that_exist() -> None:
    """A unit that was renamed would be cheap until it is measured again."""
    named = [*Costs.read().units, *plan.ALWAYS]
    gone = [name for name in named if not plugin.exists(name)]
    assert gone == []


def test_files_with_slow_tests_have_costs() -> None:
    """What was never measured runs every time: `make costs TESTS=file` measures a new file."""
    known = {file_of(name) for name in Costs.read().units if name.endswith(" slow")}
    files = {path for path in (plan.ROOT / "tests").rglob("test_*.py") if has_slow_tests(path)}
    files.discard(WRITES_SUITES)
    assert {path.relative_to(plan.ROOT).as_posix() for path in files} <= known


def has_slow_tests(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(
        line.startswith(("@pytest.mark.slow", "pytestmark =")) and "slow" in line
        for line in text.splitlines()
    )
