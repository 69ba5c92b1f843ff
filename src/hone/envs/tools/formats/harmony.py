"""The reader of OpenAI's harmony format: gpt-oss.

A turn consists of messages, each with a header of marks. A call is a message to a function:

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from hone.envs.tools.formats.found import Found, Malformed, Schemas, decode_whole
from hone.types import Message

__all__ = ["answers", "harmony"]

_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(text: str, schemas: Schemas, found: Found) -> None:
    """Messages of the channel `analysis` are reasoning, those to a function calls, others text."""
    for message in _ENDS.split(text):
        header, mark, body = message.partition("<|message|>")
        if not mark:
            found.texts.append(header)
            continue
        channel = _CHANNEL.search(header)
        if recipient := _RECIPIENT.search(header):
            try:
                found.call(recipient[1].removeprefix("functions."), decode_whole(body))
            except Malformed as error:
                found.error(error)
        elif channel and channel[1] == "analysis":
            found.reasoning.append(body)
        else:
            found.texts.append(body)


def answers(messages: Sequence[Message]) -> str:
    """The messages of tools and the header of the policy's next turn, as gpt-oss was trained on
    them. Its chat template can write them only after a message with the calls as data, which would
    write the calls anew."""
    written = [
        f"<|start|>functions.{message.get('name', 'error')} to=assistant<|channel|>commentary"
        f"<|message|>{json.dumps(message['content'], ensure_ascii=False)}<|end|>"
        for message in messages
    ]
    return "".join([*written, "<|start|>assistant"])
