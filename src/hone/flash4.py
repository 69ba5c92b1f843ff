"""Facts about FlashAttention 4 (the package `flash-attn-4`) that need no import of it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

__all__ = [
    "ARCHITECTURES",
    "MODULE",
    "REQUIREMENTS",
    "broken",
    "import_problem",
    "is_installed",
    "serves",
]

MODULE = "flash_attn.cute.interface"
REQUIREMENTS = "flash-attn-4>=4.0.0b36", "nvidia-cutlass-dsl>=4.8"
ARCHITECTURES = (9, 10)
"""Major compute capabilities on which its kernels differ from those of FlashAttention 2."""
_DISTRIBUTION = "flash-attn-4"
_INSTALL = "pip install " + " ".join(f"'{requirement}'" for requirement in REQUIREMENTS)
_MAX_HEAD_DIM, _HEAD_DIM_MULTIPLE = 128, 8


def is_installed() -> bool:
    """Whether the package is installed, broken or not."""
    # The distribution is looked up, since FlashAttention 2 has a module `flash_attn` too.
    try:
        distribution(_DISTRIBUTION)
    except PackageNotFoundError:
        return False
    return True


def serves(head_dim: int) -> bool:
    """Whether it has kernels for this head size on each of `ARCHITECTURES`, forward and
    backward."""
    return head_dim <= _MAX_HEAD_DIM and head_dim % _HEAD_DIM_MULTIPLE == 0


def import_problem() -> str | None:
    """A message on why the package cannot be imported, or None. Another process tries to import it;
    that takes some seconds, since it loads torch."""
    words = [sys.executable, "-c", f"import {MODULE}"]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return None
    *_, reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return broken(reason)


def broken(reason: str) -> str:
    """The message for a package that is installed and cannot be imported."""
    return (
        f"attention of training uses {_DISTRIBUTION}, which is installed but broken: {reason}. "
        f"Install it anew ({_INSTALL} --force-reinstall), or uninstall it (pip uninstall "
        f"{_DISTRIBUTION}): FlashAttention 2 comes with torch"
    )
