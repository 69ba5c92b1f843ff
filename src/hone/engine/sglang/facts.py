"""Facts about SGLang, and about the Python that has it, without importing it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

__all__ = [
    "FAMILIES",
    "INSTALL",
    "PYTHON",
    "VERSIONS",
    "installed_version",
    "interpreter",
    "is_served",
]

PYTHON = "HONE_SGLANG_PYTHON"
"""The environment variable that names the Python that has SGLang."""
OLDEST, TOO_NEW = (0, 5, 15), (0, 6, 0)
"""Versions that are served: from the first, below the second."""
VERSIONS = "from 0.5.15, below 0.6,"
INSTALL = "python -m venv sglang && sglang/bin/pip install sglang==0.5.15"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose parameters a sync finds in SGLang."""
_PROBE_S = 60.0
_PROBE = "from importlib.metadata import version; print(version('sglang'))"


def interpreter() -> str:
    """The Python that has SGLang: the one that `HONE_SGLANG_PYTHON` names, or the one of hone."""
    return os.environ.get(PYTHON) or sys.executable


@cache
def installed_version(python: str) -> str | None:
    """The version of SGLang that this Python has; None where it has none, or does not run. Nothing
    of SGLang is run."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def is_served(version: str) -> bool:
    """Whether engines run on this version."""
    parts = version.split(".")[:3]
    if len(parts) < 3 or not all(part.isdigit() for part in parts):
        return False
    return OLDEST <= tuple(map(int, parts)) < TOO_NEW
