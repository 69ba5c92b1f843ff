"""Each planted mistake is one that the choice of tests would find.

The catalogue of mistakes says which test kills which change of a file; were one of these tests
costly and not reached by that file, a change there could land without it.
"""

from __future__ import annotations

from tests.mutants.run import CATALOGUE, Mutant, load
from tests.selection.graph import Graph
from tests.selection.plan import MARKS, ROOT, Costs, file_of, unit_of
from tests.selection.plugin import shares_fixtures
from tests.tables import check_rows


def killers(mutant: Mutant, costs: Costs) -> set[str]:
    """The units that kill a mutant, or may: those of a whole file where it names one."""
    found: set[str] = set()
    for test in mutant.killed_by:
        file, _, name = test.partition("::")
        unit = unit_of(test, shares_fixtures=shares_fixtures(ROOT / file))
        listed = (
            {unit, *(f"{unit} {mark}" for mark in MARKS)}
            if name
            else {u for u in costs.units if file_of(u) == file}
        )
        found |= (listed & costs.units.keys()) or {unit}
    return found


def test_a_change_of_the_file_reaches_a_test_that_kills_its_mistake() -> None:
    graph, costs = Graph.read(ROOT), Costs.read()
    costly = {unit.name for unit in costs.costly}

    def check(mutant: Mutant) -> None:
        reached = graph.distances([mutant.file])
        units = killers(mutant, costs)
        assert any(name not in costly or file_of(name) in reached for name in units), units

    check_rows({mutant.id: mutant for mutant in load(CATALOGUE)}, check, minimum=300)
