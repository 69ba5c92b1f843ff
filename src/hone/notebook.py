"""A progress bar and curves in a notebook, while a run goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.observe.run_folder import METRICS, RunFolder
from hone.results import curves

__all__ = ["following", "is_notebook"]

_EVERY_S = 1.0


def is_notebook() -> bool:
    """Whether this is a notebook's process: IPython is there, and shows HTML."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # Hosted notebooks derive theirs from Jupyter's.
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)


@contextmanager
def following(run_dir: Path, num_steps: int) -> Generator[None]:
    """Inside, a notebook shows how far the run of a folder is; elsewhere nothing happens."""
    if not is_notebook():
        yield
        return
    from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

    handle: Any = display(HTML(""), display_id=True)
    ended = threading.Event()

    def show() -> None:
        handle.update(HTML(_page(run_dir, num_steps)))

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


def _page(run_dir: Path, num_steps: int) -> str:
    rows = RunFolder.read(run_dir).rows if (run_dir / METRICS).is_file() else []
    done = rows[-1]["step"] if rows else 0
    bar = f'<progress value="{done}" max="{num_steps}"></progress> step {done} of {num_steps}'
    return f"<div>{bar}</div>{curves(rows)}"
