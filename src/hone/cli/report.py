"""`hone report RUN... [--output FILE]`: draw the report of a run, or one that compares several."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from hone.tools.report.write import write_report

__all__ = ["run"]

_DESCRIPTION = """Draw the report of a run, even of one that is still running. For several runs one
page overlays their curves and lists differences of their configurations and environments."""


def run(argv: Sequence[str]) -> int:
    """Write the report and print its path."""
    parser = ArgumentParser(prog="hone report", description=_DESCRIPTION)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="folder that run.dir named, or a file that `hone generate` has written",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="HTML file to write (RUN/report.html; of several runs comparison.html in the folder "
        "that they share)",
    )
    arguments = parser.parse_args(argv)
    sys.stdout.write(f"{write_report(*arguments.runs, output=arguments.output)}\n")
    return 0
