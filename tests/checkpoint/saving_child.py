"""Processes that save checkpoints and end in the middle of it.

`python -m tests.checkpoint.saving_child` imports torch once and forks for each line that it reads:
`loop FOLDER` saves until the copy is killed, `full FOLDER` saves on a disk that is full.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from hone.checkpoint.store import CheckpointStore


def parts_of(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((64,), float(step)), "bias": torch.arange(5) + step},
        "optimizer": {"step": step, "moments": [torch.full((64,), -float(step))]},
    }


def loop(folder: Path) -> None:
    """Save one step after the other, and say which is saved."""
    store = CheckpointStore(folder, keep_last=2)
    step = max(store.steps(), default=0) + 1
    _say(os.getpid())
    while True:
        store.save(step, parts_of(step))
        _say(step)
        step += 1


def full(folder: Path) -> None:
    """Save once, and once more where no file may be larger than a page."""
    store = CheckpointStore(folder)
    store.save(1, parts_of(1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        store.save(2, {"model": {"weight": torch.zeros(100_000)}})
    except OSError as error:
        _say(repr(f"{type(error).__name__} {error}"))


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        what, folder = line.rstrip("\n").split(" ", 1)
        pid = os.fork()
        if pid == 0:
            try:
                {"loop": loop, "full": full}[what](Path(folder))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        _say("dead")


if __name__ == "__main__":
    main()
