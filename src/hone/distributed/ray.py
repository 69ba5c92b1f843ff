"""Workers as Ray actors: a Ray that has room for them, their processes, and how they are reached.

With `ray_trainers` the only module that imports Ray.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from tempfile import mkdtemp
from time import monotonic
from typing import Any, Literal, TypeVar

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hone.config.algorithm import TeacherConfig
from hone.config.cluster import ClusterConfig, ScorerName
from hone.config.model import ModelConfig
from hone.config.reward import RewardModelConfig
from hone.config.tree import RLConfig
from hone.distributed.address import no_cluster, unreachable
from hone.distributed.calls import Hub, serve
from hone.distributed.listening import LOOPBACK, host_store, interface_of
from hone.distributed.pool import WorkersLostError
from hone.distributed.processes import DEVICES_HELD, HONE_KEY, environment, processes
from hone.distributed.signals import handling
from hone.errors import UserError
from hone.types import EngineLostError

__all__ = [
    "EngineRank",
    "RayPending",
    "RayWorker",
    "RayWorkers",
    "ReferenceRank",
    "RewardModelRank",
    "TeacherRank",
    "WorkerRank",
    "check_nodes",
    "join",
    "network_environment",
    "ray_workers",
    "reserve_gpus",
    "why_lost",
]

_log = logging.getLogger(__name__)

Role = Literal["engine"] | ScorerName

_Located = TypeVar("_Located", ModelConfig, TeacherConfig, RewardModelConfig)

PLACING_S = 60.0
"""How long devices that others hold are waited for."""
_STARTING_S = 900.0
"""How long an engine may take to read its model's configuration and to record its graphs, and a
model that scores to load its weights."""
_RAY_GONE_S = 10
"""How long processes of a Ray of this host look for its head, which never comes again."""
_PER_CORE = 4
"""Processes of a run on CPUs that may share a core: with many more none gets on."""
_CALLS = 8
"""Calls of one engine that run side by side: the longest waits for weights."""
_METHODS = 4
"""Methods of an actor that run side by side: one lasts as long as the worker."""
_IDS = re.compile(r"(class_name|actor_id|namespace|pid|ip|name|node_id|job_id):")
_GUESSES = "Some common causes include"
_SETTLE_S = 1.0
"""How long the first rank has to notice that another one is gone."""
_LOOK_S = 5.0
"""How often those who wait ask whether Ray is still there."""


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """The engines and frozen models of `cluster`, as actors, and how others are started in place of
    those that are lost."""

    cfg: RLConfig
    placed: PlacementGroup
    uses_gpus: bool
    build: str
    """`module:function` that makes, of role, configuration and name, what a worker's calls are for:
    in its process, once that sees its GPUs."""
    host: str
    """How workers reach this process."""
    hub: Hub
    """The lines to them."""

    def start(self, role: Role, index: int) -> RayWorker:
        """Begin to make a worker on its devices."""
        check_own_node()
        cfg, is_engine = self.cfg, role == "engine"
        name, size = f"{role} {index}", cfg.engine.tensor_parallel_size if is_engine else 1
        actor = ray.remote(_RANKS[role]).options(
            num_cpus=1,
            num_gpus=1 if self.uses_gpus else 0,
            max_concurrency=_METHODS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.placed,
                placement_group_bundle_index=_workers(cfg.cluster).index((role, index)),
            ),
        )
        # Ray makes these methods where no checker sees them.
        ranks: list[Any] = [
            actor.remote(cfg, self.build, role, name=name, rank=rank, size=size)
            for rank in range(size)
        ]
        return RayWorker(name, ranks, self.hub)

    @property
    def starting_s(self) -> float:
        """How long a worker may take to start: less than the other trainers wait for this one,
        which knows what is slow."""
        return min(_STARTING_S, 0.9 * self.cfg.trainer.parallel.timeout_s)

    def start_all(self) -> dict[Role, list[RayWorker]]:
        """All of them, by role. Those that are gone as they start are started anew later, as any
        that are lost. Raises UserError for what was refused, with its own words, and TimeoutError.
        """
        cluster, start_s = self.cfg.cluster, monotonic()
        roles = cluster.devices(self.cfg.engine.tensor_parallel_size)
        apart = [role.words for role in roles if not role.trains]
        _log.info("starting on Ray: %s", ", ".join(apart))
        started: dict[Role, list[RayWorker]] = {}
        for role, index in _workers(cluster):
            started.setdefault(role, []).append(self.start(role, index))
        deadline = start_s + self.starting_s
        for worker in chain(*started.values()):
            with suppress(EngineLostError):
                worker.wait_until_made(max(deadline - monotonic(), 0.0))
        _log.info("they are there after %.1f s", monotonic() - start_s)
        return started


def _workers(cluster: ClusterConfig) -> list[tuple[Role, int]]:
    """Role and index of all, in the order of their places."""
    numbers: dict[Role, int] = {"engine": cluster.num_engines, **cluster.num_scorers}
    return [(role, index) for role, number in numbers.items() for index in range(number)]


@contextmanager
def reserve_gpus(cfg: RLConfig) -> Generator[None]:
    """Keep the GPUs of the trainers of this host, which is not that of the first one, from all that
    Ray starts. Raises as `ray_workers`."""
    with _joined(cfg, uses_gpus=cfg.run.device != "cpu" and torch.cuda.is_available()):
        yield


@contextmanager
def ray_workers(cfg: RLConfig, build: str) -> Generator[RayWorkers]:
    """Join or start a Ray that has devices for the engines and frozen models of `cluster`; whatever
    is started there ends with the context.

    Raises UserError where there is no such cluster, or it has too few devices.
    """
    uses_gpus, address = cfg.run.device != "cpu" and torch.cuda.is_available(), cfg.cluster.address
    with (
        _joined(cfg, uses_gpus=uses_gpus),
        environment({} if address is None else network_environment()),
    ):
        placed = _place(cfg, uses_gpus=uses_gpus)
        try:
            host = LOOPBACK if address is None else ray.util.get_node_ip_address()
            num_lines = cfg.cluster.num_engines + sum(cfg.cluster.num_scorers.values())
            with closing(Hub(host, num_lines=num_lines, lost_after_s=_LOOK_S)) as hub:
                yield RayWorkers(_anywhere(cfg), placed, uses_gpus, build, host, hub)
        finally:
            remove_placement_group(placed)


def _anywhere(cfg: RLConfig) -> RLConfig:
    """The same in processes that run in other folders."""
    reward = cfg.reward.model_copy(update={"model": _placed(cfg.reward.model)})
    moved = {"model": _placed(cfg.model), "teacher": _placed(cfg.teacher), "reward": reward}
    return cfg.model_copy(update=moved)


def _placed(section: _Located) -> _Located:
    """The same from any folder: its path, where that is one of this host, is whole."""
    if section.path is None or not Path(section.path).exists():
        return section
    return section.model_copy(update={"path": str(Path(section.path).resolve())})


@contextmanager
def _joined(cfg: RLConfig, *, uses_gpus: bool) -> Generator[None]:
    """Be the driver of a Ray: of `cluster.address`, or of one of this host alone."""
    address = cfg.cluster.address
    try:  # an interrupt may find it half started
        if address is None:
            num_cpus, num_gpus, inherited = _own_devices(cfg, uses_gpus=uses_gpus)
            with environment(inherited), _private():
                _start(num_cpus, num_gpus)
        else:
            join(address)
            check_nodes(cfg.cluster, "GPU" if uses_gpus else "CPU")
        # Ray takes back what nobody refers to any more.
        holder = _reserve_own() if address is not None and uses_gpus else None
        yield
        del holder
    finally:
        # Where the node is dead Ray ends this process in there, before anybody has said why.
        if not ray.is_initialized() or own_node()["Alive"]:
            with _undisturbed():
                ray.shutdown()
                _read_settings()


def _start(num_cpus: int, num_gpus: int) -> None:
    """Start a Ray of this host alone. Raises UserError where it does not come up."""
    # Not TMPDIR: names of sockets have 107 bytes at most (103 on macOS), and Ray adds some 65.
    place = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
    try:
        place.mkdir(parents=True, exist_ok=True)
        # Ray lets all users write into its folder. Who exchanges a socket there takes the place of
        # a process of Ray, so it lies in a folder that no other user enters.
        private = mkdtemp(prefix="ray-", dir=place)
        ray.init(
            address="local",
            _temp_dir=f"{private}/r",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        # What Ray raises after half a minute has no class of its own.
        is_of_ray = type(error) is Exception or isinstance(error, RuntimeError | OSError | RayError)
        if not is_of_ray:
            raise
        raise UserError(
            f"Ray, which starts engines and models with devices of their own, did not start on "
            f"this host: {f'{error}'.strip().rstrip('.')}. Usual causes are a host that is busy, "
            "few processes that may be started (ulimit -u), and a full disk: free it, or name a "
            "folder of another one in RAY_TMPDIR. Then give the same command again. Its logs are "
            f"in the newest folder '{place}/ray-*/r/session_latest/logs'."
        ) from error


def _undisturbed() -> AbstractContextManager[None]:
    """Ctrl-C does nothing inside: after half a shutdown Ray ends this process, with a code of its
    own."""
    is_main = threading.current_thread() is threading.main_thread()
    return handling(signal.SIG_IGN, signal.SIGINT) if is_main else nullcontext()


def join(address: str, *, log_to_driver: bool = False) -> None:
    """Be a driver of the Ray at `address`. Raises UserError where there is none."""
    if (reason := unreachable(address)) is not None:
        raise UserError(reason)
    try:
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    except (OSError, RayError, ValueError) as error:
        raise UserError(no_cluster(address, f"{error}")) from error


def _own_devices(cfg: RLConfig, *, uses_gpus: bool) -> tuple[int, int, dict[str, str]]:
    """The CPUs and GPUs that a Ray of this host may give away, all but the trainers' devices, and
    the environment that it must be started in: its processes inherit that."""
    roles = cfg.cluster.devices(cfg.engine.tensor_parallel_size)
    total = sum(role.number for role in roles)
    words = " + ".join(role.words for role in roles)
    needed, num_cores = total - cfg.cluster.num_processes, os.cpu_count() or 1
    num_cpus = max(num_cores, needed)
    environment = {"RAY_gcs_rpc_server_reconnect_timeout_s": f"{_RAY_GONE_S}"}
    if not uses_gpus:
        if total > _PER_CORE * num_cores:
            raise UserError(
                f"{total} processes are needed: {words}, and this host has {num_cores} CPU cores, "
                f"of which each serves {_PER_CORE} at most. Use fewer, or name a Ray cluster with "
                "cluster.address."
            )
        return num_cpus, 0, environment
    visible = _visible_gpus()
    left = visible[processes().local_world_size :]
    if needed > len(left):
        raise UserError(
            f"{total} devices are needed: {words}, and this host has {len(visible)} GPUs. Use "
            "fewer, or name a Ray cluster with cluster.address."
        )
    return num_cpus, len(left), environment | {"CUDA_VISIBLE_DEVICES": ",".join(left)}


@contextmanager
def _private() -> Generator[None]:
    """A Ray that is started inside listens at loopback, and to nobody without its token: whoever
    reaches the ports of a Ray otherwise has programs run by it.

    Ray takes an address for its ports from what other hosts reach, whatever it is given, but where
    it may not have other nodes. The token is drawn here, for this Ray alone, and is nowhere but in
    the environment of its processes. Ray has read its settings when it was imported, so it is made
    to read them again.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    may_have_nodes = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment(token):
            _read_settings()
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = may_have_nodes


def _read_settings() -> None:
    """Let Ray read its environment anew."""
    raylet: Any = resolve_name("ray._raylet")  # native: no checker sees what is in it
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _visible_gpus() -> list[str]:
    """The GPUs of this process as CUDA names them, in the order of their indices."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


def check_nodes(cluster: ClusterConfig, kind: str) -> None:
    """Whether the Ray that was joined is the cluster that the configuration speaks of."""
    devices = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
    expected = cluster.devices_per_node or 0
    # A node without any may be there for the trainers, whose devices Ray need not know.
    if len(devices) < cluster.num_nodes or any(0 < number < expected for number in devices):
        raise UserError(
            f"the Ray cluster has {len(devices)} nodes with {devices} {kind}s; asked for are "
            f"cluster.num_nodes {cluster.num_nodes} and cluster.devices_per_node "
            f"{cluster.devices_per_node or 'unset'}. Start Ray on the others, or ask for less."
        )


class _Holder:
    """Keeps GPUs of a host from others, and says which."""

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


def _reserve_own() -> Any:
    """Take the trainers' GPUs of this host out of what Ray gives away, where it has them, as long
    as the returned handle lives."""
    own, node = processes(), own_node()
    if not node["Resources"].get("GPU") or os.environ.get(DEVICES_HELD):
        return None
    mine = set(_visible_gpus()[: own.local_world_size])
    holder: Any = (
        ray.remote(num_cpus=0)(_Holder)
        .options(
            num_gpus=own.local_world_size,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
    )
    try:
        held = set(ray.get(holder.gpus.remote(), timeout=PLACING_S))
    except RayError as error:
        raise UserError(
            f"this host is part of the Ray cluster, which has not given its {own.local_world_size} "
            f"GPUs for training within {PLACING_S:.0f} s. End what holds them: {error}"
        ) from error
    if held != mine:
        raise UserError(
            f"the trainers of this host use GPUs {sorted(mine)}, and its Ray gives them "
            f"{sorted(held)}: it holds others of them. End what does, or start Ray here with the "
            "engines' GPUs alone (CUDA_VISIBLE_DEVICES)."
        )
    return holder


def _place(cfg: RLConfig, *, uses_gpus: bool) -> PlacementGroup:
    """Devices for every engine, the ranks of one on one host, and then for what scores."""
    cluster, size = cfg.cluster, cfg.engine.tensor_parallel_size
    kind = "GPU" if uses_gpus else "CPU"
    sizes = [size if role == "engine" else 1 for role, _ in _workers(cluster)]
    placed = placement_group([{"CPU": n} | {kind: n} for n in map(float, sizes)], strategy="PACK")
    if not placed.wait(PLACING_S):
        remove_placement_group(placed)
        total = int(ray.cluster_resources().get(kind, 0))
        free = int(ray.available_resources().get(kind, 0))
        words = [role.words for role in cluster.devices(size) if not role.trains]
        raise UserError(
            f"{' + '.join(words)} need {sum(sizes)} {kind}s, an engine's on one host; the cluster "
            f"has {total}, of which {free} are free. Use fewer, or end what holds them."
        )
    return placed


def network_environment() -> dict[str, str]:
    """What makes gloo meet other hosts of a Ray cluster where Ray does.

    Left to itself it takes the address of this host's name, which is that of loopback where
    `/etc/hosts` says so, as that of many systems does. NCCL looks for an interface by itself.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    name = interface_of(ray.util.get_node_ip_address())
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


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
        f"frozen models with it: {reason}. Why is in raylet.out and dashboard_agent.log of "
        f"'{logs}', or nowhere where something killed it (`dmesg` tells of memory). The same "
        "command goes on from the last checkpoint."
    )


class WorkerRank:
    """One process of a worker. The methods of an engine run in threads, side by side, those of what
    scores one after the other."""

    def __init__(
        self, cfg: RLConfig, build: str, role: Role, *, name: str, rank: int, size: int
    ) -> None:
        self._cfg = cfg
        self._build = build
        self._role = role
        self._name = name
        self._rank = rank
        self._size = size
        self._store: Any = None
        """Where the ranks of this engine meet, of several in the first."""
        self._target: Any = None
        self._failure: BaseException | None = None
        self._started = threading.Event()

    def address(self) -> tuple[str, int]:
        """Where the ranks of this engine meet: a store that the first one serves, at the address by
        which Ray knows its host. One rank meets nobody."""
        host = ray.util.get_node_ip_address()
        if self._size == 1:
            return host, 0
        self._store = host_store(host, timeout_s=_STARTING_S)
        return host, self._store.port

    def gpus(self) -> list[str]:
        """The GPU that Ray has given this rank, as CUDA names it; none on a CPU."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, address: tuple[str, int], key: str, *gpus: list[str]) -> None:
        """Make what the calls are for. `gpus` are those of each rank, which sign what they send
        each other with `key`."""
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
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            # A Ray of this host alone has inherited the trainers' environment.
            "TORCHELASTIC_RESTART_COUNT": "0",
            HONE_KEY: key,
        }
        if self._cfg.cluster.address is not None:
            os.environ |= network_environment()
        try:
            self._target = resolve_name(self._build)(self._role, self._cfg, self._name)
        except BaseException as error:
            self._failure = error
            if self._cfg.cluster.address is not None and isinstance(error, ValueError | OSError):
                # Who reads it is on another host, where files may be there that lack here.
                where = f"{self._name} on {socket.gethostname()}"
                raise UserError(f"{where}: {error}") from error
            raise
        finally:
            self._started.set()

    def serve(self, address: tuple[str, int], key: bytes) -> None:
        """Answer the calls of a line: each waits until what they are for is made."""
        num_threads = _CALLS if self._role == "engine" else 1
        serve(address, key, self._call, num_threads=num_threads)

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        return getattr(self._made(), method)(*args)

    def follow(self) -> None:
        """Do what the first rank does, until it is closed or gone."""
        self._made().follow()

    def _made(self) -> Any:
        self._started.wait()
        if self._target is None:
            raise RuntimeError(f"{self._name} could not be made: {self._failure}")
        return self._target


class EngineRank(WorkerRank):
    """Of an engine; the system lists Ray's processes under the names of their classes."""


class ReferenceRank(WorkerRank):
    """Of a reference model."""


class TeacherRank(WorkerRank):
    """Of a teacher."""


class RewardModelRank(WorkerRank):
    """Of a reward model."""


_RANKS: Mapping[Role, type[WorkerRank]] = {
    "engine": EngineRank,
    "reference": ReferenceRank,
    "teacher": TeacherRank,
    "reward_model": RewardModelRank,
}


@dataclass(frozen=True, slots=True)
class RayPending:
    """What a call will have returned."""

    engine: str
    future: Future[Any]

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """As of a future."""
        self.future.add_done_callback(fn)

    def result(self, timeout_s: float) -> Any:
        """Wait for it. Raises what the call has raised, TimeoutError, and EngineLostError where a
        process of the engine is gone; WorkersLostError where Ray itself is."""
        deadline = monotonic() + timeout_s
        left_s = timeout_s
        while not self.future.done() and left_s > 0.0:
            if wait([self.future], min(left_s, _LOOK_S)).done:
                break
            check_own_node()
            left_s = deadline - monotonic()
        if not self.future.done():
            raise TimeoutError(f"{self.engine} has not answered within {timeout_s:g} s")
        return self.future.result()


class RayWorker:
    """A `Worker`: the actors of its ranks, of which the first takes the calls, over a line of its
    own. Ray says when one is gone."""

    def __init__(self, name: str, ranks: Sequence[Any], hub: Hub) -> None:
        """`ranks` are actors of `WorkerRank`."""
        self.name = name
        self._ranks = list(ranks)
        self._line = hub.line(name)
        first = self._ranks[0]
        address, key = first.address.remote(), secrets.token_hex(32)
        gpus = [rank.gpus.remote() for rank in self._ranks]
        self._starting = [rank.start.remote(address, key, *gpus) for rank in self._ranks]
        served = first.serve.remote(hub.address, self._line.key)
        served.future().add_done_callback(self._on_first_ended)
        for rank in self._ranks[1:]:
            rank.follow.remote().future().add_done_callback(self._on_other_ended)

    def _on_first_ended(self, served: Future[None]) -> None:
        error = served.exception()
        cause = why_lost(error) if isinstance(error, RayError) else f"it has ended: {error}"
        self._line.end(cause)

    def _on_other_ended(self, followed: Future[None]) -> None:
        """Without it the engine hangs. What the first rank knows of it says more."""
        error = followed.exception()
        if isinstance(error, RayError):  # else it was closed in order
            cause = f"of another rank: {why_lost(error)}"
            end = threading.Timer(_SETTLE_S, self._line.end, (cause,))
            end.daemon = True
            end.start()

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
                try:
                    ray.get(ref)
                except RayTaskError as error:
                    raise error.cause from None
                except RayError as error:
                    raise EngineLostError(self.name, why_lost(error)) from error

    def call(self, method: str, /, *args: Any) -> RayPending:
        """Begin a call of a method of what the first rank has made."""
        return RayPending(self.name, self._line.call(method, *args))

    def kill(self) -> None:
        """End its processes at once."""
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._line.end("it was killed")


def why_lost(error: RayError) -> str:
    """What became of the process, without the numbers by which Ray knows it."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not _IDS.match(line))
    return text.partition(_GUESSES)[0].rstrip()
