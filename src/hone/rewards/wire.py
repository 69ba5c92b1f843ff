"""Length-prefixed messages over a stream socket: four bytes of length, then the body."""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Iterator

__all__ = ["MAX_IMAGE_BYTES", "MAX_RESULT_BYTES", "ProtocolError", "Stream", "receive", "send"]

MAX_RESULT_BYTES = 1 << 20
"""Largest message accepted from a worker, which runs untrusted code; an environment's answer may
have images besides."""
MAX_IMAGE_BYTES = 16 << 20
"""Most bytes of the images of one answer, in base64."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16


class ProtocolError(Exception):
    """The other side sent something that is not a message."""


def send(sock: socket.socket, body: bytes) -> None:
    """Send one message over a blocking socket."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes | None:
    """Wait for one message on a blocking socket; None when the other side has closed."""
    header = _receive_exactly(sock, _LENGTH.size)
    return None if header is None else _receive_exactly(sock, _LENGTH.unpack(header)[0])


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    body = bytearray()
    while len(body) < num_bytes:
        piece = sock.recv(min(num_bytes - len(body), 1 << 20))
        if not piece:
            return None
        body += piece
    return bytes(body)


class Stream:
    """One end of a socket that never blocks, whatever the other side does."""

    def __init__(self, sock: socket.socket, *, max_bytes: int | None) -> None:
        """A longer message than `max_bytes` is an error; None: any is read."""
        sock.setblocking(False)
        self.sock = sock
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self.ended = False
        """The other side has closed."""
        self._outgoing = bytearray()
        self._incoming = bytearray()

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing) and not self.ended

    def put(self, body: bytes) -> None:
        """Queue one message and send what the socket takes now."""
        self._outgoing += _LENGTH.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                sent = self.sock.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended = True

    def take(self) -> Iterator[bytes]:
        """The messages that have arrived. Raises ProtocolError at an impossible length."""
        self._read()
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > self._max_bytes:
                raise ProtocolError(f"message of {length} bytes, at most {self._max_bytes}")
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                return
            body = bytes(self._incoming[_LENGTH.size : end])
            del self._incoming[:end]
            yield body

    def _read(self) -> None:
        try:
            while len(self._incoming) <= 2 * self._max_bytes:
                piece = self.sock.recv(_READ_BYTES)
                if not piece:
                    self.ended = True
                    return
                self._incoming += piece
        except BlockingIOError:
            return
        except ConnectionError:
            self.ended = True

    def close(self) -> None:
        self.sock.close()
