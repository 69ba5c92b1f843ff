"""The processes below a process."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Generator

import psutil
import pytest

from hone.rewards import process_tree
from hone.rewards.process_tree import children_of, num_descendants

CHAIN = "read line; sleep 1000 & sleep 1000 & sh -c 'sleep 1000 & echo up; wait'; wait"
"""Waits for a line; then it has three children, and one of these has another."""


@pytest.fixture
def chain() -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(
        ["sh", "-c", CHAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        yield shell
        os.killpg(shell.pid, 9)


def test_descendants_are_counted_as_the_parents_of_all_processes_say(
    chain: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chain.stdin is not None
    assert chain.stdout is not None
    assert num_descendants(chain.pid) == 0
    chain.stdin.write("\n")
    chain.stdin.flush()
    assert chain.stdout.readline() == "up\n"
    children = children_of(chain.pid)
    if children is None:
        pytest.skip("the kernel has no lists of children")
    assert children == {child.pid for child in psutil.Process(chain.pid).children()}
    assert len(children) == 3
    assert num_descendants(chain.pid) == 4
    monkeypatch.setattr(process_tree, "children_of", lambda _: None)
    assert num_descendants(chain.pid) == 4


def test_children_of_all_threads_count() -> None:
    started = list[subprocess.Popen[bytes]]()
    may_end = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "1000"]))
        may_end.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        while not started:
            thread.join(0.01)
        children = children_of(os.getpid())
        assert children is None or started[0].pid in children
    finally:
        may_end.set()
        thread.join()
        started[0].kill()
        started[0].wait()


def test_a_process_that_has_ended_has_no_descendants() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert children_of(process.pid) is None
    assert num_descendants(process.pid) == 0
