"""Reads what environments of other frameworks return: changed prompts, messages, numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from hone.envs.session import DataRow
from hone.types import Message

__all__ = [
    "appended_opening",
    "appended_text",
    "content_of",
    "finite_numbers",
    "is_content",
    "messages_of",
    "number_of",
    "text_of",
]


def messages_of(row: DataRow) -> list[Message]:
    """The prompt of a row as messages, which the caller may change. A text without a chat template
    is one message of the user."""
    if row.messages:
        return copy.deepcopy(list(row.messages))
    if isinstance(row.unrendered, str):
        return [{"role": "user", "content": row.unrendered}]
    return copy.deepcopy(row.unrendered)


def appended_text(before: str, after: str, who: str) -> str:
    """What `after` has beyond `before`. Raises ValueError where it does not begin with it."""
    if not after.startswith(before):
        raise ValueError(
            f"{who} rewrote the prompt, which begins with {before[:80]!r}, to {after[:80]!r}; only "
            "an addition at its end is possible. Write the prompt into the rows of the data"
        )
    return after[len(before) :]


def appended_opening(
    before: Sequence[Message], after: Sequence[Message], who: str
) -> str | list[Message] | None:
    """What `after` has beyond `before`: more messages, more text in the last message, or None where
    they are equal. Raises ValueError where anything else differs."""
    shared, rest = list(after[: len(before)]), list(after[len(before) :])
    if shared == list(before):
        return rest or None
    if not rest and len(shared) == len(before):
        last, grown = before[-1], shared[-1]
        if shared[:-1] == list(before[:-1]) and {**grown, "content": last["content"]} == last:
            return appended_text(text_of(last["content"]), text_of(grown["content"]), who) or None
    raise ValueError(
        f"{who} rewrote the prompt of {len(before)} messages; only messages after it, or text at "
        "its end, are possible. Write the prompt into the rows of the data"
    )


def text_of(content: Any) -> str:
    """The text of a message's content: a text, None, or a list of text parts, which are joined.

    Raises ValueError for other parts, such as images.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    others = [part for part in content if not _is_text(part)]
    if others:
        raise ValueError(f"content parts other than text are not supported: {others[0]!r:.80}")
    return "".join(part["text"] for part in content)


def content_of(content: Any) -> str | list[Any]:
    """The content of a message: its text, or its parts where one of them is no text."""
    if is_content(content) and not all(map(_is_text, content)):
        return content
    return text_of(content)


def is_content(value: Any) -> bool:
    """Whether a value is a list of content parts, as messages have it: text, images."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, Mapping) and "type" in part for part in value)
    )


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def number_of(value: Any) -> float:
    """A reward as a float: a number, or a tensor or array of one element.

    Raises whatever the conversion of another value raises.
    """
    return float(_item(value))


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the values, for logs. Others are left out."""
    plain = {str(key): _item(value) for key, value in values.items()}
    numbers = {key: float(value) for key, value in plain.items() if isinstance(value, Real)}
    return {key: number for key, number in numbers.items() if math.isfinite(number)}


def _item(value: Any) -> Any:
    """The number in a tensor or array of one element; other values unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and math.prod(value.shape) == 1 else value
