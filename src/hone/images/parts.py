"""Image parts of chat messages, in the spellings that users and clients write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

__all__ = ["has_images", "image_in", "is_image_part", "is_parts"]

_IMAGE_TYPES = ("image", "image_url", "input_image")


def is_image_part(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is an image."""
    kind = part.get("type")
    return kind in _IMAGE_TYPES or (kind is None and "text" not in part and "image" in part)


def image_in(part: Mapping[str, Any]) -> dict[str, Any]:
    """The image of an image part as `{"image": value}`; empty where the part has none."""
    for name in ("image", "image_url", "url"):
        if (value := part.get(name)) is not None:
            return {"image": value.get("url", value) if isinstance(value, dict) else value}
    if part.get("bytes") is not None:
        return {"image": {"bytes": part["bytes"], "path": part.get("path")}}
    return {"image": part["path"]} if part.get("path") is not None else {}


def is_parts(said: Sequence[Any]) -> bool:
    """Whether a list is the content of one message, rather than messages."""
    return bool(said) and all(
        isinstance(x, Mapping) and "role" not in x and ("type" in x or "image" in x) for x in said
    )


def has_images(content: Any) -> bool:
    """Whether the content of a message, as hone keeps it, has an image part."""
    return isinstance(content, list | tuple) and any(
        part.get("type") == "image" for part in cast("Sequence[Mapping[str, Any]]", content)
    )
