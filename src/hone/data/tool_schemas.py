"""The schemas of tools that a chat template gets: those of the environment, then those of a row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hone.data.columns import without_nulls
from hone.data.sources import shorten
from hone.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TOOLS", "ToolSchemas", "all_tools", "require_written"]

TOOLS = "tools"
"""The column of a row's own tools, as in TRL."""
ToolSchemas = Sequence[Mapping[str, Any]]
"""Schemas of functions, each `{"type": "function", "function": {"name": ...}}`."""
_MARK = "hone_tool_mark_{}"


def all_tools(tools: ToolSchemas, columns: Mapping[str, Any], location: str) -> list[Any]:
    """The environment's `tools`, then those in the column `tools` of a row: a list of objects, or
    such a list as JSON text.

    Raises UserError, naming `location`, for another value, and for a tool of the row that has the
    name of one of the environment's.
    """
    own = _row_tools(columns.get(TOOLS), location)
    if taken := {_name(tool) for tool in tools} & {_name(tool) for tool in own}:
        raise UserError(
            f"{location}: column {TOOLS!r} has the tool {min(map(str, taken))!r}, and so has the "
            "environment (env.tools); a call could mean either, so rename one of them"
        )
    return [*tools, *own]


def require_written(
    tokenizer: PreTrainedTokenizerBase, tools: ToolSchemas, *, uses_chat: bool
) -> None:
    """Raise UserError where prompts would not show the environment's tools to the policy."""
    if not uses_chat:
        raise UserError(
            "the environment's tools (env.tools) are shown to the model by a chat template, and "
            "prompts are rendered without one; use a tokenizer that has one with data.chat 'auto', "
            "or give one in model.chat_template"
        )
    marks = [_MARK.format(number) for number in range(len(tools))]
    marked: list[Any] = [_renamed(tool, mark) for tool, mark in zip(tools, marks, strict=True)]
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hello"}],
            tools=marked,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"the chat template does not accept the environment's tools (env.tools): {error}. "
            "Name a template that takes them in model.chat_template"
        ) from error
    left_out = [tool for tool, mark in zip(tools, marks, strict=True) if mark not in str(text)]
    if left_out:
        raise UserError(
            f"the chat template does not write the environment's tool {_name(left_out[0])!r} "
            "(env.tools), so the model would not know of it; name a template that writes tools in "
            "model.chat_template"
        )


def _row_tools(value: Any, location: str) -> list[Any]:
    tools: Any = without_nulls(value)
    if isinstance(value, str) and value.strip():
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError):
            tools = value
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(
            f"{location}: column {TOOLS!r} goes into the chat template, and must hold a list of "
            "JSON schemas, as [{'type': 'function', 'function': {'name': ...}}], or that as JSON "
            f"text, got {shorten(repr(value))}; mend it, or rename a column that is something else"
        )
    return tools or []


def _name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool.get("name")


def _renamed(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": {**function, "name": name}}
    return {**tool, "name": name}
