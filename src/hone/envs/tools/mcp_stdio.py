"""A server of the Model Context Protocol in a process of its own: one message a line."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from subprocess import PIPE, Popen, TimeoutExpired
from threading import Lock, Thread
from typing import IO, Any

from hone.envs.tools.json_rpc import answer_to_server, encode, id_of_answer, read, result_of
from hone.envs.tools.tool import ToolLostError

__all__ = ["StdioConnection"]

_PATIENCE_S = 2.0
"""Time for a server to end once its input has, and once more after the signal to end."""


class StdioConnection:
    """Starts the server, and ends it with `close`. The server stays in the worker's process group,
    and is killed with the worker."""

    def __init__(self, command: Sequence[str], *, deadline_s: float) -> None:
        """Raises ToolLostError where the command cannot be run."""
        self._name = " ".join(command)
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._lock = Lock()
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
        self._threads = [
            Thread(target=self._read_messages, args=(stdout,), daemon=True),
            Thread(target=self._read_log, args=(stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def request(self, method: str, params: Mapping[str, Any]) -> Any:
        """As `Connection.request`."""
        number = next(self._numbers)
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._has_ended:
                raise self._lost("has ended")
            self._waiting[number] = answer
        try:
            self._send(encode(method, params, number))
            message = answer.result(self._deadline_s)
        except TimeoutError:
            raise self._lost(f"did not answer {method} in {self._deadline_s:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        return result_of(message)

    def notify(self, method: str) -> None:
        self._send(encode(method, None))

    def agreed(self, protocol_version: str) -> None:
        """Lines carry no version."""

    def close(self) -> None:
        """Close the server's input, at which it should end; else end it."""
        with suppress(OSError):
            self._stdin.close()
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            with suppress(TimeoutExpired):
                self._process.wait(_PATIENCE_S)
                break
        # A child of the server may hold its output open: then the daemon threads are left.
        for thread in self._threads:
            thread.join(_PATIENCE_S)

    def _send(self, message: bytes) -> None:
        try:
            with self._lock:
                self._stdin.write(message + b"\n")
                self._stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: the pipe is closed
            raise self._lost(f"takes no messages: {error}") from error

    def _read_messages(self, stdout: IO[bytes]) -> None:
        with stdout, suppress(OSError, ValueError):
            for line in stdout:
                for message in read(line):
                    self._take(message)
        self._threads[1].join(_PATIENCE_S)  # so that the error has the server's last lines
        with self._lock:
            self._has_ended = True
            waiting = list(self._waiting.values())
        for answer in waiting:
            answer.set_exception(self._lost("has ended"))

    def _take(self, message: dict[str, Any]) -> None:
        if (number := id_of_answer(message)) is not None:
            with self._lock:
                answer = self._waiting.pop(number, None)
            if answer is not None:
                answer.set_result(message)
        elif reply := answer_to_server(message):
            with suppress(ToolLostError):
                self._send(reply)

    def _read_log(self, stderr: IO[bytes]) -> None:
        with stderr, suppress(OSError, ValueError):
            self._last_lines.extend(stderr)

    def _lost(self, what: str) -> ToolLostError:
        log = b"".join(self._last_lines).decode(errors="replace").strip()
        return ToolLostError(
            f"the server `{self._name}` of env.tools {what}"
            + (f"; its last lines were: {log[-500:]}" if log else "")
        )
