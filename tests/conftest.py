"""Settings of the whole suite: what is costly in it happens once, and the shell changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.warm_fork_servers import Starter

pytest_plugins = ("tests.selection.plugin", "pytester")


def pytest_configure(config: pytest.Config) -> None:
    """Take what a busy machine or the shell would change out of the tests.

    How long an example of Hypothesis takes is no finding. A shell that starts the suite with
    `nohup` or in the background has signals ignored, which processes inherit; a handler that does
    nothing keeps this process alive, and those that it starts get the default. The environment of
    vLLM is without Hypothesis.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "hone", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("hone")


@pytest.fixture(scope="session", autouse=True)
def warm_fork_servers() -> Iterator[None]:
    """Pools of reward workers start at once, not after half a second of imports."""
    from hone.rewards import pool

    with pytest.MonkeyPatch.context() as patch:
        starter = Starter(pool)
        patch.setattr(pool, "_start_fork_server", starter)
        yield
        starter.close()
