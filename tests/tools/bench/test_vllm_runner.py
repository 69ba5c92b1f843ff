"""vLLM's process: what it is told, what is read back, and how it ends. A stand-in for vLLM runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hone.errors import UserError
from hone.tools.bench import vllm_runner
from hone.tools.bench.measure import EngineRun
from hone.tools.bench.vllm_runner import run_vllm
from tests.tools.bench.fakes import request

FAKE = Path(__file__).parent / "fake_vllm"
REQUESTS = (request("a", 3, 2), request("b", 5, 4))


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE), prepend=os.pathsep)


def run(log: Path) -> EngineRun:
    return run_vllm({"model": "m"}, warmup=REQUESTS[:1], requests=REQUESTS, log=log)


def test_steps_come_back_as_of_our_engine(tmp_path: Path) -> None:
    started_s = time.perf_counter()
    found = run(tmp_path / "logs" / "vllm.log")
    assert time.perf_counter() - started_s < 300  # a thread of vLLM's would have kept it for longer
    assert (found.name, found.version) == ("vllm", "0.24.0")
    steps = found.measured.steps
    assert [x.num_seqs for x in steps] == [2, 2, 1, 1]
    assert [x.num_tokens for x in steps] == [2, 2, 1, 1]
    assert [x.num_first_tokens for x in steps] == [2, 0, 0, 0]
    assert [x.finished_tokens for x in steps] == [0, 5, 0, 9]
    assert found.measured.num_cached_tokens == 2
    assert all(duration_s >= 0.001 for duration_s in found.measured.step_s)
    assert found.warmup_s >= 0.002
    assert 'options {"model": "m"}' in (tmp_path / "logs" / "vllm.log").read_text()


def test_a_failure_shows_what_vllm_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "fail")
    with pytest.raises(UserError, match=r"(?s)vLLM failed \(exit code 1\).*no kernel for this"):
        run(tmp_path / "log")


def test_a_run_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    monkeypatch.setattr(vllm_runner, "_TIMEOUT_S", 3.0)
    started_s = time.perf_counter()
    with pytest.raises(UserError, match="vLLM was not done after 3 s"):
        run(tmp_path / "log")
    assert time.perf_counter() - started_s < 300  # it would sleep for longer


def test_processes_that_vllm_leaves_behind_are_ended(tmp_path: Path) -> None:
    """As vLLM's engine process is, when the runner leaves by `os._exit`."""
    alive = tmp_path / "alive"
    child = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(.05)"
    )
    script = (
        "import os, subprocess, sys, time, pathlib\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"while not pathlib.Path({str(alive)!r}).exists(): time.sleep(.05)\n"
        "os._exit(3)"
    )
    with pytest.raises(UserError, match="exit code 3"):
        run_vllm(
            {},
            warmup=REQUESTS,
            requests=REQUESTS,
            log=tmp_path / "log",
            command=(sys.executable, "-c", script),
        )
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()
