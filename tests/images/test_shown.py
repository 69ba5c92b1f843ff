"""Images that an environment has shown: how long they are known, and how they travel."""

from __future__ import annotations

import gc
import json
import pickle
from pathlib import Path

import pytest

from hone.images import store as store_module
from hone.images.opening import open_image
from hone.images.pixels import TileSource
from hone.images.sending import with_pixels
from hone.images.shown import restored, saved, with_images
from hone.images.store import PixelStore
from hone.model_input import Content, ModelInput
from hone.types import Request, SamplingParams
from tests.images.family import Family
from tests.vision.examples import picture


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory):
    return Family("smolvlm", tmp_path_factory.mktemp("family")).reader().settings


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch):
    """Enter a process, by its number."""
    made = [PixelStore(), PixelStore()]

    def enter(number: int) -> PixelStore:
        monkeypatch.setattr(store_module, "STORE", made[number])
        return made[number]

    return enter


def shown(store: PixelStore, settings, seed: int, num_tiles: int = 2) -> ModelInput:
    file = open_image(picture(seed, 120, 60), folder=None)
    tiles = [store.show(TileSource(file, settings, n, "turn 1")) for n in range(num_tiles)]
    return ModelInput(
        tuple(
            Content(kind="image", hash=tile.hash, start=20 * n, num_tokens=16, shown=tile)
            for n, tile in enumerate(tiles)
        )
    )


def is_known(store: PixelStore, hashes: list[str]) -> bool:
    gc.collect()
    return all(store.source(name) is not None for name in hashes)


def test_an_image_is_known_as_long_as_a_sequence_has_it(stores, settings):
    store = stores(0)
    sample = shown(store, settings, 1)
    hashes = [content.hash for content in sample.contents]
    prompt = ModelInput((Content(kind="image", hash="of the data", start=0, num_tokens=4),))
    row = prompt.followed_by(sample, 10)
    assert [content.start for content in row.contents] == [0, 10, 30]
    again = shown(store, settings, 1)
    assert again.contents[0].shown is sample.contents[0].shown
    del again, sample
    assert is_known(store, hashes)
    del row
    gc.collect()
    assert [store.source(name) for name in hashes] == [None, None]


def test_another_process_of_the_trainer_gets_the_image(stores, settings):
    here = stores(0)
    ours = shown(here, settings, 2)
    hashes = [content.hash for content in ours.contents]
    message = pickle.dumps((ours, ours))
    assert len(message) < 1.5 * len(ours.contents[0].shown.source.file.source) + 3000
    there = stores(1)
    theirs = pickle.loads(message)
    assert theirs == (ours, ours)
    for mine, found in zip(here.pixels(hashes), there.pixels(hashes), strict=True):
        assert (mine.values == found.values).all()
    del theirs
    gc.collect()
    assert [there.source(name) for name in hashes] == [None, None]


def test_an_engine_gets_pixels_alone(stores, settings):
    here = stores(0)
    ours = shown(here, settings, 3)
    request = Request(
        id="a", prompt_ids=(1,), sampling=SamplingParams(max_tokens=1), model_input=ours
    )
    message = pickle.dumps(with_pixels([request]))
    there = stores(1)
    (found,) = pickle.loads(message)
    assert found == request
    assert all(content.shown is None for content in found.model_input.contents)
    hashes = [content.hash for content in ours.contents]
    assert [there.source(name) for name in hashes] == [None, None]
    for mine, theirs in zip(here.pixels(hashes), there.pixels(hashes), strict=True):
        assert (mine.values == theirs.values).all()


def test_a_checkpoint_has_each_file_once(stores, settings):
    ours = [shown(stores(0), settings, seed) for seed in (4, 5, 4)]
    text = json.dumps(saved(ours))
    sizes = {len(each.contents[0].shown.source.file.source) for each in ours}
    assert sum(sizes) < len(text) < 1.4 * sum(sizes) + 8000
    there = stores(1)
    tiles = restored(json.loads(text))
    bare = [
        ModelInput(tuple(Content(kind="image", hash=c.hash, start=c.start, num_tokens=16)
                         for c in each.contents))
        for each in ours
    ]  # fmt: skip
    found = [with_images(each, tiles) for each in bare]
    assert found == ours
    hashes = [content.hash for each in ours for content in each.contents]
    del tiles, bare
    assert is_known(there, hashes)
    for mine, theirs in zip(stores(0).pixels(hashes), there.pixels(hashes), strict=True):
        assert (mine.values == theirs.values).all()


def test_images_of_the_data_are_not_saved(stores, tmp_path: Path):
    of_data = ModelInput((Content(kind="image", hash="a", start=0, num_tokens=4),))
    assert saved([of_data]) == {"files": {}, "tiles": {}}
    assert with_images(of_data, {}) is of_data
