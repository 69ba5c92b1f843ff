"""How deeply the values of a request may be nested: templates, encoders of JSON and texts of errors
go through them by recursion."""

from __future__ import annotations

from typing import Any, cast

__all__ = ["MAX_DEPTH", "is_deep"]

MAX_DEPTH = 100


def is_deep(value: Any) -> bool:
    """Whether objects and lists lie in each other more than `MAX_DEPTH` times."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            part
            for entry in level
            for part in (
                cast("dict[str, Any]", entry).values() if isinstance(entry, dict) else entry
            )
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True
