"""Why a run ended, for those who look at its folder later: the cause as an event, and the report.

A run that fails has an event `error` with the message, the step and the phase in which it failed;
one that a second Ctrl-C or an early SIGTERM ends at once has an event `interrupted`, and one that
has written its model an event `finished`.
"""

from __future__ import annotations

import logging
import signal
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from hone.distributed.processes import processes
from hone.distributed.watch import Watch, claim
from hone.errors import UserError
from hone.loops.interrupt import Terminated
from hone.observe.disk import DiskError
from hone.observe.loggers import append_event
from hone.observe.report.write import write_report
from hone.observe.run_folder import LOCK, RunFolder, is_locked

__all__ = ["Ending", "evaluation_cause", "record_death"]

_log = logging.getLogger(__name__)

_DRAWING_S = 5.0
"""What a process that ends for another one's sake gives to its report."""


class Ending:
    """Writes the end of a run into its folder.

    The first process draws the report of a run that ends well. The cause of another end is written
    by the process whose error people read, which then draws the report.
    """

    def __init__(self, folder: Path, watch: Watch, *, is_first: bool) -> None:
        self._folder, self._watch = folder, watch
        self._is_first = is_first
        self._is_recorded = False

    @contextmanager
    def report(self) -> Generator[None]:
        """Draw the report when the block ends. Of a block that fails before `cause` was entered
        there is none: the folder may be another run's."""
        try:
            yield
        except BaseException as error:
            if self._is_recorded and (problem := _draw_failed(self._folder)):
                error.add_note(problem)
            raise
        if self._is_first:
            write_report(self._folder)

    @contextmanager
    def cause(self) -> Generator[None]:
        """Record the error that ends the block, or that it ended well. Entered while the folder is
        locked."""
        self._watch.on_end, began_s = self._other_ended, time.time()
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if _claims_report(error):
                self._record(**_described(error))
            raise
        if self._is_first:
            self._finish(began_s)

    def _finish(self, began_s: float) -> None:
        """Write the event `finished`, unless the folder ends with one, or this launch, which began
        at `began_s`, was interrupted and has saved."""
        run = RunFolder.read(self._folder, has_ended=True)
        if run.end is not None:
            kind, at_s = run.end["kind"], run.end.get("timestamp_s", 0.0)
            if kind == "finished" or (kind == "interrupted" and at_s >= began_s):
                return
        append_event(self._folder, "finished", step=run.rows[-1]["step"] if run.rows else 0)

    def _other_ended(self, reason: str) -> None:
        """Another process is gone or stuck, and this one ends the run for it."""
        self._record(kind="error", message=reason, error="LostPeerError")
        # This process is to leave, however long the disk or a large folder takes.
        drawing = Thread(target=_draw_failed, args=[self._folder], daemon=True)
        drawing.start()
        drawing.join(_DRAWING_S)

    def _record(self, **fields: Any) -> None:
        self._is_recorded = True
        _record(self._folder, **fields, step=self._watch.step, phase=self._watch.phase)


def record_death(folder: Path, message: str, *, pids: Sequence[int], step: int, phase: str) -> None:
    """Write into a run folder how a process has ended that could not do so, once all have ended.
    Not where none of the run's processes, `pids`, had come so far as to take the folder, or another
    run has it."""
    lock = folder / LOCK
    if not lock.is_file() or lock.read_text(errors="replace").strip() not in map(str, pids):
        return
    if is_locked(folder):
        return
    _record(folder, kind="error", message=message, error="LostPeerError", step=step, phase=phase)
    _draw_failed(folder)


@contextmanager
def evaluation_cause(folder: Path) -> Generator[None]:
    """Record the error that ends an evaluation of its own, as an event that says nothing of the
    training run whose folder it may be."""
    try:
        yield
    except Exception as error:
        if _claims_report(error):
            _record(folder, **_described(error) | {"kind": "eval_error"})
        raise


def _record(folder: Path, **fields: Any) -> None:
    try:
        append_event(folder, **fields)
    except DiskError as problem:  # the error that ends the run is the one to report
        _log.warning("warning: the cause is not in the run folder: %s", problem)


def _draw_failed(folder: Path) -> str | None:
    """Draw the report of a run that failed; why that could not be done, or None."""
    try:
        write_report(folder, has_ended=True)
    except Exception as error:  # noqa: BLE001  # the one that ended the run is to be raised
        problem = f"the report could not be drawn: {str(error) or type(error).__name__}"
        _log.warning("warning: %s", problem)
        return problem
    return None


def _claims_report(error: BaseException) -> bool:
    """Whether this process reports why the run ends."""
    own = processes()
    if own.world_size == 1:
        return True
    return not isinstance(error, SystemExit) and claim(own) is not None


def _described(error: BaseException) -> dict[str, Any]:
    """Fields of the event."""
    match error:
        case KeyboardInterrupt():
            return {"kind": "interrupted", "message": "Ctrl-C ended the run at once"}
        case Terminated():
            name = signal.Signals(error.number).name
            return {"kind": "interrupted", "message": f"{name} ended the run at once"}
        case _:
            fields = {
                "kind": "error",
                "message": str(error) or type(error).__name__,
                "error": type(error).__name__,
            }
            if not isinstance(error, UserError):
                fields["traceback"] = "".join(traceback.format_exception(error))
            return fields
