"""Calls of an object in another process, over one socket for each process.

    hub = Hub("127.0.0.1")                      # in the process that calls
line = hub.line("engine 0")                 # calls wait until the other process connects
    pending = line.call("poll", 10.0)
    serve(hub.address, line.key, target)        # in the other process, until the line is closed

The code that starts processes also reports when one is gone (`Line.end`). A call costs either end a
few system calls and a pickle, a tenth of a call of a Ray actor, so that one process can drive a
thousand engines.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import pickle
import resource
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from time import monotonic, sleep
from typing import Any

import psutil

from hone.distributed.listening import listen
from hone.errors import UserError
from hone.types import EngineLostError

__all__ = ["Frames", "Hub", "Line", "frame", "serve"]

_log = logging.getLogger(__name__)

KEY_BYTES = 32
"""Length of the key that a process sends first. The key is secret: connections without it are
refused."""
_SEND_S = 30.0
"""Longest time that a process may leave messages unread once the socket's buffers are full."""
_CONNECT_S = 60.0
_LINGER_S = 1e-4
"""Delay before answers are read, per line, so that the thread wakes once for the answers of many
lines."""
_MIN_LINGER_S, _MAX_LINGER_S = 2e-3, 0.05
_OTHER_FILES = 256
"""Files that a process may open later, in addition to its lines."""
_MAX_STRANGERS = 64
"""Open connections without a key that are allowed in addition to the expected ones. Fewer than
`_OTHER_FILES`, so that strangers cannot use up the files that the process needs."""
_NO_ROOM = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM
_FULL_S = 10.0
"""Pause in accepting connections once no file can be opened."""
_HEADER = struct.Struct("<Q")
_READ_BYTES = 1 << 18


def frame(value: Any) -> bytes:
    """Encode a picklable value: the number of bytes, then the pickle."""
    message = pickle.dumps(value, protocol=5)
    return _HEADER.pack(len(message)) + message


class Frames:
    """Decoder of values from a byte stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Any]:
        """Iterate over the values that `data` completes."""
        self._buffer += data
        start, num_bytes = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while num_bytes >= (begin := start + _HEADER.size):
                end = begin + _HEADER.unpack_from(view, start)[0]
                if num_bytes < end:
                    break
                start = end
                yield pickle.loads(view[begin:end])
        del self._buffer[:start]


class Line:
    """Calls to one other process. Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = secrets.token_bytes(KEY_BYTES)
        self._numbers = count()
        # `_lock` guards the fields below.
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent: list[bytes] = []
        """Calls made before the process connected."""
        self._open: dict[int, Future[Any]] = {}
        self._cause = ""

    def call(self, method: str, /, *args: Any) -> Future[Any]:
        """Call a method of the object that the process serves, without waiting for it. The future
        raises the method's exception, and EngineLostError once the line has ended."""
        future, number, broken = Future[Any](), next(self._numbers), ""
        message = frame((number, method, args))
        with self._lock:
            ended = self._cause
            if not ended:
                self._open[number] = future
                if self._socket is None:
                    self._unsent.append(message)
                else:
                    broken = _try_to_send(self._socket, message)
        if ended:
            future.set_exception(EngineLostError(self.name, ended))
        elif broken:
            self.end(broken)
        return future

    def end(self, cause: str) -> None:
        """End the line: open and later calls raise EngineLostError with `cause`. The first cause
        counts."""
        with self._lock:
            if self._cause:
                return
            self._cause = cause
            unanswered, self._open = list(self._open.values()), {}
            self._unsent.clear()
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it may be closed already
                    self._socket.shutdown(socket.SHUT_RDWR)
        for future in unanswered:
            future.set_exception(EngineLostError(self.name, cause))

    def connect(self, sock: socket.socket) -> None:
        """Attach the socket of the process, and send the calls made so far."""
        with self._lock:
            self._socket = sock
            unsent, self._unsent = self._unsent, []
            broken = _try_to_send(sock, b"".join(unsent))
        if broken:
            self.end(broken)

    def take(self, answer: tuple[int, bool, Any]) -> None:
        """Resolve a call. `answer` is its number, whether the method returned, and the value or
        exception."""
        number, has_returned, value = answer
        with self._lock:
            future = self._open.pop(number, None)
        if future is None:  # the line has ended meanwhile
            return
        if has_returned:
            future.set_result(value)
        else:
            future.set_exception(value)


def _try_to_send(sock: socket.socket, message: bytes) -> str:
    """Send a message. Returns the reason if it could not be sent, or an empty string."""
    try:
        sock.sendall(message)
    except BlockingIOError:  # the timeout of the socket's option
        return f"it has not read what was sent to it for {_SEND_S:g} s"
    except OSError:  # the reading thread sees the broken connection too, and waits for the cause
        return ""
    return ""


class Hub:
    """Server of all lines of a process, with one reading thread."""

    def __init__(self, host: str, *, num_lines: int = 1, lost_after_s: float = 5.0) -> None:
        """Listen at `host` only, the address by which other processes reach this one, for
        `num_lines` lines at a time. A line whose connection ends is ended `lost_after_s` later;
        until then the process that started the other side may give a better reason.

        Each line is an open file, so the limit of this process is raised if needed. Raises
        UserError if the system refuses.
        """
        wanted = psutil.Process().num_fds() + num_lines + _OTHER_FILES
        _allow_files(wanted, f"{num_lines:,} engines and frozen models")
        self._lost_after_s = lost_after_s
        self._lines: dict[bytes, Line] = {}
        """Lines whose process has not connected yet, by key."""
        self._num_connected = 0
        self._strangers: dict[socket.socket, None] = {}
        """Connections that have not sent a key yet, oldest first."""
        self._received = memoryview(bytearray(_READ_BYTES))
        self._has_more = False
        """Whether a socket had more data than one read returned."""
        self._is_full_until: float | None = None
        """Time until which no connection is accepted, because no file could be opened."""
        self._listener = listen(host)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waker, wakes = socket.socketpair()
        self._selector.register(wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read, args=(wakes,), name="calls", daemon=True)
        self._thread.start()

    def line(self, name: str) -> Line:
        """Create the line to a process that will `serve` its key."""
        line = Line(name)
        self._lines[line.key] = line
        return line

    def close(self) -> None:
        """Close all connections. Open calls get no answer."""
        self._waker.close()
        self._thread.join()

    def _read(self, wakes: socket.socket) -> None:
        while True:
            linger_s = min(_LINGER_S * self._num_connected, _MAX_LINGER_S)
            if linger_s >= _MIN_LINGER_S and not self._has_more:
                sleep(linger_s)
            self._has_more = False
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj is wakes:
                    self._close_all()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj.fileno() >= 0:  # not dropped a moment ago
                        self._take(key.fileobj, key.data)

    def _wait_s(self) -> float | None:
        """Timeout of the next wait for data. None waits without limit."""
        if self._is_full_until is None:
            return None
        if (left_s := self._is_full_until - monotonic()) > 0.0:
            return left_s
        self._is_full_until = None
        self._selector.register(self._listener, selectors.EVENT_READ)
        return None

    def _accept(self) -> None:
        """Accept all waiting connections."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:  # no connection is waiting
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # the connection was closed again
                # The selector would report the same connection again at once, in an endless loop.
                _log.warning("no further process can connect for now: %s", error)
                self._selector.unregister(self._listener)
                self._is_full_until = monotonic() + _FULL_S
                return
            self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it may be closed already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            timeout = struct.pack("ll", int(_SEND_S), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            self._selector.register(sock, selectors.EVENT_READ, _Connection())
            self._strangers[sock] = None
            if len(self._strangers) > len(self._lines) + _MAX_STRANGERS:
                self._drop(next(iter(self._strangers)), None)

    def _take(self, sock: socket.socket, connection: _Connection) -> None:
        line = connection.line
        wanted = _READ_BYTES if line is not None else KEY_BYTES - len(connection.key)
        try:
            num_bytes = sock.recv_into(self._received, wanted, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        data = self._received[:num_bytes]
        self._has_more |= num_bytes == _READ_BYTES
        if not num_bytes:
            self._drop(sock, line)
        elif line is not None:
            try:
                for answer in connection.frames.feed(data):
                    line.take(answer)
            except Exception as error:  # noqa: BLE001  what is unpickled may raise anything
                line.end(f"its answer cannot be read: {type(error).__name__}: {error}")
                self._drop(sock, line)
        else:
            connection.key += bytes(data)
            if len(connection.key) < KEY_BYTES:
                return
            connection.line = self._lines.pop(connection.key, None)
            if connection.line is None:
                _log.warning("a connection without a key of this run was refused")
                self._drop(sock, None)
            else:
                self._num_connected += 1
                del self._strangers[sock]
                connection.line.connect(sock)

    def _drop(self, sock: socket.socket, line: Line | None) -> None:
        self._selector.unregister(sock)
        self._strangers.pop(sock, None)
        sock.close()
        if line is not None:
            self._num_connected -= 1
            end = threading.Timer(self._lost_after_s, line.end, ("its connection has ended",))
            end.daemon = True
            end.start()

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def _allow_files(wanted: int, why: str) -> None:
    """Raise the limit of open files of this process to `wanted`. Raises UserError if the host's
    limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UserError(
            f"the first process of a run with {why} has {wanted:,} files open, and the limit of "
            f"this host is {hard:,} (`ulimit -Hn`). Raise it for the user (nofile in "
            "/etc/security/limits.conf, LimitNOFILE of a service, --ulimit nofile of a container), "
            "or take fewer engines."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Connection:
    """State of one accepted connection."""

    def __init__(self) -> None:
        self.key = b""
        self.line: Line | None = None
        """Set once the key has arrived."""
        self.frames = Frames()


def serve(
    address: tuple[str, int],
    key: bytes,
    call: Callable[[str, Sequence[Any]], Any],
    *,
    num_threads: int,
) -> None:
    """Answer the calls of a line with `call(method, args)` until it is closed, in `num_threads`
    threads. Raises OSError if nobody listens at `address`."""
    sending = threading.Lock()
    with (
        socket.create_connection(address, _CONNECT_S) as sock,
        ThreadPoolExecutor(num_threads, thread_name_prefix="calls") as pool,
    ):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(key)

        def answer(number: int, method: str, args: Sequence[Any]) -> None:
            message = frame_of_answer(number, method, args)
            with sending, contextlib.suppress(OSError):  # the caller may be gone
                sock.sendall(message)

        def frame_of_answer(number: int, method: str, args: Sequence[Any]) -> bytes:
            try:
                return frame((number, True, call(method, args)))
            except Exception as error:  # noqa: BLE001  the caller gets it
                return frame((number, False, _portable(error)))

        frames = Frames()
        while data := _received(sock):
            for request in frames.feed(data):
                pool.submit(answer, *request)


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_READ_BYTES)
    except OSError:  # reset
        return b""


def _portable(error: Exception) -> Exception:
    """The error itself, if it survives a pickle."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  whatever its own methods raise
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
