"""Which of the processes of a run this one is and where they meet, from torchrun's environment.

The only place that reads torchrun's environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hone.errors import UserError

__all__ = [
    "DEVICES_HELD",
    "HONE_KEY",
    "HONE_LAUNCHER",
    "Processes",
    "Rendezvous",
    "environment",
    "has_hone_launcher",
    "processes",
    "rendezvous",
    "run_key",
]

HONE_LAUNCHER = "HONE_LAUNCHER"
"""Set by `hone.distributed.spawn`, beside torchrun's variables."""
DEVICES_HELD = "HONE_DEVICES_HELD"
"""Set where Ray has given this host's devices to the trainers, so that they need not take them."""
HONE_KEY = "HONE_KEY"
"""Set where hone starts processes, to what only they know; torchrun's get it from the user."""
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

    @property
    def has_other_hosts(self) -> bool:
        """Whether some of the processes are on other hosts than this one."""
        return self.local_world_size < self.world_size

    @property
    def is_beside_first(self) -> bool:
        """Whether it is on the host of rank 0, where torchrun serves the store."""
        return self.rank == self.local_rank

    def named(self, text: str) -> str:
        """What this process says, with who it is where hosts have terminals of their own."""
        if not self.has_other_hosts:
            return text
        return f"rank {self.rank} on {socket.gethostname()}: {text}"


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


def has_hone_launcher() -> bool:
    """Whether this is one of several processes that `hone.distributed.spawn` has started, which
    reports how one of them was killed and turns a signal into the exit code of the run."""
    return processes().world_size > 1 and os.environ.get(HONE_LAUNCHER) == "1"


def run_key() -> bytes:
    """What the processes of this run sign messages with that are unpickled; empty where nothing has
    given them a secret."""
    return os.environ.get(HONE_KEY, "").encode()


@contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Environment variables of this process, and of what it starts, for as long as it is inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The key-value store over which processes find each other."""

    host: str
    port: int
    has_server: bool
    """Whether whoever started the processes serves the store; otherwise rank 0 does."""
    attempt: int
    """How often torchrun has started all processes anew; the store outlives them."""


def rendezvous() -> Rendezvous:
    """Where the processes of this run meet.

    Raises UserError where the environment does not say.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise UserError(
            f"several processes were started, but not where they meet: MASTER_ADDR is "
            f"{host or 'unset'}, MASTER_PORT {port or 'unset'}. Start them with torchrun, which "
            "sets both."
        )
    return Rendezvous(
        host=host,
        port=int(port),
        has_server=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
