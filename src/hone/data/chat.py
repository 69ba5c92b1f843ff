"""From an example to token ids: the one place where text becomes tokens.

A prompt is rendered once, by the chat template or the prompt template, and the ids that come out
are the ids that are measured, stored and sent to the engine. Sampled ids never pass through here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from jinja2 import TemplateError

from hone.config.data import TEMPLATE_FIELD, DataConfig
from hone.config.errors import UserError
from hone.data.columns import Example, as_text
from hone.data.sources import shorten
from hone.data.token_bytes import max_bytes_per_token
from hone.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Demonstration", "Rendered", "Renderer", "TooLong"]

ENCODE_BATCH = 1024
"""Texts given to the tokenizer at a time: enough to use its threads, little enough memory."""
SLICE_CHARS = 2**16
"""Of a text that may be too long by far: tokenised in milliseconds, whatever the tokenizer."""
_LONG_TOKEN_CHARS = 8
"""A text of so many characters for each token that it may have is most likely too long."""
_MAX_ADDED_BY_A_CUT = 256
"""Tokens that a text may have more of where it is cut: a prefix, and the two parts of a word. Of up
to 100 characters a word has as many pieces at most, and beyond it may be one unknown token."""
_IN_A_WORD = re.compile(r"\S\S")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, for people, and as ids, for the engine."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the answer to imitate; the first `num_prompt_tokens` ids are the prompt's."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TooLong:
    """A row that has more tokens than may be, as its size or its first slices say: it has not been
    tokenised whole."""

    min_tokens: int
    """It has so many or more."""
    limit: Literal["max_prompt_tokens", "max_tokens"]
    """The setting that it breaks."""


class Renderer:
    """Renders the examples of a data set for one tokenizer.

    With a chat template: the messages, then the header of the assistant's turn. Without: the
    prompt template, after the tokenizer's begin-of-text token if it uses one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.template = cfg.prompt_template
        self.system_prompt = cfg.system_prompt
        self.uses_chat = _uses_chat(tokenizer, cfg)
        self.start_ids = () if self.uses_chat else _start_ids(tokenizer)
        if not any(match[2] for match in TEMPLATE_FIELD.finditer(self.template)):
            raise UserError(
                f"data.prompt_template {self.template!r} names no column, so all prompts would "
                "be the same; put {prompt} into it"
            )

    def prompts(
        self, examples: Sequence[Example], *, max_tokens: int | None = None
    ) -> list[Rendered | TooLong]:
        """Each example's prompt, ready to be sampled from; `TooLong` for those that surely have
        more than `max_tokens`, which are not tokenised: that takes hundreds of times their size."""
        texts = [self._prompt_text(example) for example in examples]
        found: list[Rendered | TooLong | None] = [
            self._too_long(text, max_tokens, "max_prompt_tokens") for text in texts
        ]
        rest = [n for n, outcome in enumerate(found) if outcome is None]
        encoded = self._encode([texts[n] for n in rest], [examples[n] for n in rest])
        for n, ids in zip(rest, encoded, strict=True):
            if not (token_ids := (*self.start_ids, *ids)):
                raise UserError(f"{examples[n].location}: the prompt renders to no tokens at all")
            found[n] = Rendered(texts[n], token_ids)
        return [outcome for outcome in found if outcome is not None]

    def demonstrations(
        self,
        examples: Sequence[Example],
        *,
        max_prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> list[Demonstration | TooLong]:
        """Each example's prompt and completion up to and with the end token.

        The prompt's ids are those that `prompts` gives, and so those a model will be asked with.
        Rows that surely have more tokens than the limits are not tokenised, as there.
        """
        end = self.tokenizer.eos_token_id
        if not isinstance(end, int):
            raise UserError(
                "the tokenizer declares no end-of-sequence token, so a model could not learn "
                "where an answer ends; set eos_token in its tokenizer_config.json"
            )
        found: list[Demonstration | TooLong | None] = []
        rest: list[tuple[int, Rendered, str]] = []
        prompts = self.prompts(examples, max_tokens=max_prompt_tokens)
        for n, (example, prompt) in enumerate(zip(examples, prompts, strict=True)):
            if isinstance(prompt, TooLong):
                found.append(prompt)
                continue
            whole = self._whole_text(example, prompt)
            found.append(self._whole_too_long(example, prompt, whole, max_tokens))
            if found[n] is None:
                rest.append((n, prompt, whole))
        encoded = self._encode([whole for _, _, whole in rest], [examples[n] for n, _, _ in rest])
        for (n, prompt, _), ids in zip(rest, encoded, strict=True):
            found[n] = self._demonstration(examples[n], prompt, (*self.start_ids, *ids), end)
        return [outcome for outcome in found if outcome is not None]

    @cached_property
    def _max_bytes_per_token(self) -> int | None:
        return max_bytes_per_token(self.tokenizer)

    def _too_long(
        self,
        text: str,
        max_tokens: int | None,
        limit: Literal["max_prompt_tokens", "max_tokens"],
    ) -> TooLong | None:
        """That a text has more than `max_tokens`, where its size says so, else None."""
        if max_tokens is None or len(text) <= max_tokens:
            return None
        if self._max_bytes_per_token is not None:
            # A character has four bytes at most, and a token is allowed as many or more.
            num_bytes = len(text.encode(errors="surrogatepass"))
            if num_bytes > max_tokens * self._max_bytes_per_token:
                return TooLong(-(-num_bytes // self._max_bytes_per_token), limit)
        return self._too_many_in_slices(text, max_tokens, limit)

    def _too_many_in_slices(
        self, text: str, max_tokens: int, limit: Literal["max_prompt_tokens", "max_tokens"]
    ) -> TooLong | None:
        """The same of a text whose size alone does not say it, from its first slices."""
        if len(text) <= max(2 * SLICE_CHARS, _LONG_TOKEN_CHARS * max_tokens):
            return None
        num_tokens = start = 0
        while start < len(text):
            # Inside a word: added tokens may take in all spaces on either side.
            cut = _IN_A_WORD.search(text, start + SLICE_CHARS)
            end = len(text) if cut is None else cut.start() + 1
            piece, start = text[start:end], end
            try:
                encoded: Any = self.tokenizer(piece, add_special_tokens=False, verbose=False)
            except Exception as error:
                # Of this very class is what `tokenizers` raises: `_encode` names the row.
                if type(error) is not Exception:
                    raise
                return None
            num_tokens += max(len(encoded["input_ids"]) - _MAX_ADDED_BY_A_CUT, 0)
            # Cuts have been allowed for. Should one add more all the same, by merging in another
            # way what follows it, then not as many as the whole text may have: up to twice the
            # limit it is tokenised whole.
            if num_tokens > 2 * max_tokens:
                return TooLong(num_tokens // 2, limit)
        return None

    def _whole_too_long(
        self, example: Example, prompt: Rendered, whole: str, max_tokens: int | None
    ) -> TooLong | None:
        """The same of prompt and completion, in either of the ways in which `_demonstration` makes
        one: what follows the last end token is left out there, and here."""
        assert example.completion is not None
        kept = prompt.text if whole.startswith(prompt.text) else ""
        texts = (
            kept + self._until_end(whole.removeprefix(kept)),
            prompt.text + self._until_end(example.completion["content"]),
        )
        bounds = [self._too_long(text, max_tokens, "max_tokens") for text in texts]
        known = [bound for bound in bounds if bound is not None]
        return min(known, key=lambda bound: bound.min_tokens) if len(known) == 2 else None

    def _until_end(self, text: str) -> str:
        end = cast(str, self.tokenizer.eos_token)
        return text[: text.rindex(end)] if end in text else text

    def _demonstration(
        self, example: Example, prompt: Rendered, whole: tuple[int, ...], end: int
    ) -> Demonstration:
        num_prompt = len(prompt.token_ids)
        if whole[:num_prompt] == prompt.token_ids:
            completion = whole[num_prompt:]
        else:
            # A template that rewrites history, or a token across the border: the prompt must
            # stay what it is at sampling time, so the completion is rendered by itself.
            completion = self._completion_alone(example)
        if end in completion:
            # What a template puts after the end token (a line break) is never sampled.
            last = len(completion) - 1 - completion[::-1].index(end)
            completion = completion[: last + 1]
        else:
            completion = (*completion, end)
        return Demonstration((*prompt.token_ids, *completion), num_prompt)

    def _completion_alone(self, example: Example) -> tuple[int, ...]:
        assert example.completion is not None
        others = example.completion.keys() - {"role", "content"}
        if others:
            raise UserError(
                f"{example.location}: the chat template does not keep the prompt as it was once "
                f"an answer follows, so the demonstration's {', '.join(sorted(others))} cannot be "
                "rendered; put everything to be learned into its content"
            )
        return self._encode([example.completion["content"]], [example])[0]

    def _prompt_text(self, example: Example) -> str:
        messages = self._messages(example)
        if self.uses_chat:
            return self._apply_template(messages, example, add_generation_prompt=True)
        return cast(str, messages[0]["content"])

    def _whole_text(self, example: Example, prompt: Rendered) -> str:
        assert example.completion is not None
        if self.uses_chat:
            messages = [*self._messages(example), example.completion]
            return self._apply_template(messages, example, add_generation_prompt=False)
        return prompt.text + example.completion["content"]

    def _messages(self, example: Example) -> list[Message]:
        if isinstance(example.prompt, str):
            messages: list[Message] = [{"role": "user", "content": self._fill_template(example)}]
        elif self.uses_chat:
            messages = example.prompt
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

        def fill(match: re.Match[str]) -> str:
            literal, name = match[1], match[2]
            if literal is not None:
                return "{" + literal + "}"
            if name not in values:
                raise UserError(
                    f"{example.location}: data.prompt_template names the column {name!r}; the row "
                    f"has {', '.join(values)}. For literal braces write {{{{{name}}}}}."
                )
            return as_text(values[name])

        return TEMPLATE_FIELD.sub(fill, self.template)

    def _apply_template(
        self, messages: list[Message], example: Example, *, add_generation_prompt: bool
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"{example.location}: the chat template does not accept these messages: {error}"
            ) from error
        return cast(str, text)

    def _encode(self, texts: Sequence[str], examples: Sequence[Example]) -> list[tuple[int, ...]]:
        """Ids of each example's text; special tokens only where the text spells them."""
        ids: list[tuple[int, ...]] = []
        for start in range(0, len(texts), ENCODE_BATCH):
            part = slice(start, start + ENCODE_BATCH)
            try:
                batch: Any = self.tokenizer(
                    list(texts[part]),
                    add_special_tokens=False,
                    return_attention_mask=False,
                    verbose=False,
                )
            except Exception as error:
                # Of this very class is what `tokenizers` raises for text it has no token for.
                if type(error) is not Exception:
                    raise
                raise self._unencodable(texts[part], examples[part], error) from error
            ids.extend(map(tuple, batch["input_ids"]))
        return ids

    def _unencodable(
        self, texts: Sequence[str], examples: Sequence[Example], error: Exception
    ) -> Exception:
        """A UserError naming the first row at fault, found by going through the batch again."""
        if len(texts) > 1:
            for text, example in zip(texts, examples, strict=True):
                self._encode([text], [example])
            return error
        return UserError(
            f"{examples[0].location}: the tokenizer cannot encode this text ({error}): "
            f"{shorten(texts[0])}"
        )


def _uses_chat(tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> bool:
    has_template = tokenizer.chat_template is not None
    if cfg.chat == "always" and not has_template:
        raise UserError(
            "data.chat is 'always', but the tokenizer has no chat template; give one in "
            "model.chat_template, or set data.chat to 'auto' or 'never'"
        )
    uses_chat = has_template and cfg.chat != "never"
    if cfg.system_prompt is not None and not uses_chat:
        raise UserError(
            "data.system_prompt needs a chat template, and prompts are rendered without one "
            f"(data.chat is {cfg.chat!r}, the tokenizer has {'a' if has_template else 'no'} "
            "template); put the text into data.prompt_template instead"
        )
    return uses_chat


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The begin-of-text token where the tokenizer puts one; an end token it adds is left out."""
    start = tokenizer.bos_token_id
    probe: Any = tokenizer("")
    if isinstance(start, int) and probe["input_ids"][:1] == [start]:
        return (start,)
    return ()
