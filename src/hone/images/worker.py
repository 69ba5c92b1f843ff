"""A process that decodes images for a `PixelPool`: one at a time, until its connection is closed.

    python -P -m hone.images.worker CONNECTION MEMORY

Both are inherited descriptors. A job is an image, the settings of a model, and a time limit, behind
which the kernel ends the process: so none that hangs is left when the pool's process is gone. The
pixels of tiles are written into the shared memory, and their shapes are sent; or the message of an
ImageError.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing.connection import Connection

import numpy as np

from hone.families.vision.spec import ImageSettings
from hone.images.opening import ImageError, ImageFile, verify
from hone.images.pixels import make_tiles

__all__ = ["Answer", "Job", "main", "serve"]

Job = tuple[ImageFile, ImageSettings | None, float]
"""Without settings the image is decoded, and makes no pixels."""
Answer = list[list[int]] | str
"""The shape of each tile, or the message of an ImageError; sent as JSON."""


def main() -> None:
    """Serve the process at the other end of the connection."""
    # A scheduler may send these to every process of a run, which still needs images for its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))


def serve(connection: Connection, memory: int) -> None:
    """Answer jobs that come through `connection`, with pixels in the file `memory`, until the other
    end is closed."""
    while True:
        try:
            file, settings, limit_s = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            answer = _answer(file, settings, memory)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            # Not pickled: who decodes what strangers have made is not trusted.
            connection.send_bytes(json.dumps(answer).encode())
        except (EOFError, ConnectionError):  # the pool has closed, or its process is gone
            return


def _answer(file: ImageFile, settings: ImageSettings | None, memory: int) -> Answer:
    try:
        if settings is None:
            verify(file)
            return []
        tiles = make_tiles(file, settings)
    except ImageError as error:
        return str(error)
    os.ftruncate(memory, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    with open(memory, "wb", closefd=False) as stream:
        for tile in tiles:
            stream.write(np.ascontiguousarray(tile.values).data)
    return [[*tile.values.shape] for tile in tiles]


if __name__ == "__main__":
    main()
