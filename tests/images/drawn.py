"""Images for tests: drawn, encoded, and broken."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from hone.families.vision.spec import ImageSettings

__all__ = ["SETTINGS", "drawn", "encoded"]

SETTINGS = ImageSettings(
    family="qwen3_vl",
    patch_size=16,
    merge_size=2,
    min_pixels=32 * 32,
    max_pixels=16 * 32 * 32,
    mark="<image>",
    bare="<image>",
    placeholder="<image>",
    placeholder_id=1,
)
"""Settings that make at most 16 tokens of an image."""


def drawn(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    """A smooth random image in RGB, whose corners differ."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Bytes of the image's file."""
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()
