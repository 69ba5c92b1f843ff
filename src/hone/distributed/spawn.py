"""Start the processes of a run on this host, and end them together.

They get the environment that torchrun gives, so that they cannot tell the difference. What differs
is how a run ends: Ctrl-C reaches each process once and is theirs to obey, and after a failure the
others are gone within seconds, stopped ones too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["spawn"]

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, after its step."""
_GRACE_S = 4.0
"""What the others have, after a failure, to learn of it and end by themselves."""
_POLL_S = 0.05


def spawn(command: Sequence[str], nproc: int) -> int:
    """Run `command` in `nproc` processes; the exit code of the run.

    That is 0, 130 where Ctrl-C ended it, else the code of the process that failed: those that end
    because of it have 1. Where it was killed, that is told here.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        processes = [
            subprocess.Popen(
                command,
                env=_environment(rank, nproc, server.getsockname()[1]),
                start_new_session=True,  # the terminal's Ctrl-C comes through us, and once
            )
            for rank in range(nproc)
        ]
        try:
            with _forwarding(processes):
                # Imported while the processes do the same: it takes seconds.
                from torch.distributed import TCPStore

                store = TCPStore(
                    "127.0.0.1",
                    server.getsockname()[1],
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=os.dup(server.fileno()),
                )
                return _watch_over(processes, store)
        finally:
            for process in processes:
                _kill(process)


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    defaults = {
        "OMP_NUM_THREADS": max((os.cpu_count() or 1) // nproc, 1),
        # A broken connection is explained by us; torch adds a page of C++ frames in each process.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {
        **{name: str(value) for name, value in defaults.items()},
        **os.environ,
        **{name: str(value) for name, value in own.items()},
    }


def _watch_over(processes: Sequence[subprocess.Popen[bytes]], store: Store) -> int:
    """Wait until all have ended; after a failure, not for long."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, INTERRUPTED)]
        if failed:
            break
        if None not in codes:
            return INTERRUPTED if INTERRUPTED in codes else 0
        time.sleep(_POLL_S)
    killed = [rank for rank in failed if (codes[rank] or 0) < 0]
    for rank in killed[:1]:
        _tell_killed(rank, processes[rank].pid, -(codes[rank] or 0), store)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
    told = [process.poll() for process in processes]
    return next((code for code in told if code and code > 1 and code != INTERRUPTED), 1)


def _tell_killed(rank: int, pid: int, number: int, store: Store) -> None:
    from hone.distributed.watch import is_first_to_fail, prefixed, read

    store = prefixed(store)
    if not is_first_to_fail(store):
        return
    name = signal.Signals(number).name
    hint = " (by the kernel, for want of memory?)" if number == signal.SIGKILL else ""
    said = read(store, rank)
    last = f", in {said.describe(time.time()).partition(': ')[2]}" if said is not None else ""
    sys.stderr.write(f"error: rank {rank} (pid {pid}) was killed by {name}{hint}{last}\n")
    sys.stderr.flush()


@contextmanager
def _forwarding(processes: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    """Ctrl-C and SIGTERM go on to every process, which decides when to stop."""

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    previous = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
