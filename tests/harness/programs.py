"""Programs that play episodes in tests, written to a folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

__all__ = ["command_of"]

CLIENT = """
import json
import os
import sys
import urllib.error
import urllib.request

TASK = json.load(sys.stdin)
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]


def post(path, body, base=BASE):
    request = urllib.request.Request(
        base + path,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def chat(messages, **fields):
    body = {"model": os.environ["HONE_MODEL"], "messages": messages, "return_token_ids": True}
    return post("/chat/completions", body | {"logprobs": True} | fields)


def said(answer):
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
"""


def command_of(folder: Path, name: str, program: str) -> str:
    """Write a program, which may use `CLIENT`, and return its command."""
    file = folder / f"{name}.py"
    file.write_text(CLIENT + program)
    return f"{shlex.quote(sys.executable)} -S -P {shlex.quote(str(file))}"
