"""`POST /v1/completions`: OpenAI's API of texts, without a template; a prompt may be token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hone.door.prompts import AskedPrompt, TextPrompt, TokenPrompt
from hone.door.refusal import Refusal, openai_error
from hone.door.turns import Answer, Asked, AskedTurn
from hone.door.wire.asking import sampling_of
from hone.door.wire.chat import usage
from hone.door.wire.fields import Fields, wrong
from hone.door.wire.streaming import event
from hone.types import SamplingParams

__all__ = ["CompletionOptions", "CompletionWriter", "read_completion", "written_completion"]


class CompletionOptions:
    """What a request wants to have in its answer."""

    def __init__(self, fields: Fields, model: str) -> None:
        self.model = model
        wanted = fields.get("logprobs")
        if wanted is not None and wanted not in (0, 1):
            raise wrong("logprobs", "must be 0 or 1: log-probs are of sampled tokens alone")
        self.has_logprobs = wanted is not None
        self.has_ids = fields.flag("return_token_ids")
        self.names_ids = fields.flag("return_tokens_as_token_ids")
        self.has_usage = fields.part("stream_options").flag("include_usage")


def read_completion(fields: Fields, defaults: SamplingParams) -> Asked:
    """The request. Raises Refusal."""
    given = fields.required("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    prompt: AskedPrompt
    if isinstance(given, str):
        prompt = TextPrompt(given)
    elif isinstance(given, list) and given and all(type(x) is int and x >= 0 for x in given):
        prompt = TokenPrompt(tuple(given))
    else:
        raise wrong("prompt", "must be one text, or one list of token ids")
    return Asked(
        prompt=prompt,
        prompt_field="prompt",
        sampling=sampling_of(fields, defaults, max_tokens=("max_tokens",)),
        seed=fields.integer("seed"),
    )


def written_completion(
    turn: AskedTurn, answer: Answer, options: CompletionOptions, texts: Sequence[str]
) -> dict[str, Any]:
    """The answer; `texts` are those of its tokens."""
    sampled = answer.sampled
    choice: dict[str, Any] = {
        "index": 0,
        "text": answer.content,
        "finish_reason": "length" if answer.is_cut else "stop",
        "logprobs": None,
    }
    if options.has_logprobs:
        choice["logprobs"] = _logprobs(texts, sampled.token_ids, sampled.logprobs, options)
    if options.has_ids:
        choice["prompt_token_ids"] = list(answer.prompt_ids)
        choice["token_ids"] = list(sampled.token_ids)
    written = _head(turn, options) | {
        "choices": [choice],
        "usage": usage(answer),
        "weight_version": answer.weight_version,
    }
    if answer.turn is not None:
        written["turn"] = answer.turn
    return written


class CompletionWriter:
    """Writes `text_completion` events."""

    ping = b": keep-alive\n\n"

    def __init__(
        self, options: CompletionOptions, texts_of: Callable[[Sequence[int]], list[str]]
    ) -> None:
        """`texts_of` gives the texts of single tokens."""
        self._options, self._texts_of = options, texts_of
        self._turn: AskedTurn | None = None

    def begin(self, turn: AskedTurn) -> Iterable[bytes]:
        self._turn = turn
        return ()

    def more(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Iterable[bytes]:
        options = self._options
        if not text and not (token_ids and (options.has_logprobs or options.has_ids)):
            return
        choice = _choice(text)
        if options.has_ids:
            choice["token_ids"] = list(token_ids)
        if options.has_logprobs:
            texts = self._texts_of(token_ids)
            choice["logprobs"] = _logprobs(texts, token_ids, logprobs, options)
        yield event(self._head() | {"choices": [choice]})

    def end(self, answer: Answer) -> Iterable[bytes]:
        choice = _choice("", "length" if answer.is_cut else "stop")
        if self._options.has_ids:
            choice["prompt_token_ids"] = list(answer.prompt_ids)
        yield event(self._head() | {"choices": [choice], "weight_version": answer.weight_version})
        if self._options.has_usage:
            yield event(self._head() | {"choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        yield event(openai_error(refusal))

    def _head(self) -> dict[str, Any]:
        assert self._turn is not None
        return _head(self._turn, self._options)


def _head(turn: AskedTurn, options: CompletionOptions) -> dict[str, Any]:
    return {
        "id": f"cmpl-{turn.id}",
        "object": "text_completion",
        "created": turn.created,
        "model": options.model,
    }


def _choice(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}


def _logprobs(
    texts: Sequence[str],
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    options: CompletionOptions,
) -> dict[str, Any]:
    names = [f"token_id:{token}" for token in token_ids] if options.names_ids else list(texts)
    return {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": None}
