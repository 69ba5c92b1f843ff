"""A team of processes: the first one works, and the others repeat the calls that it announces.

    team = Team(channel, is_first=channel.rank == 0, calls={"step": engine.step})
    groups = team.run(lambda: collect(team))        # the same result on all processes

The work of the first process depends on the arrival of scores, on signals, and on remote engines,
all unknown to the other processes. So it announces its collective calls, which the others repeat,
and at the end its result. A process that was started as a worker is called through
`hone.distributed.calls` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol, TypeVar

__all__ = ["Messages", "Team", "run_for"]

T = TypeVar("T")
KEEPALIVE_S = 5.0
"""Interval of messages to waiting processes. It is well below their timeouts: without a message the
watch would take the first process for the one that hangs."""
_Calls = list[tuple[str, tuple[Any, ...]]]
"""Names and arguments of calls. `finish` sends its value under the name `_RESULT`."""
_RESULT = "result"


class Messages(Protocol):
    """The transport of a team: a mesh or a channel."""

    def broadcast(self, value: Any, /) -> Any:
        """The picklable value of the first process. Collective."""
        ...


class Team:
    """The processes that share `messages`, or one process if that is None.

    If a process fails, the others wait until the watch or the launcher ends them.
    """

    def __init__(
        self,
        messages: Messages | None,
        *,
        is_first: bool,
        calls: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """`calls` are the calls that the first process may announce, by name, on every process."""
        self.is_first = is_first
        self._messages = messages
        self._made = {} if calls is None else dict(calls)
        self._waiting: _Calls = []
        """Calls that the others make before the next announced one."""
        self._last_message_s = monotonic()

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process and return its result on all. The others follow
        meanwhile."""
        if not self.is_first:
            return self.follow()
        value = work()
        self.finish(value)
        return value

    # -- the first process -----------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """Make a call on all processes at the same time, so that it may be collective. Returns this
        process's result."""
        self.announce(name, *arguments)
        return self._made[name](*arguments)

    def later(self, name: str, *arguments: Any) -> Any:
        """Make a call here now, and on the others before the next `call`. Returns this process's
        result. If the call raises here, the others do not make it."""
        value = self._made[name](*arguments)
        self._waiting.append((name, arguments))
        return value

    def announce(self, name: str, *arguments: Any) -> None:
        """Announce a call to the others. The caller makes it itself."""
        self._waiting.append((name, arguments))
        self._send()

    def keep_waiting(self) -> None:
        """Send the others a sign of life if the last message is `KEEPALIVE_S` old. Called regularly
        while nothing is announced."""
        if monotonic() - self._last_message_s > KEEPALIVE_S:
            self._send()

    def finish(self, value: Any) -> None:
        """End `follow` on the other processes, which returns `value`."""
        self.announce(_RESULT, value)

    def _send(self) -> None:
        calls, self._waiting = self._waiting, []
        if self._messages is not None:
            self._messages.broadcast(calls)
        self._last_message_s = monotonic()

    # -- the others ------------------------------------------------------------------------------

    def follow(self) -> Any:
        """Repeat the calls of the first process until it finishes. Returns its result."""
        assert self._messages is not None
        while True:
            calls: _Calls = self._messages.broadcast(None)
            for name, arguments in calls:
                if name == _RESULT:
                    return arguments[0]
                self._made[name](*arguments)


def run_for(teams: Sequence[Team], work: Callable[[], T]) -> T:
    """Run `work` as `Team.run`, for all teams that this process leads, or the one that it
    follows."""
    first, *others = teams
    if others:
        return first.run(lambda: run_for(others, work))
    return first.run(work)
