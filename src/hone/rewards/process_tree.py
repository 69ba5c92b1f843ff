"""The processes below a process, from the kernel's lists. These cost only what is in them, whereas
to read the parents of all processes takes milliseconds on a busy host."""

from __future__ import annotations

import os

import psutil

__all__ = ["children_of", "num_descendants"]


def children_of(pid: int) -> set[int] | None:
    """Ids of the children of a process. None where that is not known: the kernel has no lists, or
    the process or one of its threads has just ended."""
    children: set[int] = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children.update(map(int, file.read().split()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return children


def num_descendants(pid: int) -> int:
    """Number of processes below a process; 0 where it has ended."""
    unseen, number = [pid], 0
    while unseen:
        children = children_of(unseen.pop())
        if children is None:
            return _num_by_parents(pid)
        unseen += children
        number += len(children)
    return number


def _num_by_parents(pid: int) -> int:
    try:
        return len(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return 0  # it has ended
