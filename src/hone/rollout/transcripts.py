"""What a reward model reads: a prompt with its completion, or the dialogue of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from hone.data.chat import Renderer
from hone.data.columns import Example
from hone.data.settings import DataConfig
from hone.errors import UserError
from hone.images.parts import has_images
from hone.types import Message, Prompt, Sample, StopReason, Turn, with_opened_tag

__all__ = ["Transcripts"]


class Transcripts:
    """Renders prompts with their completions for a reward model, in its own tokens.

    The text is rendered and tokenised again, since the model may have another tokenizer and chat
    template (`Renderer.transcript`). A truncated completion has no end token.

    An episode is a dialogue where the policy and the reward model both have a chat template: the
    messages of the prompt, the policy's turns, and the environment's messages between them. Else
    its text is one completion, with what the environment has said as it was shown to the policy.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        max_tokens: int,
        vocab_size: int,
        path: str,
    ) -> None:
        """`max_tokens` is the model's context, `vocab_size` the size of its vocabulary, `path` its
        name for messages. Raises UserError where its tokenizer cannot render what `data` requires.
        """
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._path = path
        try:
            self._renderer = Renderer(tokenizer, data)
        except UserError as error:
            raise UserError(f"reward.model.path={path!r}: {error}") from error
        # The messages of `Prompt.messages` have the system prompt and the template's text already.
        default = DataConfig.model_fields["prompt_template"].default
        plain = data.model_copy(update={"system_prompt": None, "prompt_template": default})
        self._of_messages = Renderer(tokenizer, plain)

    def check(self, prompt: Prompt, turns: Sequence[Turn] = ()) -> None:
        """Raise UserError where a prompt of the data, or an episode with `turns` and one more,
        cannot be rendered for the model."""
        text = prompt.answer or prompt.text
        if turns:
            last = turns[-1]
            made_up = Turn(start=last.end, end=last.end, text=text, stop_reason=StopReason.EOS)
            turns = (*turns, made_up)
        try:
            self.of(prompt, text, is_truncated=False, turns=turns)
        except UserError as error:
            raise UserError(f"reward.model.path={self._path!r}: {error}") from error

    def of_sample(self, sample: Sample) -> list[int]:
        """Token ids of a sample that has ended: of its last path, where it has several. Raises as
        `of`."""
        # Of an episode that a limit has ended, the last turn may be whole.
        last = sample.turns[-1].stop_reason if sample.turns else sample.stop_reason
        is_truncated = last is StopReason.LENGTH
        return self.of(sample.prompt, sample.text, is_truncated=is_truncated, turns=sample.turns)

    def of(
        self, prompt: Prompt, completion: str, *, is_truncated: bool, turns: Sequence[Turn] = ()
    ) -> list[int]:
        """Token ids of a prompt with its completion, whose text is that of `turns` where there are
        any. Raises UserError where the text cannot be rendered or tokenised, or becomes a token
        that the model lacks."""
        shows = any(has_images(said.get("content")) for turn in turns for said in turn.messages)
        if prompt.model_input or shows:
            raise UserError(
                f"row {prompt.id} has an image, and a reward model reads text alone; score it with "
                "a function, or leave such rows out"
            )
        renderer, asked = self._renderer, prompt.unrendered or prompt.text
        answer: Message = {
            "role": "assistant",
            "content": with_opened_tag(prompt.text, completion),
        }
        if prompt.messages and renderer.uses_chat:
            renderer = self._of_messages
            *later, answer = _dialogue(prompt, turns) or [answer]
            asked = [*prompt.messages, *later]
        example = Example(
            id=prompt.id,
            location=f"row {prompt.id}",
            prompt=asked,
            answer=None,
            completion=answer,
            task=prompt.task,
            metadata={},
            columns=prompt.metadata,
            raw_answer=None,
            is_truncated=is_truncated,
        )
        ids = list(renderer.transcript(example))
        if max(ids, default=0) >= self._vocab_size:
            raise UserError(
                f"prompt and completion have token {max(ids)} of the tokenizer in that folder, and "
                f"its model has {self._vocab_size}: put the model's own tokenizer there"
            )
        return ids


def _dialogue(prompt: Prompt, turns: Sequence[Turn]) -> list[Message]:
    """The messages of an episode after its prompt, the last of which is the policy's; none where
    the environment has said nothing in messages. What it says in text alone is part of the policy's
    message, as it was for the policy.

    Raises UserError where it has also said something in token ids, whose text is not known.
    """
    if not any(turn.messages for turn in turns[:-1]):
        return []
    for turn, following in pairwise(turns):
        if following.start > turn.end and not turn.observed:
            raise UserError(
                f"row {prompt.id}: the environment has answered a turn with token_ids and another "
                "one with messages, and a reward model that reads messages has no text for the "
                "ids. Answer with text"
            )
    messages: list[Message] = []
    content, before = "", prompt.text
    for turn in turns:
        content += with_opened_tag(before, turn.text)
        before = turn.observed
        if turn.messages:
            messages += [{"role": "assistant", "content": content}, *turn.messages]
            content = ""
        else:
            content += turn.observed
    return [*messages, {"role": "assistant", "content": content}]
