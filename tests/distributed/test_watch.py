"""R11: no wait without a deadline and a culprit. Two processes, one of which falls ill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hone.distributed.processes import Processes
from hone.distributed.watch import Watch, read_progress
from hone.observe.spans import Spans
from tests.distributed.watched_runs import Case, End

ROOT = Path(__file__).parents[2]

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
FAULTS = [
    Case("train", "kill"),
    Case("checkpoint", "kill"),
    Case("generate", "stop"),
    Case("train", "stop"),
    Case("sync", "hang"),
    Case("generate", "quit"),
    Case("score", "user error"),
    Case("train", "bug"),
]
NEVER_COMES = Case("start", "hang")
LATE = Case("score", "late")
TWO_MISTAKES = Case("start", "both wrong", reporter="slow to tell")
UNDER_TORCHRUN = {
    "at once": Case("train", "kill", "torchrun"),
    "SIGTERM during the report": Case("train", "kill", "torchrun", "slow to end"),
}


@pytest.fixture(scope="module")
def ends() -> dict[Case, End]:
    """How each run has ended. They run at the same time: most of it is waiting."""
    cases = [*FAULTS, NEVER_COMES, LATE, TWO_MISTAKES, *UNDER_TORCHRUN.values()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.watched_runs", json.dumps([*map(asdict, cases)])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [End(**values) for values in json.loads(done.stdout)]
    return dict(zip(cases, found, strict=True))


def end_of(case: Case, ends: dict[Case, End]) -> End:
    end = ends[case]
    assert end.code is not None, f"It hangs.\n{end.screen}"
    assert not end.left, end.left
    return end


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: f"{case.fault}-{case.phase}")
def test_R11_the_first_error_names_the_culprit(case: Case, ends: dict[Case, End]) -> None:
    code, said, num_lines = ENDS[case.fault]
    end = end_of(case, ends)
    if code is None:
        assert end.code != 0, end.screen
        assert "rank 1" in end.first_error, end.screen
        assert f"{case.phase} of step 2" in end.first_error, end.screen
        assert end.screen.count("error:") == 1, end.screen
    else:
        assert end.code == code, end.screen
        assert end.screen.count("the planted") == (2 if case.fault == "bug" else 1), end.screen
    assert all(text in end.first_error for text in said), end.screen
    assert len(end.screen.splitlines()) in num_lines, end.screen
    assert ("out of memory" in end.screen) == (case.fault == "kill"), end.screen


def test_R11_a_process_that_never_comes_is_named(ends: dict[Case, End]) -> None:
    end = end_of(NEVER_COMES, ends)
    assert end.code == 1
    assert "rank 1 did not come: it has not been heard of" in end.first_error, end.screen


def test_a_late_process_is_waited_for(ends: dict[Case, End]) -> None:
    end = end_of(LATE, ends)
    assert (end.code, end.screen) == (0, "")


@pytest.mark.parametrize("case", UNDER_TORCHRUN.values(), ids=UNDER_TORCHRUN)
def test_R11_under_torchrun_the_others_name_the_one_that_was_killed(
    case: Case, ends: dict[Case, End]
) -> None:
    """torchrun ends them at once by SIGTERM; they speak first, once, and one of them alone."""
    screen = end_of(case, ends).screen
    assert screen.count("error: rank 1 (pid ") == screen.count("error: ") == 1, screen
    own, _, of_torchrun = screen.partition("error: rank 1 (pid ")[2].partition("Traceback")
    assert "is gone without an error of its own, in train of step 2 for" in own, screen
    assert "out of memory" in own
    assert of_torchrun.startswith(" (most recent call last)")


def test_R11_of_two_mistakes_one_is_told_however_slowly(ends: dict[Case, End]) -> None:
    """Both processes are wrong at once; the one that tells takes longer than the other has to end,
    and longer still to leave."""
    end = end_of(TWO_MISTAKES, ends)
    assert (end.code, end.screen) == (2, "error: the planted mistake\n")


def test_where_a_phase_begins_is_not_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, store = Watch(Processes(0, 1, 0, 1), timeout_s=60), dist.HashStore()
    monkeypatch.setattr(watch, "_store", store)
    relay: dict[str, Any] = {"enter": watch.enter}  # as recorders have one
    exec(compile("def begin(path): enter(path)", "recorder.py", "exec"), relay)
    with Spans(on_begin=relay["begin"]).span("train"):
        pass
    said = read_progress(store, 0)
    assert said is not None
    assert said.where.startswith("test_watch.py:"), said.where
