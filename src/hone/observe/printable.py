"""Text of data and models, made safe for a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all that a terminal obeys, but for tab and new line
    "\u202a-\u202e\u2066-\u2069"  # these turn the direction of what follows
    "\ud800-\udfff]"  # no characters: UTF-8 cannot write them
)


def printable(text: str) -> str:
    """`text` with control characters written as escapes: `\\x1b` for the one that colours."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)
