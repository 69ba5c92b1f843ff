"""The text that follows a turn of the policy which calls tools.

Most chat templates write the answers of tools only after a message whose calls are data, and a turn
of the policy is text, which is never rendered again. So the template gets a stand-in for each turn
that tools have answered: a call of each of these tools, with a mark as its argument. What the
template writes from the first token after the mark that ends a turn follows the policy's tokens:

    prompt | header of a turn | f(mark) <end> answers, header of the next turn
                                        └─────────── is appended ────────────┘

Stand-ins have no reasoning. Where a template drops the reasoning of earlier turns or writes an
empty one, the policy still continues from its own, since its tokens stay. What stands between the
turns, which is the prompt and earlier answers, must be written as it was sampled from.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from hone.data.template_check import RenderError, shape_of
from hone.data.turns_as_texts import Continuation, Render, without_empty_reasoning
from hone.types import Message, Sample

__all__ = ["after_calls", "answers_calls", "closes_turns"]

_MARK = "hone-turn-{}-of-the-policy"
_KEY = "mark"
_FORMS = ("objects", "texts", "plain")
"""How a stand-in is written, of which templates take one or another: with the arguments of its
calls as objects, or as JSON in a text; or as a text without calls, where a template has none or
refuses several in one message."""


@dataclass(slots=True)
class _Said:
    """A message of the policy: one or more turns, and what the environment has answered."""

    mark: str
    before: str
    """The text before it, from which it was sampled: the prompt, or the last observation."""
    answers: tuple[Message, ...] = ()

    @property
    def called(self) -> list[Message]:
        """The answers of tools that follow it."""
        return [*takewhile(lambda message: message["role"] == "tool", self.answers)]

    def message(self, form: str) -> Message:
        """Its stand-in, in one of `_FORMS`."""
        if form == "plain" or not self.called:
            return {"role": "assistant", "content": self.mark}
        arguments: Any = {_KEY: self.mark}
        calls = [
            {
                "id": answer.get("tool_call_id") or f"none{place:05d}",
                "type": "function",
                "function": {
                    "name": answer.get("name") or "unknown",
                    "arguments": json.dumps(arguments) if form == "texts" else arguments,
                },
            }
            for place, answer in enumerate(self.called)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def answers_calls(messages: Sequence[Message]) -> bool:
    """Whether messages are answers of tools, and nothing else."""
    return bool(messages) and all(message["role"] == "tool" for message in messages)


def after_calls(
    sample: Sample,
    messages: Sequence[Message],
    render: Render,
    ends: Collection[str],
    kept: set[int],
) -> Continuation | None:
    """What a chat template writes after the last turn of a sample that `messages` answer; None
    where tools have answered neither it nor an earlier turn.

    `ends` are the texts of the tokens that end a turn. `kept` has hashes of dialogues that `render`
    has been found to keep as they were, and gets that of this one; others that differ from them
    only in their texts are not tried again. Raises RenderError where the template writes what the
    policy was sampled from in another way once `messages` follow it.
    """
    said = _said(sample, messages)
    if not any(each.called for each in said):
        return None
    last, refusal = said[-1], None
    for form in _FORMS:
        earlier: list[Message] = [*sample.prompt.messages]
        for each in said[:-1]:
            earlier += [each.message(form), *each.answers]
        history = [*earlier, last.message(form)]
        try:
            whole = render([*history, *messages], True)
        except RenderError as error:
            refusal = refusal or error
            continue
        if last.mark not in whole:
            continue
        if not answers_calls(messages):
            return Continuation(_behind_all(said, whole, form, ends), history)
        if (shape := hash((form, shape_of([*history, *messages])))) not in kept:
            _require_kept(last, whole, earlier, render)
            kept.add(shape)
        return Continuation(whole[_end_of(last, whole, form, ends) :], history)
    raise refusal or RenderError(
        "the chat template does not write the assistant's messages; name another one in "
        "model.chat_template"
    )


def closes_turns(
    prompt: Sequence[Message], end: str, render: Render, ends: Collection[str]
) -> bool:
    """Whether a chat template ends turns without calls with the text `end`. One that it writes only
    between calls and their answers opens the answers, too."""
    said = _Said(_MARK.format(0), "")
    again: Message = {"role": "user", "content": "and?"}
    whole = render([*prompt, said.message("plain"), again], True)
    place = whole.rfind(said.mark)
    return place >= 0 and _first_of(ends, whole, place) == whole.find(end, place)


def _said(sample: Sample, messages: Sequence[Message]) -> list[_Said]:
    """The policy's messages, the last of them answered by `messages`."""
    said: list[_Said] = []
    before, is_new = sample.prompt.text, True
    for number, turn in enumerate(sample.turns):
        if is_new:
            said.append(_Said(_MARK.format(number), before))
        said[-1].answers = turn.messages
        # An observation without messages continues the policy's own message.
        before, is_new = turn.observed, bool(turn.messages)
    said[-1].answers = tuple(messages)
    return said


def _require_kept(last: _Said, whole: str, earlier: list[Message], render: Render) -> None:
    """Raise RenderError where `whole` does not begin with what the policy's last message was
    sampled from, up to the header of that message. Whitespace does not count."""
    asked = render(earlier, True)
    kept = commonprefix([asked, render(earlier, False)])  # noqa: RUF071 - of texts
    if not asked.endswith(last.before) or not _packed(whole).startswith(_packed(kept)):
        raise RenderError(
            "the chat template writes what stands before the policy's turn anew once the answers "
            "of tools follow it. What the policy was sampled from cannot change; give a template "
            "that keeps it in model.chat_template"
        )


def _packed(text: str) -> str:
    return "".join(text.split())


def _behind_all(said: Sequence[_Said], whole: str, form: str, ends: Collection[str]) -> str:
    """The text after the last message, where all that is not the policy's is as it was."""
    position = 0
    for each in said:
        header = next(
            (
                text
                for text in (each.before, without_empty_reasoning(each.before))
                if whole.startswith(text, position)
            ),
            None,
        )
        if header is None:
            raise RenderError(
                "the chat template writes earlier messages anew once others follow them: instead "
                f"of {each.before[-60:]!r} it has {whole[position : position + 60]!r}. What the "
                "policy was sampled from cannot change; give a template that keeps it in "
                "model.chat_template"
            )
        position += len(header)
        if each.called:
            position = _end_of(each, whole, form, ends)
        elif whole.startswith(each.mark, position):
            position += len(each.mark)
        else:
            raise RenderError(
                "the chat template does not render the assistant's messages as they are; give "
                "another one in model.chat_template"
            )
    return whole[position:]


def _end_of(said: _Said, whole: str, form: str, ends: Collection[str]) -> int:
    """The place after a stand-in that tools have answered, with all that belongs to its calls."""
    start = whole.rfind(said.mark) + len(said.mark)
    if form == "plain":
        return start
    if (place := _first_of(ends, whole, start)) is None:
        raise RenderError(
            "after a turn that calls tools the chat template writes none of the tokens that end a "
            f"turn of the model ({', '.join(map(repr, sorted(ends))) or 'it declares none'}), so "
            "where the answers begin is not known. Name the token in eos_token_id of the model's "
            "generation_config.json"
        )
    return place


def _first_of(ends: Collection[str], whole: str, start: int) -> int | None:
    """The place of the first of the texts from `start` on."""
    places = [place for end in ends if end and (place := whole.find(end, start)) >= 0]
    return min(places, default=None)
