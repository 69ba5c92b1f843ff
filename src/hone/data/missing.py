"""Answers and completions that are not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.data.rows import SourceRow
from hone.images.parts import has_images

__all__ = ["is_silent", "listed", "nothing_in"]


def nothing_in(row: SourceRow, column: str | None, role: str) -> str:
    """The message, with the place, that the column of `role` is empty in a row."""
    return (
        f"{row.location}: nothing in column {column!r}, which was to give the {role}; "
        f"the row has {listed(row.columns)}"
    )


def is_silent(value: Any) -> bool:
    """Whether a completion says nothing: null, blank text, no message, or a last message of the
    assistant without text and calls of tools."""
    if isinstance(value, str):
        return not value.strip()
    if not isinstance(value, list) or not value:
        return value is None or value == []
    last = value[-1]
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    content = last.get("content")
    if has_images(content):
        return False
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return not any(text.strip() if isinstance(text, str) else text for text in texts)


def listed(columns: Mapping[str, Any]) -> str:
    """The names of columns, for messages."""
    return ", ".join(columns) or "no columns"
