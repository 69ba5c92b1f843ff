"""Who may use the server.

Each request has a key: that of the server, which opens everything, or that of one session. A
session's key is made of its id and a secret of this process, so none is kept, and the key of a
session that has ended still differs from a wrong one. Keys are compared in constant time and never
logged. What comes in is JSON; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from hone.door.refusal import Refusal
from hone.errors import UserError
from hone.observe.disk import writing

__all__ = ["Keys", "is_loopback", "new_id", "read_key"]

_PREFIX = "hone-"
_MIN_KEY = 16
"""Fewest characters of a key that a file gives."""


class Keys:
    """The key of a server, and those of its sessions."""

    def __init__(self, key: str | None = None) -> None:
        """`key` is that of the server; None draws one."""
        self.key = key or _PREFIX + secrets.token_urlsafe(32)
        self._secret = secrets.token_bytes(32)

    def session_key(self, session_id: str) -> str:
        """The key of a session."""
        proof = hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()
        return f"{_PREFIX}{session_id}.{proof}"

    def session_of(self, headers: Mapping[str, str], named: str | None) -> str | None:
        """The id of the session that a request is for: the one `named` in its path, else the one
        whose key it has; None for a request with the server's key and no session.

        Raises Refusal without a right key.
        """
        given = _given_key(headers)
        if given is None:
            raise Refusal(
                401, "the request has no key; send Authorization: Bearer KEY, or x-api-key: KEY"
            )
        if _are_equal(given, self.key):
            return named
        owner = given.removeprefix(_PREFIX).partition(".")[0]
        is_right = _are_equal(given, self.session_key(owner)) and named in (None, owner)
        if not is_right:
            raise Refusal(401, "the key is not that of this server or session")
        return owner

    def require_server_key(self, headers: Mapping[str, str]) -> None:
        """Raise Refusal for a request without the key of the server."""
        given = _given_key(headers)
        if given is None or not _are_equal(given, self.key):
            raise Refusal(401, "this needs the key of the server; a session's key is not enough")


def read_key(file: Path | None) -> str | None:
    """The key in `file`; where there is no such file, a new one with a new key, which only its
    owner can read. None without a file. Raises UserError for an empty or short key,
    and DiskError where the file cannot be written."""
    if file is None:
        return None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        key = _PREFIX + secrets.token_urlsafe(32)
        with writing(file, "serve.key_file"):
            file.parent.mkdir(parents=True, exist_ok=True)
            place = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(place, "w", encoding="utf-8") as opened:
                    opened.write(f"{key}\n")
            except OSError:  # an empty file would be refused at the next start
                file.unlink()
                raise
        return key
    if len(key) < _MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(
            f"serve.key_file={str(file)!r} must hold one key of at least {_MIN_KEY} ASCII "
            "characters without blanks, such as `openssl rand -hex 32` prints; or name a file that "
            "does not exist, and one is written"
        )
    return key


def new_id() -> str:
    """A random id that nobody guesses."""
    return secrets.token_hex(16)


def is_loopback(host: str) -> bool:
    """Whether `host` is reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _given_key(headers: Mapping[str, str]) -> str | None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def _are_equal(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
