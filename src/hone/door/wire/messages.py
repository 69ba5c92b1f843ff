"""`POST /v1/messages`: Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hone.door.calls import decoded
from hone.door.refusal import Refusal, anthropic_error
from hone.door.turns import Answer, Asked, AskedTurn
from hone.door.wire.asking import (
    MAX_NAME,
    asked_chat,
    content_of,
    content_text,
    given_image,
    joined,
    require_messages,
    sampling_of,
)
from hone.door.wire.fields import Fields, wrong
from hone.door.wire.streaming import event
from hone.types import Message, SamplingParams

__all__ = ["MessagesWriter", "read_messages", "written_messages"]


def read_messages(fields: Fields, defaults: SamplingParams) -> Asked:
    """The request. Raises Refusal."""
    fields.required("max_tokens")
    messages: list[Message] = []
    if system := content_text(fields.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for message in fields.objects("messages"):
        messages += _messages(message)
    require_messages(messages, "messages")
    tools = tuple(map(_tool, fields.objects("tools")))
    sampling = sampling_of(fields, defaults, max_tokens=("max_tokens",), stop="stop_sequences")
    return asked_chat(fields, messages, tools, sampling, field="messages")


def _messages(fields: Fields) -> list[Message]:
    """A message as chat templates take it: results of tools become messages of their own."""
    role = fields.choice("role", ("user", "assistant", "system"), "")
    content = fields.required("content")
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": content_text(content, fields.path("content"))}]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for place, block in enumerate(fields.objects("content")):
        match block.text("type"):
            case "text":
                parts.append({"type": "text", "text": block.text("text")})
            case "image" if role == "user":
                parts.append(given_image(content[place], f"{fields.path('content')}[{place}]"))
            case "tool_use" if role == "assistant":
                function = {"name": block.text("name"), "arguments": block.mapping("input")}
                calls.append(
                    {
                        "id": block.text("id", most=MAX_NAME),
                        "type": "function",
                        "function": function,
                    }
                )
            case "tool_result" if role == "user":
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.text("tool_use_id", most=MAX_NAME),
                        "content": content_of(block.get("content"), block.path("content")),
                    }
                )
            case "thinking" | "redacted_thinking":
                pass  # templates leave out earlier thoughts, and the ids of ours are in the tree
            case kind:
                raise wrong(block.path("type"), f"is {kind!r:.60}, which is not served here")
    message: Message = {"role": role, "content": joined(parts)}
    if calls:
        message["tool_calls"] = calls
    is_empty = bool(results) and not parts
    return [*results, *([] if is_empty else [message])]


def _tool(fields: Fields) -> Mapping[str, Any]:
    if fields.text("type", "custom") != "custom":
        raise wrong(fields.path("type"), "must be custom; there are no built-in tools here")
    function = {
        "name": fields.text("name"),
        "description": fields.text("description", ""),
        "parameters": fields.mapping("input_schema"),
    }
    return {"type": "function", "function": function}


def written_messages(turn: AskedTurn, answer: Answer, model: str) -> dict[str, Any]:
    """The answer."""
    content: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        content.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        content.append(_block(call.id, call.name, decoded(call.arguments)))
    reason, sequence = _stop_reason(answer)
    written = _message(turn, model) | {
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(len(answer.prompt_ids), len(answer.sampled.token_ids)),
        "weight_version": answer.weight_version,
    }
    if answer.turn is not None:
        written["turn"] = answer.turn
    return written


class MessagesWriter:
    """Writes the events of a message: its start, its blocks one by one, its end."""

    def __init__(self, model: str) -> None:
        self.ping = event({"type": "ping"}, "ping")
        self._model = model
        self._is_open, self._index = False, 0

    def begin(self, turn: AskedTurn) -> Iterable[bytes]:
        message = _message(turn, self._model) | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(turn.prompt_ids), 0),
        }
        yield _event({"type": "message_start", "message": message})

    def more(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Iterable[bytes]:
        if not text:
            return
        yield from self._open()
        yield self._delta({"type": "text_delta", "text": text})

    def end(self, answer: Answer) -> Iterable[bytes]:
        if not answer.calls:
            yield from self._open()
        yield from self._close()
        for call in answer.calls:
            yield from self._start(_block(call.id, call.name, {}))
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            yield from self._close()
        reason, sequence = _stop_reason(answer)
        yield _event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": _usage(len(answer.prompt_ids), len(answer.sampled.token_ids)),
            }
        )
        yield _event({"type": "message_stop"})

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        yield _event(anthropic_error(refusal))

    def _open(self) -> Iterable[bytes]:
        """The start of the text, unless it has started."""
        if not self._is_open:
            yield from self._start({"type": "text", "text": ""})

    def _start(self, block: dict[str, Any]) -> Iterable[bytes]:
        self._is_open = True
        yield _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> Iterable[bytes]:
        if self._is_open:
            yield _event({"type": "content_block_stop", "index": self._index})
            self._is_open, self._index = False, self._index + 1


def _event(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def _message(turn: AskedTurn, model: str) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": model}


def _block(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _stop_reason(answer: Answer) -> tuple[str, str | None]:
    if answer.is_cut:
        return "max_tokens", None
    if answer.calls:
        return "tool_use", None
    if answer.stopped_by is not None:
        return "stop_sequence", answer.stopped_by
    return "end_turn", None


def _usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    return {"input_tokens": num_prompt, "output_tokens": num_sampled}
