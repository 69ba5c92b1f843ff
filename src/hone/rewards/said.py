"""What an environment says, checked before it leaves its worker.

Images become data URIs here: the worker reads paths and pillow's images, so that no other process
opens a path which a completion may have chosen, and the driver takes nothing but bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hone.images.opening import ImageError, open_image, verify
from hone.images.parts import data_uri, image_in, is_image_part, is_parts, parts_in
from hone.rewards import wire
from hone.rewards.shapes import InvalidScoreError

__all__ = ["num_image_bytes", "sendable"]


def sendable(said: str | Sequence[Any]) -> str | tuple[dict[str, Any], ...]:
    """A text, messages, or parts of a message as JSON values. Raises InvalidScoreError."""
    if isinstance(said, str):
        return said
    made = _content([*said]) if is_parts(said) else _messages(said)
    if isinstance(made, str):
        return made
    made = tuple(made)
    num_bytes = num_image_bytes(made)
    if num_bytes > wire.MAX_IMAGE_BYTES:
        raise InvalidScoreError(
            f"answered with images of {num_bytes:,} bytes in base64, and an answer may have "
            f"{wire.MAX_IMAGE_BYTES:,}; show smaller images, fewer of them, or JPEG"
        )
    try:
        json.dumps(made, allow_nan=False)
    except (TypeError, ValueError) as error:
        text = f"answered with messages that are not made of JSON values: {error}"
        raise InvalidScoreError(text) from None
    return made


def num_image_bytes(said: str | Sequence[Mapping[str, Any]]) -> int:
    """Number of bytes of the images in what `sendable` has made, in base64."""
    return sum(len(part.get("image", "")) for part in parts_in(said))


def _messages(answer: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    messages = tuple(answer)
    if not messages or not all(isinstance(turn, dict) and "role" in turn for turn in messages):
        raise InvalidScoreError(
            "answered with a list that is not of chat messages, such as "
            '[{"role": "user", "content": "..."}]'
        )
    return tuple(
        {**turn, "content": _content(turn["content"])} if "content" in turn else turn
        for turn in cast("tuple[dict[str, Any], ...]", messages)
    )


def _content(content: Any) -> str | list[dict[str, Any]]:
    """The content of a message with data URIs in the place of images; a text where it has none."""
    if isinstance(content, str):
        return content
    parts = [*map(_part, content)] if isinstance(content, list | tuple) and content else [None]
    if None in parts:
        raise InvalidScoreError(
            f"answered with a message whose content is {content!r:.80}; it must be text, or a list "
            'of parts such as {"type": "text", "text": "..."} and {"type": "image", "image": ...}: '
            "a chat template would write Python's spelling of anything else"
        )
    found = cast("list[dict[str, Any]]", parts)
    if all(part["type"] == "text" for part in found):
        return "".join(part["text"] for part in found)
    return found


def _part(part: Any) -> dict[str, Any] | None:
    """A part of a message; None for what is none."""
    if isinstance(part, Mapping) and is_image_part(cast("Mapping[str, Any]", part)):
        return {"type": "image", "image": _as_text(image_in(part))}
    text = part.get("text") if isinstance(part, Mapping) else None
    return {"type": "text", "text": text} if isinstance(text, str) else None


def _as_text(image: Any) -> str:
    """An image as a data URI: the bytes of a file as they are, pillow's image as a PNG."""
    try:
        file = open_image(image, folder=None)
        verify(file)
    except ImageError as error:
        raise InvalidScoreError(f"answered with an image that {error}") from error
    data = file.source.read_bytes() if isinstance(file.source, Path) else file.source
    return data_uri(data)
