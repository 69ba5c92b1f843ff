"""Names of columns with images, parts of chat messages that are images, and data URIs."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

__all__ = [
    "IMAGE_COLUMNS",
    "IMAGE_FIELDS",
    "data_uri",
    "has_images",
    "image_in",
    "is_image_part",
    "is_parts",
    "parts_in",
    "says_image",
]

IMAGE_COLUMNS = ("images", "image")
"""Columns of data in which images are looked for, in this order."""

IMAGE_FIELDS = ("image", "image_url", "url", "bytes", "path")
"""Fields of a part of a message, or of the hub's feature, that may hold the image. The first that
is not null counts: `path` only names the file where `bytes` are there."""
_IMAGE_TYPES = ("image", "image_url", "input_image")


def says_image(part: Mapping[Any, Any]) -> bool:
    """Whether the type of a part of a message is that of an image."""
    return part.get("type") in _IMAGE_TYPES


def is_image_part(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is an image."""
    has_no_type = part.get("type") is None and "text" not in part
    return says_image(part) or (has_no_type and "image" in part)


def image_in(value: Mapping[Any, Any]) -> Any:
    """The image in an image part, or in the hub's feature; None where it has none."""
    found = next((value[name] for name in IMAGE_FIELDS if value.get(name) is not None), None)
    return found.get("url", found) if isinstance(found, dict) else found


def is_parts(said: Sequence[Any]) -> bool:
    """Whether a list is the content of one message, rather than messages."""
    return bool(said) and all(
        isinstance(x, Mapping) and "role" not in x and ("type" in x or "image" in x) for x in said
    )


def parts_in(said: str | Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """All parts of a text, of messages, or of the content of one message; a text is one part."""
    if isinstance(said, str) or is_parts(said):
        contents: Iterator[Any] = iter((said,))
    else:
        contents = (message.get("content") or "" for message in said)
    for content in contents:
        if isinstance(content, str):
            yield {"type": "text", "text": content}
        else:
            yield from content


def data_uri(data: bytes) -> str:
    """The bytes of an image's file as a data URI. Who reads it finds the format in the bytes."""
    return f"data:image;base64,{b64encode(data).decode()}"


def has_images(content: Any) -> bool:
    """Whether the content of a message, as hone keeps it, has an image part."""
    return isinstance(content, list | tuple) and any(
        part.get("type") == "image" for part in cast("Sequence[Mapping[str, Any]]", content)
    )
