"""Workers as Ray actors: joining or starting a Ray cluster, placing the workers, calling them.
Only this module and `ray_trainers` import Ray."""

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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from tempfile import mkdtemp
from time import monotonic
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hone.config.plan import RunPlan
from hone.distributed.address import no_cluster, unreachable
from hone.distributed.calls import Hub
from hone.distributed.listening import LOOPBACK, host_store, interface_of
from hone.distributed.pool import WorkersLostError
from hone.distributed.processes import DEVICES_HELD, environment, processes
from hone.distributed.settings import ClusterConfig, RoleDevices, RoleName
from hone.distributed.signals import handling
from hone.distributed.worker_rank import (
    STARTING_S,
    WorkerRank,
    WorkerSpec,
    rank_environment,
    runs_on_gpus,
    visible_gpus,
)
from hone.errors import UserError
from hone.models.settings import ModelConfig
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

PLACING_S = 60.0
"""Longest wait for devices that other programs use."""
_RAY_GONE_S = 10
"""Time after which processes of a local Ray give up their head node, which never comes back."""
_PER_CORE = 4
"""Most processes per core of a run on CPUs. Far more would make no progress."""
_METHODS = 4
"""Methods of an actor that may run at the same time. One of them runs as long as the worker
lives."""
_IDS = re.compile(r"(class_name|actor_id|namespace|pid|ip|name|node_id|job_id):")
_GUESSES = "Some common causes include"
_SETTLE_S = 1.0
"""Time that the first rank has to notice that another one is gone."""
_LOOK_S = 5.0
"""Interval in which waiting calls check whether Ray is alive."""


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """The engines and frozen models of `cluster` as actors. Starts them, and later their
    replacements."""

    plan: RunPlan
    placed: PlacementGroup
    uses_gpus: bool
    build: str
    """See `WorkerSpec.build`."""
    host: str
    """The address at which workers reach this process."""
    hub: Hub
    """The lines to the workers."""

    def start(self, role: RoleName, index: int) -> RayWorker:
        """Begin to start a worker on its devices."""
        check_own_node()
        plan = self.plan
        size = plan.roles[role].axes.world
        spec = WorkerSpec(f"{role} {index}", role, size, self.build, plan)
        actor = ray.remote(_RANKS[role]).options(
            num_cpus=1,
            num_gpus=1 if self.uses_gpus else 0,
            max_concurrency=_METHODS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.placed,
                placement_group_bundle_index=_workers(plan).index((role, index)),
            ),
        )
        # Ray creates these methods at run time, unseen by type checkers.
        ranks: list[Any] = [actor.remote(spec, rank) for rank in range(size)]
        return RayWorker(spec.name, ranks, self.hub)

    @property
    def starting_s(self) -> float:
        """Longest start of a worker. Shorter than the other trainers' wait for this process, which
        can name the slow worker."""
        return min(STARTING_S, 0.9 * self.plan.timeout_s)

    def start_all(self) -> dict[RoleName, list[RayWorker]]:
        """Start all workers, by role. Workers that are lost during their start are restarted later
        like any other.

        Raises the UserError of a worker that could not be built, and TimeoutError.
        """
        plan, start_s = self.plan, monotonic()
        words = ", ".join(role.words for role in _devices(plan) if not role.trains)
        _log.info("starting on Ray: %s", words)
        started: dict[RoleName, list[RayWorker]] = {}
        for role, index in _workers(plan):
            started.setdefault(role, []).append(self.start(role, index))
        deadline = start_s + self.starting_s
        for worker in chain(*started.values()):
            with suppress(EngineLostError):
                worker.wait_until_made(max(deadline - monotonic(), 0.0))
        _log.info("%s ready after %.1f s", words, monotonic() - start_s)
        return started


def _workers(plan: RunPlan) -> list[tuple[RoleName, int]]:
    """Role and index of all workers, in the order of their placement bundles."""
    roles = [role for role in plan.roles.values() if role.where == "ray"]
    return [(role.name, index) for role in roles for index in range(role.num_workers)]


def _devices(plan: RunPlan) -> list[RoleDevices]:
    """The devices of each role, worded as in the configuration."""
    return plan.cluster.devices(plan.roles["engine"].axes.tensor)


@contextmanager
def reserve_gpus(plan: RunPlan) -> Generator[None]:
    """Reserve the GPUs of this host's trainers in Ray. For hosts other than that of the first
    process. Raises as `ray_workers`."""
    with _joined(plan, uses_gpus=runs_on_gpus(plan.config.run)):
        yield


@contextmanager
def ray_workers(plan: RunPlan, build: str) -> Generator[RayWorkers]:
    """Join or start a Ray cluster with devices for the engines and frozen models of `cluster`. All
    that is started there ends with the context.

    Raises UserError if there is no such cluster or it has too few devices.
    """
    uses_gpus, address = runs_on_gpus(plan.config.run), plan.cluster.address
    with (
        _joined(plan, uses_gpus=uses_gpus),
        environment({} if address is None else network_environment()),
    ):
        placed = _place(plan, uses_gpus=uses_gpus)
        try:
            host = LOOPBACK if address is None else ray.util.get_node_ip_address()
            num_lines = len(_workers(plan))
            with closing(Hub(host, num_lines=num_lines, lost_after_s=_LOOK_S)) as hub:
                yield RayWorkers(_with_absolute_paths(plan), placed, uses_gpus, build, host, hub)
        finally:
            remove_placement_group(placed)


def _with_absolute_paths(plan: RunPlan) -> RunPlan:
    """The plan with absolute paths, for processes with other working directories."""
    moved = {
        name: replace(role, model=_with_absolute_path(role.model))
        for name, role in plan.roles.items()
    }
    return replace(plan, roles=moved)


def _with_absolute_path(model: ModelConfig) -> ModelConfig:
    """The model with an absolute path if it is a local one."""
    if not Path(model.path).exists():
        return model
    return model.model_copy(update={"path": str(Path(model.path).resolve())})


@contextmanager
def _joined(plan: RunPlan, *, uses_gpus: bool) -> Generator[None]:
    """Become a driver of the Ray cluster at `cluster.address`, or of a new cluster of this host
    alone."""
    address = plan.cluster.address
    try:  # an interrupt may come when Ray is half started
        if address is None:
            num_cpus, num_gpus, inherited = _own_devices(plan, uses_gpus=uses_gpus)
            with environment(inherited), _private():
                _start(num_cpus, num_gpus)
        else:
            join(address)
            check_nodes(plan.cluster, "GPU" if uses_gpus else "CPU")
        # The reservation lasts as long as the handle is referenced.
        holder = _reserve_own() if address is not None and uses_gpus else None
        yield
        del holder
    finally:
        # On a dead node `shutdown` would end this process before the cause is reported.
        if not ray.is_initialized() or own_node()["Alive"]:
            with _undisturbed():
                ray.shutdown()
                _read_settings()


def _start(num_cpus: int, num_gpus: int) -> None:
    """Start Ray on this host only. Raises UserError if it does not start."""
    # Not TMPDIR: socket names are limited to 107 bytes (103 on macOS), and Ray adds some 65.
    place = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
    try:
        place.mkdir(parents=True, exist_ok=True)
        # Ray's folder is writable for all users, and a user who replaces a socket in it can pose as
        # a process of Ray. So it lies in a folder that no other user can enter.
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
        # Ray's error after half a minute has no class of its own.
        is_of_ray = type(error) is Exception or isinstance(error, RuntimeError | OSError | RayError)
        if not is_of_ray:
            raise
        raise UserError(
            f"Ray, which starts remote engines and models, did not start on "
            f"this host: {f'{error}'.strip().rstrip('.')}. Usual causes are a host that is busy, "
            "few processes that may be started (ulimit -u), and a full disk: free it, or name a "
            "folder of another one in RAY_TMPDIR. Then give the same command again. Its logs are "
            f"in the newest folder '{place}/ray-*/r/session_latest/logs'."
        ) from error


def _undisturbed() -> AbstractContextManager[None]:
    """Context manager that ignores Ctrl-C: an interrupted shutdown of Ray ends this process with
    Ray's own exit code."""
    is_main = threading.current_thread() is threading.main_thread()
    return handling(signal.SIG_IGN, signal.SIGINT) if is_main else nullcontext()


def join(address: str, *, log_to_driver: bool = False) -> None:
    """Become a driver of the Ray cluster at `address`. Raises UserError if there is none."""
    if (reason := unreachable(address)) is not None:
        raise UserError(reason)
    try:
        ray.init(address=address, log_to_driver=log_to_driver, logging_level=logging.ERROR)
    except (OSError, RayError, ValueError) as error:
        raise UserError(no_cluster(address, f"{error}")) from error


def _own_devices(plan: RunPlan, *, uses_gpus: bool) -> tuple[int, int, dict[str, str]]:
    """The CPUs and GPUs that a local Ray may assign (all but the trainers'), and the environment to
    start it in, which its processes inherit."""
    roles = _devices(plan)
    total = sum(role.number for role in roles)
    words = " + ".join(role.words for role in roles)
    needed, num_cores = total - plan.cluster.num_processes, os.cpu_count() or 1
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
    visible = visible_gpus()
    left = visible[processes().local_world_size :]
    if needed > len(left):
        raise UserError(
            f"{total} devices are needed: {words}, and this host has {len(visible)} GPUs. Use "
            "fewer, or name a Ray cluster with cluster.address."
        )
    return num_cpus, len(left), environment | {"CUDA_VISIBLE_DEVICES": ",".join(left)}


@contextmanager
def _private() -> Generator[None]:
    """Context manager in which a new Ray listens at loopback only and requires a token. Anyone who
    reaches an unprotected Ray port can run programs.

    Ray binds its ports to an address that other hosts reach, whatever address it is given, unless
    it may not have other nodes. The token is drawn here for this Ray only, and exists only in the
    environment of its processes. Ray has read its settings at import, so they are read again.
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
    """Make Ray read its environment again."""
    raylet: Any = resolve_name("ray._raylet")  # a native module, opaque to type checkers
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def check_nodes(cluster: ClusterConfig, kind: str) -> None:
    """Check that the joined Ray cluster has the nodes and devices of the configuration. Raises
    UserError."""
    devices = [int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]]
    expected = cluster.devices_per_node or 0
    # A node without devices may be there for the trainers, whose devices need not be known to Ray.
    if len(devices) < cluster.num_nodes or any(0 < number < expected for number in devices):
        raise UserError(
            f"the Ray cluster has {len(devices)} nodes with {devices} {kind}s; asked for are "
            f"cluster.num_nodes {cluster.num_nodes} and cluster.devices_per_node "
            f"{cluster.devices_per_node or 'unset'}. Start Ray on the others, or ask for less."
        )


class _Holder:
    """Actor that reserves GPUs of a host and lists them."""

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


def _reserve_own() -> Any:
    """Reserve the trainers' GPUs of this host in Ray, if it manages them, as long as the returned
    handle lives."""
    own, node = processes(), own_node()
    if not node["Resources"].get("GPU") or os.environ.get(DEVICES_HELD):
        return None
    mine = set(visible_gpus()[: own.local_world_size])
    holder: Any = (
        ray.remote(num_cpus=0)(_Holder)
        .options(
            num_gpus=own.local_world_size,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
    )
    try:
        reserved = set(ray.get(holder.gpus.remote(), timeout=PLACING_S))
    except RayError as error:
        raise UserError(
            f"this host is part of the Ray cluster, which has not given its {own.local_world_size} "
            f"GPUs for training within {PLACING_S:.0f} s. End what holds them: {error}"
        ) from error
    if reserved != mine:
        raise UserError(
            f"the trainers of this host use GPUs {sorted(mine)}, and its Ray gives them "
            f"{sorted(reserved)}: other programs use the rest. End them, or start Ray here with "
            "the engines' GPUs alone (CUDA_VISIBLE_DEVICES)."
        )
    return holder


def _place(plan: RunPlan, *, uses_gpus: bool) -> PlacementGroup:
    """Reserve devices for every engine, the ranks of each on one host, and for the scorers."""
    kind = "GPU" if uses_gpus else "CPU"
    sizes = [plan.roles[role].axes.world for role, _ in _workers(plan)]
    placed = placement_group([{"CPU": n} | {kind: n} for n in map(float, sizes)], strategy="PACK")
    if not placed.wait(PLACING_S):
        remove_placement_group(placed)
        total = int(ray.cluster_resources().get(kind, 0))
        free = int(ray.available_resources().get(kind, 0))
        words = [role.words for role in _devices(plan) if not role.trains]
        raise UserError(
            f"{' + '.join(words)} need {sum(sizes)} {kind}s, an engine's on one host; the cluster "
            f"has {total}, of which {free} are free. Use fewer, or end what holds them."
        )
    return placed


def network_environment() -> dict[str, str]:
    """Environment that makes gloo use the interface that Ray uses.

    By default gloo takes the address of this host's name, which is loopback if `/etc/hosts` says
    so, as on many systems. NCCL finds an interface itself.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    name = interface_of(ray.util.get_node_ip_address())
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def own_node() -> dict[str, Any]:
    """Ray's record of the node of this process."""
    own = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == own)


def check_own_node() -> None:
    """Raise WorkersLostError if the Ray node of this process is dead. Ray then ends all that this
    process has started, and starts nothing more for it."""
    node = own_node()
    if node["Alive"]:
        return
    logs = Path(node["RayletSocketName"]).parents[1] / "logs"
    reason = node["DeathReasonMessage"].rstrip(".") or "it has left in order"
    raise WorkersLostError(
        f"the Ray node of this host, {node['NodeManagerAddress']}, has ended, and all engines and "
        f"frozen models with it: {reason}. The cause is in raylet.out or dashboard_agent.log of "
        f"'{logs}'. If another program killed the node, no log of Ray names it: `dmesg` shows "
        "whether memory ran out. The same command goes on from the last checkpoint."
    )


class RayRank(WorkerRank):
    """One process of a worker on Ray."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        super().__init__(spec, rank)
        self._store: Any = None
        """Rendezvous store of the worker's ranks, which the first rank serves. None in the other
        ranks, and where there is only one."""

    def address(self) -> tuple[str, int]:
        """Address of the rendezvous store of the engine's ranks, which the first rank serves at the
        address by which Ray knows its host. One rank needs no store."""
        host = ray.util.get_node_ip_address()
        if self.spec.size == 1:
            return host, 0
        self._store = host_store(host, timeout_s=STARTING_S)
        return host, self._store.port

    def gpus(self) -> list[str]:
        """CUDA name of the GPU that Ray has assigned to this rank. Empty on a CPU."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def start(self, address: tuple[str, int], key: str, *gpus: list[str]) -> None:
        """Build the worker's object. `gpus` are those of each rank. The ranks sign their messages
        with `key`."""
        os.environ |= rank_environment(self.rank, self.spec.size, address, key, [*chain(*gpus)])
        if self.spec.plan.cluster.address is None:
            self.make()
            return
        os.environ |= network_environment()
        try:
            self.make()
        except (ValueError, OSError) as error:
            # The reader is on another host, whose files may differ.
            where = f"{self.spec.name} on {socket.gethostname()}"
            raise UserError(f"{where}: {error}") from error


class EngineRank(RayRank):
    """Rank of an engine. The system lists Ray's processes under their class names."""


class ReferenceRank(RayRank):
    """Rank of a reference model."""


class TeacherRank(RayRank):
    """Rank of a teacher."""


class RewardModelRank(RayRank):
    """Rank of a reward model."""


_RANKS: Mapping[RoleName, type[RayRank]] = {
    "engine": EngineRank,
    "reference": ReferenceRank,
    "teacher": TeacherRank,
    "reward_model": RewardModelRank,
}


@dataclass(frozen=True, slots=True)
class RayPending:
    """The future result of a call to a worker on Ray."""

    engine: str
    future: Future[Any]

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """See `Pending.add_done_callback`."""
        self.future.add_done_callback(fn)

    def result(self, timeout_s: float) -> Any:
        """Wait for the result. Raises the call's exception, TimeoutError, EngineLostError if a
        process of the engine is gone, and WorkersLostError if Ray itself is gone."""
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
    """A `Worker` whose ranks are Ray actors. The first one takes the calls over its own line. Ray
    reports when an actor is gone."""

    def __init__(self, name: str, ranks: Sequence[Any], hub: Hub) -> None:
        """`ranks` are handles of `WorkerRank` actors."""
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
        """End the line when another rank is gone, since the worker would hang. The line ends after
        `_SETTLE_S`, within which the first rank may end it with its own error, which says more."""
        error = followed.exception()
        if isinstance(error, RayError):  # otherwise it was closed in an orderly way
            cause = f"of another rank: {why_lost(error)}"
            end = threading.Timer(_SETTLE_S, self._line.end, (cause,))
            end.daemon = True
            end.start()

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def wait_until_made(self, timeout_s: float) -> None:
        """Wait until all ranks are built. Raises the error of a rank that could not be built,
        TimeoutError, and EngineLostError as soon as a rank is gone: the other ranks would wait for
        it until their own timeout."""
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
        """Begin a call of a method of the first rank's object."""
        return RayPending(self.name, self._line.call(method, *args))

    def kill(self) -> None:
        """Kill its processes at once."""
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._line.end("it was killed")


def why_lost(error: RayError) -> str:
    """The cause of a lost process, without Ray's ids."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not _IDS.match(line))
    return text.partition(_GUESSES)[0].rstrip()
