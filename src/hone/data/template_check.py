"""Finds the parts of a dialogue that a chat template leaves out. Some templates write nothing for
an unknown role or for tool calls, and raise no error.

    messages with a mark in place of each text and each tool's name ──► template ──► text
    a mark that is not in the text ──► "the call of 'weather' in message 2"

Some templates, such as Llama 3's, leave out the text of a message that calls tools, and most leave
out reasoning. Their models are trained that way, so neither is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hone.types import Message

__all__ = ["RenderError", "TemplateCheck", "shape_of"]


class RenderError(ValueError):
    """An observation cannot be appended to its sample."""


class TemplateCheck:
    """Checks one chat template for parts that it leaves out. It checks once for each shape of
    dialogues, since a check renders the dialogue again."""

    def __init__(self, refusal: type[Exception]) -> None:
        """`refusal` is the error that is raised where the template rejects messages."""
        self._refusal = refusal
        self._written: set[Hashable] = set()
        """Shapes of dialogues that the template writes completely."""

    def first_left_out(
        self,
        messages: Sequence[Message],
        render: Callable[[list[Message]], str],
        *,
        start: int = 0,
        shape: Hashable,
    ) -> str | None:
        """A description of the first part, from message `start` on, that `render` does not write;
        None where it writes all. `shape` is the result of `shape_of`, together with everything else
        that decides which parts the template writes."""
        if shape in self._written:
            return None
        try:
            lost = _left_out(messages, render, start)
        except self._refusal:
            lost = []  # the template accepts the original texts and rejects the marks
        if lost:
            return lost[0]
        self._written.add(shape)
        return None


def shape_of(messages: Sequence[Message]) -> Hashable:
    """A key of a dialogue. Dialogues with equal keys differ only in their texts, and a template
    writes the same parts of them."""
    return tuple((x["role"], _kind_of_text(x), len(_calls(x))) for x in messages)


def _left_out(
    messages: Sequence[Message], render: Callable[[list[Message]], str], start: int
) -> list[str]:
    """Descriptions of the parts that are not written, with messages counted from 1. Of content that
    is no text, the parts that are texts are checked."""
    wanted: dict[str, str] = {}
    marked: list[Message] = [*messages[:start]]
    for number, message in enumerate(messages[start:], start + 1):
        made = dict(message)
        if calls := _calls(message):
            made["tool_calls"] = renamed = list[Any]()
            for place, call in enumerate(calls):
                mark = f"hone_mark_{number}_{place}_"
                renamed.append(_renamed(call, mark))
                wanted[mark] = f"the call of {_tool_name(call)!r} in message {number}"
        elif _has_text(message):
            made["content"] = mark = f"hone_mark_{number}_"
            wanted[mark] = f"message {number}, of the role {message['role']!r}"
        elif isinstance(parts := message.get("content"), list):
            made["content"] = renewed = list[Any]()
            for place, part in enumerate(parts):
                mark = f"hone_mark_{number}_{place}_"
                is_text = isinstance(part, dict) and bool(str(part.get("text", "")).strip())
                renewed.append({**part, "text": mark} if is_text else part)
                if is_text:
                    wanted[mark] = f"a text of message {number}, of the role {message['role']!r}"
        marked.append(made)
    text = render(marked)
    if any(mark not in text for mark in wanted):
        text += render([_with_ids(message) for message in marked])
    return [part for mark, part in wanted.items() if mark not in text]


def _kind_of_text(message: Message) -> Hashable:
    content = message.get("content")
    if not isinstance(content, list):
        return _has_text(message)
    return tuple(part.get("type") if isinstance(part, dict) else "" for part in content)


def _has_text(message: Message) -> bool:
    """Whether a message has content that is text; an environment may give a list of parts."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _calls(message: Message) -> list[dict[str, Any]]:
    """The tool calls of a message; an empty list where a call has no tool's name."""
    value = message.get("tool_calls")
    calls = value if isinstance(value, list) else []
    are_named = all(isinstance(x, dict) and isinstance(_tool_name(x), str) for x in calls)
    return calls if are_named else []


def _tool_name(call: dict[str, Any]) -> Any:
    """The name of the tool: in the field `function`, as in APIs, or next to its arguments."""
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else call.get("name")


def _with_ids(message: Message) -> Message:
    """A message whose tool calls have their names as ids too: Kimi K2's template writes only
    ids."""
    calls = _calls(message)
    ids = [{**call, "id": _tool_name(call)} if "id" in call else call for call in calls]
    return {**message, "tool_calls": ids} if calls else message


def _renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": {**function, "name": name}}
    return {**call, "name": name}
