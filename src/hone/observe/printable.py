"""Makes text of data and models safe for a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters of a terminal, except tab and newline
    "\u202a-\u202e\u2066-\u2069"  # characters that change the text direction
    "\ud800-\udfff]"  # surrogates, which UTF-8 cannot encode
)


def printable(text: str) -> str:
    """Replace control characters in `text` by escapes, such as `\\x1b`."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)
