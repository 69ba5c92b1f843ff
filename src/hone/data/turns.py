"""What an environment says, as the tokens that go behind a turn of the policy.

The policy's tokens are never rendered again. Under a chat template a message is rendered by the
difference: the whole conversation is rendered with a mark in place of each turn of the policy, and
what follows the last mark, from the end of the policy's message to the header of its next one, is
appended. What lies before it must be what the sample holds already, piece by piece; a template
that writes earlier messages anew fails the sample instead of showing the policy another history
than it was sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from hone.config.data import DataConfig
from hone.data.chat import template_arguments, uses_chat
from hone.data.left_out import TemplateCheck, shape_of
from hone.data.sources import shorten
from hone.families.tokens import is_of_tokenizers, unknown_token
from hone.types import Message, Observation, Sample, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RenderError", "TurnRenderer"]

_MARK = "hone-turn-{}-of-the-policy"
_MARKS = re.compile(_MARK.format(r"\d+"))


class RenderError(ValueError):
    """An observation cannot be appended to its sample."""


class TurnRenderer:
    """Renders observations for one tokenizer, as `Renderer` does prompts."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        *,
        vocab_size: int,
        end_ids: Collection[int] = (),
    ) -> None:
        """`vocab_size` is the number of the model's tokens, `end_ids` are those that end a turn of
        it (`hone.models.load.load_end_ids`)."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.uses_chat = uses_chat(tokenizer, cfg)
        # Ids that end a turn, with their texts.
        self.ends = {end: cast(str, tokenizer.decode([end])) for end in end_ids}
        self._template_check = TemplateCheck(RenderError)

    def __call__(
        self, sample: Sample, observation: Observation
    ) -> tuple[str, tuple[Message, ...], tuple[int, ...]]:
        """The text behind the last turn, the messages among it, and the ids to append.

        Raises RenderError.
        """
        text, messages, token_ids = self._appended(sample, observation)
        if unknown := unknown_token(
            token_ids, self.vocab_size, self.tokenizer.convert_ids_to_tokens
        ):
            said = f", {shorten(repr(text))}," if text else ""
            raise RenderError(
                f"row {sample.prompt.id}: what the environment answers to turn "
                f"{len(sample.turns)}{said} has {unknown}, and the model has {self.vocab_size}: "
                "its tokenizer has more. Answer without it, or name the model's own tokenizer in "
                "model.tokenizer"
            )
        return text, messages, token_ids

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
        history = [*sample.prompt.messages, *_marked(sample)]
        whole = self._render(sample, [*history, *messages])
        *pieces, new = _MARKS.split(whole)
        held = [sample.prompt.text, *(turn.observed for turn in sample.turns[:-1])]
        if len(pieces) != len(held):
            raise RenderError(
                "the chat template does not render the assistant's messages as they are; give "
                "another one in model.chat_template, or answer with a text of role None"
            )
        for number, (now, before) in enumerate(zip(pieces, held, strict=True)):
            if now != before:
                where = "the prompt" if number == 0 else f"what follows turn {number}"
                raise RenderError(
                    f"the chat template writes {where} anew once messages follow it: it was "
                    f"{_end(before)}, and is {_end(now)}. What the policy was sampled from cannot "
                    "change; give a template that keeps it in model.chat_template, or answer with "
                    "a text of role None"
                )
        self._require_written(sample, history, messages)
        return new

    def _require_written(
        self, sample: Sample, history: Sequence[Message], messages: Sequence[Message]
    ) -> None:
        """Raise RenderError where the template leaves out one of the messages that follow a
        history."""
        part = self._template_check.first_left_out(
            [*history, *messages],
            partial(self._render, sample),
            start=len(history),
            shape=shape_of(messages),
        )
        if part is not None:
            raise RenderError(
                f"the chat template leaves out {part}; answer with a role that it writes, or "
                "name another template in model.chat_template"
            )

    def _render(self, sample: Sample, messages: list[Message]) -> str:
        prompt = sample.prompt
        arguments = template_arguments(self.tokenizer, prompt.metadata, f"row {prompt.id}")
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
        """The end token that `text`, which follows the policy's last turn, begins with, where the
        policy has sampled it, or another one that ends a turn as well; else nothing."""
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


def _marked(sample: Sample) -> list[Message]:
    """The conversation behind the prompt, a mark for each turn of the policy."""
    messages: list[Message] = []
    content = ""
    for number, turn in enumerate(sample.turns):
        content += _MARK.format(number)
        is_last = number == len(sample.turns) - 1
        if turn.messages or is_last:
            messages += [{"role": "assistant", "content": content}, *turn.messages]
            content = ""
        else:
            content += turn.observed
    return messages


def _end(text: str) -> str:
    """What two texts that begin alike are told apart by, for messages."""
    return repr(text if len(text) <= 60 else f"...{text[-60:]}")
