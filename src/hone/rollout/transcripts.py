"""What a reward model reads: a prompt with its completion, or the dialogue of an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from hone.data.chat import Renderer
from hone.data.columns import Example
from hone.data.settings import DataConfig
from hone.errors import UserError
from hone.images.opening import ImageError
from hone.model_input import TEXT, ModelInput
from hone.types import Message, Prompt, Sample, StopReason, Turn, with_opened_tag

if TYPE_CHECKING:
    from hone.images.reader import ImageReader, RowImage

__all__ = ["Transcript", "Transcripts"]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A sequence of a reward model."""

    token_ids: tuple[int, ...]
    model_input: ModelInput = TEXT
    """Inputs of the model besides the ids, such as images."""


class Transcripts:
    """Renders prompts with their completions for a reward model, in its own tokens.

    The text is rendered and tokenised again, since the model may have another tokenizer and chat
    template (`Renderer.transcripts`), and images become its own tokens. A truncated completion has
    no end token.

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
        images: ImageReader | None = None,
    ) -> None:
        """`max_tokens` is the model's context, `vocab_size` the size of its vocabulary, `path` its
        name for messages, `images` its reader of images; None: it reads text alone. Raises
        UserError where its tokenizer cannot render what `data` requires.
        """
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._path = path
        self._images = images
        make = partial(Renderer, tokenizer, images=images, spells_images=True)
        try:
            self._renderer = make(data)
        except UserError as error:
            raise UserError(f"reward.model.path={path!r}: {error}") from error
        # The messages of `Prompt.messages` have the system prompt and the template's text already.
        default = DataConfig.model_fields["prompt_template"].default
        plain = data.model_copy(update={"system_prompt": None, "prompt_template": default})
        self._of_messages = make(plain)

    def check(self, prompt: Prompt, turns: Sequence[Turn] = (), shown: ModelInput = TEXT) -> None:
        """Raise UserError where a prompt of the data, or an episode with `turns` and one more,
        cannot be rendered for the model. `shown` is that of `of`."""
        text = prompt.answer or prompt.text
        if self._images is not None and not prompt.answer:
            bare = self._images.settings.bare
            text = self._images.with_own_marks(text, prompt.model_input).replace(bare, "")
        if turns:
            last = turns[-1]
            made_up = Turn(start=last.end, end=last.end, text=text, stop_reason=StopReason.EOS)
            turns = (*turns, made_up)
        try:
            self.of(prompt, text, is_truncated=False, turns=turns, shown=shown)
        except UserError as error:
            raise UserError(f"reward.model.path={self._path!r}: {error}") from error

    def of_sample(self, sample: Sample) -> Transcript:
        """A sample that has ended: its last path, where it has several. Raises as `of`."""
        # Of an episode that a limit has ended, the last turn may be whole.
        last = sample.turns[-1].stop_reason if sample.turns else sample.stop_reason
        return self.of(
            sample.prompt,
            sample.text,
            is_truncated=last is StopReason.LENGTH,
            turns=sample.turns,
            shown=sample.model_input,
        )

    def of(
        self,
        prompt: Prompt,
        completion: str,
        *,
        is_truncated: bool,
        turns: Sequence[Turn] = (),
        shown: ModelInput = TEXT,
    ) -> Transcript:
        """A prompt with its completion, whose text is that of `turns` where there are any. `shown`
        are the images that an environment has shown between these.

        Raises UserError where they cannot be rendered or tokenised, become a token that the model
        lacks, or have an image that it does not see.
        """
        images = self._images_of(prompt, shown)
        self._refuse_own_marks(prompt, [turn.text for turn in turns] or [completion])
        renderer, asked = self._renderer, prompt.unrendered or prompt.text
        has_chat = bool(prompt.messages) and renderer.uses_chat
        answer: Message = {
            "role": "assistant",
            "content": with_opened_tag(prompt.text, completion),
        }
        later: list[Message] = []
        if shown or (has_chat and any(turn.messages for turn in turns[:-1])):
            said = partial(self._said, shown=shown)
            *later, answer = _dialogue(prompt, turns, said, in_messages=has_chat)
        if has_chat:
            renderer = self._of_messages
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
            images=images,
        )
        (row,) = renderer.transcripts([example])
        if max(row.token_ids, default=0) >= self._vocab_size:
            raise UserError(
                f"prompt and completion have token {max(row.token_ids)} of the tokenizer in that "
                f"folder, and its model has {self._vocab_size}: put the model's own tokenizer there"
            )
        return Transcript(row.token_ids, row.model_input)

    def _images_of(self, prompt: Prompt, shown: ModelInput) -> tuple[RowImage, ...]:
        """All images of an episode, in their order."""
        model_input = prompt.model_input.followed_by(shown, len(prompt.token_ids))
        if not model_input:
            return ()
        if self._images is None:
            raise UserError(
                f"row {prompt.id} has an image, and the reward model reads text alone, so that it "
                "would not see what it scores; name a vision-language model in reward.model.path, "
                "score with a function, or leave such rows out"
            )
        try:
            return self._images.images_of(model_input)
        except ImageError as error:
            raise UserError(f"row {prompt.id}: for the reward model {error}") from error

    def _refuse_own_marks(self, prompt: Prompt, texts: Sequence[str]) -> None:
        """Raise UserError where the policy has written what stands for an image."""
        if self._images is None:
            return
        mark = next(filter(None, map(self._images.own_mark, texts)), None)
        if mark is not None:
            raise UserError(
                f"row {prompt.id}: the completion has {mark!r}, which stands for an image with the "
                "reward model"
            )

    def _said(self, turn: Turn, *, shown: ModelInput) -> str:
        """What the environment has answered to a turn as a text, with what stands for an image in
        the text of this model."""
        if self._images is None:
            return turn.observed
        return self._images.with_own_marks(turn.observed, shown)


def _dialogue(
    prompt: Prompt, turns: Sequence[Turn], said: Callable[[Turn], str], *, in_messages: bool
) -> list[Message]:
    """The messages of an episode after its prompt, the last of which is the policy's. What the
    environment `said` in text alone is part of the policy's message, as it was for the policy;
    without `in_messages` all of it is.

    Raises UserError where it has also said something in token ids, whose text is not known.
    """
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
        if in_messages and turn.messages:
            messages += [{"role": "assistant", "content": content}, *turn.messages]
            content = ""
        else:
            content += said(turn)
    return [*messages, {"role": "assistant", "content": content}]
