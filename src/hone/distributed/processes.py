"""Which of the processes of a run this one is, as torchrun tells it.

The only place that reads torchrun's environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hone.config.errors import UserError

__all__ = ["Processes", "processes"]

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among all that torchrun has started, one a device."""

    rank: int
    """Its number, over all hosts, from 0 to `world_size` - 1."""
    world_size: int
    local_rank: int
    """Its number on this host, from 0 to `local_world_size` - 1: that of its GPU."""
    local_world_size: int


def processes() -> Processes:
    """This process as torchrun's variables name it; without any of them the only one.

    Raises UserError where they are incomplete or contradict each other.
    """
    values = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if not values:
        return Processes(rank=0, world_size=1, local_rank=0, local_world_size=1)
    if len(values) == len(_VARIABLES) and all(text.isdecimal() for text in values.values()):
        found = Processes(*(int(values[name]) for name in _VARIABLES))
        if (
            found.rank < found.world_size
            and found.local_rank < found.local_world_size <= found.world_size
        ):
            return found
    got = ", ".join(f"{name}={values.get(name, '(unset)')}" for name in _VARIABLES)
    raise UserError(
        f"the environment has {got}, which is no place among torchrun's processes: start this with "
        "torchrun, which sets all four, or unset them all to run one process"
    )
