"""Rendering of examples to token ids: the one place where text becomes tokens.

A prompt is rendered once, by the chat template or the prompt template. The resulting ids are
measured, stored and sent to the engine. Sampled ids never pass through here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from hone.data.columns import Example, text_of, without_nulls
from hone.data.images import parts_of
from hone.data.settings import DataConfig, fill_template, template_fields
from hone.data.sources import shorten
from hone.data.template_check import TemplateCheck, shape_of
from hone.data.tool_schemas import TOOLS, ToolSchemas, all_tools, require_written
from hone.errors import UserError
from hone.families.tokens import is_of_tokenizers
from hone.images.parts import has_images
from hone.model_input import TEXT, ModelInput
from hone.types import Message, opened_tag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.images.reader import ImageReader, RowImage

__all__ = ["Demonstration", "Rendered", "Renderer", "template_arguments", "uses_chat"]

_log = logging.getLogger(__name__)

ENCODE_BATCH = 1024
"""Texts in one call of the tokenizer: enough for its threads, and little memory."""
ARGUMENTS = "chat_template_kwargs"
"""The column of variables that a chat template gets with the messages, as in TRL."""
CHARS_PER_TOKEN = 16
"""A text with more characters than this for each allowed token is probably too long: its beginning
is tokenised first."""
_REMEDY = (
    "name images in a column, with <image> in the prompt where they belong, and take the token out "
    "of the text"
)
_NO_TEMPLATE = DataConfig.model_fields["prompt_template"].default


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, for people, and as ids, for the engine."""

    text: str
    """With the mark of the chat template for each image, of which the ids have all tokens."""
    token_ids: tuple[int, ...]
    is_cut: bool = False
    """Only the beginning was tokenised, which is too long already."""
    messages: tuple[Message, ...] = ()
    """The messages that the chat template rendered, with `keeps_messages`."""
    model_input: ModelInput = TEXT
    """Inputs of the model besides these ids."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.token_ids


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the answer to imitate; the first `num_prompt_tokens` ids are the prompt's."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    is_cut: bool = False
    """Only the beginning was tokenised, which is too long already."""
    asked_ids: tuple[int, ...] = ()
    """The ids of the prompt alone, for a reward model: its template may render a prompt differently
    when an answer follows, so `token_ids` may begin with other ids."""
    model_input: ModelInput = TEXT
    """Inputs of the model besides the ids of the whole row."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.asked_ids or self.token_ids[: self.num_prompt_tokens]


class Renderer:
    """Renders the examples of a data set for one tokenizer.

    With a chat template: the messages, then the header of the assistant's turn. Without: the
    prompt template, after the tokenizer's begin-of-text token if it uses one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cfg: DataConfig,
        *,
        keeps_messages: bool = False,
        end_ids: Collection[int] = (),
        tools: ToolSchemas = (),
        images: ImageReader | None = None,
        spells_images: bool = False,
    ) -> None:
        """`keeps_messages` is for environments, which may append messages. `end_ids`, for
        demonstrations, end a turn of the model (`hone.models.load.load_end_ids`); the tokenizer's
        end token is always among them. `tools` are those of the environment, which every prompt
        shows; raises UserError where the chat template does not write them. `images` is the reader
        of the model's images; None: it reads text alone. With `spells_images` texts of the
        assistant have `ImageSettings.bare` in place of an image that an environment has shown in
        them."""
        self.tokenizer = tokenizer
        self.template = cfg.prompt_template
        self.system_prompt = cfg.system_prompt
        self.uses_chat = uses_chat(tokenizer, cfg)
        self.keeps_messages = keeps_messages and self.uses_chat
        self.start_ids = () if self.uses_chat else _start_ids(tokenizer)
        self.tools = tools
        self.images = images
        self.spells_images = spells_images
        if tools:
            require_written(tokenizer, tools, uses_chat=self.uses_chat)
        self._has_logged = False
        self._template_check = TemplateCheck(UserError)
        end = tokenizer.eos_token_id
        self.end = (end,) if isinstance(end, int) else ()
        self.end_ids = frozenset((*end_ids, *self.end))
        if not template_fields(self.template):
            raise UserError(
                f"data.prompt_template {self.template!r} names no column, so all prompts would "
                "be the same; put {prompt} into it"
            )

    def prompts(
        self, examples: Sequence[Example], *, max_tokens: int | None = None
    ) -> list[Rendered]:
        """Each example's prompt, ready to be sampled from. If a prompt has far more than
        `max_tokens`, only its beginning is tokenised: the whole would take hundreds of times its
        size in memory."""
        self._log_arguments(examples)
        texts = [self._prompt_text(example) for example in examples]
        prompts: list[Rendered] = []
        asked = [self._asked_images(example) for example in examples]
        encoded = self._encode(self._expanded(texts, examples, asked), examples, max_tokens)
        for example, text, images, (ids, is_cut) in zip(
            examples, texts, asked, encoded, strict=True
        ):
            if not (token_ids := self._started(ids)):
                raise UserError(f"{example.location}: the prompt renders to no tokens at all")
            messages = tuple(self._messages(example)) if self.keeps_messages else ()
            contents = TEXT if is_cut else self._contents(token_ids, example, images)
            prompts.append(Rendered(text, token_ids, is_cut, messages, contents))
        return prompts

    def demonstrations(
        self,
        examples: Sequence[Example],
        *,
        max_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> list[Demonstration]:
        """Each example's prompt and completion, including the end token at which sampling would
        stop; a truncated completion has no end token.

        The prompt's ids are those of `prompts`, with which the model is sampled later. Rows that
        have far more tokens than the limits are cut like those of `prompts`.
        """
        if not self.end:
            raise UserError(
                "the tokenizer declares no end-of-sequence token, so a model could not learn "
                "where an answer ends; set eos_token in its tokenizer_config.json"
            )
        prompts = self.prompts(examples, max_tokens=max_prompt_tokens)
        texts = [
            "" if prompt.is_cut else self._whole_text(example, prompt)
            for example, prompt in zip(examples, prompts, strict=True)
        ]
        images = [example.images for example in examples]
        encoded = self._encode(self._expanded(texts, examples, images), examples, max_tokens)
        demonstrations: list[Demonstration] = []
        for example, prompt, text, (ids, is_cut) in zip(
            examples, prompts, texts, encoded, strict=True
        ):
            num_prompt = len(prompt.token_ids)
            if prompt.is_cut:
                row = Demonstration(prompt.token_ids, num_prompt, is_cut=True)
            elif is_cut:
                row = Demonstration(self._started(ids), num_prompt, is_cut=True)
            else:
                row = self._demonstration(example, prompt, text, self._started(ids))
            demonstrations.append(replace(row, model_input=prompt.model_input))
        return demonstrations

    def transcripts(
        self,
        examples: Sequence[Example],
        *,
        max_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> list[Demonstration]:
        """The rows that a reward model reads, in training and to score: `demonstrations` with
        other ids. With a chat template they are all that it writes, including text after the
        end token, since reward models are trained and used on that text. Without one they end with
        the end token. A truncated completion has no end token."""
        rows = self.demonstrations(
            examples, max_prompt_tokens=max_prompt_tokens, max_tokens=max_tokens
        )
        return [
            row if row.is_cut else self._as_transcript(example, row)
            for example, row in zip(examples, rows, strict=True)
        ]

    def _as_transcript(self, example: Example, row: Demonstration) -> Demonstration:
        token_ids = self._transcript(example, row)
        # The template may write the prompt differently, so that images begin elsewhere.
        contents = self._contents(token_ids, example, example.images)
        return replace(row, token_ids=token_ids, asked_ids=row.prompt_ids, model_input=contents)

    def _transcript(self, example: Example, demonstration: Demonstration) -> tuple[int, ...]:
        if not self.uses_chat or example.is_truncated:
            return demonstration.token_ids
        assert example.completion is not None
        messages = [*self._messages(example), example.completion]
        text = self._apply_template(messages, example, add_generation_prompt=False)
        (text,) = self._expanded([text], [example], [example.images])
        return self._encode_whole([text], [example])[0]

    def _demonstration(
        self, example: Example, prompt: Rendered, text: str, whole: tuple[int, ...]
    ) -> Demonstration:
        """The demonstration of a prompt with its answer, whose text is `text` with the ids
        `whole`."""
        completion = self._completion(example, prompt, text, whole)
        if not example.is_truncated:
            completion = self._ended(example, completion)
        return Demonstration((*prompt.token_ids, *completion), len(prompt.token_ids))

    def _completion(
        self, example: Example, prompt: Rendered, text: str, whole: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The ids after the prompt. The prompt must have the same ids as at sampling time; where
        the template rewrites it, or a token spans its border, the completion is tokenised alone."""
        num_prompt = len(prompt.token_ids)
        keeps_prompt = whole[:num_prompt] == prompt.token_ids
        answer = text[len(prompt.text) :]
        if not keeps_prompt and not text.startswith(prompt.text):
            answer = _content_alone(
                example,
                "the chat template does not keep the prompt as it was once an answer follows",
            )
        without_tag = _without_opened(answer, prompt.text)
        if keeps_prompt and without_tag == answer:
            return whole[num_prompt:]
        spelt = example.images[len(self._asked_images(example)) :]
        (without_tag,) = self._expanded([without_tag], [example], [spelt])
        return self._encode([without_tag], [example])[0][0]

    def _ended(self, example: Example, completion: tuple[int, ...]) -> tuple[int, ...]:
        """The completion up to and including the first end token after its text. What a template
        writes after that, such as a line break, is never sampled. Without an end token the
        tokenizer's is appended."""
        assert example.completion is not None
        places = [place for place, token in enumerate(completion) if token in self.end_ids]
        if not places:
            return (*completion, *self.end)
        last = places.pop()
        after = self._stripped_text(completion[last + 1 :])
        if after and example.completion["content"].rstrip().endswith(after):
            return (*completion, *self.end)  # the end token is part of the text, which continues
        while places and not self._stripped_text(completion[places[-1] + 1 : last]):
            last = places.pop()
        return completion[: last + 1]

    def _stripped_text(self, ids: tuple[int, ...]) -> str:
        """The decoded ids without whitespace at both ends."""
        return cast(str, self.tokenizer.decode([*ids])).strip() if ids else ""

    def _prompt_text(self, example: Example) -> str:
        messages = self._messages(example)
        if self.uses_chat:
            text = self._apply_template(messages, example, add_generation_prompt=True)
            self._require_written(messages, example)
            return text
        content = messages[0]["content"]
        if isinstance(content, str):
            return content
        assert self.images is not None
        bare = self.images.settings.bare
        return "".join(bare if part["type"] == "image" else part["text"] for part in content)

    def _whole_text(self, example: Example, prompt: Rendered) -> str:
        assert example.completion is not None
        if example.is_truncated:
            return prompt.text + _content_alone(example, "the completion was cut as it was sampled")
        if not self.uses_chat:
            return prompt.text + _content_alone(example, "it is rendered without chat template")
        messages = [*self._messages(example), example.completion]
        text = self._apply_template(messages, example, add_generation_prompt=False)
        if "tool_calls" in example.completion:
            self._require_written(messages, example, is_answered=True)
        return text

    def _messages(self, example: Example) -> list[Message]:
        if isinstance(example.prompt, str):
            text = self._fill_template(example)
            num_images = len(self._asked_images(example))
            said = parts_of(text, num_images, example.location) if num_images else text
            messages: list[Message] = [{"role": "user", "content": said}]
        elif self.uses_chat:
            messages = example.prompt
            if self.template != _NO_TEMPLATE:
                raise UserError(
                    f"{example.location}: the prompt is a list of chat messages, and "
                    f"data.prompt_template {shorten(repr(self.template))} is text around a prompt "
                    "that is text. Remove data.prompt_template: what stands before a dialogue goes "
                    "into data.system_prompt"
                )
        else:
            raise UserError(
                f"{example.location}: the prompt is a list of chat messages, but prompts are "
                "rendered without chat template; use a tokenizer that has one with data.chat "
                "'auto', or give the model's template in model.chat_template"
            )
        if self.images is not None:
            self._refuse_own_marks([*messages, *filter(None, [example.completion])], example)
        if self.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise UserError(
                f"{example.location}: the row has a system message of its own, and "
                "data.system_prompt gives another; remove one of them"
            )
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _refuse_own_marks(self, messages: Sequence[Message], example: Example) -> None:
        """Raise UserError where a message spells out a token that stands for images."""
        assert self.images is not None
        for message in messages:
            if self.spells_images and message["role"] == "assistant":
                continue
            content = message["content"]
            for part in content if has_images(content) else [{"text": content}]:
                mark = self.images.own_mark(part.get("text", ""))
                if mark is not None:
                    raise UserError(
                        f"{example.location}: the text of a message of the role "
                        f"{message['role']!r} has {mark!r}, which stands for an image with this "
                        f"model; {_REMEDY}"
                    )

    def _asked_images(self, example: Example) -> tuple[RowImage, ...]:
        """The images of an example's prompt. Those that its completion spells are behind them."""
        if self.images is None or not self.spells_images:
            return example.images
        assert example.completion is not None
        num_spelt = example.completion["content"].count(self.images.settings.mark)
        return example.images[: len(example.images) - num_spelt]

    def _expanded(
        self,
        texts: Sequence[str],
        examples: Sequence[Example],
        images: Sequence[Sequence[RowImage]],
    ) -> Sequence[str]:
        """The texts with all tokens of their images. Empty texts stand for no text and stay."""
        if self.images is None:
            return texts
        return [
            self.images.expand(text, own, example.location) if text else text
            for text, example, own in zip(texts, examples, images, strict=True)
        ]

    def _contents(
        self, token_ids: Sequence[int], example: Example, images: Sequence[RowImage]
    ) -> ModelInput:
        if self.images is None:
            return TEXT
        return self.images.contents(token_ids, images, example.location)

    def _fill_template(self, example: Example) -> str:
        values = {**example.columns, "prompt": example.prompt}

        def value_of(name: str) -> str:
            if name not in values:
                raise UserError(
                    f"{example.location}: data.prompt_template names the column {name!r}; the row "
                    f"has {', '.join(values)}. For literal braces write {{{{{name}}}}}."
                )
            return text_of(without_nulls(values[name]), name, example.location)

        return fill_template(self.template, value_of)

    def _apply_template(
        self, messages: list[Message], example: Example, *, add_generation_prompt: bool
    ) -> str:
        arguments = template_arguments(
            self.tokenizer, example.columns, example.location, tools=self.tools
        )
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"{example.location}: the chat template does not accept these messages: {error}. "
                "Mend the row, or name another template in model.chat_template"
            ) from error
        return cast(str, text)

    def _require_written(
        self, messages: list[Message], example: Example, *, is_answered: bool = False
    ) -> None:
        """Raise UserError where the template leaves out one of the messages or a tool call. With
        `is_answered` only the last message, the answer, is checked."""

        def render(marked: list[Message]) -> str:
            return self._apply_template(marked, example, add_generation_prompt=not is_answered)

        part = self._template_check.first_left_out(
            messages,
            render,
            start=len(messages) - 1 if is_answered else 0,
            shape=(shape_of(messages), bool(example.columns.get(TOOLS)), is_answered),
        )
        if part is not None:
            raise UserError(
                f"{example.location}: the chat template leaves out {part}. Name a template that "
                "writes it in model.chat_template, or leave such rows out"
            )

    def _log_arguments(self, examples: Sequence[Example]) -> None:
        """Log once which columns the template gets besides the messages, or warn that it does not
        use them."""
        names = (TOOLS, ARGUMENTS)
        present = [name for name in names if any(x.columns.get(name) for x in examples)]
        if self._has_logged or not present:
            return
        self._has_logged = True
        if self.uses_chat:
            _log.info("the chat template gets the columns %s of each row", " and ".join(present))
            if TOOLS in present and TOOLS not in str(self.tokenizer.chat_template):
                _log.warning(
                    "warning: the chat template does not write tools, so that the model does not "
                    "see them; name one that does in model.chat_template"
                )
        elif unread := [name for name in present if name not in template_fields(self.template)]:
            _log.warning(
                "warning: the model does not see the columns %s: prompts are rendered without a "
                "chat template. Use a tokenizer that has one with data.chat 'auto', or give one in "
                "model.chat_template",
                " and ".join(unread),
            )

    def _started(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids after the begin-of-text token, which is added unless they begin with it."""
        return ids if ids[: len(self.start_ids)] == self.start_ids else (*self.start_ids, *ids)

    def _encode(
        self, texts: Sequence[str], examples: Sequence[Example], max_tokens: int | None = None
    ) -> list[tuple[tuple[int, ...], bool]]:
        """Ids of each example's text, and whether only its beginning was tokenised because it has
        more than `max_tokens`. No special tokens are added; those in the text are recognised."""
        encoded: list[tuple[tuple[int, ...], bool]] = []
        for start in range(0, len(texts), ENCODE_BATCH):
            part = slice(start, start + ENCODE_BATCH)
            begun = [
                self._encode_beginning(text, example, max_tokens)
                for text, example in zip(texts[part], examples[part], strict=True)
            ]
            rest = ["" if ids else text for text, ids in zip(texts[part], begun, strict=True)]
            whole = self._encode_whole(rest, examples[part])
            encoded += [
                (ids or all_ids, bool(ids)) for ids, all_ids in zip(begun, whole, strict=True)
            ]
        return encoded

    def _encode_beginning(
        self, text: str, example: Example, max_tokens: int | None
    ) -> tuple[int, ...]:
        """Ids of the beginning of a text that has far more than `max_tokens`, else no ids.

        At the cut there may be a few tokens more than in the whole text, hence the factor of 2.
        """
        if max_tokens is None:
            return ()
        length = CHARS_PER_TOKEN * max_tokens
        while length < len(text):
            (ids,) = self._encode_whole([text[:length]], [example])
            if len(ids) > 2 * max_tokens:
                return ids
            length *= 8
        return ()

    def _encode_whole(
        self, texts: Sequence[str], examples: Sequence[Example]
    ) -> list[tuple[int, ...]]:
        try:
            batch: Any = self.tokenizer(
                list(texts),
                add_special_tokens=False,
                return_attention_mask=False,
                verbose=False,
            )
        except Exception as error:
            if not is_of_tokenizers(error):
                raise
            raise self._unencodable(texts, examples, error) from error
        return list(map(tuple, batch["input_ids"]))

    def _unencodable(
        self, texts: Sequence[str], examples: Sequence[Example], error: Exception
    ) -> Exception:
        """A UserError naming the first row at fault, found by encoding the rows one by one."""
        if len(texts) > 1:
            for text, example in zip(texts, examples, strict=True):
                self._encode_whole([text], [example])
            return error
        return UserError(
            f"{examples[0].location}: the tokenizer cannot encode this text ({error}): "
            f"{shorten(texts[0])}"
        )


def template_arguments(
    tokenizer: PreTrainedTokenizerBase,
    columns: Mapping[str, Any],
    location: str,
    *,
    tools: ToolSchemas = (),
) -> dict[str, Any]:
    """Arguments of a row for the chat template besides its messages: the environment's `tools` and
    those of the row (`all_tools`), and the variables in its `chat_template_kwargs`.

    Raises UserError, naming `location`, for other values, and for variables that are arguments of
    the rendering itself.
    """
    arguments: Any = without_nulls(columns.get(ARGUMENTS) or {})
    if not isinstance(arguments, dict):
        raise UserError(
            f"{location}: column {ARGUMENTS!r} must hold an object of variables for the chat "
            f"template, as {{'enable_thinking': false}}, got {shorten(repr(arguments))}; mend or "
            "rename it"
        )
    if taken := sorted(_own_arguments(type(tokenizer)) & arguments.keys()):
        raise UserError(
            f"{location}: {', '.join(taken)} in column {ARGUMENTS!r} would change how prompts "
            f"are made, and not what a template reads; remove it (tools have the column "
            f"{TOOLS!r}, a template the key model.chat_template)"
        )
    shown = all_tools(tools, columns, location)
    return arguments | ({"tools": shown} if shown else {})


@cache
def _own_arguments(kind: type[PreTrainedTokenizerBase]) -> frozenset[str]:
    """The arguments of `apply_chat_template` that are not variables of a template."""
    return frozenset(inspect.signature(kind.apply_chat_template).parameters) - {"documents"}


def uses_chat(tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> bool:
    """Whether prompts are rendered by a chat template. Raises UserError where they cannot be."""
    has_template = tokenizer.chat_template is not None
    if cfg.chat == "always" and not has_template:
        raise UserError(
            "data.chat is 'always', but the tokenizer has no chat template; give one in "
            "model.chat_template, or set data.chat to 'auto' or 'never'"
        )
    is_chat = has_template and cfg.chat != "never"
    if cfg.system_prompt is not None and not is_chat:
        raise UserError(
            "data.system_prompt needs a chat template, and prompts are rendered without one "
            f"(data.chat is {cfg.chat!r}, the tokenizer has {'a' if has_template else 'no'} "
            "template); put the text into data.prompt_template instead"
        )
    return is_chat


def _content_alone(example: Example, since: str) -> str:
    """The content of a demonstration, for when no template renders its message. Raises UserError,
    with the reason `since`, where the message has more than its content, such as tool calls."""
    assert example.completion is not None
    others = example.completion.keys() - {"role", "content"}
    if others:
        raise UserError(
            f"{example.location}: {since}, so the demonstration's {', '.join(sorted(others))} "
            "cannot be rendered; put everything to be learned into its content"
        )
    return cast(str, example.completion["content"])


def _without_opened(answer: str, prompt: str) -> str:
    """The answer without a tag at its start that the prompt has already opened, such as `<think>`
    of reasoning models. An answer that closes the tag more often than it opens it has a tag of its
    own, inside the prompt's, and stays unchanged."""
    opened = opened_tag(prompt)
    tag = opened.rstrip()
    if not tag or not answer.lstrip().startswith(tag):
        return answer
    if answer.count(tag.replace("<", "</")) > answer.count(tag):
        return answer
    return answer.lstrip().removeprefix(tag).removeprefix(opened[len(tag) :])


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The begin-of-text token, where the tokenizer adds one to a text; else no ids."""
    start = tokenizer.bos_token_id
    probe: Any = tokenizer("")
    if isinstance(start, int) and probe["input_ids"][:1] == [start]:
        return (start,)
    return ()
