"""Reading the lines of a workload file, each one JSON object with known keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from hone.config.base import Section
from hone.config.errors import UserError
from hone.config.schema import locate, nearest

__all__ = ["read_lines"]

Line = TypeVar("Line", bound=Section)


def read_lines(path: Path, kind: type[Line]) -> Iterator[tuple[int, Line]]:
    """The lines of a JSONL file with their numbers, from 1; blank ones are passed over.

    Raises UserError naming the line that is wrong.
    """
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                try:
                    yield number, kind.model_validate_json(text, strict=True)
                except ValidationError as error:
                    raise UserError(f"{path}, line {number}: {_explain(error, kind)}") from error


def _explain(error: ValidationError, kind: type[Section]) -> str:
    """The problem of a line. A misspelt key comes first: it explains one that is missing."""
    details = error.errors(include_url=False)
    detail = next((x for x in details if x["type"] == "extra_forbidden"), details[0])
    path = [str(part) for part in detail["loc"]]
    match detail["type"]:
        case "json_invalid" | "model_type":
            return f"no JSON object: {detail['msg']}"
        case "extra_forbidden":
            near = nearest(kind, path)
            keys = ", ".join(kind.model_fields)
            hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {keys}"
            return f"unknown key '{path[0]}'; {hint}"
        case "missing":
            return f"'{path[0]}' is required"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case _:
            field = locate(kind, path[:1])
            assert field is not None, f"{path=}"
            return f"{path[0]} is {detail['input']!r}; allowed: {field.allowed}"
