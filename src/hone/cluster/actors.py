"""Engines and references in processes of their own, as Ray actors, and how the controller reaches
them."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from hone.config.tree import RLConfig
from hone.distributed.pool import WorkersLostError
from hone.types import EngineLostError

__all__ = [
    "EngineRank",
    "RayWorker",
    "ReferenceRank",
    "Role",
    "WorkerRank",
    "check_own_node",
    "network_environment",
    "own_node",
]

Role = Literal["engine", "reference"]

_IDS = re.compile(r"(class_name|actor_id|namespace|pid|ip|name|node_id|job_id):")
_GUESSES = "Some common causes include"
_SETTLE_S = 1.0
"""How long the first rank has to notice that another one is gone."""
_LOOK_S = 5.0
"""How often those who wait ask whether Ray is still there."""


def network_environment() -> dict[str, str]:
    """What makes gloo meet other hosts of a Ray cluster where Ray does.

    Left to itself it takes the address of this host's name, which is that of loopback where
    `/etc/hosts` says so, as that of many systems does. NCCL looks for an interface by itself.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    own = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def own_node() -> dict[str, Any]:
    """What Ray knows of the node of this process."""
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == own)


def check_own_node() -> None:
    """Raise WorkersLostError where the Ray node of this process is dead: Ray ends all that this
    process has started, and starts nothing more for it."""
    node = own_node()
    if node["Alive"]:
        return
    logs = Path(node["RayletSocketName"]).parents[1] / "logs"
    reason = node["DeathReasonMessage"].rstrip(".") or "it has left in order"
    raise WorkersLostError(
        f"the Ray node of this host, {node['NodeManagerAddress']}, has ended, and all engines and "
        f"references with it: {reason}. Why is in raylet.out and dashboard_agent.log of "
        f"'{logs}', or nowhere where something killed it (`dmesg` tells of memory). The same "
        "command goes on from the last checkpoint."
    )


class WorkerRank:
    """One process of a worker. The methods of an engine run in threads of the actor, side by side,
    those of a reference one after the other."""

    def __init__(self, cfg: RLConfig, role: Role, name: str, rank: int = 0, size: int = 1) -> None:
        self._cfg = cfg
        self._role = role
        self._name = name
        self._rank = rank
        self._size = size
        self._target: Any = None
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
        """Make what the calls are for. `gpus` are those of each rank."""
        if named := list(chain(*gpus)):
            # Each rank sees all of them, as ranks that read each other's memory must.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named)
        os.environ |= {  # as torchrun would have it
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_RANK": str(self._rank),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": address[0],
            "MASTER_PORT": str(address[1]),
            # A Ray of this host alone has inherited the trainers' environment.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if self._cfg.cluster.address is not None:
            os.environ |= network_environment()
        try:
            self._target = self._make()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._started.set()

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method of what is made here, once it is."""
        return getattr(self._made(), method)(*args)

    def follow(self) -> None:
        """Do what the first rank does, until it is closed or gone."""
        self._made().follow()

    def _make(self) -> Any:
        """What the calls are for, on the device of this process."""
        from hone.loops.workers import build_engine_worker, build_reference

        if self._role == "engine":
            return build_engine_worker(self._cfg, name=self._name)
        return build_reference(self._cfg)

    def _made(self) -> Any:
        self._started.wait()
        if self._target is None:
            raise RuntimeError(f"{self._name} could not be made: {self._failure}")
        return self._target


class EngineRank(WorkerRank):
    """Of an engine; the system lists Ray's processes under the names of their classes."""


class ReferenceRank(WorkerRank):
    """Of a reference model."""


@dataclass(frozen=True, slots=True)
class _RayPending:
    """What a call will have returned."""

    engine: str
    ref: ray.ObjectRef[Any]
    others: Sequence[ray.ObjectRef[Any]]
    """Calls of the other ranks that last as long as the engine: without these it hangs."""

    def result(self, timeout_s: float) -> Any:
        """Wait for it. Raises what the call has raised, TimeoutError, and EngineLostError where a
        process of the engine is gone; WorkersLostError where Ray itself is."""
        deadline = monotonic() + timeout_s
        ended = self._ended(min(timeout_s, _LOOK_S))
        while not ended and (left_s := deadline - monotonic()) > 0.0:
            check_own_node()
            ended = self._ended(min(left_s, _LOOK_S))
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

    def _ended(self, timeout_s: float) -> list[ray.ObjectRef[Any]]:
        return ray.wait([self.ref, *self.others], timeout=timeout_s)[0]

    def _raise_of_others(self) -> None:
        """Raise EngineLostError where another rank is gone, or has failed."""
        for ref in ray.wait([*self.others], num_returns=len(self.others), timeout=0.0)[0]:
            try:
                ray.get(ref)
            except RayError as error:
                raise EngineLostError(self.engine, f"of another rank: {_how(error)}") from error


class RayWorker:
    """A `Worker`: the actors of its ranks, of which the first takes the calls."""

    def __init__(self, name: str, ranks: Sequence[Any]) -> None:
        """`ranks` are actors of `WorkerRank`."""
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
        """Begin a call of a method of what the first rank has made."""
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
