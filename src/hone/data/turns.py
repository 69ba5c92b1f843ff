"""Renders an environment's observation to the tokens that follow a turn of the policy.

The policy's tokens are never rendered again. With a chat template, the whole conversation is
rendered with something in place of each turn of the policy: a mark (`turns_as_texts`), or a call of
a tool where tools have answered (`turns_after_calls`). The text after it, from the end of the
policy's message to the header of its next one, is appended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jinja2 import TemplateError

from hone.data.chat import ARGUMENTS, template_arguments, uses_chat
from hone.data.images import MARK
from hone.data.observation_limit import cut_observation
from hone.data.settings import DataConfig
from hone.data.shown_images import bare_text, open_shown
from hone.data.sources import shorten
from hone.data.template_check import RenderError, TemplateCheck, shape_of
from hone.data.tool_schemas import ToolSchemas
from hone.data.turns_after_calls import after_calls, answers_calls, closes_turns
from hone.data.turns_as_texts import after_texts
from hone.envs.tools.formats.registry import FORMATS
from hone.errors import UserError
from hone.families.tokens import is_of_tokenizers, unknown_token
from hone.images.parts import has_images, is_image_part, is_parts, parts_in
from hone.images.reader import ImageReader, RowImage
from hone.model_input import TEXT, ModelInput
from hone.types import Message, Observation, Prompt, Sample, StopReason, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Appended", "TurnRenderer"]


class Appended(NamedTuple):
    """What follows a turn of the policy."""

    text: str
    """With the mark of the chat template for each image, of which the ids have all tokens."""
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    model_input: ModelInput
    """Inputs of the model besides these ids."""


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
        tool_format: str | None = None,
        max_prompt_tokens: int | None = None,
        max_observation_tokens: int | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """`vocab_size` is that of the model; `end_ids` are the tokens that end one of its turns
        (`hone.models.load.load_end_ids`); `tools` are those that `Renderer` has shown, and
        `tool_format` that in which the model calls them (`hone.envs.tools.formats.registry`).
        `max_prompt_tokens` is the longest prompt that leaves room for a completion, for openings,
        and `max_observation_tokens` the longest message of the environment; None: any. `images` is
        that of `Renderer`."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.images = images
        self.tools = tools
        self._format = None if tool_format is None else FORMATS[tool_format]
        self.max_prompt_tokens = max_prompt_tokens
        self.max_observation_tokens = max_observation_tokens
        self.num_cut = 0
        """Messages of the environment that have lost their middle."""
        self.uses_chat = uses_chat(tokenizer, cfg)
        # Ids that end a turn, with their texts.
        self.ends = {end: cast(str, tokenizer.decode([end])) for end in end_ids}
        self._closing: dict[str, bool] = {}
        # Dialogues that the template keeps as they were, by the row's variables for it.
        self._kept: defaultdict[str, set[int]] = defaultdict(set)
        self._template_check = TemplateCheck(RenderError)

    def __call__(
        self,
        sample: Sample,
        observation: Observation,
        images: Sequence[RowImage] | None = None,
    ) -> Appended:
        """What follows the last turn. `images` are those of the observation where they are open
        already, so that its parts have their hashes. Raises RenderError."""
        if images is None:
            observation, images = self._read(observation)
        what = f"what the environment answers to turn {len(sample.turns)}"
        made = self._appended(sample, observation, images, f"row {sample.prompt.id}: {what}")
        said = f", {shorten(repr(made.text))}," if made.text else ""
        self._require_known(made.token_ids, sample.prompt, what + said)
        return made

    def opening(self, prompt: Prompt, observation: Observation) -> Prompt:
        """The prompt with what a session says before the first turn: a text or parts go to the end
        of the last message, or of the prompt without a chat template, and messages go after the
        last one.

        Raises RenderError.
        """
        observation, images = self._read(observation)
        said, where = observation.content, f"row {prompt.id}: the start of the session"
        is_one = isinstance(said, str) or is_parts(said)
        messages: tuple[Message, ...] = ()
        if prompt.messages:
            history, new = self._opened(prompt, said)
            messages = (*history, *new)
            text = self._render(prompt, list(messages))
            self._require_written(prompt, history, new)
            known = () if self.images is None else self.images.images_of(prompt.model_input)
            token_ids, model_input = self._encode_said(text, (*known, *images), where)
        elif is_one:
            added = bare_text(said, self.images)
            text = prompt.text + added
            new_ids, new_input = self._encode_said(added, images, where)
            token_ids = (*prompt.token_ids, *new_ids)
            model_input = prompt.model_input.followed_by(new_input, len(prompt.token_ids))
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
        unrendered = prompt.unrendered
        if is_one and isinstance(unrendered, str) and not (images and messages):
            unrendered = self._marked(prompt, said)
        elif messages:
            unrendered = [*messages]
        return replace(
            prompt,
            text=text,
            token_ids=token_ids,
            messages=messages,
            model_input=model_input,
            unrendered=unrendered,
        )

    def require_answers(self) -> None:
        """Raise UserError where the policy calls tools, and the chat template cannot go on after
        their answers, twice in an episode."""
        if self._format is None or self._format.answers is not None or not self.uses_chat:
            return
        asked: Message = {"role": "user", "content": "hello"}
        prompt = Prompt(id="-", token_ids=(0,), text="", messages=(asked,))
        prompt = replace(prompt, text=self._render(prompt, [asked]))
        sample = Sample(
            id="-", prompt=prompt, index=0, token_ids=[], logprobs=[], weight_versions=[],
            loss_mask=[], stop_reason=StopReason.STOP_STRING,
        )  # fmt: skip
        for number in range(2):
            answer: Message = {
                "role": "tool",
                "name": "tool",
                "tool_call_id": f"answer{number:03d}",
                "content": "done",
            }
            turn = Turn(start=0, end=0, text="call", stop_reason=StopReason.STOP_STRING)
            sample.turns.append(turn)
            try:  # without the tokenizer, which may know other words alone
                turn.observed = self._behind_last_turn(sample, (answer,))
                turn.messages = (answer,)
            except RenderError as error:
                raise UserError(
                    "the answers of the environment's tools cannot follow a turn that calls them: "
                    f"{error}"
                ) from error

    def _read(self, observation: Observation) -> tuple[Observation, tuple[RowImage, ...]]:
        """The observation with messages of at most `max_observation_tokens`, and its images."""
        said, images = open_shown(observation.content, self.images)
        observation = replace(observation, content=said)
        if self.max_observation_tokens is None:
            return observation, images
        observation, num_cut = cut_observation(
            observation,
            self.max_observation_tokens,
            self._encode,
            self._decode,
            [image.layout.num_features for image in images],
        )
        self.num_cut += num_cut
        return observation, images

    def _decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def _opened(
        self, prompt: Prompt, said: str | Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[Message]]:
        """The messages of the prompt that stay as they are, and those that are new or changed."""
        if not isinstance(said, str) and not is_parts(said):
            return prompt.messages, tuple(said)
        *earlier, last = prompt.messages
        content = last.get("content")
        if isinstance(content, str) and not isinstance(said, str):
            content = [{"type": "text", "text": content}]
        if isinstance(content, list) and (has_images(content) or not isinstance(said, str)):
            new = [{"type": "text", "text": said}] if isinstance(said, str) else said
            return earlier, ({**last, "content": [*cast("list[Any]", content), *new]},)
        if not isinstance(content, str) or not isinstance(said, str):
            raise RenderError(
                f"row {prompt.id}: the session starts with a text, which goes to the end of the "
                "last message, and that has no text; start with messages"
            )
        return earlier, ({**last, "content": content + said},)

    def _marked(self, prompt: Prompt, said: str | Sequence[Message]) -> str:
        """A prompt that is a text with what a session says behind it, and a mark for each image,
        as in rows."""
        asked, parts = str(prompt.unrendered), [*parts_in(said)]
        if self.images is not None and any(map(is_image_part, parts)) and MARK not in asked:
            asked = MARK * len(self.images.images_of(prompt.model_input)) + asked
        return asked + "".join(MARK if is_image_part(part) else part["text"] for part in parts)

    def _require_known(self, token_ids: Sequence[int], prompt: Prompt, what: str) -> None:
        unknown = unknown_token(token_ids, self.vocab_size, self.tokenizer.convert_ids_to_tokens)
        if unknown:
            raise RenderError(
                f"row {prompt.id}: {what} has {unknown}, and the model has {self.vocab_size}: its "
                "tokenizer has more. Answer without it, or name the model's own tokenizer in "
                "model.tokenizer"
            )

    def _appended(
        self,
        sample: Sample,
        observation: Observation,
        images: Sequence[RowImage],
        where: str,
    ) -> Appended:
        if observation.token_ids:
            return Appended("", (), observation.token_ids, TEXT)
        content, messages = observation.content, tuple[Message, ...]()
        is_one = isinstance(content, str) or is_parts(content)
        if not is_one:
            messages = tuple(cast("Sequence[Message]", content))
        elif self.uses_chat and observation.role is not None:
            messages = ({"role": observation.role, "content": content},)
        if not messages:
            text = bare_text(content, self.images)
            return Appended(text, (), *self._encode_said(text, images, where))
        if not self.uses_chat:
            raise RenderError(
                "the environment answers with chat messages, and prompts are rendered without a "
                "chat template; answer with a text, or use a tokenizer that has a template with "
                "data.chat 'auto'"
            )
        write = self._format.answers if self._format is not None else None
        if write is not None and answers_calls(messages):
            text = write(messages)
        else:
            text = self._behind_last_turn(sample, messages)
        appended = text.removeprefix(self._ended_by(sample, text))
        return Appended(text, messages, *self._encode_said(appended, images, where))

    def _behind_last_turn(self, sample: Sample, messages: Sequence[Message]) -> str:
        """The text after the last turn. Where tools have answered it or an earlier one, these turns
        are messages with calls."""
        render = partial(self._render, sample.prompt)
        refusal: RenderError | None = None
        try:
            kept = self._kept[repr(sample.prompt.metadata.get(ARGUMENTS))]
            found = after_calls(sample, messages, render, self._ends_of(sample), kept)
        except RenderError as error:
            if answers_calls(messages):
                raise
            found, refusal = None, error
        if found is None:
            try:
                found = after_texts(sample, messages, render)
            except RenderError as error:
                raise refusal or error from error
        self._require_written(sample.prompt, found.history, messages)
        return found.text

    def _require_written(
        self, prompt: Prompt, history: Sequence[Message], messages: Sequence[Message]
    ) -> None:
        """Raise RenderError where the template leaves out one of the messages after `history`."""
        part = self._template_check.first_left_out(
            [*history, *messages],
            partial(self._render, prompt),
            start=len(history),
            shape=(shape_of(messages), bool(history) and "tool_calls" in history[-1]),
        )
        if part is not None:
            raise RenderError(
                f"the chat template leaves out {part}; answer with a role that it writes, or "
                "name another template in model.chat_template"
            )

    def _render(
        self,
        prompt: Prompt,
        messages: list[Message],
        add_generation_prompt: bool = True,
    ) -> str:
        arguments = template_arguments(
            self.tokenizer, prompt.metadata, f"row {prompt.id}", tools=self.tools
        )
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **arguments,
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
        sampled = cast(str, self.tokenizer.decode([last]))
        if text.startswith(sampled):
            return sampled
        if last not in self.ends:
            return ""
        other = next(filter(text.startswith, self.ends.values()), "")
        return other if other and self._closes_turns(sample, other) else ""

    def _closes_turns(self, sample: Sample, end: str) -> bool:
        """Whether the template ends turns without calls with `end`."""
        if end not in self._closing:
            render = partial(self._render, sample.prompt)
            messages = sample.prompt.messages
            try:
                closes = closes_turns(messages, end, render, self._ends_of(sample))
            except RenderError:
                closes = True
            self._closing[end] = closes
        return self._closing[end]

    def _ends_of(self, sample: Sample) -> set[str]:
        """The texts of the tokens that end a turn, with that which ended the last one."""
        turn = sample.turns[-1]
        last = sample.token_ids[turn.start : turn.end][-1:]
        is_ended = turn.stop_reason is StopReason.EOS
        return {*self.ends.values(), *([self._decode(last)] if is_ended and last else [])}

    def _encode_said(
        self, text: str, images: Sequence[RowImage], where: str
    ) -> tuple[tuple[int, ...], ModelInput]:
        """Ids and images of a rendered text."""
        if self.images is None:
            return self._encode(text), TEXT
        try:
            token_ids = self._encode(self.images.expand(text, images, where))
            found = self.images.contents(token_ids, images, where)
        except UserError as error:
            raise RenderError(str(error)) from error
        return token_ids, found

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
