"""Several processes that run one function together, with torchrun's environment.

`python -m tests.ranks WORLD_SIZE MODULE [ARGUMENT ...]` imports the module once, forks, and calls
its `main(*arguments)` in every process. To import torch and transformers in each would take longer
than most tests do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]


def run_ranks(module: str, world_size: int, *arguments: object, timeout_s: float) -> Any:
    """What `main` of rank 0 has printed, JSON. One that fails ends all and fails the test."""
    command = [sys.executable, "-m", "tests.ranks", str(world_size), module, *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        try:
            printed, errors = parent.communicate(timeout=timeout_s)
        finally:
            if parent.returncode is None:
                os.killpg(parent.pid, signal.SIGKILL)
    assert parent.returncode == 0, errors
    return json.loads(printed)


def fork_ranks(world_size: int, function: Callable[[], object]) -> int:
    """Call it in so many copies of this process. The exit status of the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks: set[int] = set()
    for rank in range(world_size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        pid = os.fork()
        if pid == 0:
            os.environ.update(common | own | sizes)
            if rank:
                os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            _run(function)
        ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status) or 1
    return 0


def _run(function: Callable[[], object]) -> NoReturn:
    """Call it and end this process at once: threads of gloo may outlive their group."""
    status = 0
    try:
        function()
    except BaseException:  # noqa: BLE001  a copy of the parent must not go on as it
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    size, module, *arguments = sys.argv[1:]
    sys.exit(fork_ranks(int(size), partial(import_module(module).main, *arguments)))
