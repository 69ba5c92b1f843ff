"""Functions that draw the pages of a run, passed in from outside: the run does not import them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Pages"]


class _WriteReport(Protocol):
    def __call__(self, run_dir: Path, /, *, has_ended: bool = False) -> object: ...


@dataclass(frozen=True, slots=True)
class Pages:
    """Functions that draw the pages of a run. The command line and the Python interface pass
    `hone.tools.report.pages.PAGES`; a run without them writes no report."""

    write_report: _WriteReport
    """Writes the report into a run folder. Raises UserError or DiskError if it cannot."""
    dashboard: Callable[[], dict[str, Any]]
    """The dashboard for Grafana, as JSON values."""
