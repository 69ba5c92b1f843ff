"""pytest runs what was chosen, says so, and measures what it costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.selection import plan, plugin
from tests.selection.change import STATE_VARIABLE
from tests.selection.graph import Graph
from tests.selection.plan import Costs, file_of, unit_of

FILES = {
    "test_cheap": "def test_a(): pass\ndef test_b(): pass\n",
    "test_costly": "def test_c(): pass\ndef test_d(): pass\n",
    "test_shared": """
import pytest
@pytest.fixture(scope="module")
def ranks(): return 1
def test_e(ranks): pass
def test_g(ranks): pass
@pytest.mark.slow
def test_f(ranks): pass
""",
}
COSTS = {
    "test_costly.py::test_c": 50.0,
    "test_costly.py::test_d": 1.0,
    "test_shared.py": 20.0,
    "test_shared.py slow": 90.0,
}


@pytest.fixture
def suite(
    pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.Pytester]:
    """A suite of three files, with costs, that is no git repository."""
    pytester.makepyfile(**FILES)
    pytester.makeini("[pytest]\nmarkers = slow: slow\ntestpaths = .\n")
    costs = tmp_path / "costs.json"
    Costs(COSTS, 4.0).write(costs)
    for module in (plan, plugin):
        monkeypatch.setattr(module, "ROOT", pytester.path, raising=False)
    monkeypatch.setattr(plugin, "RAN", tmp_path / "ran.json")
    monkeypatch.setattr(plugin, "FLOORS", {True: 1, False: 1})
    monkeypatch.setattr(Costs.read.__func__, "__defaults__", (costs,))
    monkeypatch.setattr(Graph, "read", lambda _: Graph(frozenset(), {}))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "state.json"))
    monkeypatch.delenv("BASE", raising=False)
    yield pytester
    plugin.shares_fixtures.cache_clear()


def run(suite: pytest.Pytester, *options: str) -> tuple[set[str], pytest.RunResult]:
    """The names of the tests that ran."""
    result = suite.runpytest_inprocess(
        "-p", "tests.selection.plugin", "-p", "no:cacheprovider", "-v", *options
    )
    passed = {line.split("::")[1].split()[0] for line in result.outlines if " PASSED" in line}
    return passed, result


def test_everything_runs_without_a_budget(suite: pytest.Pytester) -> None:
    ran, result = run(suite)
    assert ran == {f"test_{letter}" for letter in "abcdefg"}
    result.stdout.fnmatch_lines(["Chosen: all 3 costly units in about 3 minutes and all cheap*"])


def test_a_budget_leaves_out_costly_units(suite: pytest.Pytester, tmp_path: Path) -> None:
    ran, result = run(suite, "--budget", "0,0,0")
    assert ran == {"test_a", "test_b", "test_d"}
    result.stdout.fnmatch_lines(["Chosen: 0 of 3 costly units*no base: this is no git*"])
    nothing = {"commit": None, "number": 0, "units": []}
    assert json.loads((tmp_path / "ran.json").read_text()) == nothing
    ran, _ = run(suite, "--budget", "1,1,1")
    assert len(ran) > 3
    noted = set(json.loads((tmp_path / "ran.json").read_text())["units"])
    assert noted
    assert noted < COSTS.keys()


def test_costly_units_that_would_begin_late_are_left_out(
    suite: pytest.Pytester, tmp_path: Path
) -> None:
    ran, result = run(suite, "--minutes", "-1", "--budget", "100,100,100")
    assert ran == {"test_a", "test_b", "test_d"}
    result.stdout.fnmatch_lines(["3 costly units did not begin within -1 minutes"])
    noted = json.loads((tmp_path / "ran.json").read_text())
    assert noted == {"commit": None, "number": 0, "units": []}


def test_costliest_units_begin_first(suite: pytest.Pytester) -> None:
    _, result = run(suite)
    order = [line.split("::")[1].split()[0] for line in result.outlines if " PASSED" in line]
    assert order[:4] == ["test_f", "test_c", "test_e", "test_g"]


def test_a_random_order_keeps_units_together(suite: pytest.Pytester) -> None:
    orders = set()
    for seed in range(8):
        _, result = run(suite, "--shuffle", str(seed))
        order = [line.split("::")[1].split()[0] for line in result.outlines if " PASSED" in line]
        assert abs(order.index("test_e") - order.index("test_g")) == 1, "they share a fixture"
        orders.add(tuple(order))
    assert len(orders) > 1


def test_costs_are_measured_by_units(suite: pytest.Pytester, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    run(suite, "--measure-costs", str(file))
    measured = Costs.read(file)
    assert measured.units == {"test_shared.py slow": pytest.approx(0, abs=5)}
    known = {"test_gone.py::test_x": 9.0, "test_shared.py": 9.0, "test_costly.py::test_c": 9.0}
    Costs(known, 3.0).write(file)
    run(suite, "test_costly.py", "--measure-costs", str(file))
    assert Costs.read(file) == Costs({"test_shared.py": 9.0}, 3)  # other files keep their costs


def test_what_is_skipped_keeps_its_cost(suite: pytest.Pytester, tmp_path: Path) -> None:
    suite.makepyfile(test_costly="import pytest\ndef test_c(): pytest.skip('needs a browser')\n")
    file = tmp_path / "measured.json"
    Costs({"test_costly.py::test_c": 50.0}, 3.0).write(file)
    run(suite, "--measure-costs", str(file))
    assert Costs.read(file).units["test_costly.py::test_c"] == 50.0


def test_a_slow_test_that_was_never_measured_runs(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_new="import pytest\n@pytest.mark.slow\ndef test_n(): pass\n")
    assert "test_n" in run(suite, "--budget", "0,0,0")[0]


def test_a_file_that_dropped_out_is_noticed(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "FLOORS", {True: 4, False: 8})
    _, result = run(suite)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["7 rows and tests were checked, fewer than 8 *"])
    assert run(suite, "test_cheap.py")[1].ret == pytest.ExitCode.OK
    assert run(suite, "--budget", "0,0,0")[1].ret == pytest.ExitCode.TESTS_FAILED


def test_a_unit_exists_while_its_test_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "ROOT", tmp_path)
    (tmp_path / "test_plain.py").write_text(
        "@pytest.mark.slow\nclass TestA:\n    def test_b(self):"
    )
    (tmp_path / "test_shared.py").write_text('@pytest.fixture(scope="module")\ndef test_c():')
    for name, expected in {
        "test_plain.py::TestA::test_b": True,
        "test_plain.py::TestA::test_b slow": True,
        "test_plain.py::test_": False,
        "test_plain.py": False,
        "test_shared.py": True,
        "test_shared.py slow": False,
        "test_shared.py::test_c": False,
        "test_gone.py": False,
    }.items():
        assert plugin.exists(name) == expected, name


def test_names_of_units() -> None:
    name = "tests/a/test_b.py::test_c[1-2]"
    assert unit_of(name, shares_fixtures=False) == "tests/a/test_b.py::test_c"
    assert unit_of(name, shares_fixtures=True, mark="slow") == "tests/a/test_b.py slow"
    for shares_fixtures in (True, False):
        unit = unit_of(name, shares_fixtures=shares_fixtures, mark="slow")
        assert file_of(unit) == "tests/a/test_b.py"
