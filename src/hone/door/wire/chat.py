"""`POST /v1/chat/completions`: OpenAI's chat API, with token ids where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hone.door.refusal import Refusal, openai_error
from hone.door.turns import Answer, Asked, AskedTurn
from hone.door.wire.asking import (
    asked_chat,
    chat_messages,
    chat_tools,
    sampling_of,
)
from hone.door.wire.fields import Fields
from hone.door.wire.streaming import event
from hone.types import SamplingParams

__all__ = ["ChatOptions", "ChatWriter", "read_chat", "usage", "written_chat"]


class ChatOptions:
    """What a request wants to have in its answer."""

    def __init__(self, fields: Fields, model: str) -> None:
        self.model = model
        self.has_logprobs = fields.flag("logprobs")
        self.has_ids = fields.flag("return_token_ids")
        self.names_ids = fields.flag("return_tokens_as_token_ids")
        self.has_usage = fields.part("stream_options").flag("include_usage")


def read_chat(fields: Fields, defaults: SamplingParams) -> Asked:
    """The request. Raises Refusal."""
    tools, messages = chat_tools(fields), chat_messages(fields)
    limits = ("max_completion_tokens", "max_tokens")
    sampling = sampling_of(fields, defaults, max_tokens=limits)
    return asked_chat(fields, messages, tools, sampling, field="messages")


def written_chat(
    turn: AskedTurn, answer: Answer, options: ChatOptions, texts: Sequence[str]
) -> dict[str, Any]:
    """The answer; `texts` are those of its tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [call.written for call in answer.calls]
    sampled = answer.sampled
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": _finish_reason(answer),
        "logprobs": None,
    }
    if options.has_logprobs:
        choice["logprobs"] = {
            "content": _content(texts, sampled.token_ids, sampled.logprobs, options)
        }
    written: dict[str, Any] = {
        "id": f"chatcmpl-{turn.id}",
        "object": "chat.completion",
        "created": turn.created,
        "model": options.model,
        "choices": [choice],
        "usage": usage(answer),
        "weight_version": answer.weight_version,
    }
    if options.has_ids:
        written["prompt_token_ids"] = list(answer.prompt_ids)
        choice["token_ids"] = list(sampled.token_ids)
    if answer.turn is not None:
        written["turn"] = answer.turn
    return written


def usage(answer: Answer) -> dict[str, int]:
    """The numbers of tokens."""
    num_prompt, num_sampled = len(answer.prompt_ids), len(answer.sampled.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


class ChatWriter:
    """Writes `chat.completion.chunk` events."""

    ping = b": keep-alive\n\n"

    def __init__(
        self, options: ChatOptions, texts_of: Callable[[Sequence[int]], list[str]]
    ) -> None:
        """`texts_of` gives the texts of single tokens."""
        self._options, self._texts_of = options, texts_of
        self._head: dict[str, Any] = {}

    def begin(self, turn: AskedTurn) -> Iterable[bytes]:
        self._head = {
            "id": f"chatcmpl-{turn.id}",
            "object": "chat.completion.chunk",
            "created": turn.created,
            "model": self._options.model,
        }
        chunk = self._chunk({"role": "assistant", "content": ""})
        if self._options.has_ids:
            chunk["prompt_token_ids"] = list(turn.prompt_ids)
        yield event(chunk)

    def more(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Iterable[bytes]:
        options = self._options
        shows_tokens = bool(token_ids) and (options.has_logprobs or options.has_ids)
        if not text and not shows_tokens:
            return
        chunk = self._chunk({"content": text})
        choice = chunk["choices"][0]
        if options.has_ids:
            choice["token_ids"] = list(token_ids)
        if options.has_logprobs:
            texts = self._texts_of(token_ids)
            choice["logprobs"] = {"content": _content(texts, token_ids, logprobs, options)}
        yield event(chunk)

    def end(self, answer: Answer) -> Iterable[bytes]:
        if answer.reasoning:
            yield event(self._chunk({"reasoning_content": answer.reasoning}))
        for index, call in enumerate(answer.calls):
            yield event(self._chunk({"tool_calls": [{"index": index, **call.written}]}))
        chunk = self._chunk({}, _finish_reason(answer))
        chunk["weight_version"] = answer.weight_version
        if answer.turn is not None:
            chunk["turn"] = answer.turn
        yield event(chunk)
        if self._options.has_usage:
            yield event(self._head | {"choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        yield event(openai_error(refusal))

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return self._head | {"choices": [choice]}


def _finish_reason(answer: Answer) -> str:
    if answer.is_cut:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _content(
    texts: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[float], options: ChatOptions
) -> list[dict[str, Any]]:
    return [
        {
            "token": f"token_id:{token}" if options.names_ids else text,
            "logprob": logprob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }
        for text, token, logprob in zip(texts, token_ids, logprobs, strict=True)
    ]
