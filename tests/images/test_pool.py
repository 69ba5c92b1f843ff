"""The pool of processes: the same pixels, what becomes of processes that die or hang, and that
nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from hone.images import pool as module
from hone.images import worker
from hone.images.opening import ImageError, ImageFile, open_image
from hone.images.pixels import TileSource, content_hash, make_tiles
from hone.images.pool import PixelPool
from hone.images.store import STORE, PixelStore
from tests.images.drawn import SETTINGS, drawn, encoded
from tests.images.workers import workers

TILED = replace(SETTINGS, family="smolvlm", edge=32, longest_edge=64, words=("<a>", "<b>"))
WAIT_S = 60.0


def files(num: int, folder: Path | None = None) -> list[ImageFile]:
    """Images of different sizes, half of them in files."""
    found: list[ImageFile] = []
    for seed in range(num):
        data = encoded(drawn(seed, 40 + 7 * seed, 90 - 5 * seed))
        if folder is not None and seed % 2:
            (folder / f"{seed}.png").write_bytes(data)
            found.append(open_image(f"{seed}.png", folder=folder))
        else:
            found.append(open_image(data, folder=folder))
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_other_pool() -> None:
    """Other tests of this process may have left that of the store."""
    STORE.use_workers(0)


@pytest.fixture
def pool() -> Iterator[PixelPool]:
    before = len(os.listdir("/proc/self/fd"))
    pool = PixelPool(2)
    yield pool
    pool.close()
    assert workers() == []
    # Fewer, where something that an earlier test has left was closed meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before


def test_pixels_are_those_of_this_process(pool: PixelPool, tmp_path: Path) -> None:
    images = files(6, tmp_path)
    asked = [(file, settings) for file in images for settings in (SETTINGS, TILED)]
    made = [pool.submit(file, settings) for file, settings in asked]
    for (file, settings), tiles in zip(asked, made, strict=True):
        want = make_tiles(file, settings)
        found = tiles.result(WAIT_S)
        assert len(found) == len(want) == (1 if settings is SETTINGS else len(want))
        for one, other in zip(found, want, strict=True):
            assert one.settings == settings
            assert one.values.dtype == np.uint8
            np.testing.assert_array_equal(one.values, other.values)
    assert len(workers()) == 2
    assert pool.num_restarts == 0


def test_a_store_with_a_pool(pool: PixelPool, tmp_path: Path) -> None:
    images = files(5, tmp_path)
    tiles = {content_hash(f.digest, SETTINGS, 0): TileSource(f, SETTINGS, 0) for f in images}
    store = PixelStore()
    store.register(tiles)
    store.use(pool)
    names = list(tiles)
    store.prefetch(names)
    for _ in range(8):
        for pixels, source in zip(store.pixels(names), tiles.values(), strict=True):
            np.testing.assert_array_equal(pixels.values, source.pixels().values)
    assert store.num_decoded == 5
    assert store.num_hits == 40


def test_errors_are_those_of_this_process(pool: PixelPool, tmp_path: Path) -> None:
    data = encoded(drawn(0))
    (tmp_path / "a.png").write_bytes(data)
    gone = open_image("a.png", folder=tmp_path)
    (tmp_path / "a.png").unlink()
    for file in (open_image(data[: len(data) // 2], folder=None), gone):
        with pytest.raises(ImageError) as here:
            make_tiles(file, SETTINGS)
        for settings in (SETTINGS, None):
            there = pool.submit(file, settings).exception(WAIT_S)
            assert isinstance(there, ImageError)
            assert str(there) == str(here.value)
    (good,) = files(1)
    assert len(pool.submit(good, SETTINGS).result(WAIT_S)) == 1
    assert pool.num_restarts == 0


def test_a_process_that_was_killed_is_replaced_and_its_image_made() -> None:
    pool = PixelPool(1)
    try:
        images = files(3)
        pool.submit(images[0], SETTINGS).result(WAIT_S)
        (process,) = workers()
        process.suspend()
        tiles = [pool.submit(file, SETTINGS) for file in images]
        process.kill()
        for file, made in zip(images, tiles, strict=True):
            want = make_tiles(file, SETTINGS)[0].values
            np.testing.assert_array_equal(made.result(WAIT_S)[0].values, want)
        (other,) = workers()
        assert other.pid != process.pid
        assert pool.num_restarts == 1
    finally:
        pool.close()


def test_an_image_whose_process_ends_twice_is_an_error_and_the_next_one_is_made() -> None:
    pool = PixelPool(1)
    try:
        (file,) = files(1)
        bad = pool.submit(file, replace(SETTINGS, family="none"))  # a mistake of hone's own
        good = pool.submit(file, SETTINGS)
        assert "was ended twice, by exit code 1" in str(bad.exception(WAIT_S))
        assert len(good.result(WAIT_S)) == 1
        assert pool.num_restarts == 2
    finally:
        pool.close()


def test_an_image_that_takes_too_long_is_tried_twice_and_the_next_one_is_made() -> None:
    pool = PixelPool(1, limit_s=0.01)
    try:
        large = open_image(encoded(Image.new("RGB", (8000, 8000))), folder=None)
        (small,) = files(1)
        error = pool.submit(large, SETTINGS).exception(WAIT_S)
        assert "twice it took more than 0.01 s" in str(error)
        assert pool.num_restarts == 2
        pool.close()
        pool = PixelPool(1)
        assert len(pool.submit(small, SETTINGS).result(WAIT_S)) == 1
    finally:
        pool.close()


def test_a_limit_is_that_of_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process waits for an image, or for the pool to take an answer, no timer runs."""
    (file,) = files(1)
    jobs = [(file, SETTINGS, 3.0), (file, None, 5.0)]
    happened: list[Any] = []

    class Pipe:
        def recv(self) -> Any:
            happened.append("waits")
            if not jobs:
                raise EOFError
            return jobs.pop(0)

        def send_bytes(self, data: bytes) -> None:
            happened.append("answers")

    def decode(*job: Any) -> list[list[int]]:
        happened.append("decodes")
        return []

    monkeypatch.setattr(worker, "_answer", decode)
    monkeypatch.setattr(worker.signal, "setitimer", lambda *timer: happened.append(timer))
    pipe: Any = Pipe()
    worker.serve(pipe, memory=8)
    timers = [[(signal.ITIMER_REAL, limit_s), "decodes"] for limit_s in (3.0, 5.0)]
    off = [(signal.ITIMER_REAL, 0.0), "answers"]
    expected = [each for timer in timers for each in ["waits", *timer, *off]]
    assert happened == [*expected, "waits"]


def run(code: str) -> subprocess.Popen[bytes]:
    """A process with a pool that has begun images, which says the ids of its workers."""
    program = f"""
import contextlib, os, sys, time, psutil
from hone.images.opening import open_image
from hone.images.pool import PixelPool
from tests.images.drawn import SETTINGS, drawn, encoded
pool = PixelPool(2)
file = open_image(encoded(drawn(0)), folder=None)
for tiles in [pool.submit(file, SETTINGS) for _ in range(40)]:
    tiles.result()
pids = [child.pid for child in psutil.Process().children()]
links = []
for pid in [os.getpid(), *pids]:
    for fd in os.listdir(f"/proc/{{pid}}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{{pid}}/fd/{{fd}}"))
assert any("memfd:hone-images" in link for link in links), links
named = [link for link in links if link.startswith("/dev/shm")]
assert not named, named  # what has no name cannot be left
print(*pids, flush=True)
made = [pool.submit(file, SETTINGS) for _ in range(5000)]
{code}
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (None, "pass"),
        (None, "raise RuntimeError"),
        (signal.SIGTERM, "time.sleep(600)"),
        (signal.SIGKILL, "time.sleep(600)"),
        (signal.SIGINT, "[tiles.result() for tiles in made]; time.sleep(600)"),
    ],
)
def test_nothing_is_left_however_the_process_ends(number: int | None, code: str) -> None:
    process = run(code)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    if number is not None:
        process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    until(lambda: not any(map(is_running, pids)))


def test_processes_outlive_signals_to_every_process_of_a_run(pool: PixelPool) -> None:
    """Which `ray job stop` and SLURM send: the step is finished first, and needs images."""
    (file,) = files(1)
    pool.submit(file, SETTINGS).result(WAIT_S)  # they serve by now
    before = workers()
    for process in before:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            process.send_signal(number)
    made = [pool.submit(file, SETTINGS) for _ in range(4)]
    assert all(len(tiles.result(WAIT_S)) == 1 for tiles in made)
    assert {process.pid for process in before} <= {process.pid for process in workers()}


def test_closing_cancels_what_is_not_done() -> None:
    pool = PixelPool(1)
    tiles = [pool.submit(file, SETTINGS) for file in files(8) * 20]
    pool.close()
    assert all(made.done() for made in tiles)
    assert tiles[-1].cancelled()
    assert workers() == []


def test_a_pool_that_is_closed_cancels_what_comes_later() -> None:
    """Nobody would take it, and who asks would wait for ever."""
    pool, store, (file,) = PixelPool(1), PixelStore(), files(1)
    name = content_hash(file.digest, SETTINGS, 0)
    store.register({name: TileSource(file, SETTINGS, 0)})
    store.use(pool)
    pool.close()
    assert pool.submit(file, SETTINGS).cancelled()
    with pytest.raises(CancelledError):
        store.pixels([name])
    store.use(None)
    assert len(store.pixels([name])) == 1, "nobody waits for the one that was cancelled"


@pytest.mark.parametrize("data", [encoded(drawn(7)), encoded(drawn(7))[:2000]])
def test_an_image_goes_with_those_who_have_asked_for_it(pool: PixelPool, data: bytes) -> None:
    file = open_image(data, folder=None)
    gone = weakref.ref(file)
    pool.submit(file, SETTINGS).exception(WAIT_S)
    del file

    def is_gone() -> bool:
        gc.collect()  # an error and its frames hold each other
        return gone() is None

    until(is_gone)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_checking_a_data_set(
    num_workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 4)
    monkeypatch.setattr(module, "_SAY_S", 0.0)
    caplog.set_level("INFO")
    good = files(6)
    data = encoded(drawn(9)), encoded(drawn(9), "JPEG")
    cut = [open_image(each[: len(each) // 2], folder=None) for each in data]
    store = PixelStore()
    store.use_workers(num_workers)
    found = store.broken([*good, *cut, *good, *cut])
    assert found.keys() == {file.digest for file in cut}
    assert all("the file is damaged" in str(error) for error in found.values())
    assert "of 8 images are checked" in caplog.text
    assert store.broken([]) == {}
    assert len(workers()) == num_workers
    store.use_workers(num_workers)  # they stay
    assert len(workers()) == num_workers
    store.use_workers(0)
    assert workers() == []


def test_a_process_that_cannot_start_is_an_error_and_the_next_one_is_made(
    pool: PixelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits hears of it, and the thread goes on."""
    (file,) = files(1)

    def fail() -> int:
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_anonymous_memory", fail)
        for _ in range(2 * pool.num_workers):
            with pytest.raises(OSError, match="too many open files"):
                pool.submit(file, SETTINGS).result(WAIT_S)
    assert len(pool.submit(file, SETTINGS).result(WAIT_S)) == 1


def test_a_mistake_with_a_process_is_an_error_and_the_next_image_is_made(
    pool: PixelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = files(1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MOST_ANSWER_BYTES", 1)
        with pytest.raises(OSError, match="bad message length"):
            pool.submit(file, SETTINGS).result(WAIT_S)
    assert len(pool.submit(file, SETTINGS).result(WAIT_S)) == 1
