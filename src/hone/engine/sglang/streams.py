"""Generation over HTTP: a streamed answer for each request, read in a thread with an event loop."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

__all__ = ["Event", "Streams"]

_LINE_BYTES = 1 << 24
"""Longest line of an answer, in bytes."""


@dataclass(frozen=True, slots=True)
class Event:
    """News of one request."""

    name: str
    chunk: Mapping[str, Any] | None = None
    """A part of the answer; None at its end."""
    error: str = ""
    """Why the answer is incomplete; empty where it is complete."""


class Streams:
    """Streamed answers to `POST /generate`."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port, self._key = host, port, key
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        # A loop knows its tasks and their sockets by weak references alone. Without these, garbage
        # collection takes requests away while their answers come, and nobody hears of it.
        self._open: set[Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_work, args=(self._loop,), name="sglang streams", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def open(self, name: str, body: Mapping[str, Any]) -> None:
        """Send a request; its answer arrives as events with this name."""
        run = self._run(name, json.dumps(body).encode())
        future = asyncio.run_coroutine_threadsafe(run, self._loop)
        self._open.add(future)
        future.add_done_callback(self._open.discard)

    def take(self, timeout_s: float) -> list[Event]:
        """All queued events; if there is none, wait for the first for at most `timeout_s`."""
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def close(self) -> None:
        """End the thread; answers that are still coming are dropped."""
        asyncio.run_coroutine_threadsafe(self._drop_all(), self._loop).result()
        self._end()
        self._thread.join()

    async def _drop_all(self) -> None:
        """Cancel the tasks that read answers and wait until they have closed their sockets."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    async def _run(self, name: str, body: bytes) -> None:
        error = ""
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, limit=_LINE_BYTES
            )
            try:
                writer.write(self._head(len(body)) + body)
                await writer.drain()
                error = await self._read(name, reader)
            finally:
                writer.close()
        except (OSError, ValueError, asyncio.IncompleteReadError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        self._events.put(Event(name, error=error))

    def _head(self, num_bytes: int) -> bytes:
        lines = [
            "POST /generate HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            f"Authorization: Bearer {self._key}",
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _read(self, name: str, reader: asyncio.StreamReader) -> str:
        """Queue the parts of an answer as events; returns why the answer is incomplete, or an empty
        string."""
        status = int((await reader.readline()).split()[1])
        is_chunked = False
        while (line := await reader.readline()).strip():
            is_chunked |= line.lower().replace(b" ", b"") == b"transfer-encoding:chunked\r\n"
        if status != 200:
            return f"status {status}: {(await reader.read(2000)).decode(errors='replace')}"
        rest = b""
        async with aclosing(_pieces(reader, is_chunked=is_chunked)) as pieces:
            async for data in pieces:
                *messages, rest = (rest + data).split(b"\n\n")
                for message in messages:
                    content = message.removeprefix(b"data: ")
                    if content == b"[DONE]":
                        return ""
                    chunk: dict[str, Any] = json.loads(content)
                    if "error" in chunk:
                        return str(chunk["error"])
                    self._events.put(Event(name, chunk))
        return "the answer broke off"


def _work(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _pieces(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncGenerator[bytes]:
    """The body of an answer in pieces, as they arrive."""
    while not is_chunked and (data := await reader.read(1 << 16)):
        yield data
    while is_chunked and (size := int(await reader.readline() or b"0", 16)):
        yield await reader.readexactly(size)
        await reader.readline()
