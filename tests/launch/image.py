"""The Dockerfile as far as it can be read and run without Docker: its instructions, the files that
it copies, and the requirements that it installs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from tests.launch.distribution import ROOT

__all__ = ["copied", "instructions", "pip_installs"]


def instructions() -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def copied(root: Path) -> list[str]:
    """Copy what COPY copies into `root`, in place of `/`. Returns the names of the sources."""
    names: list[str] = []
    for keyword, arguments in instructions():
        if keyword != "COPY":
            continue
        *sources, target = (word for word in arguments.split() if not word.startswith("--"))
        place = root / target.removeprefix("/")
        for name in sources:
            if (ROOT / name).is_dir():  # its content, as in Docker
                shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                assert target.endswith("/"), arguments
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, place)
        names += sources
    return names


def pip_installs() -> list[list[str]]:
    """The words of each `RUN pip install ...` after these three."""
    runs = [arguments for keyword, arguments in instructions() if keyword == "RUN"]
    return [shlex.split(text)[2:] for text in runs if text.startswith("pip install ")]
