"""This process's rank in the run and the rendezvous, from torchrun's environment. No other module
reads torchrun's environment."""

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
"""Environment variable that `hone.distributed.spawn` sets in addition to torchrun's."""
DEVICES_HELD = "HONE_DEVICES_HELD"
"""Environment variable that is set if Ray has already given this host's devices to the trainers, so
that they need not reserve them."""
HONE_KEY = "HONE_KEY"
"""Environment variable with the secret key of the run. hone sets it for the processes that it
starts; with torchrun the user sets it."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Processes:
    """This process's place among the processes that torchrun has started, one per device."""

    rank: int
    """Rank over all hosts, from 0 to `world_size` - 1."""
    world_size: int
    local_rank: int
    """Rank on this host, from 0 to `local_world_size` - 1; also the index of its GPU."""
    local_world_size: int

    @property
    def has_other_hosts(self) -> bool:
        """Whether some processes are on other hosts."""
        return self.local_world_size < self.world_size

    @property
    def is_on_first_host(self) -> bool:
        """Whether this process is on the host of rank 0, where torchrun serves the store."""
        return self.rank == self.local_rank

    def named(self, text: str) -> str:
        """Prefix a message with rank and host name if the run has several hosts, each with its own
        terminal."""
        if not self.has_other_hosts:
            return text
        return f"rank {self.rank} on {socket.gethostname()}: {text}"


def processes() -> Processes:
    """This process's place from torchrun's variables, or one process if none is set. Raises
    UserError if they are incomplete or contradict each other."""
    values = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if not values:
        return Processes(rank=0, world_size=1, local_rank=0, local_world_size=1)
    if len(values) == len(_VARIABLES) and all(text.isdecimal() for text in values.values()):
        place = Processes(*(int(values[name]) for name in _VARIABLES))
        if (
            place.rank < place.world_size
            and place.local_rank < place.local_world_size <= place.world_size
        ):
            return place
    got = ", ".join(f"{name}={values.get(name, '(unset)')}" for name in _VARIABLES)
    raise UserError(
        f"the environment has {got}, which is no place among torchrun's processes: start this with "
        "torchrun, which sets all four, or unset them all to run one process"
    )


def has_hone_launcher() -> bool:
    """Whether `hone.distributed.spawn` started this process among several. It reports how a killed
    process died, and turns a signal into the exit code of the run."""
    return processes().world_size > 1 and os.environ.get(HONE_LAUNCHER) == "1"


def run_key() -> bytes:
    """The key with which processes of this run sign pickled messages. Empty if no secret was
    set."""
    return os.environ.get(HONE_KEY, "").encode()


@contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Set environment variables of this process, and of its children, until the context ends."""
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
    """Address of the key-value store over which processes find each other."""

    host: str
    port: int
    has_server: bool
    """Whether the launcher serves the store; otherwise rank 0 does."""
    attempt: int
    """Number of restarts by torchrun. The store outlives them."""


def rendezvous() -> Rendezvous:
    """The rendezvous of this run. Raises UserError if the environment does not set it."""
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
