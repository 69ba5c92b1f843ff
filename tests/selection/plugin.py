"""pytest's side of the selection: options, what is left out, the line, and measured costs.

With `-n` the head plans and its workers obey. Without `--budget` everything that is named runs.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Generator
from functools import cache
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests import tables
from tests.selection.choose import Minutes
from tests.selection.plan import (
    MARKS,
    RAN,
    ROOT,
    SHARES_FIXTURES,
    Costs,
    Plan,
    file_of,
    is_costly,
    line_of_all,
    unit_of,
)
from tests.selection.seed import SEED, seed_of

CHANGED_FILES = "HONE_CHANGED_FILES"
"""An environment variable with the changed files, a line each, for tests that choose among their
own rows; it is absent where no base is known."""

FLOORS = {True: 3000, False: 6000}
"""Fewest rows of tables and tests that a run of the whole suite may check, with a budget and
without: a file that dropped out must not go unnoticed."""

LISTED_S = 0.5
"""CPU seconds from which on a unit is listed among the costs."""

_CHOSEN = pytest.StashKey[frozenset[str]]()
_LINE = pytest.StashKey[str]()
_COMMIT = pytest.StashKey[tuple[str | None, int]]()
"""On which the run began, and its number."""
_SKIPPED = pytest.StashKey[bool]()
_ROWS = pytest.StashKey[int]()
_LATE = pytest.StashKey[set[str]]()
_COSTLY = pytest.StashKey[frozenset[str]]()
_END = pytest.StashKey[float]()
_COSTS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hone")
    group.addoption(
        "--budget",
        help="leave out costly units but for those that fit: minutes for what the change touches, "
        "of these for units further off, and for the turn, as TOUCHED,FAR,TURN",
    )
    group.addoption(
        "--minutes", type=float, help="skip costly units that would begin later than this"
    )
    group.addoption("--measure-costs", metavar="FILE", help="write the CPU seconds of all units")
    group.addoption(
        "--seed",
        type=int,
        help="what random draws of tests follow from; 0 with a budget or for named tests, so that "
        "a landing is not refused for another draw, and a new one for the whole suite",
    )
    group.addoption("--shuffle", type=int, metavar="SEED", help="run tests in a random order")


def is_head(config: pytest.Config) -> bool:
    """Whether this process is no worker of xdist."""
    return not hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = 0
    config.stash[_LATE] = set()
    minutes = config.option.minutes
    config.stash[_END] = inf if minutes is None else monotonic() + 60 * minutes
    config.stash[_COSTS] = Counter()
    is_fresh = config.option.budget is None and runs_all(config)
    seed = config.option.seed
    if seed is None:
        seed = random.SystemRandom().randrange(1, 1 << 31) if is_fresh else 0
    config.stash[SEED] = seed if is_head(config) else config.workerinput["seed"]
    if not is_head(config):
        if (chosen := config.workerinput["chosen"]) is not None:
            config.stash[_CHOSEN] = frozenset(chosen)
        return
    config.option.loadscopereorder = False  # the costliest come first, not the largest
    if config.option.budget is None:
        return
    try:
        plan = Plan.make(Minutes.parse(config.option.budget))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_CHOSEN] = plan.choice.names
    config.stash[_LINE] = plan.line
    config.stash[_COMMIT] = plan.change.head, plan.change.number
    if plan.change.files is not None:
        os.environ[CHANGED_FILES] = "\n".join(sorted(plan.change.files))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n N`, a file whose tests share a fixture goes to one worker, other tests to any."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if shares_fixtures(config.rootpath / file) else nodeid

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    chosen = node.config.stash.get(_CHOSEN, None)
    node.workerinput["seed"] = node.config.stash[SEED]
    node.workerinput["chosen"] = None if chosen is None else sorted(chosen)


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if not is_head(config):
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly:
        return
    line = config.stash.get(_LINE, None)
    if line is None and runs_all(config):
        line = line_of_all(config.getoption("numprocesses", None) or 1)
    if line is not None:
        reporter.write_line(f"Chosen: {line}. Draws: --seed {seed_of(config)}.")


def runs_all(config: pytest.Config) -> bool:
    """Whether nothing was named or filtered: the whole suite, or what a budget leaves of it."""
    option = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    last_failed = getattr(option, "lf", False)  # absent without the cache plugin
    return whole and not (option.keyword or option.markexpr or last_failed)


def unit(item: pytest.Item) -> str:
    """The name of an item's unit."""
    mark = next((mark for mark in MARKS if item.get_closest_marker(mark)), None)
    return unit_of(item.nodeid, shares_fixtures=shares_fixtures(item.path), mark=mark)


@cache
def shares_fixtures(file: Path) -> bool:
    """Whether a file has a fixture that its tests share."""
    return SHARES_FIXTURES in file.read_text(encoding="utf-8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    costs = Costs.read().units
    config.stash[_COSTLY] = frozenset(name for name, s in costs.items() if is_costly(name, s))
    units = {item: unit(item) for item in items}
    chosen = config.stash.get(_CHOSEN, None)
    if chosen is not None:
        left = [
            item
            for item, name in units.items()
            if name in costs and is_costly(name, costs[name]) and name not in chosen
        ]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    if config.option.shuffle is None:
        items.sort(key=lambda item: -costs.get(units[item], 0))
    else:
        shuffle(items, units, config.option.shuffle)


def shuffle(items: list[pytest.Item], units: dict[pytest.Item, str], seed: int) -> None:
    """Put units, and the tests in each, into a random order."""
    draw = random.Random(seed)
    draw.shuffle(items)
    order = {name: draw.random() for name in sorted(set(units.values()))}
    items.sort(key=lambda item: order[units[item]])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count what a test costs and how many rows it checks; its processes count once they end."""
    rows, before = tables.rows_checked(), os.times()
    try:
        return (yield)
    finally:
        after = os.times()
        seconds = sum(after[:4]) - sum(before[:4])
        waited = (after.elapsed - before.elapsed) / 2
        if not item.stash.get(_SKIPPED, False):
            item.config.stash[_COSTS][unit(item)] += max(seconds, waited)
        item.config.stash[_ROWS] += max(1, tables.rows_checked() - rows)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note what is skipped: it does not show what it costs elsewhere."""
    report = yield
    item.stash[_SKIPPED] = report.skipped or item.stash.get(_SKIPPED, False)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A slow machine leaves out what it has no time for; it stays first in line."""
    if monotonic() > item.config.stash[_END] and (name := unit(item)) in item.config.stash[_COSTLY]:
        item.config.stash[_LATE].add(name)
        pytest.skip(f"no time left ({item.config.option.minutes:g} minutes)")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if late := config.stash[_LATE]:
        minutes = config.option.minutes
        terminalreporter.write_line(
            f"{len(late)} costly units did not begin within {minutes:g} minutes", yellow=True
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if not is_head(config):
        config.workeroutput["costs"] = dict(config.stash[_COSTS])
        config.workeroutput["late"] = sorted(config.stash[_LATE])
        config.workeroutput["rows"] = config.stash[_ROWS]
        return
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if config.option.measure_costs and session.exitstatus in ended:
        write_costs(config)
    if session.exitstatus != pytest.ExitCode.OK or not runs_all(config):
        return
    if config.option.collectonly:
        return
    floor = FLOORS[config.option.budget is not None]
    if (rows := config.stash[_ROWS]) < floor:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.ensure_newline()
        reporter.write_line(
            f"{rows} rows and tests were checked, fewer than {floor} "
            "(tests/selection/plugin.py): has a file dropped out?",
            red=True,
        )
        return
    if (chosen := config.stash.get(_CHOSEN, None)) is None:
        return
    commit, number = config.stash[_COMMIT]
    ran = {"commit": commit, "number": number, "units": sorted(chosen - config.stash[_LATE])}
    RAN.parent.mkdir(exist_ok=True)
    RAN.write_text(json.dumps(ran), encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what a worker has measured."""
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash[_COSTS].update(output.get("costs", {}))
    node.config.stash[_LATE].update(output.get("late", []))
    node.config.stash[_ROWS] += output.get("rows", 0)


def write_costs(config: pytest.Config) -> None:
    """Write what a run has measured. What it did not run keeps its cost: other files, and tests
    that were skipped, since they cost more where they are not."""
    file = Path(config.option.measure_costs)
    measured = config.stash[_COSTS]
    listed = {name: s for name, s in measured.items() if s >= LISTED_S or is_costly(name, s)}
    known = Costs.read(file) if file.exists() else Costs({}, 0)
    kept = {name: s for name, s in known.units.items() if name not in measured and exists(name)}
    others = known.others_s
    if runs_all(config):
        others = sum(seconds for name, seconds in measured.items() if name not in listed)
    Costs(kept | listed, others).write(file)


def exists(name: str) -> bool:
    """Whether a unit is still in the tree."""
    plain, _, mark = name.partition(" ")
    file, test = ROOT / file_of(name), plain.rpartition("::")[2] if "::" in plain else ""
    if not file.is_file():
        return False
    text = file.read_text(encoding="utf-8")
    is_whole_file = SHARES_FIXTURES in text
    return mark in text and is_whole_file == (not test) and (not test or f"def {test}(" in text)
