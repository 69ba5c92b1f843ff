"""`hone watch RUN [--port N]`: the report of a run as a page that keeps up with it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from hone.observe.local_server import ADDRESS
from hone.tools.report.served import serve

__all__ = ["run"]

_DESCRIPTION = """Serve the report of a run, at work or ended, as a page that shows each step as it
comes and searches any number of samples. It reads the run folder alone and listens on this host
alone: from elsewhere, `ssh -L 8642:localhost:8642 HOST`, and open the address there."""
PORT = 8642


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C."""
    parser = ArgumentParser(prog="hone watch", description=_DESCRIPTION)
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="folder that run.dir named, or a file that `hone generate` has written",
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=PORT, help=f"port to listen at ({PORT}; 0: any)"
    )
    arguments = parser.parse_args(argv)
    with serve(arguments.run, arguments.port) as server:
        sys.stdout.write(f"http://{ADDRESS}:{server.port}/  (Ctrl-C ends it)\n")
        sys.stdout.flush()
        try:
            Event().wait()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0
