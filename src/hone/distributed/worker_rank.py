"""One process of a worker: an actor of Ray or a process of this host.

A worker has one or several ranks, with a device each. Each rank builds the worker's object; the
first one answers the calls, and the others follow it. Ranks find each other through torchrun's
variables.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from traceback import format_exc
from typing import Any

import torch

from hone.config.run import GenerateRunConfig
from hone.distributed.calls import serve
from hone.distributed.processes import HONE_KEY
from hone.errors import UserError

__all__ = [
    "STARTING_S",
    "WorkerRank",
    "WorkerSpec",
    "rank_environment",
    "runs_on_gpus",
    "visible_gpus",
]

STARTING_S = 900.0
"""Longest start of an engine, which reads its model's configuration and captures its graphs, or of
a scoring model, which loads its weights."""
_CALLS = 8
"""Calls of one engine that may run at the same time: the longest one waits for weights."""


def rank_environment(
    rank: int, size: int, meeting: tuple[str, int], key: str, gpus: Sequence[str]
) -> dict[str, str]:
    """Environment of one of `size` ranks, as torchrun would set it. The rendezvous store is at
    `meeting`, and messages are signed with `key`. `gpus` are the CUDA names of all ranks' GPUs,
    empty on a CPU."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # The parent may itself be one of torchrun's processes, with these variables set.
        "TORCHELASTIC_RESTART_COUNT": "0",
        HONE_KEY: key,
    }
    if gpus:
        # Each rank sees all GPUs: ranks that read each other's memory must.
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def runs_on_gpus(run: GenerateRunConfig) -> bool:
    """Whether processes of this host compute on GPUs: GPUs exist and `run.device` is not `cpu`."""
    return run.device != "cpu" and torch.cuda.is_available()


def visible_gpus() -> list[str]:
    """CUDA names of this process's GPUs, in the order of their indices."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Specification of a worker, independent of where its processes run. Picklable."""

    name: str
    """Name in messages, as `engine 0`."""
    role: str
    size: int
    """Number of ranks."""
    build: str
    """`module:function` that builds the worker's object from role, plan and name, in each rank,
    once its GPUs are visible."""
    plan: Any


class WorkerRank:
    """One process of a worker. Calls of an engine run in several threads, those of a scorer one
    after the other."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self._target: Any = None
        self._failure: BaseException | None = None
        self._started = threading.Event()

    def make(self) -> None:
        """Build the worker's object. Raises the builder's error."""
        spec = self.spec
        try:
            self._target = resolve_name(spec.build)(spec.role, spec.plan, spec.name)
        except BaseException as error:
            if not isinstance(error, UserError):  # the caller has no traceback of this process
                error.add_note(f"In rank {self.rank} of {spec.name}:\n{format_exc()}")
            self._failure = error
            raise
        finally:
            self._started.set()

    def wait_until_made(self) -> None:
        """Wait for `make`, in any thread. Raises its error."""
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def serve(self, address: tuple[str, int], key: bytes) -> None:
        """Answer the calls of a line. Each waits until the worker's object is built."""
        num_threads = _CALLS if self.spec.role == "engine" else 1
        serve(address, key, self._call, num_threads=num_threads)

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        if method == "wait_until_made":
            return self.wait_until_made()
        return getattr(self._made(), method)(*args)

    def follow(self) -> None:
        """Repeat the first rank's calls until it is closed or gone."""
        self._made().follow()

    def _made(self) -> Any:
        self._started.wait()
        if self._target is None:
            raise RuntimeError(f"{self.spec.name} could not be made: {self._failure}")
        return self._target
