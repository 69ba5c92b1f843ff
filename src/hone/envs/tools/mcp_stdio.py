"""A server of the Model Context Protocol in a process of its own: one message a line."""

from __future__ import annotations

import itertools
import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Lock, Thread
from time import monotonic
from typing import IO, Any

from hone.envs.tools.json_rpc import answer_to_server, encode, id_of_answer, read, result_of
from hone.envs.tools.tool import ToolLostError

__all__ = ["StdioConnection"]

_PATIENCE_S = 2.0
"""Time for a server to end once its input has, and once more after the signal to end."""
_MAX_LINE = 64 * 2**20
"""Longest message, in bytes."""
_MAX_LOG_LINE = 2**16
_PIPE = 2**16
"""Bytes that are written at once: what a pipe holds."""


class StdioConnection:
    """Starts the server, and ends it with `close`. The server stays in the worker's process group,
    and is killed with the worker. A call has one deadline, for its way to the server, which may
    read nothing, and for the answer."""

    def __init__(self, command: Sequence[str], *, deadline_s: float) -> None:
        """Raises ToolLostError where the command cannot be run."""
        self._name = " ".join(command)
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._writing = Lock()
        self._is_cut = False
        """Whether a part of a message has been written, so that no other can follow. Guarded by
        `_writing`."""
        self._lock = Lock()
        # Guarded by the lock, which nobody holds for long.
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._has_ended = False
        self._last_lines: deque[bytes] = deque(maxlen=5)
        try:
            self._process: Popen[bytes] = Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        except OSError as error:
            raise ToolLostError(
                f"the server `{self._name}` of env.tools cannot be started: {error}"
            ) from error
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin: IO[bytes] = stdin
        os.set_blocking(stdin.fileno(), False)
        self._threads = [
            Thread(target=self._read_messages, args=(stdout,), daemon=True),
            Thread(target=self._read_log, args=(stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """As `Connection.request`."""
        end = monotonic() + self._deadline_s
        number = next(self._numbers)
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._has_ended:
                raise self._lost("has ended")
            self._waiting[number] = answer
        try:
            self._send(encode(method, params, number), end)
            message = answer.result(max(0.0, end - monotonic()))
        except TimeoutError:
            raise self._lost(f"did not answer {method} in {self._deadline_s:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        return result_of(message)

    def notify(self, method: str) -> None:
        try:
            self._send(encode(method, None), monotonic() + self._deadline_s)
        except TimeoutError:
            raise self._lost(f"did not read {method} in {self._deadline_s:g} s") from None

    def agreed(self, protocol_version: str) -> None:
        """Lines carry no version."""

    def close(self) -> None:
        """Close the server's input, at which it should end; else end it."""
        for end in (self._close_input, self._process.terminate, self._process.kill):
            end()
            with suppress(TimeoutExpired):
                self._process.wait(_PATIENCE_S)
                break
        self._close_input()  # no call writes any more: nobody can read it
        # A child of the server may hold its output open: then the daemon threads are left.
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def _close_input(self) -> None:
        """Close the server's input, unless a call still writes into it after `_PATIENCE_S`."""
        if self._writing.acquire(timeout=_PATIENCE_S):
            try:
                self._stdin.close()
            finally:
                self._writing.release()

    def _send(self, message: bytes, end: float) -> None:
        """Write a message up to the monotonic time `end`. Raises TimeoutError after it."""
        if not self._writing.acquire(timeout=max(0.0, end - monotonic())):
            raise TimeoutError
        try:
            self._write(message + b"\n", end)
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:  # ValueError: the pipe is closed
            raise self._lost(f"takes no messages: {error}") from error
        finally:
            self._writing.release()

    def _write(self, data: bytes, end: float) -> None:
        if self._is_cut:
            raise self._lost("takes no messages: it did not read an earlier one to its end")
        # The pipe itself, and not the buffer of `_stdin`, which would block.
        poll = select.poll()
        poll.register(self._stdin, select.POLLOUT)
        num_written = 0
        while num_written < len(data):
            left = max(0.0, end - monotonic())
            if not poll.poll(left * 1000):
                self._is_cut = num_written > 0
                raise TimeoutError
            with suppress(BlockingIOError):
                num_written += os.write(
                    self._stdin.fileno(), data[num_written : num_written + _PIPE]
                )

    def _read_messages(self, stdout: IO[bytes]) -> None:
        why = "has ended"
        with stdout, suppress(OSError, ValueError):
            while line := stdout.readline(_MAX_LINE + 1):
                if len(line) > _MAX_LINE:
                    why = f"wrote a line of more than {_MAX_LINE:,} bytes"
                    break
                for message in read(line):
                    self._take(message)
        self._threads[1].join(_PATIENCE_S)  # so that the error has the server's last lines
        with self._lock:
            self._has_ended = True
            waiting = list(self._waiting.values())
        for answer in waiting:
            answer.set_exception(self._lost(why))

    def _take(self, message: dict[str, Any]) -> None:
        if (number := id_of_answer(message)) is not None:
            with self._lock:
                answer = self._waiting.pop(number, None)
            if answer is not None:
                answer.set_result(message)
        elif reply := answer_to_server(message):
            with suppress(ToolLostError, TimeoutError):
                self._send(reply, monotonic() + self._deadline_s)

    def _read_log(self, stderr: IO[bytes]) -> None:
        with stderr, suppress(OSError, ValueError):
            while line := stderr.readline(_MAX_LOG_LINE):
                self._last_lines.append(line)

    def _lost(self, what: str) -> ToolLostError:
        log = b"".join(self._last_lines).decode(errors="replace").strip()
        return ToolLostError(
            f"the server `{self._name}` of env.tools {what}"
            + (f"; its last lines were: {log[-500:]}" if log else "")
        )
