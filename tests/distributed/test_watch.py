"""R11: no wait without a deadline and a culprit. Two processes, one of which falls ill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from hone.distributed.processes import Processes
from hone.distributed.watch import Watch, read_progress
from hone.observe.spans import Spans

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 3.0
START_S = 40.0
"""Import of torch in two processes, on a busy machine."""


@dataclass(frozen=True)
class End:
    code: int
    screen: str
    seconds: float

    @property
    def first_error(self) -> str:
        lines = [x for x in self.screen.splitlines() if "error" in x.lower() or "Traceback" in x]
        assert lines, self.screen
        return lines[0]


def watched(phase: str, fault: str, *, patch: str = "", timeout_s: float = TIMEOUT_S) -> End:
    """Run two processes; `patch` is code that plants a bug in the launcher."""
    mark = uuid.uuid4().hex  # tests beside this one have such processes too
    command = ["-m", "tests.distributed.watched_rank", phase, fault, str(timeout_s), mark]
    program = (
        "import sys\nfrom hone.distributed import spawn\n"
        f"{patch}\nsys.exit(spawn.spawn([sys.executable, *{command!r}], 2))"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=START_S + timeout_s + 60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    end = End(done.returncode, done.stdout + done.stderr, time.monotonic() - start)
    left = [p.pid for p in psutil.process_iter() if mark in _words(p)]
    assert not left, left
    return end


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def assert_names_the_culprit(end: End, phase: str) -> None:
    assert end.code not in (0, None), end.screen
    assert end.seconds < START_S + TIMEOUT_S + 30, end.seconds
    assert "rank 1" in end.first_error, end.screen
    assert f"{phase} of step 2" in end.first_error, end.screen
    assert len(end.screen.splitlines()) <= 24, end.screen


ENDS: dict[str, tuple[int | None, list[str], range]] = {
    # fault of rank 1: exit code (None: any but 0), what the first error says, lines on the screen
    "kill": (None, ["was killed by SIGKILL"], range(2, 3)),
    "stop": (None, ["silent"], range(1, 25)),
    # It is alive and busy with something else: where its main thread is, is shown.
    "hang": (None, ["in fall_ill"], range(2, 25)),
    # A library may end the process: nobody but the launcher is left to say so.
    "quit": (None, ["ended with exit code 3"], range(1, 2)),
    "user error": (2, ["error: the planted mistake"], range(1, 3)),
    "bug": (1, ["Traceback"], range(2, 99)),
}


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("kill", "train"),
        ("kill", "checkpoint"),
        pytest.param("stop", "generate", marks=pytest.mark.slow),
        pytest.param("stop", "train", marks=pytest.mark.slow),
        ("hang", "sync"),
        ("quit", "generate"),
        ("user error", "score"),
        ("bug", "train"),
    ],
)
def test_R11_the_first_error_names_the_culprit(fault: str, phase: str) -> None:
    code, said, num_lines = ENDS[fault]
    # A process with an error first waits a little for another one's: the deadline must not pass.
    end = watched(phase, fault, timeout_s=TIMEOUT_S if code is None else 30.0)
    if code is None:
        assert_names_the_culprit(end, phase)
        assert end.screen.count("error:") == 1, end.screen
    else:
        assert end.code == code
        assert end.screen.count("the planted") == (2 if fault == "bug" else 1), end.screen
    assert all(text in end.first_error for text in said), end.screen
    assert len(end.screen.splitlines()) in num_lines, end.screen
    assert ("out of memory" in end.screen) == (fault == "kill"), end.screen


@pytest.mark.slow
def test_R11_a_process_that_never_comes_is_named() -> None:
    end = watched("start", "hang")
    assert end.code == 1
    assert "rank 1 did not come: it has not been heard of" in end.first_error, end.screen


def test_a_late_process_is_waited_for() -> None:
    end = watched("score", "late")
    assert (end.code, end.screen) == (0, "")


SLOW_TO_END = """\
import os, time
if 'RANK' in os.environ:
    import hone.cli.main as main
    explain = main._explain
    main._explain = lambda error: (explain(error), time.sleep(2))[0]
"""


@pytest.mark.parametrize("patch", ["", SLOW_TO_END], ids=["at once", "SIGTERM during the report"])
def test_R11_under_torchrun_the_others_name_the_one_that_was_killed(
    patch: str, tmp_path: Path
) -> None:
    """torchrun ends them at once by SIGTERM; they speak first, once, and one of them alone."""
    (tmp_path / "sitecustomize.py").write_text(patch)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["tests.distributed.watched_rank", "train", "kill", "30"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        check=False,
    )
    screen = done.stdout + done.stderr
    assert screen.count("error: rank 1 (pid ") == screen.count("error: ") == 1, screen
    own, _, of_torchrun = screen.partition("error: rank 1 (pid ")[2].partition("Traceback")
    assert "is gone without an error of its own, in train of step 2 for" in own, screen
    assert "out of memory" in own
    assert of_torchrun.startswith(" (most recent call last)")


SLOW_TO_TELL = """\
import atexit, os, time
if 'RANK' in os.environ:
    import hone.cli.main as main
    explain = main._explain
    main._explain = lambda error: (time.sleep(1.5), explain(error))[1]
    atexit.register(time.sleep, 3)
"""


def test_R11_of_two_mistakes_one_is_told_however_slowly(tmp_path: Path) -> None:
    """Both processes are wrong at once; the one that tells takes longer than the other has to end,
    and longer still to leave."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_TO_TELL)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = f"import os; os.environ['PYTHONPATH'] = {path!r}"
    end = watched("start", "both wrong", patch=f"spawn._GRACE_S = 0.3; {environment}")
    assert (end.code, end.screen) == (2, "error: the planted mistake\n")


def test_R11_planted_a_watch_that_does_not_look(tmp_path: Path) -> None:
    """Without it nobody is named: the backend's timeout says what it waited for, not whom."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    import hone.distributed.mesh as mesh, hone.distributed.watch as watch\n"
        "    watch.Watch._missing = lambda self: []\n"
        "    mesh.BACKSTOP_S = 1.0\n"
    )
    patch = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path)!r}"
    end = watched("train", "stop", patch=patch)
    with pytest.raises(AssertionError):
        assert_names_the_culprit(end, "train")


def test_where_a_phase_begins_is_not_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, store = Watch(Processes(0, 1, 0, 1), timeout_s=60), dist.HashStore()
    monkeypatch.setattr(watch, "_store", store)
    with Spans(on_begin=watch.enter).span("train"):
        pass
    said = read_progress(store, 0)
    assert said is not None
    assert said.where.startswith("test_watch.py:"), said.where
