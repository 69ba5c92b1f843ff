"""What the APIs have in common: sampling parameters, messages, tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hone.door.calls import decoded
from hone.door.images import GivenImage
from hone.door.prompts import ChatPrompt
from hone.door.turns import Asked
from hone.door.wire.fields import Fields, wrong
from hone.images.parts import image_in, is_image_part
from hone.types import Message, SamplingParams

__all__ = [
    "MAX_NAME",
    "asked_chat",
    "chat_messages",
    "chat_tools",
    "content_of",
    "content_text",
    "given_image",
    "joined",
    "require_messages",
    "require_question",
    "sampling_of",
    "wants_calls",
]

_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (),
    "frequency_penalty": (),
    "presence_penalty": (),
    "repetition_penalty": (1,),
    "logit_bias": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "min_tokens": (),
    "echo": (),
    "suffix": (),
    "use_beam_search": (),
    "continue_final_message": (),
    "prompt_logprobs": (),
    "audio": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "features": (),
}
"""Fields that change what is sampled or answered and that nobody here computes, with the values
that change nothing."""
MAX_NAME = 1024
"""Most characters of names and ids, which templates may leave out of a prompt but sessions keep."""
_MAX_ARGUMENTS = 2**16
"""Most characters of `chat_template_kwargs` as JSON, for the same reason."""
_LONGEST_HEAD = 256
"""Most characters of a data URI before its bytes."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


def sampling_of(
    fields: Fields, defaults: SamplingParams, *, max_tokens: tuple[str, ...], stop: str = "stop"
) -> SamplingParams:
    """The sampling parameters of a request. `max_tokens` are the names of its bound, the first that
    is there counts; `stop` is the name of its stop strings."""
    fields.refuse(_UNSERVED, "this server does not do that; leave it out")
    given = (fields.integer(name, least=1) for name in max_tokens)
    most = next((value for value in given if value is not None), None)
    temperature = fields.number("temperature", least=0.0, most=100.0)
    if temperature is not None and 0 < temperature < 1e-6:
        temperature = 0.0
    top_p = fields.number("top_p", least=0.0, most=1.0)
    if top_p == 0:
        raise wrong(fields.path("top_p"), "must be above 0")
    top_k = fields.integer("top_k", least=-1)
    min_p = fields.number("min_p", least=0.0, most=1.0)
    stops, stop_ids = fields.texts(stop), fields.token_ids("stop_token_ids")
    return replace(
        defaults,
        max_tokens=defaults.max_tokens if most is None else most,
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=defaults.top_k if top_k is None else max(top_k, 0),
        min_p=defaults.min_p if min_p is None else min_p,
        stop=stops or defaults.stop,
        stop_token_ids=stop_ids or defaults.stop_token_ids,
        ignore_eos=fields.flag("ignore_eos"),
    )


def chat_messages(fields: Fields, name: str = "messages") -> tuple[Message, ...]:
    """The messages of OpenAI's chat API, as chat templates take them: contents as texts, or as
    parts where there are images (`content_of`), arguments of calls as objects where they are JSON.
    Arguments that are none stay a text."""
    messages = tuple(map(_message, fields.objects(name)))
    if not messages:
        raise wrong(fields.path(name), "must have at least one message")
    require_question(messages, fields.path(name))
    return messages


def require_question(messages: tuple[Message, ...], path: str) -> None:
    """Raise Refusal where the last message is the assistant's."""
    if messages[-1]["role"] == "assistant":
        raise wrong(
            path, "must not end with a message of the assistant; what it began is not continued"
        )


def _message(fields: Fields) -> Message:
    role = fields.choice("role", _ROLES, "")
    if not role:
        raise wrong(fields.path("role"), "is missing")
    message: Message = {"role": "system" if role == "developer" else role}
    read = content_text if role == "assistant" else content_of
    message["content"] = read(fields.get("content"), fields.path("content"))
    if role == "assistant" and fields.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in fields.objects("tool_calls")]
    for name in ("name", "tool_call_id"):
        if value := fields.text(name, "", most=MAX_NAME):
            message[name] = value
    return message


def _call(fields: Fields) -> dict[str, Any]:
    function = fields.part("function")
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        arguments = decoded(arguments)
    made = {"name": function.text("name"), "arguments": {} if arguments is None else arguments}
    return {"id": fields.text("id", "", most=MAX_NAME), "type": "function", "function": made}


def content_text(content: Any, path: str) -> str:
    """The content of a message as a text: a text, or parts that are texts."""
    parts = _parts(content, path)
    for place, part in enumerate(parts):
        if part["type"] == "image":
            raise wrong(
                f"{path}[{place}]",
                "is an image, and here is place for text alone; send it in a message of the user, "
                "or in the result of a tool",
            )
    return "".join(part["text"] for part in parts)


def content_of(content: Any, path: str) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or with images its parts (`given_image`)."""
    return joined(_parts(content, path))


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as the content of a message: a text, unless there are images."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def given_image(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """An image part of any API with a `GivenImage` in `image`. Raises Refusal unless its image is
    base64: in a data URI or, as Anthropic's API has it, with the source."""
    source = part.get("source")
    value = _from_source(source, path) if isinstance(source, dict) else image_in(part)
    if not isinstance(value, str) or not value:
        raise wrong(path, "is an image part without an image; give its bytes as a data URI")
    if value[:5].lower() != "data:":
        kind = "the URL" if value[:8].lower().startswith(("http://", "https://")) else "the text"
        raise wrong(
            path,
            f"is {kind} {value!r:.100}, and nothing is fetched or opened here; send the bytes of "
            "the image as a data URI: data:image/png;base64,...",
        )
    head, comma, _ = value[:_LONGEST_HEAD].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise wrong(path, "is a data URI that is not base64; write data:image/png;base64,...")
    return {"type": "image", "image": GivenImage(value, path)}


def _from_source(source: Mapping[str, Any], path: str) -> Any:
    """The image of a block of Anthropic's API."""
    match source.get("type"):
        case "base64" if isinstance(source.get("data"), str):
            return f"data:{source.get('media_type')};base64,{source['data']}"
        case "url":
            return source.get("url")
        case kind:
            raise wrong(
                f"{path}.source", f"is of type {kind!r:.60}, and must be base64, with its text"
            )


def _parts(content: Any, path: str) -> list[dict[str, Any]]:
    """The content of a message as parts."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise wrong(path, "must be a text or a list of parts")
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        where = f"{path}[{place}]"
        if isinstance(part, dict) and is_image_part(part):
            parts.append(given_image(part, where))
            continue
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise wrong(where, f"is {kind!r:.60}; only parts of text and images are served")
        parts.append({"type": "text", "text": text})
    return parts


def asked_chat(
    fields: Fields,
    messages: Sequence[Message],
    tools: tuple[Mapping[str, Any], ...],
    sampling: SamplingParams,
    *,
    field: str,
) -> Asked:
    """What a request of chat messages asks for; `field` is the name of its messages."""
    arguments = fields.mapping("chat_template_kwargs")
    if len(json.dumps(arguments)) > _MAX_ARGUMENTS:
        raise wrong(
            fields.path("chat_template_kwargs"),
            f"must have at most {_MAX_ARGUMENTS:,} characters as JSON",
        )
    return Asked(
        prompt=ChatPrompt(
            messages=tuple(messages),
            tools=tools,
            arguments=arguments,
        ),
        prompt_field=field,
        sampling=sampling,
        seed=fields.integer("seed"),
        reads_calls=wants_calls(fields, tools),
    )


def require_messages(messages: Sequence[Message], field: str) -> None:
    """Raise Refusal where there is nothing to answer."""
    if not messages or messages[-1]["role"] == "system":
        raise wrong(field, "must have at least one message")
    require_question(tuple(messages), field)


def chat_tools(fields: Fields, name: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """The tools of a request, as OpenAI's chat API has them."""
    tools: list[Mapping[str, Any]] = []
    for tool in fields.objects(name):
        if tool.text("type", "function") != "function":
            raise wrong(tool.path("type"), "must be function; there are no built-in tools here")
        function = tool.mapping("function")
        if not isinstance(function.get("name"), str):
            raise wrong(tool.path("function.name"), "must be a text")
        if not isinstance(function.get("parameters", {}), dict):
            raise wrong(tool.path("function.parameters"), "must be an object, a JSON schema")
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def wants_calls(fields: Fields, tools: tuple[Mapping[str, Any], ...]) -> bool:
    """Whether an answer is read for calls. Raises Refusal for a choice that would force one."""
    choice = fields.get("tool_choice")
    name = choice.get("type") if isinstance(choice, dict) else choice
    if name not in (None, "auto", "none"):
        raise wrong(
            fields.path("tool_choice"),
            f"is {choice!r:.100}, and no call can be forced here; use auto or none",
        )
    return bool(tools) and name != "none"
