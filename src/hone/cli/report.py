"""`hone report RUN [--output FILE]`: draw the report of a run folder, even of a running one."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from hone.observe.report import write_report

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Write the report and print its path."""
    parser = ArgumentParser(prog="hone report", description="Draw the report of a run folder.")
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder that run.dir named")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="HTML file to write (RUN/report.html)"
    )
    arguments = parser.parse_args(argv)
    sys.stdout.write(f"{write_report(arguments.run_dir, arguments.output)}\n")
    return 0
