"""The text that follows a turn of the policy which is a text.

The whole conversation is rendered with a mark in place of each turn of the policy. The text after
the last mark is what follows. The texts before it must equal those of the sample: with a template
that renders earlier messages differently once others follow, the policy would continue from another
history than it was sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hone.data.template_check import RenderError
from hone.types import Message, Sample, opened_tag

__all__ = ["Continuation", "Render", "after_texts", "without_empty_reasoning"]

_MARK = "hone-turn-{}-of-the-policy"
_END_MARK = "hone-end-of-a-turn"
_TURNS = re.compile(_MARK.format(r"\d+") + rf"(?:\s*</\w+>\s*{_END_MARK})?")
"""A turn of the policy: its mark, or that of its reasoning up to the end of its text."""
_EMPTY_REASONING = re.compile(r"(?:<(\w+)>\s*</\1>|<\|channel>\w+\s*<channel\|>)\s*\Z")

Render = Callable[[list[Message], bool], str]
"""Renders messages, with or without the header of the policy's next turn. Raises RenderError."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows the last turn of a sample."""

    text: str
    """From the end of the policy's message to the header of its next one."""
    history: list[Message]
    """The messages that were rendered before the new ones."""


def after_texts(sample: Sample, messages: Sequence[Message], render: Render) -> Continuation:
    """What a chat template writes after the last turn of a sample, which `messages` answer.

    Raises RenderError where it writes what the policy was sampled from in another way once they
    follow.
    """
    problems: list[str] = []
    for turns in _histories(sample):
        history = [*sample.prompt.messages, *turns]
        *pieces, new = _TURNS.split(render([*history, *messages], True))
        if (problem := _difference(sample, pieces)) is None:
            return Continuation(new, history)
        problems.append(problem)
    raise RenderError(problems[0])


def without_empty_reasoning(header: str) -> str:
    """The header of a turn without a reasoning at its end that is closed at once. Templates write
    one where the policy shall not reason, and many leave it out of earlier turns."""
    return _EMPTY_REASONING.sub("", header)


def _histories(sample: Sample) -> Iterator[list[Message]]:
    """The conversation after the prompt with a mark for each turn of the policy, in the ways in
    which templates know reasoning, until one of them gives what the policy was sampled from.

    Where a template has opened reasoning before a turn, and the turn closes it, the turn is marked
    as reasoning and a text after it: a template would write an empty reasoning for a text alone.
    """
    yield (plain := _marked(sample))
    if (inline := _marked(sample, reasoning="inline")) != plain:
        yield inline
        yield _marked(sample, reasoning="field")


def _marked(
    sample: Sample, *, reasoning: Literal["inline", "field"] | None = None
) -> list[Message]:
    """`reasoning`: whether it is a part of the content, in its tags, or the message's
    `reasoning_content`."""
    messages: list[Message] = []
    message: Message = {"role": "assistant", "content": ""}
    before = sample.prompt.text
    for number, turn in enumerate(sample.turns):
        mark = _MARK.format(number)
        tag = opened_tag(before).rstrip() if reasoning else ""
        closing = tag.replace("<", "</")
        if not tag or closing not in turn.text:
            message["content"] += mark
        elif reasoning == "field" and not message["content"]:
            message |= {"reasoning_content": mark, "content": _END_MARK}
        else:
            message["content"] += f"{tag}\n{mark}\n{closing}\n\n{_END_MARK}"
        before = turn.observed
        is_last = number == len(sample.turns) - 1
        if turn.messages or is_last:
            messages += [message, *turn.messages]
            message = {"role": "assistant", "content": ""}
        else:
            message["content"] += turn.observed
    return messages


def _difference(sample: Sample, pieces: Sequence[str]) -> str | None:
    """Why the texts around the policy's turns, up to the last one, are not those that it was
    sampled from; None where they are."""
    expected = [sample.prompt.text, *(turn.observed for turn in sample.turns[:-1])]
    if len(pieces) != len(expected):
        return (
            "the chat template does not render the assistant's messages as they are; give "
            "another one in model.chat_template, or answer with a text of role None"
        )
    for number, (now, before) in enumerate(zip(pieces, expected, strict=True)):
        if now not in (before, without_empty_reasoning(before)):
            where = "the prompt" if number == 0 else f"what follows turn {number}"
            return (
                f"the chat template writes {where} anew once messages follow it: it was "
                f"{_end(before)}, and is {_end(now)}. What the policy was sampled from cannot "
                "change; give a template that keeps it in model.chat_template, or answer with "
                "a text of role None"
            )
    return None


def _end(text: str) -> str:
    """The end of a text, for messages on two texts with the same start."""
    return repr(text if len(text) <= 60 else f"...{text[-60:]}")
