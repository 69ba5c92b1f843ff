"""The connections of the server: how many may be open, and how long each may say nothing.

uvicorn counts connections and refuses requests beyond a limit, but it lets a client connect and
send nothing, or one byte a minute, for ever: a few thousand such connections keep all others out.
Here the server waits for the head of a request `HEAD_S` seconds, and where the limit is reached,
the connection that has waited longest for a request makes room for a new one. A request whose
answer is being made is never ended for another one.

    connected ──head──► a request is answered ──end of the answer──► waits for the next one
        └── waits: ended after HEAD_S, or for a new connection ──────────────┘

How long a body may take is bounded where it is read (`bodies.read_body`).
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_S", "KEEP_ALIVE_S", "STALL_S", "Connections"]

HEAD_S = 20.0
"""Longest wait for the head of a request, in seconds, from the connection or the last answer on."""
KEEP_ALIVE_S = 10
"""Longest silence after an answer. OpenAI's and Anthropic's clients use a connection again within
5 seconds, and an end at the same moment would lose their request."""
STALL_S = 60.0
"""Longest time in which a client takes nothing of an answer, in seconds."""
_OTHER_FILES = 512
"""Files that the process may have open for other purposes."""


class Connections:
    """The open connections of a server."""

    def __init__(self, most: int) -> None:
        """At most `most` may be open; fewer where the host does not allow so many open files."""
        self.most = _allowed(most)
        self._resting: OrderedDict[_Connection, None] = OrderedDict()
        """Those without a request that is being answered: who has waited longest is first."""

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """What uvicorn calls for each connection."""
        return cast("type[asyncio.Protocol]", self._make)

    def _make(self, **of_uvicorn: Any) -> _Connection:
        return _Connection(self._resting, self.most, **of_uvicorn)


class _Connection(H11Protocol):
    def __init__(
        self, resting: OrderedDict[_Connection, None], most: int, **of_uvicorn: Any
    ) -> None:
        super().__init__(**of_uvicorn)
        self._resting, self._most = resting, most
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        """Bytes that the client had not taken when it was last looked at."""

    # -- called by the transport and by uvicorn --------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._rest()
        if len(self.connections) > self._most:
            oldest = next(iter(self._resting))
            if oldest is not self:  # else all others are answered, and this one gets status 503
                oldest.drop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._leave_rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next request where it is there
        if not self._is_answering:
            self._rest()

    def pause_writing(self) -> None:
        """The client takes an answer slower than it is written."""
        super().pause_writing()
        self._leave_rest()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_S, self._end_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timers()
        if not self._is_answering:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_rest()
        self._cancel_timers()
        super().connection_lost(exc)

    # -- our own ---------------------------------------------------------------------------------

    def drop(self) -> None:
        """End the connection, without waiting for what the client has not taken."""
        self._leave_rest()
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle = cast("Any", self.cycle)  # None before the first request
        return (cycle is not None and not cycle.response_complete) or self.flow.write_paused

    def _rest(self) -> None:
        self._leave_rest()
        self._resting[self] = None
        self._head_timer = self.loop.call_later(HEAD_S, self.drop)

    def _leave_rest(self) -> None:
        self._resting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_stalled(self) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent >= self._num_unsent:
            self.drop()
            return
        self._num_unsent = num_unsent
        self._stall_timer = self.loop.call_later(STALL_S, self._end_stalled)

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._stall_timer = None


def _allowed(most: int) -> int:
    """Connections that this process may open, `most` where that is possible: the limit of open
    files is raised where the host allows it, and files for other purposes stay free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most
    return max(1, soft - _OTHER_FILES, soft // 2)
