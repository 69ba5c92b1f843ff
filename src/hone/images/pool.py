"""A pool of processes that decode and resize images, while the caller's process does other work.

    PixelPool.submit ─► queue ─► a thread for each process ─► worker (hone/images/worker.py)
                                        ◄── shapes by a socket, pixels by shared memory ──┘

Threads would not do: what surrounds decoding holds Python's lock, for which they compete with the
trainer (`hone bench data` measures it). A thread here only waits for its process.

Each process has shared memory for the pixels of one image, which its thread copies out. So shared
memory holds at most one image a process, and what is kept is bounded by the `PixelStore`. The
memory has no name in any folder: nothing is left of it when the processes are gone, however they
ended.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import islice
from multiprocessing.connection import Connection

import numpy as np

from hone.families.vision.spec import ImageSettings
from hone.images.opening import ImageError, ImageFile, verify
from hone.images.pixels import TilePixels, layout_of
from hone.images.worker import Answer, Job

__all__ = ["LIMIT_S", "PixelPool", "Tiles", "check_images"]

_log = logging.getLogger(__name__)

LIMIT_S = 60.0
"""Most seconds for one image. The largest ones take about 4 of a core."""
_LOOK_S = 1.0
"""Seconds between two looks at whether a process that does not answer is there."""
_SAY_S = 10.0
"""Seconds between two messages of a check that takes long."""
_CHUNK = 1024
_MOST_ANSWER_BYTES = 1 << 20

Tiles = Future[list[TilePixels]]


class PixelPool:
    """Decodes images in processes of its own, which end with this one."""

    def __init__(self, num_workers: int, *, limit_s: float = LIMIT_S) -> None:
        """The processes start with their first images. `limit_s` is the time for one image."""
        self.num_workers = num_workers
        self.num_restarts = 0
        """Processes that ended or were ended while they had an image."""
        self._limit_s = limit_s
        self._jobs: queue.SimpleQueue[tuple[ImageFile, ImageSettings | None, Tiles] | None]
        self._jobs = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._closing = threading.Lock()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"hone-images-{number}", daemon=True)
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def submit(
        self, file: ImageFile, settings: ImageSettings | None, tiles: Tiles | None = None
    ) -> Tiles:
        """Have the tiles of an image made; they, or the ImageError, become the result of `tiles`,
        which is cancelled where the pool is closed. Without settings the image is only verified."""
        tiles = tiles or Tiles()
        with self._closing:  # else nobody may take the job
            if not self._is_closed:
                self._jobs.put((file, settings, tiles))
                return tiles
        tiles.cancel()
        return tiles

    def close(self) -> None:
        """End the processes, and cancel what is not done."""
        with self._closing:
            self._is_closed = True
        atexit.unregister(self.close)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job[2].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for worker in tuple(self._workers):
            worker.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Have images made by one process, one after the other, until the pool closes."""
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            worker = self._make(worker, *job)
            del job  # the image goes with those who have asked for it, not with the next one
        if worker is not None:
            self._end(worker)

    def _make(
        self,
        worker: _Worker | None,
        file: ImageFile,
        settings: ImageSettings | None,
        tiles: Tiles,
    ) -> _Worker | None:
        """Have an image made, and return the process for the next one. The image of a process that
        ends is tried once more: the kernel may have taken its memory for another program."""
        how = ""
        for _ in range(2):
            try:
                worker = worker or self._start()
            except Exception as error:  # noqa: BLE001  who waits must hear of it
                tiles.set_exception(error)
                return None
            try:
                made = worker.ask((file, settings, self._limit_s))
            except ImageError as error:
                tiles.set_exception(error)
                return worker
            except (EOFError, ConnectionError):
                how, worker = self._end(worker), None
                if self._is_closed:
                    tiles.cancel()
                    return None
                self.num_restarts += 1
            except Exception as error:  # noqa: BLE001  as above: this thread goes on
                self._end(worker)
                tiles.set_exception(error)
                return None
            else:
                tiles.set_result(made)
                return worker
        tiles.set_exception(ImageError(f"cannot be decoded: {self._reason(how)}"))
        return None

    def _start(self) -> _Worker:
        worker = _Worker()
        self._workers.add(worker)
        return worker

    def _end(self, worker: _Worker) -> str:
        self._workers.discard(worker)
        return worker.end()

    def _reason(self, how: str) -> str:
        if how == signal.Signals.SIGALRM.name:
            return f"twice it took more than {self._limit_s:g} s"
        return f"the process that decodes it was ended twice, by {how}"


class _Worker:
    """One process, as its thread sees it."""

    def __init__(self) -> None:
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            with theirs:
                self._memory = _anonymous_memory()
                undo.callback(os.close, self._memory)
                inherited = (theirs.fileno(), self._memory)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "hone.images.worker", *map(str, inherited)],
                    pass_fds=inherited,
                    env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the process of the pool, which ends it
                )
            undo.pop_all()
        self._connection = Connection(ours.detach())

    def ask(self, job: Job) -> list[TilePixels]:
        """Do a job. Raises ImageError; EOFError and ConnectionError where the process has ended."""
        self._connection.send(job)
        while not self._connection.poll(_LOOK_S):
            if self._process.poll() is not None:
                raise EOFError
        answer: Answer = json.loads(self._connection.recv_bytes(_MOST_ANSWER_BYTES))
        if isinstance(answer, str):
            raise ImageError(answer)
        file, settings, _ = job
        if settings is None:
            return []
        tiles = layout_of(file, settings).tiles
        if answer != [[tile.height, tile.width, 3] for tile in tiles]:
            raise ImageError(f"has been decoded to tiles of other sizes: {answer}")
        return list(self._tiles(answer, settings))

    def kill(self) -> None:
        """End the process at once; `ask` then raises."""
        self._process.kill()

    def end(self) -> str:
        """End the process, unless it has ended, and say how it ended."""
        self._connection.close()
        os.close(self._memory)
        try:
            status = self._process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return signal.Signals(-status).name if status < 0 else f"exit code {status}"

    def _tiles(
        self, shapes: Iterable[Sequence[int]], settings: ImageSettings
    ) -> Iterator[TilePixels]:
        place = 0
        for shape in shapes:
            values = np.empty(shape, np.uint8)
            place += os.preadv(self._memory, [values.data], place)
            yield TilePixels(values, settings)
        os.ftruncate(self._memory, 0)


def check_images(files: Iterable[ImageFile], pool: PixelPool | None) -> dict[str, ImageError]:
    """The errors of images that cannot be decoded as a whole, by their digests. Equal images are
    decoded once, in the processes of a pool; without a pool in this process."""
    distinct = {file.digest: file for file in files}
    found: dict[str, ImageError] = {}
    said = time.monotonic()
    for number, (digest, error) in enumerate(_verified(distinct, pool), start=1):
        if error is not None:
            found[digest] = error
        if (now := time.monotonic()) > said + _SAY_S:
            said = now
            _log.info("%s of %s images are checked", f"{number:,}", f"{len(distinct):,}")
    return found


def _verified(
    files: dict[str, ImageFile], pool: PixelPool | None
) -> Iterator[tuple[str, ImageError | None]]:
    if pool is None:
        for digest, file in files.items():
            try:
                verify(file)
            except ImageError as error:
                yield digest, error
            else:
                yield digest, None
        return
    remaining = iter(files.items())
    while chunk := list(islice(remaining, _CHUNK)):
        checks = [(digest, pool.submit(file, None)) for digest, file in chunk]
        for digest, check in checks:
            error = check.exception()
            if error is not None and not isinstance(error, ImageError):
                raise error
            yield digest, error


def _anonymous_memory() -> int:
    """A descriptor of memory without a name. That of Linux is not bounded by the size of /dev/shm,
    which is small in containers."""
    if sys.platform == "linux":
        return os.memfd_create("hone-images")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
