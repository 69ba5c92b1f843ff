"""The store: what is decoded and how often, what is kept, and what other processes sent."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from hone.data.settings import DataConfig
from hone.images import store as module
from hone.images.opening import ImageError, open_image
from hone.images.pixels import TilePixels, TileSource, content_hash, make_tiles
from hone.images.pool import Tiles
from hone.images.sending import with_pixels
from hone.images.store import PixelStore
from hone.loops.inputs import image_reader
from hone.model_input import Content, ModelInput
from hone.models.settings import ModelConfig
from hone.models.tiny_vision import make_tiny_vision_model
from hone.types import Request, SamplingParams
from tests.images.drawn import SETTINGS, drawn, encoded
from tests.images.workers import workers

NUM_BYTES = 3 * 64 * 64  # of an image of 60 x 80 pixels
TILED = replace(SETTINGS, family="smolvlm", edge=32, longest_edge=64, words=("<a>", "<b>"))


def sources(num: int, settings: Any = SETTINGS, num_tiles: int = 1) -> dict[str, TileSource]:
    found: dict[str, TileSource] = {}
    for seed in range(num):
        file = open_image(encoded(drawn(seed)), folder=None)
        for number in range(num_tiles):
            name = content_hash(file.digest, settings, number)
            found[name] = TileSource(file, settings, number)
    return found


def filled(tiles: dict[str, TileSource], **options: Any) -> PixelStore:
    store = PixelStore(**options)
    store.register(tiles)
    return store


def same(found: Sequence[TilePixels], tiles: dict[str, TileSource], names: Sequence[str]) -> None:
    for pixels, name in zip(found, names, strict=True):
        source = tiles[name]
        want = make_tiles(source.file, source.settings)[source.number]
        np.testing.assert_array_equal(pixels.values, want.values)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Slow:
    """In place of a pool: images are made where the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any, Tiles]] = []

    def submit(self, file: Any, settings: Any, tiles: Tiles) -> None:
        self.asked.append((file, settings, tiles))

    def make(self) -> None:
        for file, settings, tiles in self.asked:
            tiles.set_result(make_tiles(file, settings))


def test_a_group_with_one_image_decodes_it_once() -> None:
    tiles = sources(1)
    store = filled(tiles)
    (name,) = tiles
    for _ in range(8):
        same(store.pixels([name]), tiles, [name])
    same(store.pixels([name] * 3), tiles, [name] * 3)
    assert (store.num_decoded, store.num_hits) == (1, 8)
    assert store.busy_s > 0
    assert store.num_bytes == NUM_BYTES


def test_all_tiles_of_an_image_are_made_at_once_and_given_in_the_order_asked_for() -> None:
    tiles = sources(3, TILED, num_tiles=5)
    store = filled(tiles)
    names = list(tiles)
    mixed = [names[i] for i in np.random.default_rng(0).permutation(15)]
    same(store.pixels(mixed), tiles, mixed)
    assert store.num_decoded == 3


def test_threads_that_ask_at_the_same_time_wait_for_one_decoding() -> None:
    tiles = sources(1, TILED, num_tiles=5)
    store, pool = filled(tiles), Slow()
    store.use(pool)  # type: ignore[arg-type]
    names = list(tiles)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(store.pixels, [names[i % 5]]) for i in range(8)]
        try:
            until(lambda: store.num_hits == 7)
        finally:
            pool.make()
        for i, answer in enumerate(asked):
            same(answer.result(), tiles, [names[i % 5]])
    assert len(pool.asked) == store.num_decoded == 1


def test_threads_without_a_pool_wait_for_one_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = sources(1)
    store = filled(tiles)
    (name,) = tiles
    began, goes_on = threading.Event(), threading.Event()

    def slowly(*args: Any) -> list[TilePixels]:
        began.set()
        assert goes_on.wait(60)
        return make_tiles(*args)

    monkeypatch.setattr(module, "make_tiles", slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(store.pixels, [name])
        assert began.wait(60)
        second = threads.submit(store.pixels, [name])
        try:
            until(lambda: store.num_hits == 1)
        finally:
            goes_on.set()
        same([*first.result(), *second.result()], tiles, [name, name])
    assert store.num_decoded == 1


def test_the_bound_holds_and_what_has_gone_is_made_again() -> None:
    tiles = sources(4)
    store = filled(tiles, max_bytes=3 * NUM_BYTES)
    a, b, c, d = tiles
    for name in (a, b, c, a, d):  # b was asked for least recently
        same(store.pixels([name]), tiles, [name])
        assert store.num_bytes <= store.max_bytes
    assert store.num_decoded == 4
    store.pixels([a, c, d])
    assert store.num_decoded == 4
    same(store.pixels([b]), tiles, [b])
    assert store.num_decoded == 5
    assert store.num_bytes == 3 * NUM_BYTES


def test_a_bound_of_nothing_still_gives_pixels() -> None:
    tiles = sources(2, TILED, num_tiles=5)
    store = filled(tiles, max_bytes=0)
    same(store.pixels(list(tiles)), tiles, list(tiles))
    assert (store.num_decoded, store.num_bytes) == (2, 0)


def test_a_kept_tile_holds_its_own_memory_alone() -> None:
    """Else one tile of an image that is kept would hold the pixels of all, beyond the bound."""
    tiles = sources(1, TILED, num_tiles=5)
    for pixels in filled(tiles).pixels(list(tiles)):
        owner = pixels.values
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert owner.nbytes == pixels.values.nbytes


def test_unknown_hashes_and_bad_images_are_errors_and_nobody_waits_for_them() -> None:
    data = encoded(drawn(0))
    file = open_image(data[: len(data) // 2], folder=None)
    store = filled({"x": TileSource(file, SETTINGS, 0, "train.jsonl, line 3: image 2")})
    for _ in range(2):
        with pytest.raises(ImageError, match=r"^train.jsonl, line 3: image 2 cannot be decoded"):
            store.pixels(["x"])
    with pytest.raises(KeyError):
        store.pixels(["unknown"])
    assert store.num_decoded == 0


def test_an_image_without_a_location_is_named_by_its_file() -> None:
    file = open_image(encoded(drawn(0)), folder=None)
    assert str(TileSource(file, SETTINGS, 0)) == f"an image of {len(encoded(drawn(0))):,} bytes"


def test_prefetching_begins_what_half_the_bound_holds_in_order_and_once() -> None:
    tiles = sources(5)
    store, pool = filled(tiles, max_bytes=6 * NUM_BYTES), Slow()
    names = list(tiles)
    store.prefetch(names)  # nothing without a pool
    store.use(pool)  # type: ignore[arg-type]
    for _ in range(2):
        store.prefetch([names[3], names[3], names[1], names[0], names[2], names[4]])
    expected = [tiles[names[i]].file for i in (3, 1, 0)]
    assert [file for file, _, _ in pool.asked] == expected
    pool.make()
    assert store.num_decoded == 3
    same(store.pixels([names[0], names[3]]), tiles, [names[0], names[3]])
    store.prefetch([names[3], names[1], names[0]])  # they are there
    assert len(pool.asked) == 3


# ---- of other processes --------------------------------------------------------------------------


def requests(hashes: Sequence[str], num: int) -> list[Request]:
    contents = tuple(
        Content(kind="image", hash=name, start=4 * i, num_tokens=4, shape=(1, 2, 2))
        for i, name in enumerate(hashes)
    )
    shown = ModelInput(contents)
    return [
        Request(
            id=str(number),
            prompt_ids=(1,) * 4 * len(hashes),
            model_input=shown,
            sampling=SamplingParams(max_tokens=1),
        )
        for number in range(num)
    ]


def test_pixels_that_were_sent_live_as_long_as_what_they_were_sent_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = sources(2)
    names = list(tiles)
    here, there = filled(tiles), PixelStore(max_bytes=0)
    monkeypatch.setattr("hone.images.store.STORE", here)
    both = pickle.dumps(with_pixels(requests(names, 8)))
    one = pickle.dumps(with_pixels(requests(names[:1], 1)))
    assert here.num_decoded == 2
    assert len(both) < 2.2 * NUM_BYTES  # each image once
    monkeypatch.setattr("hone.images.store.STORE", there)
    first, second = pickle.loads(both), pickle.loads(one)
    assert [request.id for request in first] == [str(i) for i in range(8)]
    same(there.pixels(names), tiles, names)
    kept = first[5]
    del first
    gc.collect()
    more = pickle.loads(one)
    same(there.pixels(names), tiles, names)  # one of eight is left
    del kept
    gc.collect()
    third = pickle.loads(one)
    same(there.pixels(names[:1]), tiles, names[:1])
    with pytest.raises(KeyError):
        there.pixels(names[1:])
    del second, more, third
    gc.collect()
    fourth = pickle.loads(both)  # notices that those above have gone, and brings both again
    same(there.pixels(names), tiles, names)
    assert len(fourth) == 8
    assert there.num_decoded == 0


@pytest.mark.parametrize("number", [0, 2])
def test_a_run_has_the_processes_of_its_recipe(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_vision_model(tmp_path, family="qwen3_vl", weights=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    store = PixelStore()
    monkeypatch.setattr("hone.loops.inputs.STORE", store)
    cfg = DataConfig(train=(), image_workers=number)
    for _ in range(2):  # of prompts, and of what environments show
        assert image_reader(ModelConfig(path=str(folder)), cfg, tokenizer) is not None
    file = open_image(encoded(drawn(0)), folder=None)
    assert store.broken([file]) == {}
    children = psutil.Process().children()
    assert sum("hone.images.worker" in child.cmdline() for child in children) == min(number, 1)
    store.use_workers(0)


def test_processes_of_a_command_end_with_it_and_earlier_ones_are_used_again() -> None:
    file = open_image(encoded(drawn(0)), folder=None)
    store, earlier = PixelStore(), Slow()
    store.use(earlier)  # type: ignore[arg-type]
    before = workers()
    with store.own_workers():
        store.use_workers(1)
        assert store.broken([file]) == {}
        assert len(workers()) == len(before) + 1
    assert workers() == before
    tiles = sources(1)
    store.register(tiles)
    store.prefetch(list(tiles))
    assert len(earlier.asked) == 1
