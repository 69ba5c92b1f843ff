"""Reads the tool calls of a turn into its `Action`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hone.envs.session import Action, ToolCall
from hone.envs.tools.formats.found import Schemas
from hone.envs.tools.formats.registry import FORMATS, parse

__all__ = ["argument_schemas", "can_be_id", "needs_ids", "read_action"]

_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""An id of a call as Mistral's templates ask for it."""


def argument_schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schema of each tool's arguments by name, from schemas of functions as chat templates get
    them."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def read_action(action: Action, tool_format: str, schemas: Schemas) -> Action:
    """The action with `content`, `reasoning`, `tool_calls` and `parse_error` as its `text` says
    them in a format, a name of `formats.registry.FORMATS`. `schemas` are those of
    `argument_schemas`. Without `action.opened`, a call in reasoning that does not end would be
    taken for a call."""
    parsed = parse(action.text, tool_format, schemas, opened=action.opened)
    is_plain = parsed.content == action.text.strip()
    calls = parsed.calls
    if needs_ids(tool_format):
        calls = tuple(
            _with_id(call, tool_format, action.index, place) for place, call in enumerate(calls)
        )
    return replace(
        action,
        content=action.text if is_plain else parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        parse_error=parsed.parse_error,
    )


def needs_ids(tool_format: str) -> bool:
    """Whether templates of a format refuse an answer without the id of its call."""
    return FORMATS[tool_format].needs_ids


def can_be_id(written: str, tool_format: str) -> bool:
    """Whether the id that the policy has written for a call names it in messages."""
    return bool(_ID.fullmatch(written)) if needs_ids(tool_format) else bool(written)


def _with_id(call: ToolCall, tool_format: str, turn: int, place: int) -> ToolCall:
    """The call with an id that templates accept: the policy's own where it is one."""
    if can_be_id(call.id, tool_format):
        return call
    return replace(call, id=f"t{turn % 10_000:04d}c{place % 1000:03d}")
