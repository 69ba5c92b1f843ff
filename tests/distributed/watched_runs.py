"""Runs of two processes, one of which falls ill, under hone's launcher and under torchrun.

`python -m tests.distributed.watched_runs CASES` gets a list of cases as JSON, runs all at the same
time and prints how each has ended. Launchers and ranks are copies of this process, which has
imported torch once: for fresh ones that would take longer than all else.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar, NoReturn

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from hone.cli import main as cli
from hone.distributed import spawn, watch
from tests.distributed import watched_rank

NUM_RANKS = 2
PATIENCE_S = 600.0
"""For all runs together; what has not ended by then hangs."""


@dataclass(frozen=True)
class Case:
    """A run, and what is special about it."""

    phase: str
    """In which rank 1 falls ill."""
    fault: str
    launcher: str = "hone"
    reporter: str = ""
    """Who reports why the run ends: "slow to tell", "slow to end", or in the usual way."""


@dataclass(frozen=True)
class End:
    """How a run has ended."""

    code: int | None
    screen: str
    left: list[int]
    """Processes of it that outlived its launcher."""

    @property
    def first_error(self) -> str:
        lines = [x for x in self.screen.splitlines() if "error" in x.lower() or "Traceback" in x]
        assert lines, self.screen
        return lines[0]


# -- ranks ---------------------------------------------------------------------------------------


class Copy(subprocess.Popen[bytes]):
    """A rank as launchers start it, which is a copy of this process.

    It was made before the launcher had threads, and has waited for its environment since.
    """

    waiting: ClassVar[list[tuple[int, int]]] = []
    """Process ids of copies that wait, and the pipe that each reads."""

    def __init__(self, args: Any, *, env: dict[str, str], start_new_session: bool, **_: Any):
        self._start = {"args": [*map(str, args)], "env": env, "session": start_new_session}
        super().__init__(args)

    def _execute_child(self, *_: Any) -> None:
        self.pid, pipe = self.waiting.pop()
        self._child_created = True
        with open(pipe, "w", encoding="utf-8") as start:
            json.dump(self._start, start)


def make_copies(case: Case) -> None:
    for _ in range(NUM_RANKS):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _close_all_but(reading)
            _end_with(partial(_run_rank, reading, case))
        os.close(reading)
        Copy.waiting.append((pid, writing))


def _run_rank(pipe: int, case: Case) -> None:
    with open(pipe, encoding="utf-8") as file:
        text = file.read()
    if not text:
        os._exit(0)  # the launcher has started none
    start = json.loads(text)
    if start["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(start["env"])
    watch._TOKEN = uuid.uuid4().hex  # as a process that imports it has one of its own
    _slow_down(case.reporter)
    watched_rank.main(*start["args"][-2:])


def _slow_down(reporter: str) -> None:
    explain = cli._explain
    if reporter == "slow to end":
        cli._explain = lambda error: (explain(error), time.sleep(2))[0]
    elif reporter == "slow to tell":
        cli._explain = lambda error: (time.sleep(1.5), explain(error))[1]
        atexit.register(time.sleep, 3)


# -- launchers -----------------------------------------------------------------------------------


def launch(case: Case, folder: Path) -> None:
    """Run the case as a launcher of its own would."""
    make_copies(case)
    (folder / "ranks").write_text(json.dumps([pid for pid, _ in Copy.waiting]))
    words = ["tests.distributed.watched_rank", case.phase, case.fault]
    if case.launcher == "torchrun":
        subprocess_handler.Popen = Copy
        torchrun.main(["--standalone", "--nproc-per-node", str(NUM_RANKS), "-m", *words])
        return
    subprocess.Popen = Copy
    if case.reporter == "slow to tell":
        spawn._GRACE_S = 0.3
    sys.exit(spawn.spawn([sys.executable, "-m", *words], NUM_RANKS))


def start(case: Case, folder: Path) -> int:
    """Fork a launcher whose screen is a file; its process id."""
    folder.mkdir()
    pid = os.fork()
    if pid == 0:
        _end_with(lambda: _launch_on(folder / "screen", case, folder))
    return pid


def _launch_on(screen: Path, case: Case, folder: Path) -> None:
    os.setsid()
    file = os.open(screen, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _close_all_but(None)
    launch(case, folder)


def _close_all_but(kept: int | None) -> None:
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd != kept:
            with suppress(OSError):  # the folder was open as well
                os.close(fd)


def _end_with(function: Callable[[], object]) -> NoReturn:
    """Call it and end this process as the interpreter does."""
    code = 1
    try:
        try:
            function()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except BaseException:  # noqa: BLE001  as the interpreter shows it
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # a copy must not go on as this process


# -- all of them ---------------------------------------------------------------------------------


def end_of(pid: int, folder: Path, deadline: float) -> End:
    """Wait for a launcher, and look for what it has left."""
    launcher, code = psutil.Process(pid), None
    try:
        code = launcher.wait(max(deadline - time.monotonic(), 0.0))
    except psutil.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    ranks = json.loads((folder / "ranks").read_text())
    left = [rank for rank in ranks if _is_left(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    return End(code, (folder / "screen").read_text(errors="replace"), left)


def _is_left(pid: int) -> bool:
    """Whether this process still runs. Ids of processes come again only after many others."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(text: str) -> None:
    cases = [Case(**values) for values in json.loads(text)]
    deadline = time.monotonic() + PATIENCE_S
    folder = Path(mkdtemp())  # no object that removes it when a copy of this process ends
    try:
        folders = [folder / str(number) for number in range(len(cases))]
        pids = [start(case, own) for case, own in zip(cases, folders, strict=True)]
        ends = [end_of(pid, own, deadline) for pid, own in zip(pids, folders, strict=True)]
    finally:
        shutil.rmtree(folder)
    json.dump([asdict(end) for end in ends], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
