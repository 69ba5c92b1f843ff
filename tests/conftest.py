"""The whole suite must be the whole suite, and what is dear in it happens once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.warm_fork_servers import Starter

MINIMUM_COLLECTED = {"": 5000, "not slow": 4740, "slow": 260}
"""Fewest tests that a run of everything may collect, by its `-m`; raise it as the suite grows."""


NO_TIME_LEFT = pytest.StashKey[float]()
"""When the last test may begin, by the clock of `monotonic`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes", type=float, help="begin no test later than this; those left over are skipped"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if monotonic() > item.config.stash[NO_TIME_LEFT]:
        pytest.skip(f"no time left ({item.config.getoption('minutes'):g} minutes)")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reasons = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
    if number := sum("no time left (" in reason for reason in reasons):
        within = f"{config.getoption('minutes'):g} minutes"
        terminalreporter.write_line(f"{number} tests did not begin within {within}", yellow=True)


def pytest_configure(config: pytest.Config) -> None:
    """How long an example of Hypothesis takes is no finding: other programs may have the machine.

    The environment of vLLM is without Hypothesis.
    """
    minutes = config.getoption("minutes")
    config.stash[NO_TIME_LEFT] = inf if minutes is None else monotonic() + 60 * minutes
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "hone", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("hone")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n N`, a file whose tests share a fixture goes to one worker, other tests to any.

    Such fixtures start processes and take up to a minute; they come first, and run once.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _shares_fixtures(config.rootpath / file) else nodeid

    return Scheduling(config, log)


@cache
def _shares_fixtures(file: Path) -> bool:
    return 'fixture(scope="module"' in file.read_text(encoding="utf-8")


@pytest.fixture(scope="session", autouse=True)
def warm_fork_servers() -> Iterator[None]:
    """Pools of reward workers start at once, not after half a second of imports."""
    from hone.rewards import pool

    with pytest.MonkeyPatch.context() as patch:
        starter = Starter(pool)
        patch.setattr(pool, "_start_fork_server", starter)
        yield
        starter.close()


def _minimum(session: pytest.Session) -> int:
    """Fewest tests that this run may collect. Workers of xdist leave it to their head."""
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    last_failed = getattr(config.option, "lf", False)  # absent without the cache plugin
    head = not hasattr(config, "workerinput")
    if not whole or not head or config.option.keyword or last_failed:
        return 0
    return MINIMUM_COLLECTED.get(config.option.markexpr, 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    minimum = _minimum(session)
    if session.testscollected < minimum and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.ensure_newline()
        reporter.write_line(
            f"collected {session.testscollected} tests, fewer than {minimum} "
            "(tests/conftest.py): has a file dropped out?",
            red=True,
        )
