"""Pixels of this process by content hash.

A hash is a digest of an image's bytes and of the settings by which it is processed, so one store
serves every model and data set of a process. Pixels are made where they are first asked for, by a
pool of processes where there is one, and once for all that ask at a time; or they come from another
process with the requests or rows that need them.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Self

from hone.families.vision.spec import ImageSettings
from hone.images.opening import ImageError, ImageFile
from hone.images.pixels import TilePixels, TileSource, content_hash, layout_of, make_tiles
from hone.images.pool import PixelPool, Tiles, check_images
from hone.model_input import ModelInput
from hone.observe.host_memory import count_as_cache

__all__ = ["STORE", "PixelStore", "ShownTile"]


class ShownTile:
    """A tile of an image that an environment or a request has shown. The store has it as long as it
    lives, and a single one for each hash (`PixelStore.show`)."""

    __slots__ = ("__weakref__", "hash", "source")

    def __init__(self, source: TileSource) -> None:
        self.source = source
        self.hash = content_hash(*source.image, source.number)

    def __reduce__(self) -> tuple[Callable[[TileSource], ShownTile], tuple[TileSource]]:
        return _show, (self.source,)

    def __deepcopy__(self, memo: object) -> Self:
        return self


class PixelStore:
    """Pixels by hash. Threads may share it."""

    def __init__(self, *, max_bytes: int = 512 << 20) -> None:
        """`max_bytes` bounds the pixels that are kept because they may be asked for again. Those
        asked for least recently go first, and are made again where they are missing."""
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pool: PixelPool | None = None
        self._sources: dict[str, TileSource] = {}
        self._shown = weakref.WeakValueDictionary[str, ShownTile]()
        self._kept: OrderedDict[str, TilePixels] = OrderedDict()
        self._making: dict[tuple[str, ImageSettings], Tiles] = {}
        self._received: dict[str, TilePixels] = {}
        self._num_users: Counter[str] = Counter()
        self._unused: deque[list[str]] = deque()
        self.num_bytes = 0
        """Bytes of the pixels that are kept."""
        self.num_decoded = 0
        """Images that were decoded, with all of their tiles."""
        self.num_hits = 0
        """Tiles that were there, or already being made, when they were asked for."""
        self.busy_s = 0.0
        """Seconds that callers of `pixels` spent there, making pixels or waiting for them."""
        count_as_cache(self)

    @property
    def host_bytes(self) -> int:
        """Bytes of the pixels that are kept within the bound; see `HostCache`."""
        return self.num_bytes

    def register(self, sources: Mapping[str, TileSource]) -> None:
        """Add tiles that this process can make pixels of."""
        with self._lock:
            self._sources |= sources

    def show(self, source: TileSource) -> ShownTile:
        """Add a tile that this process can make pixels of as long as somebody has the result, which
        is the same for all who add it."""
        tile = ShownTile(source)
        with self._lock:
            return self._shown.setdefault(tile.hash, tile)

    def source(self, name: str) -> TileSource | None:
        """The source of a tile whose pixels this process can make; None where another process has
        made them."""
        try:
            return self._source(name)
        except KeyError:
            return None

    def use(self, pool: PixelPool | None) -> None:
        """Make pixels in these processes from now on; None: where they are asked for."""
        self._pool = pool

    def use_workers(self, number: int) -> None:
        """Make pixels in `number` processes from now on; with 0 where they are asked for. A pool of
        that size stays."""
        if number == (0 if self._pool is None else self._pool.num_workers):
            return
        if self._pool is not None:
            self._pool.close()
        self.use(PixelPool(number) if number else None)

    @contextmanager
    def own_workers(self) -> Generator[None]:
        """Context manager of a command: processes that it asks for end with it, and those of before
        are used again."""
        earlier, self._pool = self._pool, None
        try:
            yield
        finally:
            self.use_workers(0)
            self._pool = earlier

    def receive(self, pixels: Mapping[str, TilePixels], users: Iterable[ModelInput]) -> None:
        """Add pixels that another process has made, of the contents of `users`. They stay, whatever
        the bound, as long as one of these inputs does: this process cannot make them again."""
        with self._lock:
            self._received |= pixels
            for user in users:
                names = [content.hash for content in user.contents]
                self._num_users.update(names)
                # It may be called anywhere, also where this thread holds the lock.
                weakref.finalize(user, self._unused.append, names).atexit = False
            while self._unused:
                self._forget(self._unused.popleft())

    def pixels(self, hashes: Sequence[str]) -> list[TilePixels]:
        """The pixels of tiles, in the order of `hashes`. Raises KeyError for an unknown one, and
        ImageError, with the location of the row, for an image that cannot be decoded."""
        start = perf_counter()
        found: dict[str, TilePixels] = {}
        waiting: dict[str, Tiles] = {}
        sources: dict[str, TileSource] = {}
        ours: list[tuple[TileSource, Tiles]] = []
        with self._lock:
            for name in dict.fromkeys(hashes):
                if (pixels := self._there(name)) is not None:
                    found[name] = pixels
                    self.num_hits += 1
                    continue
                source = self._source(name)
                sources[name] = source
                tiles = self._making.get(source.image)
                if tiles is None:
                    tiles = self._begin(source)
                    ours.append((source, tiles))
                else:
                    self.num_hits += 1
                waiting[name] = tiles
        for source, tiles in ours:
            self._make(source, tiles)
        for name, tiles in waiting.items():
            source = sources[name]
            try:
                found[name] = tiles.result()[source.number]
            except ImageError as error:
                raise ImageError(f"{source} {error}") from error
        with self._lock:
            self.busy_s += perf_counter() - start
        return [found[name] for name in hashes]

    def prefetch(self, hashes: Iterable[str]) -> None:
        """Have the pool begin to make the pixels of tiles that will be asked for, the first ones
        first, as far as half of the bound holds them. Without a pool nothing happens."""
        ours: list[tuple[TileSource, Tiles]] = []
        with self._lock:
            if self._pool is None:
                return
            room = self.max_bytes // 2
            sources = (self._source(name) for name in hashes if name not in self._received)
            for source in {source.image: source for source in sources}.values():
                layout = layout_of(source.file, source.settings)
                room -= sum(3 * tile.height * tile.width for tile in layout.tiles)
                if room < 0:
                    break
                names = set(_hashes(source, len(layout.tiles)))
                if source.image not in self._making and not names <= self._kept.keys():
                    ours.append((source, self._begin(source)))
        for source, tiles in ours:
            self._make(source, tiles)

    def broken(self, files: Iterable[ImageFile]) -> dict[str, ImageError]:
        """The errors of images that cannot be decoded as a whole, by their digests."""
        return check_images(files, self._pool)

    def payload(self, hashes: Sequence[str]) -> dict[str, TilePixels]:
        """The pixels of tiles by their hashes, for another process."""
        return dict(zip(hashes, self.pixels(hashes), strict=True))

    def _source(self, name: str) -> TileSource:
        return self._sources.get(name) or self._shown[name].source

    def _there(self, name: str) -> TilePixels | None:
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        return self._received.get(name)

    def _forget(self, names: Iterable[str]) -> None:
        """Count one user less of each of these, and drop received pixels without any."""
        for name in names:
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name]
                self._received.pop(name, None)

    def _begin(self, source: TileSource) -> Tiles:
        """The future tiles of this image, for which all wait that ask for them. The caller must
        have them made."""
        tiles = self._making[source.image] = Tiles()
        tiles.add_done_callback(partial(self._finish, source))
        return tiles

    def _make(self, source: TileSource, tiles: Tiles) -> None:
        if (pool := self._pool) is not None:
            pool.submit(source.file, source.settings, tiles)
            return
        try:
            made = make_tiles(source.file, source.settings)
        except ImageError as error:
            tiles.set_exception(error)
        except BaseException as error:
            tiles.set_exception(error)  # other threads may be waiting
            raise
        else:
            tiles.set_result(made)

    def _finish(self, source: TileSource, tiles: Future[list[TilePixels]]) -> None:
        with self._lock:
            del self._making[source.image]
            if tiles.cancelled() or tiles.exception() is not None:
                return
            made = tiles.result()
            self.num_decoded += 1
            for name, pixels in zip(_hashes(source, len(made)), made, strict=True):
                self._keep(name, pixels)

    def _keep(self, name: str, pixels: TilePixels) -> None:
        if name in self._kept:  # of an image of which other tiles had gone
            self.num_bytes -= self._kept.pop(name).values.nbytes
        self._kept[name] = pixels
        self.num_bytes += pixels.values.nbytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= oldest.values.nbytes


def _hashes(source: TileSource, num_tiles: int) -> list[str]:
    return [content_hash(*source.image, number) for number in range(num_tiles)]


STORE = PixelStore()
"""The store of this process."""


def _show(source: TileSource) -> ShownTile:
    return STORE.show(source)
