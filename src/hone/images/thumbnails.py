"""The images of samples, for people: named in the samples' rows, and small in the run folder.

    with Thumbnails(run_dir) as thumbnails:
        row = sample_row(sample, images=thumbnails.rows(sample))

A row has the place of each image among the tokens, and no pixels. The picture of a hash is the file
`images/<hash>.png` or `.jpg`, made once, by a thread of its own. A picture that cannot be made
is a warning, and never ends a run.

A picture is made of the pixels that the model got, which the store has or makes where it makes all
others (`data.image_workers`). So an image of a stranger is decoded in no other place for it.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hone.images.pixels import TileSource, layout_of
from hone.images.store import STORE
from hone.model_input import Content
from hone.observe.run_folder import IMAGES, PICTURE_TYPES
from hone.types import Sample, Turn

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Thumbnails"]

MAX_PICTURES = 512
"""Most pictures of a folder, of up to 20 kilobytes each. Those named longest ago go first."""
EDGE = 256
"""Longest edge of a picture, in pixels."""
_QUALITY = 80

_log = logging.getLogger(__name__)


class Thumbnails:
    """The pictures in the folder of a run. Closing waits until all have been written."""

    def __init__(self, run_dir: Path, *, max_pictures: int = MAX_PICTURES) -> None:
        self._folder = run_dir / IMAGES
        self._max_pictures = max_pictures
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hone-thumbnails")
        found = (file for suffix in PICTURE_TYPES for file in self._folder.glob(f"*{suffix}"))
        self._kept = OrderedDict[str, None].fromkeys(file.stem for file in found)
        """Hashes that have a picture or will get one: those of an earlier launch, then those of
        this one in the order in which they were named last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def rows(self, sample: Sample) -> list[dict[str, Any]]:
        """The images of a sample on its last path, in the order of their tokens, as JSON values.

        `start` and `end` are indices in the prompt's tokens with the sample's behind them. An image
        in the prompt has in `chars` the place of its mark in the prompt's text, and one that an
        environment has shown has in `turn` the index of the turn that it answers.
        """
        images = _images(sample.paths[sample.id].model_input.contents)
        rows = [_row(tiles) for tiles in images]
        num_asked = len(sample.prompt.token_ids)
        asked = [row for row in rows if row["start"] < num_asked]
        marks = _marks(sample.prompt.text, images[: len(asked)])
        for row, place in zip(asked, marks, strict=False):
            row["chars"] = place
        for row in rows[len(asked) :]:
            row["turn"] = _last_before(row["start"] - num_asked, sample.turns)
        for row in rows:
            self._keep(row["hash"])
        return rows

    def _keep(self, name: str) -> None:
        """Have a picture of the image made, unless there is one."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return
        self._kept[name] = None
        # An image that an environment has shown may be forgotten before its turn comes.
        done = self._thread.submit(self._write, name, STORE.source(name))
        done.add_done_callback(partial(_report, name))
        if len(self._kept) > self._max_pictures:
            oldest, _ = self._kept.popitem(last=False)
            self._thread.submit(self._remove, oldest).add_done_callback(partial(_report, oldest))

    def _write(self, name: str, source: TileSource | None) -> None:
        if name not in self._kept:  # so many were named that it has to go already
            return
        suffix, data = _encoded(_picture(name, source))
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".{name}.{os.getpid()}.tmp"
        unfinished.write_bytes(data)
        os.replace(unfinished, self._folder / f"{name}{suffix}")

    def _remove(self, name: str) -> None:
        if name not in self._kept:  # else it was named again
            for suffix in PICTURE_TYPES:
                (self._folder / f"{name}{suffix}").unlink(missing_ok=True)


def _images(contents: Sequence[Content]) -> list[list[Content]]:
    """The contents, in one list for each image of which they are tiles."""
    images: list[list[Content]] = []
    for content in contents:
        source = STORE.source(content.hash)
        if source is None or source.number == 0 or not images:
            images.append([content])
        else:
            images[-1].append(content)
    return images


def _row(tiles: Sequence[Content]) -> dict[str, Any]:
    first, last = tiles[0], tiles[-1]
    row: dict[str, Any] = {
        "hash": first.hash,
        "start": first.start,
        "end": last.stop,
        "num_tokens": sum(tile.num_tokens for tile in tiles),
    }
    if len(first.shape) > 1:
        row["rows"], row["columns"] = first.shape[-2:]
    return row | ({"tiles": len(tiles)} if len(tiles) > 1 else {})


def _marks(text: str, images: Sequence[Sequence[Content]]) -> list[tuple[int, int]]:
    """Places of the marks of a prompt's images in its text; empty where these are not known."""
    source = STORE.source(images[0][0].hash) if images else None
    if source is None:
        return []
    found = [match.span() for match in re.finditer(re.escape(source.settings.mark), text)]
    return found if len(found) == len(images) else []


def _last_before(token: int, turns: Sequence[Turn]) -> int:
    """Index of the last turn that ends at a token or before it."""
    return max(sum(turn.end <= token for turn in turns) - 1, 0)


def _picture(name: str, source: TileSource | None) -> Image:
    """The image of a hash, made small, in its own proportions; its tile where only that is known
    here."""
    from PIL.Image import fromarray

    if source is None:
        pixels = STORE.pixels([name])[0].values
        height, width, _ = pixels.shape
    else:
        last = len(layout_of(source.file, source.settings).tiles) - 1  # which shows all of it
        tile = STORE.show(replace(source, number=last))  # the store knows it as long as it is here
        pixels = STORE.pixels([tile.hash])[0].values
        height, width = source.file.height, source.file.width
    scale = min(EDGE / max(height, width), 1.0)
    return fromarray(pixels).resize((max(round(scale * width), 1), max(round(scale * height), 1)))


def _encoded(picture: Image) -> tuple[str, bytes]:
    """Suffix and bytes of a picture's file, in the format that is smaller: drawings as PNG,
    photographs as JPEG."""
    png, jpeg = io.BytesIO(), io.BytesIO()
    picture.save(png, "PNG", optimize=True)
    picture.save(jpeg, "JPEG", quality=_QUALITY)
    return min((".png", png.getvalue()), (".jpg", jpeg.getvalue()), key=lambda file: len(file[1]))


def _report(name: str, done: Future[None]) -> None:
    """Warn of a picture that was not made, for whatever reason."""
    if (error := done.exception()) is not None:
        _log.warning(
            "warning: image %s has no picture in the report: %s: %s",
            STORE.source(name) or name,
            type(error).__name__,
            error,
        )
