"""What a run of the suite includes and why, from the costs, the graph and the change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.selection.change import Change, Record, read_change, read_record, state_file
from tests.selection.choose import COSTLY_S, NUM_PARTS, Choice, Minutes, Unit, choose
from tests.selection.graph import Graph

ROOT = Path(__file__).parents[2]
COSTS = Path(__file__).with_name("costs.json")
SHARES_FIXTURES = 'fixture(scope="module"'
MARKS = ("slow", "vllm", "envs", "launch")
"""Marks whose tests are a unit of their own."""
ALWAYS = (
    "tests/config/test_key_walk.py",
    "tests/mutants/test_run.py::test_every_entry_of_the_catalogue_fits_the_code",
    "tests/selection/test_catalogue.py::test_a_change_of_the_file_reaches_a_test_that_kills_its_mistake",
    "tests/selection/test_graph.py::test_the_graph_of_this_repository_has_no_hole",
)
"""Units that always run, whatever they cost: every change may leave a key that nobody reads, a
planted mistake without its line, or a test that no change of what it tests would reach."""
QUICK = Minutes(touched=1.0, far=0.7, turn=0.3)
"""Minutes of `make test` for costly units: what its five minutes leave."""
RAN = ROOT / ".pytest_cache" / "hone-ran.json"
"""What the last run with a budget that passed ran, which `.ci/run` adds to its record."""


def unit_of(nodeid: str, *, shares_fixtures: bool, mark: str | None = None) -> str:
    """The name of the unit that a test belongs to."""
    file, _, test = nodeid.partition("::")
    name = file if shares_fixtures else f"{file}::{test.partition('[')[0]}"
    return f"{name} {mark}" if mark else name


def file_of(unit: str) -> str:
    """The test file of a unit."""
    return unit.partition(" ")[0].partition("::")[0]


@dataclass(frozen=True)
class Costs:
    """CPU seconds of each unit above half a second, and of all others together."""

    units: Mapping[str, float]
    others_s: float

    @classmethod
    def read(cls, file: Path = COSTS) -> Costs:
        found = json.loads(file.read_text(encoding="utf-8"))
        return cls(found["units"], found["others_s"])

    def write(self, file: Path = COSTS) -> None:
        units = {name: round(seconds, 1) for name, seconds in sorted(self.units.items())}
        content = {"others_s": round(self.others_s), "units": units}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @property
    def costly(self) -> list[Unit]:
        return [
            Unit(name, file_of(name), seconds)
            for name, seconds in self.units.items()
            if is_costly(name, seconds)
        ]

    @property
    def cheap_s(self) -> float:
        """CPU seconds of what runs always."""
        costly = {unit.name for unit in self.costly}
        return self.others_s + sum(s for name, s in self.units.items() if name not in costly)


def is_costly(name: str, seconds: float) -> bool:
    """Whether a unit runs only where it is chosen."""
    if name in ALWAYS:
        return False
    return seconds > COSTLY_S or name.endswith(tuple(f" {mark}" for mark in MARKS))


@dataclass(frozen=True)
class Plan:
    """The choice of a run, and what it follows from."""

    costs: Costs
    change: Change
    distances: Mapping[str, int] | None
    choice: Choice
    minutes: Minutes

    @classmethod
    def make(cls, minutes: Minutes, record: Record | None = None) -> Plan:
        """The plan for the working tree as it is."""
        record = record or read_record(state_file())
        change = read_change(ROOT, record)
        distances = None if change.files is None else Graph.read(ROOT).distances(change.files)
        costs = Costs.read()
        choice = choose(
            costs.costly,
            distances,
            minutes,
            number=change.number,
            last_run=record.last_run,
        )
        return cls(costs, change, distances, choice, minutes)

    @cached_property
    def line(self) -> str:
        """What was chosen and why, in one line."""
        choice, change = self.choice, self.change
        costly = self.costs.costly
        names = choice.names
        reason = f"no base: {change.why}"
        if change.base is not None:
            reason = (
                f"{len(choice.touched)} reached by {len(change.files or ())} changed files "
                f"(base {change.base[:7]}: {change.why})"
            )
        left = f", {len(choice.left)} reached ones left to their turn" if choice.left else ""
        return (
            f"{len(names)} of {len(costly)} costly units in about {self.wall(names):.0f} minutes "
            f"and all cheap ones ({self.wall_of(self.costs.cheap_s):.0f}): {reason}, "
            f"{len(choice.turn)} by turn (part {change.number % NUM_PARTS + 1} of {NUM_PARTS})"
            f"{left}"
        )

    def wall(self, names: frozenset[str]) -> float:
        """Minutes that units take."""
        return self.wall_of(sum(u.seconds for u in self.costs.costly if u.name in names))

    def wall_of(self, seconds: float) -> float:
        return seconds / 60 / self.minutes.workers

    def reason(self, unit: Unit) -> str:
        if unit in self.choice.turn:
            return "turn"
        distance = (self.distances or {}).get(unit.file)
        if distance is None:
            return "not reached"
        return f"reached, {distance} imports away" + (
            "" if unit in self.choice.touched else ", left"
        )


def line_of_all(workers: int) -> str:
    """The plan of a run of everything."""
    costs = Costs.read()
    costly = costs.costly
    seconds = sum(unit.seconds for unit in costly)
    return (
        f"all {len(costly)} costly units in about {seconds / 60 / workers:.0f} minutes and all "
        f"cheap ones in {costs.cheap_s / 60 / workers:.0f}, with {workers} workers"
    )
