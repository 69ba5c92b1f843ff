"""Finds the parts of a dialogue that a chat template leaves out: some templates write nothing for a
role that they do not know, or for calls of tools, and raise no error.

    the messages, a mark in place of each text and each name of a tool ──► template ──► text
    a mark that is not in the text ──► "the call of 'weather' in message 2"

What a message says is left out by some templates where it also calls tools, as Llama 3's do, and
what it thinks by most: their models are trained so, and neither counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hone.types import Message

__all__ = ["TemplateCheck", "shape_of"]


class TemplateCheck:
    """Looks for what one chat template leaves out, once for all dialogues of a shape, since it
    takes another rendering."""

    def __init__(self, refusal: type[Exception]) -> None:
        """`refusal` is the error of a rendering that the template refuses."""
        self._refusal = refusal
        self._written: set[Hashable] = set()
        """Shapes of dialogues of which the template leaves nothing out."""

    def first_left_out(
        self,
        messages: Sequence[Message],
        render: Callable[[list[Message]], str],
        *,
        start: int = 0,
        shape: Hashable,
    ) -> str | None:
        """The first part of the messages from `start` on that `render` does not write, for people;
        None where it writes all. `shape` is that of `shape_of`, and of what else decides over what
        the template writes."""
        if shape in self._written:
            return None
        try:
            lost = _left_out(messages, render, start)
        except self._refusal:
            lost = []  # it accepts the texts as they are, and no others in their place
        if lost:
            return lost[0]
        self._written.add(shape)
        return None


def shape_of(messages: Sequence[Message]) -> Hashable:
    """Equal for dialogues that differ in their texts alone, of which a template writes the same
    parts."""
    return tuple((x["role"], _has_text(x), len(_calls(x))) for x in messages)


def _left_out(
    messages: Sequence[Message], render: Callable[[list[Message]], str], start: int
) -> list[str]:
    """The parts that are not written; messages count from 1. Only content that is text is looked
    for."""
    wanted: dict[str, str] = {}
    marked: list[Message] = [*messages[:start]]
    for number, message in enumerate(messages[start:], start + 1):
        made = dict(message)
        if calls := _calls(message):
            made["tool_calls"] = renamed = list[Any]()
            for place, call in enumerate(calls):
                mark = f"hone_mark_{number}_{place}_"
                renamed.append(_renamed(call, mark))
                wanted[mark] = f"the call of {_called(call)!r} in message {number}"
        elif _has_text(message):
            made["content"] = mark = f"hone_mark_{number}_"
            wanted[mark] = f"message {number}, of the role {message['role']!r}"
        marked.append(made)
    text = render(marked)
    if any(mark not in text for mark in wanted):
        text += render([_with_ids(message) for message in marked])
    return [part for mark, part in wanted.items() if mark not in text]


def _has_text(message: Message) -> bool:
    """Whether a message has content that is text; an environment may give a list of parts."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _calls(message: Message) -> list[dict[str, Any]]:
    """The calls of tools in a message, as far as they have names."""
    calls = message.get("tool_calls")
    found = calls if isinstance(calls, list) else []
    return found if all(isinstance(x, dict) and isinstance(_called(x), str) for x in found) else []


def _called(call: dict[str, Any]) -> Any:
    """The name of the tool: of its function, as in APIs, or next to its arguments."""
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else call.get("name")


def _with_ids(message: Message) -> Message:
    """A message whose calls of tools have their names as ids, too: Kimi K2's template writes ids
    alone."""
    calls = _calls(message)
    ids = [{**call, "id": _called(call)} if "id" in call else call for call in calls]
    return {**message, "tool_calls": ids} if calls else message


def _renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": {**function, "name": name}}
    return {**call, "name": name}
