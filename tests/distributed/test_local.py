"""Workers as processes of this host: what they see, how they end, and what is said of that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hone.distributed.local import local_workers
from hone.errors import UserError
from hone.types import EngineLostError

PATIENCE_S = 600.0
BUILD = "tests.distributed.local_target:build"


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_worker_of_two_ranks_sees_its_gpus_and_is_named_when_one_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torchrun, whose variables it does not take for its own."""
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    others = {one.pid for one in psutil.Process().children()}
    with local_workers("settings", BUILD, num_processes=2) as workers:
        worker = workers.start("engine", 1, ["4", "6"], 2)
        worker.wait_until_made(PATIENCE_S)
        found = worker.call("describe").result(PATIENCE_S)
        first = psutil.Process(found["pid"])
        started = {one.pid for one in psutil.Process().children()} - others
        (second,) = started - {first.pid}
        assert found["cfg"] == "settings"
        assert found["argv"][1:] == ["-m", "hone.distributed.local"]
        assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("0", "2", "0")
        assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("4,6", "1")
        assert psutil.Process(second).environ()["RANK"] == "1"
        key = worker._lines[0].key  # pyright: ignore[reportPrivateUsage]
        assert key not in Path(f"/proc/{first.pid}/environ").read_bytes()
        hanging = worker.call("hang")
        os.kill(second, signal.SIGKILL)
        with pytest.raises(
            EngineLostError, match="its rank 1 was killed by SIGKILL: the last words"
        ):
            hanging.result(PATIENCE_S)
    wait_for_end(first.pid)


@pytest.mark.slow
def test_what_a_worker_refuses_is_raised_as_it_is_and_an_error_of_ours_with_its_place() -> None:
    with local_workers("refuse", BUILD, num_processes=1) as workers:
        refusing = workers.start("engine", 0, [])
        workers.plan = "break"
        breaking = workers.start("engine", 1, [])
        with pytest.raises(UserError, match=r"^engine 0, a engine, is not made$"):
            refusing.wait_until_made(PATIENCE_S)
        with pytest.raises(KeyError, match="of ours") as caught:
            breaking.wait_until_made(PATIENCE_S)
        assert "In rank 0 of engine 1:" in caught.value.__notes__[0]
        assert "local_target.py" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_rank_that_cannot_be_made_ends_its_worker_while_the_first_waits_for_it() -> None:
    """Also where nobody waits for all ranks, as of an engine that is started anew."""
    with local_workers("break the second", BUILD, num_processes=2) as workers:
        call = workers.start("engine", 0, [], 2).call("describe")
        with pytest.raises(EngineLostError, match="its rank 1 could not be made: 'no room'"):
            call.result(PATIENCE_S)


DRIVER = f"""
import sys
from hone.distributed.local import local_workers
with local_workers("settings", {BUILD!r}, num_processes=1) as workers:
    worker = workers.start("engine", 0, [])
    print(worker.call("describe").result()["pid"], flush=True)
    worker.call("hang").result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_ends_with_the_process_that_has_started_it(number: signal.Signals) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        driver.send_signal(number)
        driver.wait(PATIENCE_S)
        wait_for_end(pid)
    finally:
        driver.kill()
