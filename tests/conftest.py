"""What the whole suite shares: processes that start once, and nothing left for the next test."""

from __future__ import annotations

import gc
import logging
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from zlib import crc32

import pytest

from tests.selection.seed import seed_of
from tests.warm_fork_servers import Starter

pytest_plugins = ("tests.selection.plugin", "pytester")


def pytest_configure(config: pytest.Config) -> None:
    """Take what the shell or a busy machine would change out of the tests.

    A shell that starts the suite with `nohup` or in the background has signals ignored, which
    processes inherit; a handler that does nothing keeps this process alive, and those that it
    starts get the default. How long an example of Hypothesis takes is no finding; the environment
    of vLLM is without Hypothesis.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, core, settings

        settings.register_profile(
            "hone",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=seed_of(config) == 0,
            print_blob=True,
        )
        settings.load_profile("hone")
        if seed_of(config) and core.global_force_seed is None:
            core.global_force_seed = seed_of(config)


def pytest_collection_finish() -> None:
    """A run collects all garbage before its first step: without the million objects that this
    process has by now, which would take longer than three steps of a tiny run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws follows from its name and the seed of the suite, whatever ran before it."""
    seed = crc32(f"{seed_of(item.config)} {item.nodeid}".encode())
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands set up logging for their process; the next test finds it as it was."""
    loggers = [logging.getLogger(name) for name in (None, "hone")]
    before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


@pytest.fixture(scope="session", autouse=True)
def free_disk() -> Iterator[None]:
    """Warnings about space are not those of the disk on which the tests run: it has room."""
    free = 1 << 50
    with pytest.MonkeyPatch.context() as patch:
        usage = type(shutil.disk_usage("."))(2 * free, free, free)
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_fork_servers() -> Iterator[None]:
    """Pools of reward workers start at once, not after half a second of imports."""
    from hone.rewards import pool

    with pytest.MonkeyPatch.context() as patch:
        starter = Starter(pool)
        patch.setattr(pool, "_start_fork_server", starter)
        yield
        starter.close()
