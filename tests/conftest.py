"""The whole suite must be the whole suite: a file that no longer collects is a failure."""

from __future__ import annotations

import pytest

MINIMUM_COLLECTED = 1950
"""Fewest tests that a run without selection may collect; raise it as the suite grows."""


def _is_short(session: pytest.Session) -> bool:
    """Whether a run of everything collected too little. Workers of xdist leave it to their head."""
    config = session.config
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    selected = config.option.keyword or config.option.markexpr or config.option.lf
    head = not hasattr(config, "workerinput")
    return head and whole and not selected and session.testscollected < MINIMUM_COLLECTED


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_short(session) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.ensure_newline()
        reporter.write_line(
            f"collected {session.testscollected} tests, fewer than {MINIMUM_COLLECTED} "
            "(tests/conftest.py): has a file dropped out?",
            red=True,
        )
