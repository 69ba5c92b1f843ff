"""Several processes that run one function together, with torchrun's environment.

`python -m tests.ranks WORLD_SIZE MODULE [ARGUMENT ...]` imports the module once, forks, and calls
its `main(*arguments)` in every process. To import torch and transformers in each would take longer
than most tests do; `tests.warm_ranks` imports them once for all modules. `main` of rank 0 prints
JSON, or all ranks work with `run_parts`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest

from tests.warm_ranks import launch

ROOT = Path(__file__).parents[1]
_REPORTS = "HONE_TEST_REPORTS"
"""Names the folder of what ranks have found, a file each."""


def run_ranks(
    module: str,
    world_size: int,
    *arguments: object,
    timeout_s: float = 1800.0,
    is_warm: bool = True,
) -> Any:
    """What has been printed, JSON: by `main` of rank 0, or of all ranks that use `run_parts`, for
    `parts_of`. One that fails otherwise ends all and fails the test. A module that must set the
    environment before torch is imported is not `is_warm`."""
    launched = [str(world_size), module, *map(str, arguments)]
    status, printed, errors = launch(launched, timeout_s, is_warm=is_warm)
    assert status == 0, errors
    sys.stderr.write(errors)  # pytest shows it where a test fails
    return json.loads(printed)


def fork_ranks(world_size: int, function: Callable[[], object]) -> int:
    """Call `function` in `world_size` copies of this process, and return the exit status of the
    first that failed, 0 where none did.

    This process serves the store in which they meet, as torchrun does. Its port is taken before
    they start, so that no other program can have it meanwhile.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks = _started(world_size, function, server)
        # A thread serves the store: it must not run while this process is copied.
        store = _served(server)
        status = _first_failure(ranks)
        del store
    return status


def _started(world_size: int, function: Callable[[], object], server: socket.socket) -> set[int]:
    """Start the ranks, and return the ids of their processes."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks: set[int] = set()
    for rank in range(world_size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        pid = os.fork()
        if pid == 0:
            server.close()
            os.environ.update(common | own | sizes)
            if rank:
                os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            _run(function)
        ranks.add(pid)
    return ranks


def _served(server: socket.socket) -> object:
    """A store that listens on the socket of `server` for as long as it is held."""
    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1",
        server.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(server.fileno()),
    )


def _first_failure(ranks: set[int]) -> int:
    """Wait for all ranks, and return the status of the first that fails, which ends the others."""
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


class Parts(dict[str, Any]):
    """What one rank has found in each part of its work.

    To ask for a part that it has not finished fails the test, with what every rank has raised.
    """

    errors: str = ""

    def __missing__(self, part: str) -> NoReturn:
        if not self.errors:
            raise KeyError(part)
        pytest.fail(f"{part} was not finished.\n{self.errors}", pytrace=False)


def parts_of(ranks: Sequence[dict[str, Any]]) -> list[Parts]:
    """Of each rank, from the reports of `run_parts`."""
    errors = [f"Rank {i}, {r['error']}" for i, r in enumerate(ranks) if r["error"]]
    found = [Parts(rank["found"]) for rank in ranks]
    for own in found:
        own.errors = "\n".join(errors)
    return found


def run_parts(parts: Sequence[Callable[[], object]]) -> None:
    """Call each, and report what they return, which JSON can hold. The first that raises is the
    last: groups may be of no use after it, and a rank that ends closes its connections, so that no
    other waits for it."""
    report = Path(os.environ[_REPORTS]) / os.environ["RANK"]
    found: dict[str, Any] = {}
    error = ""
    for part in parts:
        # What stands there where a library ends this process, or another rank's end does.
        ended = f"in {part.__name__}: the process was ended\n"
        report.write_text(json.dumps({"found": found, "error": ended}), encoding="utf-8")
        try:
            found[part.__name__] = part()
        except Exception:  # noqa: BLE001  whatever it is, a test fails with it
            error = f"in {part.__name__}: {traceback.format_exc()}"
            break
    report.write_text(json.dumps({"found": found, "error": error}), encoding="utf-8")


def _main(size: int, module: str, *arguments: str) -> int:
    with TemporaryDirectory() as folder:
        os.environ[_REPORTS] = folder
        status = fork_ranks(size, partial(import_module(module).main, *arguments))
        reports = [Path(folder) / str(rank) for rank in range(size)]
        if not all(report.exists() for report in reports):
            return status
        found = [json.loads(report.read_text(encoding="utf-8")) for report in reports]
        if status and not any(own["error"] for own in found):
            return status
        json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), *sys.argv[2:]))
