"""Tool calls in an answer: read from its text, and written as OpenAI's APIs write them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.door.nesting import is_deep
from hone.envs.session import ToolCall
from hone.envs.tools.formats.registry import detect, parse
from hone.envs.tools.reading import argument_schemas, can_be_id, needs_ids
from hone.errors import UserError
from hone.types import Message

__all__ = [
    "CalledTool",
    "ReadAnswer",
    "ReadCalls",
    "calls_reader",
    "decoded",
    "format_in",
    "with_names",
]

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of a half of a surrogate pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    @property
    def written(self) -> dict[str, Any]:
        """The call as OpenAI's chat API writes it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def rendered(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.name, "arguments": decoded(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """An answer, in parts."""

    content: str
    calls: tuple[CalledTool, ...] = ()
    reasoning: str = ""


def decoded(arguments: str) -> Any:
    """The object that the text of arguments stands for, or the text where it is none that can be
    written again: a policy has written it, and its mistakes must not end the episode."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(found, dict) or is_deep(found):
        return arguments
    if _HALF.search(arguments) and not _is_writable(json.dumps(found, ensure_ascii=False)):
        return arguments
    return found


def _is_writable(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which no UTF-8 has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_names(messages: Sequence[Message], start: int) -> tuple[Message, ...]:
    """The messages from `start` on. An answer of a tool, which clients name by the id of its call,
    gets the name of the tool, which some chat templates write."""
    names = {
        call.get("id"): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    return tuple(
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool"
        and not message.get("name")
        and message.get("tool_call_id") in names
        else message
        for message in messages[start:]
    )


def format_in(chat_template: str | None) -> str | None:
    """The format in which a chat template writes calls; None where that is not known."""
    try:
        return detect(chat_template)
    except UserError:
        return None


ReadCalls = Callable[[str, Sequence[Mapping[str, Any]], str], ReadAnswer]
"""Reads the text of a turn, given the tools of the request and the tag that the prompt has opened.
Never raises: a call that cannot be read stays in the content."""


def _is_sound(call: ToolCall) -> bool:
    """Whether a call can be written as JSON."""
    return _is_writable(call.name + call.id) and not is_deep(dict(call.arguments))


def calls_reader(chat_template: str | None) -> tuple[ReadCalls | None, str]:
    """The reader of the format in which a chat template writes calls; None, with the reason, where
    that is not known."""
    try:
        tool_format = detect(chat_template)
    except UserError as error:
        return None, str(error)

    def read(text: str, tools: Sequence[Mapping[str, Any]], opened: str) -> ReadAnswer:
        parsed = parse(text, tool_format, argument_schemas(tools), opened=opened)
        if not all(_is_sound(call) for call in parsed.calls):
            return ReadAnswer(text, (), parsed.reasoning)
        calls = tuple(
            CalledTool(
                id=call.id if can_be_id(call.id, tool_format) else _new_id(tool_format),
                name=call.name,
                arguments=json.dumps(dict(call.arguments), ensure_ascii=False),
            )
            for call in parsed.calls
        )
        return ReadAnswer(parsed.content if calls else text, calls, parsed.reasoning)

    return read, ""


def _new_id(tool_format: str) -> str:
    """An id of a call that the format's templates accept."""
    return secrets.token_hex(5)[:9] if needs_ids(tool_format) else f"call_{secrets.token_hex(12)}"
