"""Hashes that are equal on every machine, platform and Python version."""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["keyed_hash"]


def keyed_hash(*parts: int | str) -> int:
    """64-bit hash of the parts."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest())
