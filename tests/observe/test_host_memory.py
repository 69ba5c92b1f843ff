"""Host memory: a run is alarmed by a leak, not by stores that fill up to their bounds."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hone.images import store as store_module
from hone.images.opening import ImageFile
from hone.images.pixels import TilePixels, TileSource, content_hash
from hone.images.store import PixelStore
from hone.model_input import ContentPiece
from hone.models.features import FeatureSource
from hone.models.towers import Features
from hone.observe import host_memory as module
from hone.observe.alarms import Alarms
from hone.observe.host_memory import host_memory
from tests.images.drawn import SETTINGS

NUM_STEPS = 75
ENTRY_BYTES = 2 << 20
ALL, REST = "mem/rss_gib", "mem/rss_without_caches_gib"

Grow = Callable[[int], object]


def in_use() -> float:
    """GiB in use. Resident memory alone does not grow where earlier tests have left some free."""
    return host_memory()[ALL] - module._free_bytes()() / 2**30


def alarmed(grow: Grow) -> list[str]:
    """The metrics of alarms in a run each of whose steps makes an entry."""
    gc.collect()
    alarms, start = Alarms(), in_use()
    raised: list[str] = []
    for step in range(NUM_STEPS):
        grow(step)
        raised += [alarm.metric for alarm in alarms.check(step, host_memory())]
    assert in_use() - start > 0.9 * NUM_STEPS * ENTRY_BYTES / 2**30, "nothing has been kept"
    return raised


def growing_leak() -> Grow:
    held: list[Any] = []
    return lambda step: held.append(np.full(ENTRY_BYTES, step, np.uint8))


def filling_pixels(monkeypatch: pytest.MonkeyPatch) -> Grow:
    def made(file: ImageFile, settings: Any) -> list[TilePixels]:
        return [TilePixels(np.full((1, ENTRY_BYTES // 3, 3), 7, np.uint8), settings)]

    monkeypatch.setattr(store_module, "make_tiles", made)
    store = PixelStore()

    def grow(step: int) -> None:
        file = ImageFile(digest=f"{step}", source=b"", height=1, width=1)
        name = content_hash(file.digest, SETTINGS, 0)
        store.register({name: TileSource(file, SETTINGS, 0)})
        store.pixels([name])

    return grow


def feature_source(device: str) -> FeatureSource:
    def encode(tiles: Sequence[Any]) -> list[Features]:
        return [Features(torch.full((1, ENTRY_BYTES // 4), 7.0)) for _ in tiles]

    tower: Any = SimpleNamespace(device=torch.device(device), encode=encode)
    pixels = TilePixels(np.zeros((1, 1, 3), np.uint8), SETTINGS)
    return FeatureSource(tower, lambda names: [pixels for _ in names], max_bytes=1 << 30)


def filling_features() -> Grow:
    source = feature_source("cpu")
    return lambda step: source.gather([ContentPiece(hash=f"{step}", offset=0, size=1, place=0)])


def test_a_store_of_pixels_that_fills_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert alarmed(filling_pixels(monkeypatch)) == []


def test_a_cache_of_features_that_fills_is_no_leak() -> None:
    assert alarmed(filling_features()) == []


def test_a_leak_of_the_same_size_is_found() -> None:
    assert alarmed(growing_leak()) == [REST]


def test_features_on_a_gpu_are_not_in_host_memory() -> None:
    here, there = feature_source("cpu"), feature_source("meta")
    for source in (here, there):
        source._of(["a"])
    assert (here.host_bytes, there.host_bytes) == (ENTRY_BYTES, 0)


def test_a_store_that_is_gone_counts_no_more() -> None:
    before = len(module._caches)
    store = PixelStore()
    assert len(module._caches) == before + 1
    del store
    gc.collect()
    assert len(module._caches) <= before


EVERY_OTHER_FREED = """
import json
from hone.observe.host_memory import host_memory

host_memory()
start = host_memory()
blocks = [bytes([7]) * 24_000 for _ in range(4000)]
full = host_memory()
blocks[::2] = [None] * 2000
print(json.dumps([start, full, host_memory()]))
"""
"""No memory between blocks that are kept goes back to the system."""


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators do not say what is free")
def test_what_the_allocator_has_free_is_not_in_use() -> None:
    """In a process of its own: other threads of this one take memory and free it meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", EVERY_OTHER_FREED], capture_output=True, text=True, check=True
    )
    start, full, half = json.loads(done.stdout)
    made_gib = 4000 * 24_000 / 2**30
    assert full[REST] - start[REST] == pytest.approx(made_gib, rel=0.2)
    assert half[ALL] == pytest.approx(full[ALL], abs=0.1 * made_gib)
    assert half[REST] - start[REST] == pytest.approx(made_gib / 2, rel=0.2)


def test_another_c_library_leaves_what_is_free_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    module._free_bytes.cache_clear()
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: SimpleNamespace())
    try:
        assert module._free_bytes()() == 0
    finally:
        module._free_bytes.cache_clear()
