"""Shortens what an environment says to a number of tokens, before it is rendered.

A text that is too long loses its middle: tools often say what they did at the start and what went
wrong at the end. The cut is said in the text, so that the policy can ask for less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from hone.data.template_check import RenderError
from hone.images.parts import is_parts
from hone.types import Message, Observation

__all__ = ["cut_middle", "cut_observation"]

_NOTE = "\n... [{} left out] ...\n"
_CHARS_PER_TOKEN = 64
"""A text with more characters than this for each allowed token loses its middle before it is
encoded: a tool may return a hundred megabytes."""

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


def cut_observation(
    observation: Observation,
    max_tokens: int,
    encode: Encode,
    decode: Decode,
    image_sizes: Sequence[int] = (),
) -> tuple[Observation, int]:
    """The observation with each of its messages, or its only content, cut to `max_tokens`, and how
    many of them were cut. Token ids stand as they are. Of parts the texts are cut, and images of
    `image_sizes` tokens, in order, stay whole.

    Raises RenderError where the images of a message have more than `max_tokens`.
    """
    sizes = iter(image_sizes)

    def cut(content: Any) -> Any:
        if isinstance(content, str):
            return cut_middle(content, max_tokens, encode, decode)
        return _cut_parts(content, max_tokens, encode, decode, sizes)

    content = observation.content
    if isinstance(content, str) or is_parts(content):
        said = cut(content)
        return replace(observation, content=said), int(said != content)
    messages: list[Message] = []
    num_cut = 0
    for message in content:
        if (said := message.get("content")) and (made := cut(said)) != said:
            message = {**message, "content": made}
            num_cut += 1
        messages.append(message)
    return replace(observation, content=messages), num_cut


def _cut_parts(
    parts: Sequence[Mapping[str, Any]],
    max_tokens: int,
    encode: Encode,
    decode: Decode,
    sizes: Iterator[int],
) -> list[Mapping[str, Any]]:
    num_images = sum(part["type"] == "image" for part in parts)
    num_tokens = sum(islice(sizes, num_images))
    if num_tokens > max_tokens:
        raise RenderError(
            f"the environment shows {num_images} image{'s' * (num_images != 1)} of {num_tokens:,} "
            f"tokens in one message, and env.max_observation_tokens is {max_tokens:,}; raise it, "
            "or lower data.max_image_tokens"
        )
    room = max_tokens - num_tokens
    made: list[Mapping[str, Any]] = []
    for part in parts:
        if part["type"] != "image":
            part = {**part, "text": cut_middle(part["text"], room, encode, decode)}
            room -= len(encode(part["text"]))
        made.append(part)
    return made


def cut_middle(text: str, max_tokens: int, encode: Encode, decode: Decode) -> str:
    """The text where it has at most `max_tokens` tokens, else its start and its end with a note of
    how many tokens lie between. With the note it has at most `max_tokens`; where the note alone has
    more, or `encode` cannot encode it, the result is the start of the text.

    `encode` adds no special tokens, and raises RenderError for a text that it cannot encode;
    `decode` is its inverse for whole texts.
    """
    length = _CHARS_PER_TOKEN * max_tokens
    if len(text) > 2 * length:
        start, end = encode(text[:length]), encode(text[-length:])
        num_left_out = f"{len(text) - 2 * length:,} characters and more"
    else:
        ids = encode(text)
        if len(ids) <= max_tokens:
            return text
        start = end = ids
        num_left_out = ""
    room = _room(max_tokens, num_left_out or f"{len(start):,} tokens", encode)
    # A text is not always encoded as its parts were: fewer tokens are tried until it fits.
    while room > 0:
        first, last = (room + 1) // 2, room // 2
        note = num_left_out or f"{len(start) - room:,} tokens"
        made = (
            _whole(decode(start[:first]))
            + _NOTE.format(note)
            + _whole(decode(end[len(end) - last :]))
        )
        if (num_tokens := len(encode(made))) <= max_tokens:
            return made
        room = min(room - 1, room * max_tokens // num_tokens)
    return _start(start, max_tokens, encode, decode)


def _room(max_tokens: int, num_left_out: str, encode: Encode) -> int:
    """How many tokens of the text fit with the note; 0 where the tokenizer has no words for it."""
    try:
        return max_tokens - len(encode(_NOTE.format(num_left_out)))
    except RenderError:
        return 0


def _start(ids: Sequence[int], max_tokens: int, encode: Encode, decode: Decode) -> str:
    for length in range(max_tokens, 0, -1):
        if len(encode(made := _whole(decode(ids[:length])))) <= max_tokens:
            return made
    return ""


def _whole(text: str) -> str:
    """The text without characters of which the cut has left only some bytes, at either end."""
    return text.strip("\N{REPLACEMENT CHARACTER}")
