"""`hone doctor`: its lines, exit codes and mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hone.cli import doctor
from hone.cli.main import main
from hone.tools.doctor import speed
from hone.tools.doctor.machine import Finding, Machine, ReadingError, TorchBuild

OK, SLOW, WRONG = (Finding(level, "seen", "hoped", "do this") for level in ("ok", "slow", "wrong"))


def table(monkeypatch: pytest.MonkeyPatch, **found: Finding | None) -> None:
    rows: dict[str, tuple[Callable[[Machine], Finding | None], str]] = {
        name: (lambda machine, finding=finding: finding, "") for name, finding in found.items()
    }
    monkeypatch.setattr(doctor, "CHECKS", rows)


def test_each_line_has_what_was_measured_expected_and_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table(monkeypatch, disk=OK, links=SLOW, clocks=None)
    assert main(["doctor", "--run.dir", "elsewhere"]) == 0
    printed = capsys.readouterr().out
    assert "on the disk of elsewhere" in printed
    assert "ok     disk: seen (expected: hoped)\n" in printed
    assert "slow   links: seen (expected: hoped)\n       do this\n" in printed
    assert "clocks" not in printed
    assert printed.endswith("1 ok, 1 slow, 0 wrong\n")


def test_what_is_wrong_is_the_exit_code_and_what_needs_torch_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table(monkeypatch, disk=WRONG, torch=OK, links=OK)
    assert main(["doctor"]) == 1
    assert "ok     links" in capsys.readouterr().out
    table(monkeypatch, torch=WRONG, links=OK)
    assert main(["doctor", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert rows == [
        {
            "check": "torch",
            "level": "wrong",
            "measured": "seen",
            "expected": "hoped",
            "remedy": "do this",
        }
    ]


def test_a_reading_that_cannot_be_taken_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(machine: Machine) -> Finding:
        raise ReadingError("no answer within 90 s")

    monkeypatch.setattr(doctor, "CHECKS", {"driver": (hang, "Reboot.")})
    assert main(["doctor"]) == 1
    assert "wrong  driver: no answer within 90 s (expected: an answer)\n       Reboot." in (
        capsys.readouterr().out
    )


def test_every_row_that_asks_a_process_has_a_remedy() -> None:
    asks = [*doctor.CHECKS][[*doctor.CHECKS].index("driver") :]
    assert all(doctor.CHECKS[name][1] for name in asks)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["gsm8k"], "got gsm8k"),
        (["--run.dir"], "--run.dir without a folder"),
        (["--run.dir", "a", "--run.dir", "b"], "given 2 times"),
    ],
)
def test_mistakes(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    assert words in capsys.readouterr().err


def test_it_is_not_for_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["doctor"]) == 2
    assert "once on each host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "level"), [((120.0, 0.0), "ok"), ((120.0, 200.0), "ok"), ((90.0, 200.0), "slow")]
)
def test_speed_is_compared_with_what_a_plan_assumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: tuple[float, float], level: str
) -> None:
    with Machine(tmp_path) as machine:
        machine.torch = TorchBuild("2.13.0", None, 0, "")
        monkeypatch.setattr(machine, "ask", lambda *_: [rate])
        assert speed.training(machine).level == level


@pytest.mark.slow
def test_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it finds of the host: torch, gloo, training and sampling work on a CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    main(["doctor", "--run.dir", str(tmp_path / "runs"), "--json"])
    found = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    for name in ("torch", "links", "training", "sampling"):
        assert found[name]["level"] == "ok", found[name]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_with_its_processes_and_files(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "hone", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("ok     driver"):
        assert process.poll() is None
    time.sleep(1.0)  # a process loads torch
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert "leaked" not in errors
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 120
    while left := [x for x in psutil.process_iter(["status"]) if is_of(x, process.pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_of(process: psutil.Process, group: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE
    return False
