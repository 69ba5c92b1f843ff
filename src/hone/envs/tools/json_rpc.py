"""The messages of JSON-RPC 2.0, as the Model Context Protocol uses them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hone.envs.tools.tool import ToolError

__all__ = ["answer_to_server", "encode", "id_of_answer", "read", "result_of"]

_METHOD_NOT_FOUND = -32601


def encode(method: str, params: Mapping[str, Any] | None, number: int | None = None) -> bytes:
    """A request, or without a number a notification, on one line."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if number is not None:
        message["id"] = number
    if params is not None:
        message["params"] = params
    return json.dumps(message).encode()


def read(text: str | bytes) -> list[dict[str, Any]]:
    """The messages of a line or a body, which may be a batch. What is no message is left out:
    servers print other lines by mistake."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, dict)]


def id_of_answer(message: Mapping[str, Any]) -> int | None:
    """The number of the request that a message answers; None for other messages."""
    number = message.get("id")
    is_answer = "method" not in message and type(number) is int
    return number if is_answer else None


def result_of(message: Mapping[str, Any]) -> Any:
    """The result in an answer. Raises ToolError with the text of an error."""
    error = message.get("error")
    if error is None:
        return message.get("result")
    text = error.get("message") if isinstance(error, dict) else error
    raise ToolError(json.dumps({"error": str(text)}, ensure_ascii=False))


def answer_to_server(message: Mapping[str, Any]) -> bytes | None:
    """The answer to a request of the server: nothing but `ping` is served. None for other
    messages."""
    if "method" not in message or message.get("id") is None:
        return None
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if message["method"] == "ping":
        return json.dumps(answer | {"result": {}}).encode()
    error = {"code": _METHOD_NOT_FOUND, "message": f"{message['method']} is not supported"}
    return json.dumps(answer | {"error": error}).encode()
