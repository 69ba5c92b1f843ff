"""Repeated requests: they get the answer of the first one, so that no turn is sampled twice.

The clients of OpenAI and Anthropic send a request again by themselves after a timeout or a lost
connection. A request repeats another one of the same key or session and route where

* it has the same `Idempotency-Key`;
* it has the same body, and `x-stainless-retry-count` is above 0;
* it has the same body as one of its session that is still being sampled.

A request that was refused, or whose client has gone, is not remembered.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from hone.door.turns import AskedTurn

__all__ = ["Repeats", "Sent"]

_NUM_FINISHED = 512
"""Requests that are remembered after their end: clients ask again within seconds, and the tokens of
each take memory."""


class Sent:
    """A request as it was sent."""

    def __init__(
        self, route: str, session_id: str | None, headers: Mapping[str, str], body: bytes
    ) -> None:
        self.is_of_session = session_id is not None
        digest = hashlib.sha256(body).hexdigest()
        self.by_body = f"{session_id}/{route}/body/{digest}"
        key = headers.get("idempotency-key")
        self.by_key = f"{session_id}/{route}/key/{key}" if key else None
        count = headers.get("x-stainless-retry-count", "0")
        self.is_retry = count.isdecimal() and bool(count.strip("0"))


class Repeats:
    """The requests of a server that may be sent again."""

    def __init__(self, *, max_running: int) -> None:
        """`max_running` requests may be sampled at once."""
        # A request may have two names.
        self._max_names = 2 * (max_running + _NUM_FINISHED)
        self._turns: OrderedDict[str, AskedTurn] = OrderedDict()

    def first(self, sent: Sent) -> AskedTurn | None:
        """The turn of the request that `sent` repeats, if there is one."""
        if sent.by_key is not None:
            return self._known(sent.by_key)
        turn = self._known(sent.by_body)
        if turn is None:
            return None
        is_running = sent.is_of_session and not turn.answer.done()
        return turn if sent.is_retry or is_running else None

    def remember(self, sent: Sent, turn: AskedTurn) -> None:
        """Remember a request, in place of the oldest one where there are too many."""
        names = [name for name in (sent.by_key, sent.by_body) if name is not None]
        turn.answer.add_done_callback(lambda _: self._forget_refused(names, turn))
        for name in names:
            self._turns[name] = turn
            self._turns.move_to_end(name)
        while len(self._turns) > self._max_names:
            self._turns.popitem(last=False)

    def forget(self, session_id: str) -> None:
        """Forget the requests of a session that has ended: it answers none any more, and the tokens
        of each take memory."""
        start = f"{session_id}/"
        for name in [name for name in self._turns if name.startswith(start)]:
            del self._turns[name]

    def _forget_refused(self, names: Sequence[str], turn: AskedTurn) -> None:
        """Forget a request that was not answered, which may be asked again."""
        if turn.answer.cancelled() or turn.answer.exception() is not None:
            for name in names:
                if self._turns.get(name) is turn:
                    del self._turns[name]

    def _known(self, name: str) -> AskedTurn | None:
        turn = self._turns.get(name)
        if turn is None:
            return None
        answer = turn.answer
        if answer.done() and (answer.cancelled() or answer.exception() is not None):
            del self._turns[name]
            return None
        return turn
