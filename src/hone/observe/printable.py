"""Makes text of data, models and settings fit for a terminal or a page."""

from __future__ import annotations

import re
from html import escape

__all__ = ["breakable", "printable"]

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters of a terminal, except tab and newline
    "\u202a-\u202e\u2066-\u2069"  # characters that change the text direction
    "\ud800-\udfff]"  # surrogates, which UTF-8 cannot encode
)

_JOINT = re.compile(r"(?<=\w[._/:])(?=[A-Za-z])")
"""Where a key, metric or path goes on after a separator; not within a number."""


def printable(text: str) -> str:
    """Replace control characters in `text` by escapes, such as `\\x1b`."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def breakable(text: str) -> str:
    """HTML of `text` whose keys, metrics and paths may break after a dot, underscore, slash or
    colon, so that a narrow page need not break them inside a word."""
    return "<wbr>".join(escape(part) for part in _JOINT.split(text))
