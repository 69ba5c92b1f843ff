"""The processes that decode images for this one."""

from __future__ import annotations

import psutil

__all__ = ["workers"]


def workers() -> list[psutil.Process]:
    """Those that run."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "hone.images.worker" in child.cmdline()
    ]
