"""Settings of the server that answers requests over HTTP."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hone.config.base import Section

__all__ = ["DoorConfig"]


class DoorConfig(Section):
    """The server that answers requests over HTTP: where it listens, and what it takes at most."""

    host: str = "127.0.0.1"
    """Address or name at which the server listens. The default is reached by programs of this
    machine alone. Requests and keys travel in the clear, so others belong into a network that you
    trust."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server; 0 takes any that is free."""

    key_file: Path | None = None
    """File with the key of the server. Where there is no such file, one that only you can read is
    written, with a new key. Unset: a new key, which is printed once."""

    model_name: str | None = None
    """Name of the model in answers; unset: `model.path`."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens; unset: the model's context. Fewer need a smaller
    KV cache."""

    max_sessions: int = Field(default=1024, ge=1)
    """Sessions that may be open at once."""

    session_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds without a request after which a session may be ended to make room for another."""

    max_requests: int = Field(default=1024, ge=1)
    """Requests that may be sampled or wait at once. Further ones are answered with status 429."""

    max_body_mib: float = Field(default=16.0, gt=0)
    """Largest body of a request, in MiB."""
