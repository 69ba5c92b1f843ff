"""The images of samples in the page: what is said of each, their marks, and their small pictures.

A row names its images (`hone.images.thumbnails`); the page has `{"hash", "text"}` of each, and the
pictures by hash, each once. `images.js` draws them. A row of `hone generate` may have a column
`images` of its data in that place, which is left alone.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.observe.run_folder import read_picture

__all__ = ["asked_of", "hashes_of", "images_of", "marked_pieces", "pictures_of"]

MAX_PICTURE_BYTES = 16 << 20
"""Limit of the pictures in a page."""

Head = Mapping[str, Any]
"""The fields of a row before its per-token part."""


def _images(head: Head) -> Iterator[tuple[int, Head]]:
    """The images of a row with their numbers from 1."""
    given = head.get("images")
    named = [item for item in given if _is_named(item)] if isinstance(given, list) else []
    return enumerate(named, start=1)


def _is_named(item: object) -> bool:
    return isinstance(item, Mapping) and "hash" in item and "num_tokens" in item


def hashes_of(head: Head) -> list[str]:
    """The hashes of all images of a row."""
    return [str(image["hash"]) for _, image in _images(head)]


def asked_of(head: Head) -> dict[str, Any]:
    """The `prompt` of a row as it was rendered, with one mark for each image, and its `images`."""
    text = str(head.get("rendered", head.get("prompt", "")))
    for number, image in reversed([*_images(head)]):
        if "chars" in image:
            begin, end = image["chars"]
            text = text[:begin] + _mark(number, image) + text[end:]
    images = images_of(head)
    return {"prompt": text} | ({"images": images} if images else {})


def images_of(head: Head, turn: int | None = None) -> list[dict[str, str]]:
    """The images of a row's prompt, or those that an environment has shown after a turn."""
    return [
        {"hash": str(image["hash"]), "text": _text(number, image)}
        for number, image in _images(head)
        if image.get("turn") == turn
    ]


def marked_pieces(pieces: Sequence[str], head: Head, *, begin: int) -> list[str]:
    """The text of each token of a sample, which begins at token `begin`, with one mark for each of
    its images in place of the text of their tokens."""
    marked = [*pieces]
    for number, image in _images(head):
        first, last = image["start"] - begin, image["end"] - begin
        if 0 <= first < last <= len(marked):
            marked[first:last] = [_mark(number, image), *[""] * (last - first - 1)]
    return marked


def pictures_of(named: Mapping[str, Path]) -> dict[str, str]:
    """The pictures of hashes, each in a run's folder, as data URIs; the last ones as far as the
    limit goes. Those without a file are left out."""
    pictures: dict[str, str] = {}
    rest = MAX_PICTURE_BYTES
    for name, run in reversed([*named.items()]):
        if (picture := read_picture(run, name)) is None:
            continue
        data = base64.b64encode(picture.data).decode("ascii")
        rest -= len(data)
        if rest < 0:
            break
        pictures[name] = f"data:{picture.media_type};base64,{data}"
    return pictures


def _mark(number: int, image: Head) -> str:
    return f"[image {number}: {_counted(image)}]"


def _text(number: int, image: Head) -> str:
    """What is said of an image: `image 1, 24 tokens (4 x 6), tokens 5 to 28`."""
    size = f"{image['rows']} x {image['columns']}" if "rows" in image else ""
    if "tiles" in image:
        size = f"{image['tiles']} tiles of {size}" if size else f"{image['tiles']} tiles"
    first, last = image["start"], image["end"] - 1
    place = f"token {first:,}" if first == last else f"tokens {first:,} to {last:,}"
    return f"image {number}, {_counted(image)}{f' ({size})' if size else ''}, {place}"


def _counted(image: Head) -> str:
    return "1 token" if image["num_tokens"] == 1 else f"{image['num_tokens']:,} tokens"
