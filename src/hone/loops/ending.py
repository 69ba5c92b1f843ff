"""Records in the run folder why a run ended, as an event, and draws the report.

A run that fails has an event `error` with the message, the step and the phase in which it failed. A
run that a second Ctrl-C or an early SIGTERM ends at once has an event `interrupted`. A run that has
written its model has an event `finished`.
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
from hone.observe.pages import Pages
from hone.observe.run_folder import RunFolder, is_locked, lock_holder

__all__ = ["Ending", "evaluation_cause", "record_death"]

_log = logging.getLogger(__name__)

_DRAWING_S = 5.0
"""Longest time that a process which ends because another one failed spends on its report."""


class Ending:
    """Records the end of a run in its folder.

    The first process draws the report of a successful run. Any other end is recorded by the process
    that reports the error, which then draws the report. Nothing is written into a folder that was
    deleted: it may be another run's by then.
    """

    def __init__(
        self, folder: Path, watch: Watch, *, is_first: bool, pages: Pages | None = None
    ) -> None:
        self._folder, self._watch, self._pages = folder, watch, pages
        self._is_first = is_first
        self._is_recorded = False
        self._holder: int | None = None
        """Id of the process that has locked the folder."""
        self._is_whole = True
        """Whether the folder was still this run's when the run ended."""

    @contextmanager
    def report(self) -> Generator[None]:
        """Draw the report when the block ends. If the block fails before `cause` is entered, no
        report is drawn: the folder may be another run's."""
        try:
            yield
        except BaseException as error:
            if self._is_recorded and (problem := _draw_failed(self._folder, self._pages)):
                error.add_note(problem)
            raise
        if self._is_first and self._is_whole and self._pages is not None:
            self._pages.write_report(self._folder)

    @contextmanager
    def cause(self, holder: int) -> Generator[None]:
        """Record the error that ends the block, or its success. Entered while the folder is locked
        by the process with the id `holder`."""
        self._holder = holder
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
        """Write the event `finished`, unless it is already the last event, or this launch, which
        began at `began_s`, was interrupted and has saved."""
        if not self._is_ours():
            self._is_whole = False
            return
        run = RunFolder.read(self._folder, has_ended=True)
        if run.end is not None:
            kind, at_s = run.end["kind"], run.end.get("timestamp_s", 0.0)
            if kind == "finished" or (kind == "interrupted" and at_s >= began_s):
                return
        append_event(self._folder, "finished", step=run.rows[-1]["step"] if run.rows else 0)

    def _other_ended(self, reason: str) -> None:
        """Record that this process ends because another one is gone or stuck."""
        self._record(kind="error", message=reason, error="LostPeerError")
        # The process must end even if the disk is slow or the folder is large.
        arguments = [self._folder, self._pages]
        drawing = Thread(target=_draw_failed, args=arguments, daemon=True)
        drawing.start()
        drawing.join(_DRAWING_S)

    def _is_ours(self) -> bool:
        return lock_holder(self._folder) == str(self._holder)

    def _record(self, **fields: Any) -> None:
        if not self._is_ours():
            return
        self._is_recorded = True
        _record(self._folder, **fields, step=self._watch.step, phase=self._watch.phase)


def record_death(
    folder: Path,
    message: str,
    *,
    pids: Sequence[int],
    step: int,
    phase: str,
    pages: Pages | None = None,
) -> None:
    """Record the end of a process that could not do so itself, after all processes have ended.

    Nothing is written if none of the run's processes, `pids`, had locked the folder yet, or if
    another run has it.
    """
    if (lock_holder(folder) or "") not in map(str, pids) or is_locked(folder):
        return
    _record(folder, kind="error", message=message, error="LostPeerError", step=step, phase=phase)
    _draw_failed(folder, pages)


@contextmanager
def evaluation_cause(folder: Path) -> Generator[None]:
    """Record the error that ends `hone eval`. It is an event `eval_error`, since the folder may be
    that of a training run."""
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


def _draw_failed(folder: Path, pages: Pages | None) -> str | None:
    """Draw the report of a run that failed. Returns the reason if that failed too."""
    if pages is None:
        return None
    try:
        pages.write_report(folder, has_ended=True)
    except Exception as error:  # noqa: BLE001  # the error that ended the run is raised
        problem = f"the report could not be drawn: {str(error) or type(error).__name__}"
        _log.warning("warning: %s", problem)
        return problem
    return None


def _claims_report(error: BaseException) -> bool:
    own = processes()
    if own.world_size == 1:
        return True
    return not isinstance(error, SystemExit) and claim(own) is not None


def _described(error: BaseException) -> dict[str, Any]:
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
