"""Server-sent events: an answer is written while it is sampled.

The status of a stream is sent with its first byte, so nothing is sent before the first token, the
end, or a refusal; after `KEEP_ALIVE_S` without any of these a comment keeps the connection open.
Where the client leaves before the end, the turn is aborted.

Where the engine does not show tokens while it samples (one in another process), the whole text
comes at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import orjson
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hone.door.refusal import Refusal
from hone.door.turns import Answer, AskedTurn

__all__ = ["KEEP_ALIVE_S", "EventStream", "Writer", "event", "left"]

KEEP_ALIVE_S = 15.0
"""Longest silence of a stream, in seconds; clients and proxies give up after 60."""
_INCOMPLETE = "\ufffd"
_COMMENT = b": keep-alive\n\n"


class Writer(Protocol):
    """Writes the events of one API."""

    ping: bytes
    """Keeps a connection open."""

    def begin(self, turn: AskedTurn) -> Iterable[bytes]:
        """The events before any text."""
        ...

    def more(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Iterable[bytes]:
        """The events of new text and new tokens; the text may lag behind."""
        ...

    def end(self, answer: Answer) -> Iterable[bytes]:
        """The events after all text."""
        ...

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        """The events of an error in mid-stream."""
        ...


def event(data: Any, name: str | None = None) -> bytes:
    """An event with JSON."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


async def left(receive: Receive) -> None:
    """Return once the client of a request, whose body has been read, is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The response that streams an answer."""

    def __init__(
        self,
        turn: AskedTurn,
        writer: Writer,
        decode: Callable[[Sequence[int]], str],
        error_body: Callable[[Refusal], dict[str, Any]],
    ) -> None:
        """`error_body` makes the body of a refusal that comes before the first byte."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]  # it is not known before the end
        self._turn, self._writer, self._error_body = turn, writer, error_body
        self._text = _TextStream(turn, decode)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._turn.reading():
            gone = asyncio.create_task(left(receive))
            try:
                await self._respond(scope, receive, send, gone)
            finally:
                gone.cancel()

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, gone: asyncio.Task[None]
    ) -> None:
        is_in_time = await _change(self._turn, gone)
        if gone.done():
            return
        refusal = _refusal(self._turn)
        if refusal is not None:
            response = JSONResponse(
                self._error_body(refusal), refusal.status, headers=refusal.headers
            )
            await response(scope, receive, send)
            return
        headers = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(headers)
        if not is_in_time:
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
        async for part in self._events(gone):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if not gone.done():
            await send({"type": "http.response.body", "body": b""})

    async def _events(self, gone: asyncio.Task[None]) -> AsyncIterator[bytes]:
        turn, writer, has_begun = self._turn, self._writer, False
        while not gone.done():
            is_done = turn.answer.done()
            if is_done and (refusal := _refusal(turn)) is not None:
                yield b"".join(writer.fail(refusal))
                return
            if not has_begun and (turn.prompt_ids and (turn.token_ids or is_done)):
                has_begun = True
                yield b"".join(writer.begin(turn))
            parts = b"".join(writer.more(*self._text.take()))
            if is_done:
                yield parts + b"".join(writer.end(turn.answer.result()))
                return
            if parts:
                yield parts
            if not await _change(turn, gone):
                yield writer.ping if has_begun else _COMMENT


def _refusal(turn: AskedTurn) -> Refusal | None:
    """The refusal of a turn. Raises its error where that is another one."""
    error = turn.answer.exception() if turn.answer.done() else None
    if error is not None and not isinstance(error, Refusal):
        raise error
    return error


async def _change(turn: AskedTurn, gone: asyncio.Task[None]) -> bool:
    """Wait until a turn changes or the client is gone; False after `KEEP_ALIVE_S` of silence."""
    if turn.answer.done():
        return True
    changed = asyncio.create_task(turn.changed.wait())
    done, _ = await asyncio.wait(
        {changed, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
    )
    changed.cancel()
    with suppress(asyncio.CancelledError):
        await changed
    return bool(done)


class _TextStream:
    """The text of a turn while it is sampled, piece by piece.

    Bytes that are no complete character are held back, and as many characters as a stop string may
    begin with. Where the answer is read for calls, its text comes at the end.
    """

    def __init__(self, turn: AskedTurn, decode: Callable[[Sequence[int]], str]) -> None:
        self._turn, self._decode = turn, decode
        self._num_held = max(map(len, turn.stop), default=1) - 1
        self._num_tokens = 0
        """Tokens that have been taken."""
        self._text, self._num_sent = "", 0
        self._window: list[int] = []  # tokens whose text is `_known`, then those not complete
        self._num_known, self._known = 0, ""

    def take(self) -> tuple[str, list[int], list[float]]:
        """The text, token ids and log-probabilities since the last call."""
        turn = self._turn
        start = self._num_tokens
        if turn.answer.done():
            answer = turn.answer.result()
            ids, logprobs = answer.sampled.token_ids, answer.sampled.logprobs
            self._num_tokens = len(ids)
            text, self._num_sent = answer.content[self._num_sent :], len(answer.content)
            return text, [*ids[start:]], [*logprobs[start:]]
        ids, logprobs = turn.token_ids[start:], turn.logprobs[start:]
        self._num_tokens += len(ids)
        if turn.reads_calls:
            return "", ids, logprobs
        self._push(ids)
        end = max(len(self._text) - self._num_held, self._num_sent)
        text, self._num_sent = self._text[self._num_sent : end], end
        return text, ids, logprobs

    def _push(self, token_ids: Sequence[int]) -> None:
        self._window += token_ids
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE):
            return
        self._text += text[len(self._known) :]
        self._window = self._window[self._num_known :]
        self._known, self._num_known = self._decode(self._window), len(self._window)
