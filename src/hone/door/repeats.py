"""Repeated requests: they get the answer of the first one, so that no turn is sampled twice.

The clients of OpenAI and Anthropic send a request again by themselves after a timeout or a lost
connection. A request repeats another one of the same key or session and route where

* it has the same `Idempotency-Key`;
* it has the same body, and `x-stainless-retry-count` is above 0;
* it has the same body as one of its session that is still being sampled.

A request that was refused, or whose client has gone, is not remembered. Of one that is remembered
its answer is kept, and of the request itself a digest.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence

from hone.door.turns import AskedTurn

__all__ = ["MAX_FINISHED", "MAX_TOKENS", "Repeats", "Sent"]

MAX_FINISHED = 512
"""Requests that are remembered after their end: clients ask again within seconds."""
MAX_TOKENS = 2**22
"""Tokens of prompts and answers that are remembered after their end. Each takes about 50 bytes."""


class Sent:
    """A request as it was sent."""

    def __init__(
        self, route: str, session_id: str | None, headers: Mapping[str, str], body: bytes
    ) -> None:
        self.is_of_session = session_id is not None
        self.by_body = f"{session_id}/{route}/body/{_digest(body)}"
        key = headers.get("idempotency-key")
        self.by_key = f"{session_id}/{route}/key/{_digest(key.encode())}" if key else None
        count = headers.get("x-stainless-retry-count", "0")
        self.is_retry = count.isdecimal() and bool(count.strip("0"))


class Repeats:
    """The requests of a server that may be sent again: all that are sampled, and the newest of
    those that are answered."""

    def __init__(self) -> None:
        self._turns: dict[str, AskedTurn] = {}
        """By the names of their requests: a request may have two."""
        self._finished: deque[tuple[Sequence[str], AskedTurn]] = deque()
        """Those that are answered, the oldest first, with their names."""
        self._num_tokens = 0
        """Tokens of the finished ones."""

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
        """Remember a request, which is sampled now."""
        names = [name for name in (sent.by_key, sent.by_body) if name is not None]
        for name in names:
            self._turns[name] = turn
        turn.answer.add_done_callback(lambda _: self._finish(names, turn))

    def forget(self, session_id: str) -> None:
        """Forget the requests of a session that has ended: it answers none any more, and the tokens
        of each take memory."""
        start = f"{session_id}/"
        for name in [name for name in self._turns if name.startswith(start)]:
            del self._turns[name]
        kept = [(names, t) for names, t in self._finished if not names[0].startswith(start)]
        self._finished = deque(kept)
        self._num_tokens = sum(_num_tokens(turn) for _, turn in kept)

    def _finish(self, names: Sequence[str], turn: AskedTurn) -> None:
        """Remember an answer, in place of the oldest ones where there are too many. A request that
        was not answered may be asked again. One that nobody can repeat any more, since its session
        has ended or a newer one has its names, takes no room."""
        if _is_refused(turn) or not any(self._turns.get(name) is turn for name in names):
            self._forget(names, turn)
            return
        self._finished.append((names, turn))
        self._num_tokens += _num_tokens(turn)
        while len(self._finished) > MAX_FINISHED or (
            self._num_tokens > MAX_TOKENS and len(self._finished) > 1
        ):
            old_names, old = self._finished.popleft()
            self._num_tokens -= _num_tokens(old)
            self._forget(old_names, old)

    def _forget(self, names: Sequence[str], turn: AskedTurn) -> None:
        for name in names:
            if self._turns.get(name) is turn:  # else a newer request has the name
                del self._turns[name]

    def _known(self, name: str) -> AskedTurn | None:
        turn = self._turns.get(name)
        return None if turn is None or _is_refused(turn) else turn


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _is_refused(turn: AskedTurn) -> bool:
    answer = turn.answer
    return answer.done() and (answer.cancelled() or answer.exception() is not None)


def _num_tokens(turn: AskedTurn) -> int:
    answer = turn.answer.result()
    return len(answer.prompt_ids) + len(answer.sampled.token_ids)
