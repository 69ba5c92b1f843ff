"""The client of the walk's runs of `hone serve`: asks, notes what it gets, and ends the server."""

from __future__ import annotations

import json
import threading
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

__all__ = ["ask_in_thread"]

PATIENCE_S = 120.0
OF_THE_START = ("id", "created", "session", "key", "base_url", "openai_base_url")
"""What is different in every start."""


def ask_in_thread(cfg: Any, server: Any, keys: Any, seen: list[Any]) -> None:
    """Ask in a thread of its own, since that of the caller drives the engine."""
    threading.Thread(target=_ask_and_end, args=(cfg, server, keys, seen)).start()


def _ask_and_end(cfg: Any, server: Any, keys: Any, seen: list[Any]) -> None:
    try:
        seen.append([cfg.serve.host in server.url, server.url.rpartition(":")[0]])
        seen.append(server.port if cfg.serve.port else "any port")
        chat = {"messages": [{"role": "user", "content": "1+2="}], "logprobs": True}
        for path, body in (
            ("/v1/models", None),
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": "3+4="}),
            ("/sessions", {}),
            ("/sessions", {}),
        ):
            seen.append(_answer(server.url + path, keys.key, body))
    finally:
        server._door._handover.close()


def _answer(url: str, key: str, body: Any) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Authorization": f"Bearer {key}"})
    try:
        with urlopen(request, timeout=PATIENCE_S) as answer:
            found = json.loads(answer.read())
    except HTTPError as error:
        with error:
            return [error.code, json.loads(error.read())["error"]["code"]]
    return {name: value for name, value in found.items() if name not in OF_THE_START}
