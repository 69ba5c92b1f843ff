"""`hone bench data`: how fast threads and processes make images ready, and what training loses to
them.

The training beside them is a loop of real optimizer steps of a small model, in the main thread as
in a run: on a GPU, where there is one, else on the cores that the images need, too.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hone.config.bench_data import BenchDataConfig, DrawnConfig
from hone.data.images import values_in
from hone.data.sources import iter_source
from hone.errors import UserError
from hone.extras import import_extra
from hone.families.vision.spec import ImageSettings
from hone.images.opening import ImageError, ImageFile, open_image
from hone.images.parts import IMAGE_COLUMNS
from hone.images.pixels import TilePixels, make_tiles
from hone.images.pool import PixelPool
from hone.loops.launch import choose_device
from hone.models.tiny import make_tiny_model

__all__ = ["DataResult", "Rate", "bench_data"]

_MOST_IMAGES = 256
_MOST_WORKERS = 8
_ROWS, _TOKENS = 8, 128
"""Of a training step."""

Kind = Literal["thread", "process"]
Submit = Callable[[ImageFile], "Future[list[TilePixels]]"]


@dataclass(frozen=True, slots=True)
class Rate:
    """What a number of threads or processes reached."""

    kind: Kind
    number: int
    alone: float
    """Images a second while the main thread does nothing."""
    beside: float
    """Images a second while it trains."""
    steps: float
    """Training steps a second meanwhile."""


@dataclass(frozen=True, slots=True)
class DataResult:
    """Result of `hone bench data`."""

    cfg: BenchDataConfig
    num_images: int
    num_bytes: int
    """Of all images' files."""
    num_pixels: int
    device: str
    """Device of the training: `cpu`, or the name of the GPU."""
    num_cores: int
    caller: float
    """Images a second of the calling thread, which then does nothing else."""
    steps_alone: float
    """Training steps a second without images."""
    rates: tuple[Rate, ...]


def bench_data(cfg: BenchDataConfig) -> DataResult:
    """Measure all of it. Raises UserError for data without images, or with one that cannot be
    read."""
    files = _files(cfg) if cfg.data.train else [*_drawn(cfg.drawn, cfg.run.seed)]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    most = cfg.workers or min(num_cores or 1, _MOST_WORKERS)
    settings = _settings(cfg.data.max_image_tokens)
    device = choose_device(cfg.run)
    step = _training(device)
    rates: list[Rate] = []
    steps_alone = _rate(step, cfg.seconds)
    kinds: tuple[Kind, ...] = ("thread", "process")
    for kind in kinds:
        for number in sorted({1, most}):
            with _submitting(kind, number, settings) as submit:
                supply = _Supply(submit, files)
                supply.begin(number)
                alone, _ = supply.measure(partial(time.sleep, 0.01), cfg.seconds)
                beside, steps = supply.measure(step, cfg.seconds)
                supply.end()
            rates.append(Rate(kind, number, alone, beside, steps))
    following = cycle(files)
    return DataResult(
        cfg=cfg,
        num_images=len(files),
        num_bytes=sum(_num_bytes(file) for file in files),
        num_pixels=sum(file.height * file.width for file in files),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        num_cores=num_cores or 1,
        caller=_rate(lambda: make_tiles(next(following), settings), cfg.seconds),
        steps_alone=steps_alone,
        rates=tuple(rates),
    )


class _Supply:
    """Keeps a number of images in work, and counts those that are ready."""

    def __init__(self, submit: Submit, files: Sequence[ImageFile]) -> None:
        self._submit = submit
        self._files = cycle(files)
        self._changed = threading.Condition()
        self._num_done = self._num_begun = 0
        self._is_ending = False
        self._error: BaseException | None = None

    def begin(self, num_workers: int) -> None:
        """Return once each worker has made an image."""
        for _ in range(2 * num_workers):  # a worker need not wait for its next one
            self._next()
        self._wait(lambda: self._num_done >= 2 * num_workers)

    def measure(self, do: Callable[[], object], seconds: float) -> tuple[float, float]:
        """Images that become ready in a second while the caller repeats something, and how often it
        does that in a second."""
        first, start = self._num_done, time.perf_counter()
        num_calls = _repeat(do, seconds)
        took = time.perf_counter() - start
        return (self._num_done - first) / took, num_calls / took

    def end(self) -> None:
        """Return once nothing is in work. Raises what went wrong."""
        self._is_ending = True
        self._wait(lambda: self._num_done == self._num_begun)

    def _next(self) -> None:
        with self._changed:
            if self._is_ending or self._error is not None:
                return
            file = next(self._files)
            self._num_begun += 1
        self._submit(file).add_done_callback(self._done)

    def _done(self, tiles: Future[list[TilePixels]]) -> None:
        with self._changed:
            self._num_done += 1
            self._error = self._error or tiles.exception()
            self._changed.notify()
        self._next()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None)
        if self._error is not None:
            raise UserError(f"an image {self._error}") from self._error


@contextmanager
def _submitting(kind: Kind, number: int, settings: ImageSettings) -> Generator[Submit]:
    if kind == "thread":
        with ThreadPoolExecutor(number) as threads:
            yield lambda file: threads.submit(make_tiles, file, settings)
    else:
        with closing(PixelPool(number)) as pool:
            yield lambda file: pool.submit(file, settings)


def _repeat(do: Callable[[], object], seconds: float) -> int:
    end, num = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        do()
        num += 1
    return num


def _rate(do: Callable[[], object], seconds: float) -> float:
    start = time.perf_counter()
    return _repeat(do, seconds) / (time.perf_counter() - start)


def _training(device: torch.device) -> Callable[[], object]:
    """An optimizer step of a small model, which is warm."""
    with tempfile.TemporaryDirectory() as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(make_tiny_model(folder))
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, model.config.vocab_size, (_ROWS, _TOKENS), device=device)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # as in a run, which waits for the device once a step

    for _ in range(3):
        step()
    return step


def _settings(max_tokens: int) -> ImageSettings:
    """Those of Qwen3-VL, which resizes an image once."""
    token_pixels = 32 * 32
    return ImageSettings(
        family="qwen3_vl",
        patch_size=16,
        merge_size=2,
        min_pixels=4 * token_pixels,
        max_pixels=max_tokens * token_pixels,
        mark="<image>",
        bare="<image>",
        placeholder="<image>",
        placeholder_id=0,
    )


def _drawn(cfg: DrawnConfig, seed: int) -> Iterator[ImageFile]:
    """Images with shapes and noise, as large in bytes as photographs."""
    pillow = import_extra("PIL", module="PIL.Image", needed_by="hone bench data")
    rng = np.random.default_rng(seed)
    for _ in range(cfg.number):
        small = pillow.fromarray(rng.integers(0, 256, (9, 16, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize((cfg.width, cfg.height)), dtype=np.int16)
        noisy = smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16)
        stream = io.BytesIO()
        pillow.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=85)
        yield open_image(stream.getvalue(), folder=None)


def _files(cfg: BenchDataConfig) -> list[ImageFile]:
    """The first images of the data's rows."""
    found: list[ImageFile] = []
    for source in cfg.data.train:
        names = IMAGE_COLUMNS if source.columns.images is None else (source.columns.images,)
        for row in iter_source(source):
            for value in chain.from_iterable(values_in(row.columns.get(name)) for name in names):
                try:
                    found.append(open_image(value, folder=row.folder))
                except ImageError as error:
                    raise UserError(f"{row.location}: an image {error}") from error
            if len(found) >= _MOST_IMAGES:
                return found[:_MOST_IMAGES]
    if not found:
        raise UserError(
            f"no row of the data has an image in a column {' or '.join(map(repr, IMAGE_COLUMNS))}, "
            "or that data.train.0.columns.images names; without data images are drawn"
        )
    return found


def _num_bytes(file: ImageFile) -> int:
    return len(file.source) if isinstance(file.source, bytes) else file.source.stat().st_size
