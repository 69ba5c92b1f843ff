"""`POST /v1/responses`: OpenAI's newer API. The whole conversation comes in `input`: no response is
stored under its id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hone.door.calls import CalledTool, decoded
from hone.door.refusal import Refusal, openai_error
from hone.door.turns import Answer, Asked, AskedTurn
from hone.door.wire.asking import (
    MAX_NAME,
    asked_chat,
    content_of,
    content_text,
    require_messages,
    sampling_of,
)
from hone.door.wire.fields import Fields, wrong
from hone.door.wire.streaming import event
from hone.types import Message, SamplingParams

__all__ = ["ResponseOptions", "ResponsesWriter", "read_response", "written_response"]

_ELSEWHERE = {"previous_response_id": (), "conversation": (), "background": (), "prompt": ()}


class ResponseOptions:
    """What a request wants to have in its answer, and what the answer repeats of it."""

    def __init__(self, fields: Fields, model: str) -> None:
        self.has_ids = fields.flag("return_token_ids")
        self.head: dict[str, Any] = {
            "object": "response",
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.get("instructions"),
            "metadata": fields.mapping("metadata"),
            "parallel_tool_calls": fields.flag("parallel_tool_calls", default=True),
            "temperature": fields.get("temperature"),
            "top_p": fields.get("top_p"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.array("tools"),
        }


def read_response(fields: Fields, defaults: SamplingParams) -> Asked:
    """The request. Raises Refusal."""
    fields.refuse(_ELSEWHERE, "nothing is stored here; send the whole conversation in input")
    text_format = fields.part("text").part("format")
    text_format.refuse({"type": ("text",)}, "this server does not do that; leave it out")
    messages: list[Message] = []
    if instructions := fields.text("instructions", ""):
        messages.append({"role": "system", "content": instructions})
    given = fields.required("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in fields.objects("input"):
            _append(messages, item)
    require_messages(messages, "input")
    tools = tuple(map(_tool, fields.objects("tools")))
    sampling = sampling_of(fields, defaults, max_tokens=("max_output_tokens",))
    return asked_chat(fields, messages, tools, sampling, field="input")


def _append(messages: list[Message], item: Fields) -> None:
    """Append an item of the input. A text of the assistant and the calls after it are one
    message."""
    match item.text("type", "message"):
        case "message":
            role = item.choice("role", ("user", "assistant", "system", "developer"), "")
            if not role:
                raise wrong(item.path("role"), "is missing")
            read = content_text if role == "assistant" else content_of
            content = read(item.get("content"), item.path("content"))
            messages.append({"role": "system" if role == "developer" else role, "content": content})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.text("name"), "arguments": decoded(item.text("arguments", ""))}
            call = {
                "id": item.text("call_id", most=MAX_NAME),
                "type": "function",
                "function": function,
            }
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = content_of(item.get("output"), item.path("output"))
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.text("call_id", most=MAX_NAME),
                    "content": content,
                }
            )
        case "reasoning":
            pass  # templates leave out earlier thoughts, and the ids of ours are in the tree
        case kind:
            raise wrong(item.path("type"), f"is {kind!r:.60}, which is not served here")


def _tool(fields: Fields) -> Mapping[str, Any]:
    if fields.text("type") != "function":
        raise wrong(fields.path("type"), "must be function; there are no built-in tools here")
    function = {
        "name": fields.text("name"),
        "description": fields.text("description", ""),
        "parameters": fields.mapping("parameters"),
    }
    return {"type": "function", "function": function}


def written_response(turn: AskedTurn, answer: Answer, options: ResponseOptions) -> dict[str, Any]:
    """The answer."""
    items = [] if answer.calls and not answer.content else [_text_item(turn, answer.content)]
    items += [_call_item(call) for call in answer.calls]
    num_prompt, num_sampled = len(answer.prompt_ids), len(answer.sampled.token_ids)
    written = _response(turn, options) | {
        "status": "incomplete" if answer.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
        "weight_version": answer.weight_version,
    }
    if options.has_ids:
        items[-1] |= {
            "prompt_token_ids": list(answer.prompt_ids),
            "generation_token_ids": list(answer.sampled.token_ids),
            "generation_log_probs": list(answer.sampled.logprobs),
        }
    if answer.turn is not None:
        written["turn"] = answer.turn
    return written


class ResponsesWriter:
    """Writes the events of a response: its items one by one, each with its parts."""

    ping = b": keep-alive\n\n"

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._number = 0
        self._text, self._has_text = "", False
        self._turn: AskedTurn | None = None

    def begin(self, turn: AskedTurn) -> Iterable[bytes]:
        self._turn = turn
        response = _response(turn, self._options) | {"status": "in_progress", "output": []}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def more(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> Iterable[bytes]:
        if not text:
            return
        yield from self._open_text()
        self._text += text
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def end(self, answer: Answer) -> Iterable[bytes]:
        assert self._turn is not None
        if not answer.calls:
            yield from self._open_text()
        if self._has_text:
            yield from self._close_text()
        for index, call in enumerate(answer.calls, int(self._has_text)):
            item = _call_item(call)
            begun = item | {"arguments": "", "status": "in_progress"}
            place = {"item_id": item["id"], "output_index": index}
            yield self._event("response.output_item.added", output_index=index, item=begun)
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **place, delta=call.arguments)
            yield self._event(f"{kind}.done", **place, arguments=call.arguments, name=call.name)
            yield self._event("response.output_item.done", output_index=index, item=item)
        response = written_response(self._turn, answer, self._options)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        error = openai_error(refusal)["error"]
        yield self._event(
            "error", code=error["code"], message=error["message"], param=error["param"]
        )

    @property
    def _place(self) -> dict[str, Any]:
        assert self._turn is not None
        return {"item_id": f"msg_{self._turn.id}", "output_index": 0, "content_index": 0}

    def _open_text(self) -> Iterable[bytes]:
        """The start of the text, unless it has started."""
        if self._has_text:
            return
        assert self._turn is not None
        self._has_text = True
        item = _text_item(self._turn, "") | {"content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    def _close_text(self) -> Iterable[bytes]:
        assert self._turn is not None
        yield self._event("response.output_text.done", **self._place, text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=_part(self._text))
        item = _text_item(self._turn, self._text)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _response(turn: AskedTurn, options: ResponseOptions) -> dict[str, Any]:
    return {"id": f"resp_{turn.id}", "created_at": turn.created} | options.head


def _text_item(turn: AskedTurn, text: str) -> dict[str, Any]:
    return {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_part(text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: CalledTool) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
