"""The images of what an environment says: opened, and parts of messages with hashes in their place.

What an environment says comes from a worker, which runs code that nobody trusts. So an image is the
bytes in a data URI and nothing else: no path is opened and no address is asked for here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from hone.data.template_check import RenderError
from hone.images.opening import ImageError
from hone.images.parts import is_parts, parts_in
from hone.images.reader import ImageReader, RowImage
from hone.types import Message

__all__ = ["bare_text", "open_shown", "with_hashes"]

Said = str | Sequence[Message]
"""A text, messages, or the parts of one."""


def open_shown(said: Said, reader: ImageReader | None) -> tuple[Said, tuple[RowImage, ...]]:
    """What an environment says with the hash of an image in its place, and the images in order.

    Raises RenderError for images that cannot be shown to the model, and where a text spells a token
    that stands for one.
    """
    if reader is not None:
        _refuse_marks(said, reader)
    if any(part.get("type") == "image" and "image" not in part for part in parts_in(said)):
        raise RenderError(
            "the environment shows an image part without an image; give it as a data URI in the "
            "part's field `image`"
        )
    values = [part["image"] for part in parts_in(said) if "image" in part]
    if not values:
        return said, ()
    if reader is None:
        raise RenderError(
            "the environment shows an image, and the model reads text alone; name a "
            "vision-language model in model.path, or answer with text"
        )
    for value in values:
        if not (isinstance(value, str) and value.startswith("data:")):
            raise RenderError(
                f"the environment shows an image as {value!r:.80}, and at this place it must be a "
                "data URI, with which nothing is read from files"
            )
    try:
        images = reader.read(values, None, are_shown=True)
    except ImageError as error:
        raise RenderError(f"of what the environment shows, {error}") from error
    hashes = iter(reader.hash_of(image) for image in images)
    if is_parts(said):
        return _content(said, hashes), images
    return with_hashes(cast("Sequence[Message]", said), hashes), images


def bare_text(said: Said, reader: ImageReader | None) -> str:
    """A text, or parts as a text, with what stands for an image where there is no template."""
    if isinstance(said, str):
        return said
    return "".join(
        reader.settings.bare if reader is not None and part["type"] == "image" else part["text"]
        for part in said
    )


def with_hashes(messages: Sequence[Message], hashes: Iterator[str]) -> list[Message]:
    """The messages with the next of `hashes` in the place of each image."""
    return [
        {**message, "content": _content(message["content"], hashes)}
        if "content" in message
        else message
        for message in messages
    ]


def _content(content: Any, hashes: Iterator[str]) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "image", "hash": next(hashes)} if "image" in part else part for part in content
    ]


def _refuse_marks(said: Said, reader: ImageReader) -> None:
    for part in parts_in(said):
        if (mark := reader.own_mark(part.get("text", ""))) is not None:
            raise RenderError(
                f"the environment says {mark!r}, which stands for an image with this model; show "
                "an image as a part of a message, and answer without it"
            )
