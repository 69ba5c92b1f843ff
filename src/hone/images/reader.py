"""Turns the images of data rows into text in place of marks, and into contents among ids.

    images = reader.read(values, folder)              # headers alone, nothing is decoded
    text = reader.expand(rendered, images, location)  # marks of the chat template become tokens
    model_input = reader.contents(ids, images, location)

This is the one place where ids are expanded: engine and trainer get the same ids and the same
`ModelInput`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hone.errors import UserError
from hone.families.spec import Json
from hone.families.vision.registry import VISION
from hone.families.vision.spec import ImageLayout, ImageSettings
from hone.images.opening import ImageError, ImageFile, open_image
from hone.images.pixels import TileSource, content_hash, layout_of
from hone.images.store import STORE
from hone.model_input import TEXT, Content, ModelInput

__all__ = ["ImageReader", "RowImage"]


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image of a row, and the tokens that it becomes."""

    file: ImageFile
    layout: ImageLayout
    is_shown: bool = False
    """Whether an environment or a request has shown it, so that nobody can read it again."""


class ImageReader:
    """Reads the images of rows for one model and recipe."""

    def __init__(self, settings: ImageSettings, *, may_fetch: bool = False) -> None:
        """With `may_fetch` an image may be a URL, which is fetched."""
        self.settings = settings
        self._may_fetch = may_fetch

    @classmethod
    def of(
        cls,
        config: Json,
        processor: Json,
        tokens: Mapping[str, int],
        *,
        max_tokens: int,
        may_fetch: bool = False,
    ) -> ImageReader:
        """The reader of a model with this `config.json`, image processor's settings and
        vocabulary, with at most `max_tokens` tokens an image. Raises ValueError, as a predicate for
        a message on the model."""
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if processor.get(name) is False:
                raise ValueError(
                    f"has {name}: false in its image processor's settings, and images are resized, "
                    "scaled and normalised here"
                )
        spec = VISION[config["model_type"]]
        settings = spec.settings(config, processor, max_tokens=max_tokens, tokens=tokens)
        return cls(settings, may_fetch=may_fetch)

    def read(
        self, values: Sequence[Any], folder: Path | None, *, are_shown: bool = False
    ) -> tuple[RowImage, ...]:
        """The images of a row, from its values in the order of their marks. Relative paths are
        relative to `folder`. `are_shown` is `RowImage.is_shown` of them.

        Raises ImageError, with the image's number from 1: "image 2 is a truncated JPEG".
        """
        images: list[RowImage] = []
        for number, value in enumerate(values, start=1):
            try:
                file = open_image(value, folder=folder, may_fetch=self._may_fetch)
                images.append(RowImage(file, layout_of(file, self.settings), are_shown))
            except ValueError as error:
                raise ImageError(f"image {number} {error}") from error
        return tuple(images)

    def own_mark(self, text: str) -> str | None:
        """The token for images that a text of a row spells out, which would be taken for an image;
        None where it has none."""
        marks = (self.settings.mark, self.settings.placeholder)
        return next((mark for mark in marks if mark in text), None)

    def expand(self, text: str, images: Sequence[RowImage], location: str) -> str:
        """A rendered text with the tokens of each image in the place of its mark.

        Raises UserError unless there are as many marks as images, and no placeholder besides.
        """
        mark, placeholder = self.settings.mark, self.settings.placeholder
        first, *rest = text.split(mark)
        if len(rest) != len(images):
            raise UserError(
                f"{location}: the rendered text has {len(rest)} x {mark!r}, each of which stands "
                f"for an image, and the row has {_counted(len(images))}. A chat template that does "
                "not write images as the model needs them can be replaced in model.chat_template"
            )
        if placeholder != mark and placeholder in text:
            raise UserError(
                f"{location}: the rendered text has {placeholder!r}, which stands for a part of an "
                "image and is written by hone alone; take it out of the row or the chat template"
            )
        return first + "".join(
            image.layout.text + after for image, after in zip(images, rest, strict=True)
        )

    def contents(
        self,
        token_ids: Sequence[int],
        images: Sequence[RowImage],
        location: str,
    ) -> ModelInput:
        """The images among the ids of an expanded text. From now on this process can make their
        pixels (`STORE`): those of the data for ever, and those that were shown as long as the
        contents live.

        Raises UserError unless the runs of placeholders are the tiles of the images, in order.
        """
        if not images:
            return TEXT
        runs = [*_runs(token_ids, self.settings.placeholder_id)]
        tiles = [
            (image, n, f"{location}: image {number}")
            for number, image in enumerate(images, start=1)
            for n in range(len(image.layout.tiles))
        ]
        sizes = [image.layout.tiles[n].num_tokens for image, n, _ in tiles]
        if [size for _, size in runs] != sizes:
            raise UserError(
                f"{location}: the tokenizer makes runs of {[size for _, size in runs]} tokens "
                f"{self.settings.placeholder!r} of a text with images of {sizes} tokens. Name the "
                "model's own tokenizer in model.tokenizer, and a chat template that separates "
                "images in model.chat_template"
            )
        contents: list[Content] = []
        sources: dict[str, TileSource] = {}
        for (image, n, place), (start, size) in zip(tiles, runs, strict=True):
            name = self.hash_of(image, n)
            source = TileSource(image.file, self.settings, n, place)
            if not image.is_shown:
                sources[name] = source
            contents.append(
                Content(
                    kind="image",
                    hash=name,
                    start=start,
                    num_tokens=size,
                    shape=image.layout.tiles[n].shape,
                    shown=STORE.show(source) if image.is_shown else None,
                )
            )
        STORE.register(sources)
        return ModelInput(tuple(contents))

    def images_of(self, model_input: ModelInput) -> tuple[RowImage, ...]:
        """The images of an input that some reader's `contents` has made in this process, which may
        be that of another model. Raises ImageError as `read`."""
        images: list[RowImage] = []
        for content in model_input.contents:
            source = _source_of(content)
            if source.number:  # a further tile of the image before
                continue
            try:
                layout = layout_of(source.file, self.settings)
            except ValueError as error:
                raise ImageError(f"image {len(images) + 1} {error}") from error
            images.append(RowImage(source.file, layout, is_shown=content.shown is not None))
        return tuple(images)

    def with_own_marks(self, text: str, model_input: ModelInput) -> str:
        """A text in which the reader that has made `model_input` has written its marks for images,
        with `bare` of this one in their place."""
        for content in model_input.contents[:1]:
            other = _source_of(content).settings
            text = text.replace(other.bare, other.mark).replace(other.mark, self.settings.bare)
        return text

    def hash_of(self, image: RowImage, number: int = 0) -> str:
        """The content hash of a tile of an image."""
        return content_hash(image.file.digest, self.settings, number)


def _source_of(content: Content) -> TileSource:
    source = STORE.source(content.hash)
    assert source is not None, content.hash
    return source


def _runs(token_ids: Sequence[int], placeholder: int) -> Iterator[tuple[int, int]]:
    """Start and length of each run of placeholders."""
    place = 0
    for token, run in groupby(token_ids):
        size = sum(1 for _ in run)
        if token == placeholder:
            yield place, size
        place += size


def _counted(number: int) -> str:
    return "one image" if number == 1 else f"{number or 'no'} images"
