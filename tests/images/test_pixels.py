"""Layouts and pixels of the four families against transformers' processors, for random sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from hone.families.vision.registry import VISION
from hone.families.vision.spec import ImageLayout, ImageSettings
from hone.images.opening import open_image
from hone.images.pixels import TileSource, content_hash, layout_of, make_tiles
from tests.images.drawn import SETTINGS, drawn, encoded

SIZES = [(1, 1), (3, 5), (7, 400), (900, 9), (64, 64), (65, 63), (333, 512), (1000, 40)]


def sizes(seed: int) -> list[tuple[int, int]]:
    """The sizes above, and random ones."""
    rng = np.random.default_rng(seed)
    return SIZES + [(int(h), int(w)) for h, w in rng.integers(8, 500, (4, 2))]


def settings_of(name: str, processor: Mapping[str, Any], max_tokens: int | None) -> ImageSettings:
    """Settings of a public model, with a tokenizer of just the tokens that are needed."""
    family = next(family for family, spec in VISION.items() if name in spec.public)
    config = VISION[family].public[name]
    names = {
        "<fake_token_around_image>": 1,
        "<global-img>": 2,
        **{f"<{value}>": value for key, value in config.items() if "token" in key},
    }
    return VISION[family].settings(config, processor, max_tokens=max_tokens, tokens=names)


def normal(values: Any, settings: ImageSettings) -> Any:
    """Pixels [C, H, W] as a tower gets them, in double precision."""
    return ((values / 255 - settings.mean) / settings.std).transpose(2, 0, 1)


def ours(image: Image.Image, settings: ImageSettings) -> tuple[ImageLayout, list[Any]]:
    file = open_image(encoded(image), folder=None)
    tiles = make_tiles(file, settings)
    layout = layout_of(file, settings)
    assert all(tile.settings is settings for tile in tiles)
    assert [tile.values.shape[:2] for tile in tiles] == [
        (tile.height, tile.width) for tile in layout.tiles
    ]
    assert layout.text.count(settings.placeholder) == layout.num_features
    return layout, [normal(tile.values, settings) for tile in tiles]


def picture_of(patches: Any, rows: int, columns: int, patch: int, merge: int) -> Any:
    """The picture [C, H, W] that Qwen's patches [N, C * 2 * patch * patch] show, one by one."""
    picture = np.zeros((3, rows * patch, columns * patch))
    number = 0
    for top in range(0, rows, merge):
        for left in range(0, columns, merge):
            for row in range(top, top + merge):
                for column in range(left, left + merge):
                    values = patches[number].reshape(3, 2, patch, patch)
                    assert (values[:, 0] == values[:, 1]).all()  # both frames
                    place = np.s_[row * patch : (row + 1) * patch]
                    picture[:, place, column * patch : (column + 1) * patch] = values[:, 0]
                    number += 1
    assert number == len(patches)
    return picture


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen3-vl-2b"])
@pytest.mark.parametrize("max_tokens", [40, 300])
def test_qwen(name: str, max_tokens: int) -> None:
    patch = 14 if name.startswith("qwen2") else 16
    least = 4 * (2 * patch) ** 2
    settings = settings_of(name, {"min_pixels": least, "patch_size": patch}, max_tokens)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        size={"shortest_edge": least, "longest_edge": max_tokens * (2 * patch) ** 2},
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    for seed, (height, width) in enumerate(sizes(1)):
        image = drawn(seed, height, width)
        layout, (found,) = ours(image, settings)
        want = processor([image], return_tensors="np")
        _, rows, columns = want["image_grid_thw"][0].tolist()
        assert layout.num_features == rows * columns // 4
        assert layout.text == settings.placeholder * (rows * columns // 4)
        assert layout.tiles[0].shape == (1, rows // 2, columns // 2)
        assert layout.num_features <= max_tokens
        expected = picture_of(want["pixel_values"], rows, columns, patch, 2)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_qwen_takes_no_thin_images() -> None:
    settings = settings_of("qwen3-vl-2b", {}, 100)
    file = open_image(encoded(Image.new("RGB", (20_000, 20))), folder=None)
    with pytest.raises(ValueError, match=r"is 20000 x 20 pixels; qwen3_vl takes .* at most 200 "):
        layout_of(file, settings)


def test_gemma() -> None:
    settings = settings_of("gemma-3-4b", {}, None)
    processor = Gemma3ImageProcessorPil(
        size={"height": 896, "width": 896}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    for seed, (height, width) in enumerate([(1, 1), (9, 700), (1000, 1100)]):
        image = drawn(seed, height, width)
        layout, (found,) = ours(image, settings)
        pads = "<262144>" * 256  # as Gemma3Processor writes them
        assert layout.text == f"\n\n<255999>{pads}<256000>\n\n"
        want = processor([image], return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [64, 64 * 4, 64 * 5, 64 * 17])
@pytest.mark.parametrize("is_divided", [True, False])
def test_smolvlm(max_tokens: int, is_divided: bool) -> None:
    config = {"size": {"longest_edge": 4 * 512}, "do_image_splitting": is_divided}
    settings = replace(
        settings_of("smolvlm2-256m-video", config, max_tokens), edge=64, patch_size=2
    )
    settings = replace(settings, longest_edge=settings.longest_edge // 8)
    edges = {64: 64, 256: 64, 320: 128, 1088: 256}
    assert settings.longest_edge == (edges[max_tokens] if is_divided else 256)
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": settings.longest_edge},
        max_image_size={"longest_edge": 64},
        do_image_splitting=is_divided,
        do_resize=True,
    )
    for seed, (height, width) in enumerate(sizes(2)):
        image = drawn(seed, height, width)
        layout, found = ours(image, settings)
        want = processor([image], return_tensors="np", return_row_col_info=True)
        rows, columns = want["rows"][0][0], want["cols"][0][0]
        np.testing.assert_allclose(found, want["pixel_values"][0], rtol=0, atol=1e-6)
        text = get_image_prompt_string(
            rows,
            columns,
            64,
            image_token="<49190>",
            fake_token_around_image="<fake_token_around_image>",
            global_image_token="<global-img>",
        )
        assert layout.text == text
        assert layout.num_features == text.count("<49190>") == 64 * len(found) <= max_tokens


def test_hashes_tell_bytes_settings_and_tiles_apart() -> None:
    digests = [open_image(encoded(drawn(seed)), folder=None).digest for seed in range(2)]
    settings = [SETTINGS, replace(SETTINGS, max_pixels=99), replace(SETTINGS, mean=(0.5, 0.5, 0.4))]
    hashes = {content_hash(d, s, n) for d in digests for s in settings for n in range(2)}
    assert len(hashes) == 12
    assert content_hash(digests[0], replace(SETTINGS), 0) == content_hash(digests[0], SETTINGS, 0)


def test_a_hash_is_the_same_in_every_process() -> None:
    """It names prompts in checkpoints, so that a resumed run has to find it again."""
    assert content_hash("00ff", SETTINGS, 1) == "d50cda4222d1993efd7a5754cde534e2"


def test_a_source_makes_its_own_tile() -> None:
    settings = replace(SETTINGS, family="smolvlm", edge=32, longest_edge=64, words=("<a>", "<b>"))
    file = open_image(encoded(drawn(4)), folder=None)
    tiles = make_tiles(file, settings)
    assert len(tiles) == 5
    for number, tile in enumerate(tiles):
        found = TileSource(file, settings, number).pixels()
        np.testing.assert_array_equal(found.values, tile.values)
        assert found.num_patches == 4
