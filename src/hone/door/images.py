"""The images of requests: opened and decoded before anything is rendered.

    a part of a message     {"type": "image", "image": GivenImage(uri, "messages[0].content[1]")}
    once it is open         {"type": "image", "hash": "9f3a..."}, by which requests are compared

Strangers send them. So an image is the bytes in a data URI and nothing else: no path is opened and
no address is asked for. Each image is decoded once as a whole, by the processes of
`data.image_workers`, so that a damaged one is refused here and never met by the engine. Threads of
their own wait for that, and the event loop for neither.

An image is known as long as a request or a turn of a session has it (`hone.images.shown`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakSet

from hone.data.shown_images import with_hashes
from hone.door.refusal import Refusal
from hone.errors import UserError
from hone.images.opening import MAX_PIXELS, ImageError
from hone.images.parts import parts_in
from hone.images.pixels import TileSource
from hone.images.reader import ImageReader, RowImage
from hone.images.store import STORE, ShownTile
from hone.model_input import ModelInput
from hone.types import Message

__all__ = ["MAX_NEW_PIXELS", "GivenImage", "OpenedImage", "RequestImages", "bytes_of", "given_in"]

MAX_NEW_PIXELS = 4 * MAX_PIXELS
"""Most pixels of the images of one request that are not known yet, all together: a body of a
megabyte may have minutes of work for the processes that decode."""


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image as a request has it."""

    uri: str
    """A data URI."""
    field: str
    """Where it stands in the request, for errors."""


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image that has been decoded once, and is known as long as this lives."""

    row: RowImage
    tiles: tuple[ShownTile, ...]


def given_in(messages: Sequence[Message]) -> list[GivenImage]:
    """The images of messages that are not open yet, in the order of their parts."""
    return [part["image"] for part in parts_in(messages) if "image" in part]


def bytes_of(model_input: ModelInput) -> dict[str, int]:
    """The sizes of the images of an input that requests have brought, by their digests."""
    files = {
        content.shown.source.file for content in model_input.contents if content.shown is not None
    }
    return {file.digest: len(file.source) for file in files if isinstance(file.source, bytes)}


class RequestImages:
    """Opens the images of requests."""

    def __init__(self, reader: ImageReader, *, max_model_len: int, num_threads: int) -> None:
        """`max_model_len` is the longest sequence in tokens; `num_threads` is how many requests are
        served at a time, which is best as many as processes decode."""
        self.reader = reader
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(num_threads, "hone-door-images")
        self._decoded = WeakSet[ShownTile]()
        """Tiles of images that were found whole."""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def opened(
        self, messages: Sequence[Message]
    ) -> tuple[tuple[Message, ...], tuple[OpenedImage, ...]]:
        """The messages with the hash of each image in its place, and the images. Raises Refusal for
        one that cannot be shown to the model."""
        given = given_in(messages)
        loop = asyncio.get_running_loop()
        images = await loop.run_in_executor(self._threads, self._open, given)
        hashes = iter(image.tiles[0].hash for image in images)
        return tuple(with_hashes(messages, hashes)), images

    def _open(self, given: Sequence[GivenImage]) -> tuple[OpenedImage, ...]:
        images = tuple(map(self._read, given))
        num_tokens = sum(image.row.layout.num_features for image in images)
        if num_tokens > self._max_model_len:
            raise Refusal(
                400,
                f"the {len(images)} images of the request have {num_tokens:,} tokens, and the "
                f"model's longest sequence, prompt and answer, has {self._max_model_len:,}; send "
                "fewer of them, or lower data.max_image_tokens",
                field=given[0].field,
                code="context_length_exceeded",
            )
        new = {
            image.row.file.digest: image
            for image in images
            if any(tile not in self._decoded for tile in image.tiles)
        }
        num_pixels = sum(image.row.file.height * image.row.file.width for image in new.values())
        if num_pixels > MAX_NEW_PIXELS:
            raise Refusal(
                400,
                f"the images of the request that are new have {num_pixels:,} pixels together; at "
                f"most {MAX_NEW_PIXELS:,} are decoded, so make them smaller or send fewer",
                field=given[0].field,
            )
        STORE.prefetch(tile.hash for image in new.values() for tile in image.tiles)
        for each, image in zip(given, images, strict=True):
            if image.row.file.digest in new:
                self._decode(each, image)
        return images

    def _read(self, given: GivenImage) -> OpenedImage:
        """The image with its header read. The bytes of one that is known already are those that
        are kept (`open_image`)."""
        try:
            (row,) = self.reader.read([given.uri], None, are_shown=True)
        except ImageError as error:
            raise _wrong(given, f"{error.__cause__}") from error
        except UserError as error:  # pillow is not installed
            raise _wrong(given, f"is an image, and this server reads none: {error}") from error
        settings, where = self.reader.settings, f"a request, {given.field}"
        tiles = tuple(
            STORE.show(TileSource(row.file, settings, number, where))
            for number in range(len(row.layout.tiles))
        )
        return OpenedImage(row, tiles)

    def _decode(self, given: GivenImage, image: OpenedImage) -> None:
        """Make the pixels, which the engine asks for next."""
        try:
            STORE.pixels([tile.hash for tile in image.tiles])
        except ImageError as error:
            raise _wrong(given, f"{error.__cause__}") from error
        self._decoded.update(image.tiles)


def _wrong(given: GivenImage, text: str) -> Refusal:
    return Refusal(400, f"{given.field} {text}", field=given.field)
