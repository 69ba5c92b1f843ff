"""An engine in processes of its own, as Ray actors, and how the controller reaches it."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from hone.config.tree import RLConfig
from hone.engine.host import EngineHost
from hone.types import EngineLostError

__all__ = ["EngineRank", "RayHandle"]

_IDS = re.compile(r"(class_name|actor_id|namespace|pid|ip|name|node_id|job_id):")
_GUESSES = "Some common causes include"
_SETTLE_S = 1.0
"""How long the first rank has to notice that another one is gone."""


class EngineRank:
    """One rank of an engine. Its methods run in threads of the actor, side by side."""

    def __init__(self, cfg: RLConfig, name: str, rank: int) -> None:
        self._cfg = cfg
        self._name = name
        self._rank = rank
        self._host: EngineHost | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()

    def address(self) -> tuple[str, int]:
        """Where the ranks of this engine meet: a free port of the host of the first one."""
        with socket.create_server(("", 0)) as server:
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def gpus(self) -> list[str]:
        """The GPU that Ray has given this rank, as CUDA names it; none on a CPU."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, address: tuple[str, int], *gpus: list[str]) -> None:
        """Make the engine; its first weights come with a sync. `gpus` are those of each rank."""
        from hone.loops.hosting import make_host

        size = self._cfg.engine.tensor_parallel_size
        if named := list(chain(*gpus)):
            # Each rank sees all of them, as ranks that read each other's memory must.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named)
        os.environ |= {  # as torchrun would have it
            "RANK": str(self._rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(self._rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": address[0],
            "MASTER_PORT": str(address[1]),
            # A Ray of this host alone has inherited the trainers' environment.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        try:
            self._host = make_host(self._cfg, name=self._name)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._started.set()

    def follow(self) -> None:
        """Do what the first rank does, until it is closed or gone."""
        self._made().follow()

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method of the host, once that is made."""
        return getattr(self._made(), method)(*args)

    def _made(self) -> EngineHost:
        self._started.wait()
        if self._host is None:
            raise RuntimeError(f"{self._name} could not be made: {self._failure}")
        return self._host


@dataclass(frozen=True, slots=True)
class _RayPending:
    """What a call will have returned."""

    engine: str
    ref: ray.ObjectRef[Any]
    others: Sequence[ray.ObjectRef[Any]]
    """Calls of the other ranks that last as long as the engine: without these it hangs."""

    def result(self, timeout_s: float) -> Any:
        """Wait for it. Raises what the call has raised, TimeoutError, and EngineLostError where a
        process of the engine is gone."""
        ended, _ = ray.wait([self.ref, *self.others], timeout=timeout_s)
        if ended and self.ref not in ended:
            # What the first rank knows of it says more; it may also have closed in order.
            ended, _ = ray.wait([self.ref], timeout=min(timeout_s, _SETTLE_S))
            if not ended:
                self._raise_of_others()
        if not ended:
            raise TimeoutError(f"{self.engine} has not answered within {timeout_s:g} s")
        try:
            return ray.get(self.ref)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            raise EngineLostError(self.engine, _how(error)) from error

    def _raise_of_others(self) -> None:
        """Raise EngineLostError where another rank is gone, or has failed."""
        for ref in ray.wait([*self.others], num_returns=len(self.others), timeout=0.0)[0]:
            try:
                ray.get(ref)
            except RayError as error:
                raise EngineLostError(self.engine, f"of another rank: {_how(error)}") from error


class RayHandle:
    """One engine: the actors of its ranks, of which the first takes the calls."""

    def __init__(self, name: str, ranks: Sequence[Any]) -> None:
        """`ranks` are actors of `EngineRank`, whose methods Ray makes where no checker sees it."""
        self.name = name
        self._ranks = list(ranks)
        first = self._ranks[0]
        address = first.address.remote()
        gpus = [rank.gpus.remote() for rank in self._ranks]
        self._starting = [rank.start.remote(address, *gpus) for rank in self._ranks]
        self._following = [rank.follow.remote() for rank in self._ranks[1:]]

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def wait_until_made(self, timeout_s: float) -> None:
        """Wait for all ranks. Raises what one has refused, TimeoutError, and EngineLostError where
        one is gone: the others may wait for it long."""
        waiting, deadline = list(self._starting), monotonic() + timeout_s
        while waiting:
            ended, waiting = ray.wait(waiting, timeout=max(deadline - monotonic(), 0.0))
            if not ended:
                raise TimeoutError(
                    f"{self.name} has not started within 15 minutes, or nine tenths of "
                    "trainer.parallel.timeout_s. Is its process stopped (`ray list actors`)?"
                )
            for ref in ended:
                _RayPending(self.name, ref, ()).result(0.0)

    def call(self, method: str, /, *args: Any) -> _RayPending:
        """Begin a call of a method of the host."""
        return _RayPending(self.name, self._ranks[0].call.remote(method, args), self._following)

    def kill(self) -> None:
        """End its processes at once."""
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)


def _how(error: RayError) -> str:
    """What became of the process, without the numbers by which Ray knows it."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = " ".join(line for line in lines if line and not _IDS.match(line))
    return told.partition(_GUESSES)[0].rstrip()
