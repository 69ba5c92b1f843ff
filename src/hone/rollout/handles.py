"""How an engine is reached, in a thread of this process or anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hone.engine.host import EngineHost, Polled
from hone.weights.protocol import Pending

__all__ = ["EngineHandle", "EnginesLostError", "LocalHandle", "RecordEvent"]

RecordEvent = Callable[..., None]
"""Takes the kind of what has happened, and its fields by name."""


class EnginesLostError(ConnectionError):
    """Engines or references were lost that cannot be started anew: that was done as often as it
    may be, or what they ran on is gone too."""


class EngineHandle(Protocol):
    """How one `EngineHost` is reached, wherever it is."""

    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int:
        """Processes of this engine, all of which receive weights."""
        ...

    def call(self, method: str, /, *args: Any) -> Pending:
        """Call a method of the host, without waiting for it. Calls may overtake each other.

        Raises EngineLostError where the engine is known to be gone.
        """
        ...

    def kill(self) -> None:
        """End the engine at once, in whatever state it is."""
        ...


class LocalHandle:
    """A host in a thread of this process. One that hangs can only be left to itself."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def num_ranks(self) -> int:
        return self._host.num_ranks

    def call(self, method: str, /, *args: Any) -> Pending:
        if method == "poll":
            return _LocalPoll(self._host, *args)
        return self._host.start(method, *args)

    def kill(self) -> None:
        self._host.abandon()


@dataclass(frozen=True, slots=True)
class _LocalPoll:
    """Made when its result is asked for: nothing need wait for it before."""

    host: EngineHost
    wait_s: float

    def result(self, timeout_s: float) -> Polled:
        return self.host.poll(min(timeout_s, self.wait_s))
