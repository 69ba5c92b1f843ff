"""Renders an environment's observation to the tokens that follow a turn of the policy.

The policy's tokens are never rendered again. With a chat template, the whole conversation is
rendered with a mark in place of each turn of the policy. The text after the last mark, from the end
of the policy's message to the header of its next one, is appended. The texts before it must equal
those of the sample. A template that renders earlier messages differently once others follow fails
the sample; otherwise the policy would continue from another history than it was sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from jinja2 import TemplateError

from hone.data.chat import template_arguments, uses_chat
from hone.data.observation_limit import cut_observation
from hone.data.settings import DataConfig
from hone.data.sources import shorten
from hone.data.template_check import RenderError, TemplateCheck, shape_of
from hone.data.tool_schemas import ToolSchemas
from hone.families.tokens import is_of_tokenizers, unknown_token
from hone.types import Message, Observation, Prompt, Sample, StopReason, opened_tag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TurnRenderer"]

_MARK = "hone-turn-{}-of-the-policy"
_END_MARK = "hone-end-of-a-turn"
_TURNS = re.compile(_MARK.format(r"\d+") + rf"(?:\s*</\w+>\s*{_END_MARK})?")
"""A turn of the policy: its mark, or that of its reasoning up to the end of its text."""


class TurnRenderer:
    """Renders observations for one tokenizer, like `Renderer` for prompts."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        *,
        vocab_size: int,
        end_ids: Collection[int] = (),
        tools: ToolSchemas = (),
        max_prompt_tokens: int | None = None,
        max_observation_tokens: int | None = None,
    ) -> None:
        """`vocab_size` is that of the model; `end_ids` are the tokens that end one of its turns
        (`hone.models.load.load_end_ids`); `tools` are those that `Renderer` has shown.
        `max_prompt_tokens` is the longest prompt that leaves room for a completion, for openings,
        and `max_observation_tokens` the longest message of the environment; None: any."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.tools = tools
        self.max_prompt_tokens = max_prompt_tokens
        self.max_observation_tokens = max_observation_tokens
        self.num_cut = 0
        """Messages of the environment that have lost their middle."""
        self.uses_chat = uses_chat(tokenizer, cfg)
        # Ids that end a turn, with their texts.
        self.ends = {end: cast(str, tokenizer.decode([end])) for end in end_ids}
        self._template_check = TemplateCheck(RenderError)

    def __call__(
        self, sample: Sample, observation: Observation
    ) -> tuple[str, tuple[Message, ...], tuple[int, ...]]:
        """The text after the last turn, its messages, and the ids to append.

        Raises RenderError.
        """
        text, messages, token_ids = self._appended(sample, self._cut(observation))
        said = f", {shorten(repr(text))}," if text else ""
        what = f"what the environment answers to turn {len(sample.turns)}{said}"
        self._require_known(token_ids, sample.prompt, what)
        return text, messages, token_ids

    def opening(self, prompt: Prompt, observation: Observation) -> Prompt:
        """The prompt with what a session says before the first turn: a text goes to the end of the
        last message, or of the prompt without a chat template, and messages go after the last one.

        Raises RenderError.
        """
        said = self._cut(observation).content
        messages: tuple[Message, ...] = ()
        if prompt.messages:
            history, new = self._opened(prompt, said)
            messages = (*history, *new)
            text = self._render(prompt, list(messages))
            self._require_written(prompt, history, new)
            token_ids = self._encode(text)
        elif isinstance(said, str):
            text = prompt.text + said
            token_ids = (*prompt.token_ids, *self._encode(said))
        else:
            raise RenderError(
                f"row {prompt.id}: the session starts with chat messages, and prompts are rendered "
                "without a chat template; start with a text, or use a tokenizer that has a "
                "template with data.chat 'auto'"
            )
        self._require_known(token_ids, prompt, f"the start of the session, {shorten(repr(said))},")
        limit = self.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            raise RenderError(
                f"row {prompt.id}: with what the session starts with the prompt has "
                f"{len(token_ids):,} tokens, and {limit:,} leave room for a completion of full "
                "length; start with less, or lower the longest completion"
            )
        is_text = isinstance(prompt.unrendered, str) and isinstance(said, str)
        return replace(
            prompt,
            text=text,
            token_ids=token_ids,
            messages=messages,
            unrendered=f"{prompt.unrendered}{said}" if is_text else [*messages],
        )

    def _cut(self, observation: Observation) -> Observation:
        """The observation with messages of at most `max_observation_tokens`."""
        if self.max_observation_tokens is None:
            return observation
        limit, decode = self.max_observation_tokens, self._decode
        observation, num_cut = cut_observation(observation, limit, self._encode, decode)
        self.num_cut += num_cut
        return observation

    def _decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def _opened(
        self, prompt: Prompt, said: str | Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[Message]]:
        """The messages of the prompt that stay as they are, and those that are new or changed."""
        if not isinstance(said, str):
            return prompt.messages, tuple(said)
        *earlier, last = prompt.messages
        content = last.get("content")
        if not isinstance(content, str):
            raise RenderError(
                f"row {prompt.id}: the session starts with a text, which goes to the end of the "
                "last message, and that has no text; start with messages"
            )
        return earlier, ({**last, "content": content + said},)

    def _require_known(self, token_ids: Sequence[int], prompt: Prompt, what: str) -> None:
        unknown = unknown_token(token_ids, self.vocab_size, self.tokenizer.convert_ids_to_tokens)
        if unknown:
            raise RenderError(
                f"row {prompt.id}: {what} has {unknown}, and the model has {self.vocab_size}: its "
                "tokenizer has more. Answer without it, or name the model's own tokenizer in "
                "model.tokenizer"
            )

    def _appended(
        self, sample: Sample, observation: Observation
    ) -> tuple[str, tuple[Message, ...], tuple[int, ...]]:
        if observation.token_ids:
            return "", (), observation.token_ids
        content, messages = observation.content, tuple[Message, ...]()
        if not isinstance(content, str):
            messages = tuple(content)
        elif self.uses_chat and observation.role is not None:
            messages = ({"role": observation.role, "content": content},)
        if not messages:
            assert isinstance(content, str)
            return content, (), self._encode(content)
        text = self._behind_last_turn(sample, messages)
        return text, messages, self._encode(text.removeprefix(self._ended_by(sample, text)))

    def _behind_last_turn(self, sample: Sample, messages: Sequence[Message]) -> str:
        if not self.uses_chat:
            raise RenderError(
                "the environment answers with chat messages, and prompts are rendered without a "
                "chat template; answer with a text, or use a tokenizer that has a template with "
                "data.chat 'auto'"
            )
        problems: list[str] = []
        for turns in _histories(sample):
            history = [*sample.prompt.messages, *turns]
            *pieces, new = _TURNS.split(self._render(sample.prompt, [*history, *messages]))
            if (problem := _difference(sample, pieces)) is None:
                self._require_written(sample.prompt, history, messages)
                return new
            problems.append(problem)
        raise RenderError(problems[0])

    def _require_written(
        self, prompt: Prompt, history: Sequence[Message], messages: Sequence[Message]
    ) -> None:
        """Raise RenderError where the template leaves out one of the messages after `history`."""
        part = self._template_check.first_left_out(
            [*history, *messages],
            partial(self._render, prompt),
            start=len(history),
            shape=shape_of(messages),
        )
        if part is not None:
            raise RenderError(
                f"the chat template leaves out {part}; answer with a role that it writes, or "
                "name another template in model.chat_template"
            )

    def _render(self, prompt: Prompt, messages: list[Message]) -> str:
        arguments = template_arguments(
            self.tokenizer, prompt.metadata, f"row {prompt.id}", tools=self.tools
        )
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **arguments
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RenderError(
                f"the chat template does not accept the environment's messages: {error}"
            ) from error
        return cast(str, text)

    def _ended_by(self, sample: Sample, text: str) -> str:
        """The end token at the start of `text` that must not be appended, since the policy has
        sampled it, or another end token, at the end of its turn; else an empty text."""
        turn = sample.turns[-1]
        if turn.stop_reason is not StopReason.EOS:
            return ""
        last = sample.token_ids[turn.end - 1]
        ends = [cast(str, self.tokenizer.decode([last]))]
        if last in self.ends:
            ends += self.ends.values()
        return next(filter(text.startswith, ends), "")

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            found: Any = self.tokenizer(text, add_special_tokens=False, verbose=False)
        except Exception as error:
            if not is_of_tokenizers(error):
                raise
            raise RenderError(
                f"the tokenizer cannot encode the observation ({error}): {shorten(text)}"
            ) from error
        return tuple(found["input_ids"])


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
        if now != before:
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
