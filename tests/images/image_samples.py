"""Samples with images, of files that are made for a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from hone.families.vision.spec import ImageSettings
from hone.images.opening import ImageFile, open_image
from hone.images.pixels import TileSource, content_hash
from hone.images.store import STORE
from hone.model_input import Content, ModelInput
from hone.types import Prompt, Reward, Sample, StopReason

MARK = "<|image_pad|>"
PAD = 7
SETTINGS = ImageSettings(
    family="qwen3_vl",
    patch_size=16,
    merge_size=2,
    min_pixels=32 * 32,
    max_pixels=256 * 32 * 32,
    mark=MARK,
    bare=MARK,
    placeholder=MARK,
    placeholder_id=PAD,
)


def drawing(folder: Path, seed: int, size: tuple[int, int] = (320, 200)) -> ImageFile:
    """A file with a few shapes of one colour each."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", size, "white")
    for _ in range(3):
        x, y, edge = (int(rng.integers(0, high)) for high in (size[0] - 40, size[1] - 40, 40))
        ImageDraw.Draw(image).rectangle((x, y, x + edge + 5, y + edge + 5), fill=_colour(rng))
    return saved(folder, image, f"drawing{seed}.png")


def photograph(folder: Path, seed: int, size: tuple[int, int] = (200, 320)) -> ImageFile:
    """A file with noise, which only JPEG makes small."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return saved(folder, Image.fromarray(pixels), f"photograph{seed}.png")


def saved(folder: Path, image: Image.Image, name: str) -> ImageFile:
    image.save(folder / name)
    return open_image(name, folder=folder)


def _colour(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in rng.integers(0, 200, 3))
    return red, green, blue


def tiles_at(start: int, file: ImageFile, shapes: Sequence[tuple[int, int]]) -> list[Content]:
    """The contents of an image, a tile for each of `shapes`, with a token between two of them."""
    contents: list[Content] = []
    for number, (rows, columns) in enumerate(shapes):
        name = content_hash(file.digest, SETTINGS, number)
        STORE.register({name: TileSource(file, SETTINGS, number, f"row {file.source}")})
        size = rows * columns
        contents.append(
            Content(kind="image", hash=name, start=start, num_tokens=size, shape=(1, rows, columns))
        )
        start += size + 1
    return contents


def sample_of(
    text: str, contents: Sequence[Content], *, num_asked: int = 200, group: int = 0, index: int = 0
) -> Sample:
    """A sample of five tokens whose prompt has these contents among `num_asked` tokens."""
    ids = [11] * num_asked
    for content in contents:
        ids[content.start : content.stop] = [PAD] * content.num_tokens
    prompt = Prompt(
        id=f"shapes:{group}",
        token_ids=tuple(ids),
        text=text,
        model_input=ModelInput(tuple(contents)),
    )
    return Sample(
        id=f"shapes:{group}/1/{index}",
        prompt=prompt,
        index=index,
        token_ids=[20, 21, 22, 23, 24],
        logprobs=[-0.5] * 5,
        weight_versions=[0] * 5,
        loss_mask=[True] * 5,
        stop_reason=StopReason.EOS,
        text="three",
        reward=Reward(total=1.0, parts={"correct": 1.0}),
    )
