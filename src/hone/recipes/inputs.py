"""The command line of the modules that write models and data for recipes to start from."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path

from hone.cli.command import quiet_transformers
from hone.observe.disk import DiskError, writing

__all__ = ["write_inputs"]


def write_inputs(
    module: str,
    description: str | None,
    makers: Mapping[str, Callable[[Path, int], None]],
    *,
    drawn: str,
) -> None:
    """Write each folder of `makers`, which are called with it and the seed, and print its path.
    `module` is what `python -m` starts, and `drawn` what depends on the seed, for the help."""
    parser = ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder to write to (runs)")
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {drawn} (0)")
    arguments = parser.parse_args()
    quiet_transformers()
    for name, make in makers.items():
        try:
            with writing(arguments.dir / name, "--dir"):
                make(arguments.dir / name, arguments.seed)
        except DiskError as error:
            parser.error(f"{error}")
        sys.stdout.write(f"{arguments.dir / name}\n")
