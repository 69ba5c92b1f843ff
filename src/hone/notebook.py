"""A progress bar and curves in a notebook during a run."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.curves import curves
from hone.observe.run_folder import METRICS

__all__ = ["following", "is_notebook"]

_EVERY_S = 1.0
"""Seconds between two looks at the file of metrics."""


def is_notebook() -> bool:
    """Whether this process runs a notebook: IPython with a shell that shows HTML."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # The shells of hosted notebooks are subclasses of Jupyter's.
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)


@contextmanager
def following(run_dir: Path, num_steps: int) -> Generator[None]:
    """Show the progress of the run in `run_dir` during the block, in a notebook only."""
    if not is_notebook():
        yield
        return
    from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

    handle: Any = display(HTML(""), display_id=True)
    ended, table = threading.Event(), _Table(run_dir / METRICS)

    def show() -> None:
        if table.grow():
            handle.update(HTML(_page(table.rows, num_steps)))

    def follow() -> None:
        while not ended.wait(_EVERY_S):
            show()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show()


class _Table:
    """The rows of a JSONL file that another thread appends to."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode, self._end = 0, 0
        self._rows: dict[int, dict[str, Any]] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for each step, ascending."""
        return [self._rows[step] for step in sorted(self._rows)]

    def grow(self) -> bool:
        """Read the lines appended since the last call; True if there are any. A resumed run
        replaces the file; the new file is read from its beginning."""
        if not self._file.is_file():
            return False
        with self._file.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._end, self._rows = inode, 0, {}
            file.seek(self._end)
            appended = file.read()
        whole = appended[: appended.rfind(b"\n") + 1]  # the last line may be half written
        for line in whole.splitlines():
            row = json.loads(line)
            self._rows.setdefault(row["step"], {}).update(row)
        self._end += len(whole)
        return bool(whole)


def _page(rows: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    done = rows[-1]["step"] if rows else 0
    bar = f'<progress value="{done}" max="{num_steps}"></progress> step {done} of {num_steps}'
    return f"<div>{bar}</div>{curves(rows)}"
