"""From an example to token ids: the one place where text becomes tokens.

A prompt is rendered once, by the chat template or the prompt template, and the ids that come out
are the ids that are measured, stored and sent to the engine. Sampled ids never pass through here.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from hone.config.data import DataConfig, fill_template, template_fields
from hone.data.columns import Example, text_of, without_nulls
from hone.data.left_out import TemplateCheck, shape_of
from hone.data.sources import shorten
from hone.errors import UserError
from hone.families.tokens import is_of_tokenizers
from hone.types import Message, opened_tag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Demonstration", "Rendered", "Renderer", "template_arguments", "uses_chat"]

_log = logging.getLogger(__name__)

ENCODE_BATCH = 1024
"""Texts given to the tokenizer at a time: enough to use its threads, little enough memory."""
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"
"""Columns that a chat template gets with the messages, as in TRL."""
CHARS_PER_TOKEN = 16
"""Of a text with more characters for each token that it may have, the beginning is tried first."""
_NO_TEMPLATE = DataConfig.model_fields["prompt_template"].default


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, for people, and as ids, for the engine."""

    text: str
    token_ids: tuple[int, ...]
    is_cut: bool = False
    """The ids are those of the beginning alone, which is too long already."""
    messages: tuple[Message, ...] = ()
    """What the chat template rendered, where they are kept."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.token_ids


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the answer to imitate; the first `num_prompt_tokens` ids are the prompt's."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    is_cut: bool = False
    """The ids are those of the beginning alone, which is too long already."""
    asked_ids: tuple[int, ...] = ()
    """The prompt's ids where `token_ids` may begin with others: a reward model's template may write
    a prompt anew once an answer follows."""

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
    ) -> None:
        """`keeps_messages` for environments, which may add to them. `end_ids`, for demonstrations,
        are those that end a turn of the model (`hone.models.load.load_end_ids`); that of the
        tokenizer is one in any case."""
        self.tokenizer = tokenizer
        self.template = cfg.prompt_template
        self.system_prompt = cfg.system_prompt
        self.uses_chat = uses_chat(tokenizer, cfg)
        self.keeps_messages = keeps_messages and self.uses_chat
        self.start_ids = () if self.uses_chat else _start_ids(tokenizer)
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
        """Each example's prompt, ready to be sampled from. Of one that has far more than
        `max_tokens` the beginning alone is tokenised: all of it takes hundreds of times its
        size in memory."""
        self._log_arguments(examples)
        texts = [self._prompt_text(example) for example in examples]
        found: list[Rendered] = []
        encoded = self._encode(texts, examples, max_tokens)
        for example, text, (ids, is_cut) in zip(examples, texts, encoded, strict=True):
            if not (token_ids := self._started(ids)):
                raise UserError(f"{example.location}: the prompt renders to no tokens at all")
            messages = tuple(self._messages(example)) if self.keeps_messages else ()
            found.append(Rendered(text, token_ids, is_cut, messages))
        return found

    def demonstrations(
        self,
        examples: Sequence[Example],
        *,
        max_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> list[Demonstration]:
        """Each example's prompt and completion up to and with the token at which sampling would
        have ended; a truncated completion is followed by nothing.

        The prompt's ids are those that `prompts` gives, and so those a model will be asked with.
        Rows that have far more tokens than the limits are cut as there.
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
        encoded = self._encode(texts, examples, max_tokens)
        found: list[Demonstration] = []
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
            found.append(row)
        return found

    def transcript(self, example: Example) -> tuple[int, ...]:
        """A prompt with its completion as a reward model reads them. Under a chat template all that
        it writes, also behind the end token, since that text is what such models are trained and
        asked with; without one up to and with the end token. A truncated completion is followed by
        nothing."""
        (found,) = self.demonstrations([example])
        return self._transcript(example, found)

    def transcripts(
        self,
        examples: Sequence[Example],
        *,
        max_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> list[Demonstration]:
        """`demonstrations` whose ids are those of `transcript`: what a reward model is trained
        with."""
        found = self.demonstrations(
            examples, max_prompt_tokens=max_prompt_tokens, max_tokens=max_tokens
        )
        return [
            row
            if row.is_cut
            else replace(row, token_ids=self._transcript(example, row), asked_ids=row.prompt_ids)
            for example, row in zip(examples, found, strict=True)
        ]

    def _transcript(self, example: Example, found: Demonstration) -> tuple[int, ...]:
        if not self.uses_chat or example.is_truncated:
            return found.token_ids
        assert example.completion is not None
        messages = [*self._messages(example), example.completion]
        text = self._apply_template(messages, example, add_generation_prompt=False)
        return self._encode_whole([text], [example])[0]

    def _demonstration(
        self, example: Example, prompt: Rendered, text: str, whole: tuple[int, ...]
    ) -> Demonstration:
        """Of a prompt with its answer: `text`, of which `whole` are the ids."""
        completion = self._completion(example, prompt, text, whole)
        if not example.is_truncated:
            completion = self._ended(example, completion)
        return Demonstration((*prompt.token_ids, *completion), len(prompt.token_ids))

    def _completion(
        self, example: Example, prompt: Rendered, text: str, whole: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The ids behind the prompt, which must stay what it is at sampling time: where a template
        rewrites it, or a token lies across its border, they are those of the completion alone."""
        num_prompt = len(prompt.token_ids)
        goes_on = whole[:num_prompt] == prompt.token_ids
        said = text[len(prompt.text) :]
        if not goes_on and not text.startswith(prompt.text):
            said = _content_alone(
                example,
                "the chat template does not keep the prompt as it was once an answer follows",
            )
        once = _without_opened(said, prompt.text)
        if goes_on and once == said:
            return whole[num_prompt:]
        return self._encode([once], [example])[0][0]

    def _ended(self, example: Example, completion: tuple[int, ...]) -> tuple[int, ...]:
        """Up to and with the first of the end tokens behind what is said; what a template puts
        after it, a line break or the end of all text, is never sampled. Where there is none, the
        tokenizer's is put there."""
        assert example.completion is not None
        places = [place for place, token in enumerate(completion) if token in self.end_ids]
        if not places:
            return (*completion, *self.end)
        last = places.pop()
        behind = self._spelt(completion[last + 1 :])
        if behind and example.completion["content"].rstrip().endswith(behind):
            return (*completion, *self.end)  # the text spells an end token, and goes on
        while places and not self._spelt(completion[places[-1] + 1 : last]):
            last = places.pop()
        return completion[: last + 1]

    def _spelt(self, ids: tuple[int, ...]) -> str:
        """The text of ids but for blanks around it."""
        return cast(str, self.tokenizer.decode([*ids])).strip() if ids else ""

    def _prompt_text(self, example: Example) -> str:
        messages = self._messages(example)
        if self.uses_chat:
            text = self._apply_template(messages, example, add_generation_prompt=True)
            self._require_written(messages, example)
            return text
        return cast(str, messages[0]["content"])

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
            messages: list[Message] = [{"role": "user", "content": self._fill_template(example)}]
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
        if self.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise UserError(
                f"{example.location}: the row has a system message of its own, and "
                "data.system_prompt gives another; remove one of them"
            )
        return [{"role": "system", "content": self.system_prompt}, *messages]

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
        arguments = template_arguments(self.tokenizer, example.columns, example.location)
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
        """Raise UserError where the template leaves out one of the messages, or a call of tools
        among them; where they are answered, of the answer."""

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
        """Log once which columns the template gets beyond the messages, or that it has no place for
        them."""
        names = (TOOLS, ARGUMENTS)
        found = [name for name in names if any(x.columns.get(name) for x in examples)]
        if self._has_logged or not found:
            return
        self._has_logged = True
        if self.uses_chat:
            _log.info("the chat template gets the columns %s of each row", " and ".join(found))
            if TOOLS in found and TOOLS not in str(self.tokenizer.chat_template):
                _log.warning(
                    "warning: the chat template does not write tools, so that the model does not "
                    "see them; name one that does in model.chat_template"
                )
        elif unread := [name for name in found if name not in template_fields(self.template)]:
            _log.warning(
                "warning: the model does not see the columns %s: prompts are rendered without a "
                "chat template. Use a tokenizer that has one with data.chat 'auto', or give one in "
                "model.chat_template",
                " and ".join(unread),
            )

    def _started(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids behind the begin-of-text token, unless the text itself begins with it."""
        return ids if ids[: len(self.start_ids)] == self.start_ids else (*self.start_ids, *ids)

    def _encode(
        self, texts: Sequence[str], examples: Sequence[Example], max_tokens: int | None = None
    ) -> list[tuple[tuple[int, ...], bool]]:
        """Ids of each example's text, special tokens only where the text spells them; and whether
        they are those of its beginning alone, which has more than `max_tokens`."""
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
        """Ids of a beginning of a text that has far more than `max_tokens`, else none.

        Where a text is cut it has a few tokens more than there would be, hence the factor of 2.
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
        """A UserError naming the first row at fault, found by going through the batch again."""
        if len(texts) > 1:
            for text, example in zip(texts, examples, strict=True):
                self._encode_whole([text], [example])
            return error
        return UserError(
            f"{examples[0].location}: the tokenizer cannot encode this text ({error}): "
            f"{shorten(texts[0])}"
        )


def template_arguments(
    tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, Any], location: str
) -> dict[str, Any]:
    """What a row gives the chat template with its messages: its `tools`, a list of objects or that
    as JSON text, and the variables in its `chat_template_kwargs`.

    Raises UserError, which names `location`, where they are something else, or where a variable is
    an argument by which hone renders.
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
    tools = _tools(columns.get(TOOLS), location)
    return arguments | ({"tools": tools} if tools else {})


@cache
def _own_arguments(kind: type[PreTrainedTokenizerBase]) -> frozenset[str]:
    """The arguments of `apply_chat_template` that are no variables of a template."""
    return frozenset(inspect.signature(kind.apply_chat_template).parameters) - {"documents"}


def _tools(value: Any, location: str) -> list[Any]:
    tools: Any = without_nulls(value)
    if isinstance(value, str) and value.strip():
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError):
            tools = value
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(
            f"{location}: column {TOOLS!r} goes into the chat template, and must hold a list of "
            "JSON schemas, as [{'type': 'function', 'function': {'name': ...}}], or that as JSON "
            f"text, got {shorten(repr(value))}; mend it, or rename a column that is something else"
        )
    return tools or []


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
    """The text of a demonstration that no template renders. Raises UserError, which says `since`
    when it cannot be rendered, where it has more than its text."""
    assert example.completion is not None
    others = example.completion.keys() - {"role", "content"}
    if others:
        raise UserError(
            f"{example.location}: {since}, so the demonstration's {', '.join(sorted(others))} "
            "cannot be rendered; put everything to be learned into its content"
        )
    return cast(str, example.completion["content"])


def _without_opened(said: str, prompt: str) -> str:
    """What is said behind a prompt, without a tag that the prompt has opened already, as templates
    of reasoning models do with `<think>`. A tag that is closed more often than it is opened is one
    of its own, inside of that of the prompt."""
    opened = opened_tag(prompt)
    tag = opened.rstrip()
    if not tag or not said.lstrip().startswith(tag):
        return said
    if said.count(tag.replace("<", "</")) > said.count(tag):
        return said
    return said.lstrip().removeprefix(tag).removeprefix(opened[len(tag) :])


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The begin-of-text token where the tokenizer puts one; an end token it adds is left out."""
    start = tokenizer.bos_token_id
    probe: Any = tokenizer("")
    if isinstance(start, int) and probe["input_ids"][:1] == [start]:
        return (start,)
    return ()
