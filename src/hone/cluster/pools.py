"""Engines and references on devices of their own: a Ray with room for them, and its actors."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hone.cluster.actors import (
    EngineRank,
    RayWorker,
    ReferenceRank,
    Role,
    check_own_node,
    network_environment,
    own_node,
)
from hone.cluster.address import no_cluster, unreachable
from hone.config.cluster import ClusterConfig
from hone.config.errors import UserError
from hone.config.tree import RLConfig
from hone.distributed.processes import processes
from hone.loops.remote import Pools
from hone.loops.workers import build_engine_thread
from hone.rollout.engine_pool import EnginePool
from hone.rollout.scorer_pool import ScorerPool
from hone.types import EngineLostError

__all__ = ["ray_pools"]

_log = logging.getLogger(__name__)

_PLACING_S = 60.0
"""How long devices that others hold are waited for."""
_STARTING_S = 900.0
"""How long an engine may take to read its model's configuration and to record its graphs, and a
reference to load its weights."""
_RAY_GONE_S = 10
"""How long processes of a Ray of this host look for its head, which never comes again."""
_PER_CORE = 4
"""Processes of a run on CPUs that may share a core: with many more none gets on."""
_CALLS = 8
"""Calls of one engine that run side by side: the longest waits for weights."""


@contextmanager
def ray_pools(cfg: RLConfig) -> Generator[Pools]:
    """Start the engines and references of `cluster` on Ray; they end with the context.

    Raises UserError where there is no such cluster, or it has too few devices.
    """
    uses_gpus, cluster = cfg.run.device != "cpu" and torch.cuda.is_available(), cfg.cluster
    with ExitStack() as stack:
        stack.enter_context(_joined(cfg, uses_gpus=uses_gpus))
        if cluster.address is not None:
            stack.enter_context(_environment(network_environment()))
        placed = _place(cfg, uses_gpus=uses_gpus)
        stack.callback(remove_placement_group, placed)
        cfg = _anywhere(cfg)

        def start(role: Role, index: int) -> RayWorker:
            return _start(cfg, placed, role, index, uses_gpus=uses_gpus)

        start_s = monotonic()
        roles = cluster.devices(cfg.engine.tensor_parallel_size)
        apart = [role.words for role in roles if role.role != "trainer"]
        _log.info("starting on Ray: %s", ", ".join(apart))
        engines = [start("engine", index) for index in range(cluster.num_engines)]
        references = [start("reference", index) for index in range(cluster.num_references)]
        # Before the other trainers miss this one: it knows what is slow, they do not.
        starting_s = min(_STARTING_S, 0.9 * cfg.trainer.parallel.timeout_s)
        _await([*engines, *references], starting_s)
        _log.info("they are there after %.1f s", monotonic() - start_s)
        supervision: dict[str, Any] = {
            "timeout_s": cluster.engine_timeout_s,
            "max_restarts": cluster.max_engine_restarts,
            "start_timeout_s": starting_s,
        }
        if cfg.has_engine_thread:
            thread = build_engine_thread(cfg, name="engine 0")
            engine_pool = EnginePool([thread], restart=None, **supervision)
        else:
            engine_pool = EnginePool(engines, restart=partial(start, "engine"), **supervision)
        stack.callback(engine_pool.close)
        scorer_pool = None
        if references:
            scorer_pool = ScorerPool(references, restart=partial(start, "reference"), **supervision)
            stack.callback(scorer_pool.close)
        is_local = cluster.address is None
        host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        yield Pools(engine_pool, host, scorer_pool)


def _anywhere(cfg: RLConfig) -> RLConfig:
    """The same in processes that run in other folders."""
    if not Path(cfg.model.path).exists():
        return cfg
    model = cfg.model.model_copy(update={"path": str(Path(cfg.model.path).resolve())})
    return cfg.model_copy(update={"model": model})


@contextmanager
def _joined(cfg: RLConfig, *, uses_gpus: bool) -> Generator[None]:
    """Be the driver of a Ray: of `cluster.address`, or of one of this host alone."""
    address = cfg.cluster.address
    try:  # an interrupt may find it half started
        if address is None:
            num_cpus, num_gpus, environment = _own_devices(cfg, uses_gpus=uses_gpus)
            with _environment(environment):
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        else:
            _join(address)
            _check_nodes(cfg.cluster, "GPU" if uses_gpus else "CPU")
        # Ray takes back what nobody refers to any more.
        holder = _reserve_own() if address is not None and uses_gpus else None
        yield
        del holder
    finally:
        # Where the node is dead Ray ends this process in there, before anybody has said why.
        if not ray.is_initialized() or own_node()["Alive"]:
            with _undisturbed():
                ray.shutdown()


@contextmanager
def _undisturbed() -> Generator[None]:
    """Ctrl-C does nothing inside: after half a shutdown Ray ends this process, with a code of its
    own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _join(address: str) -> None:
    if (reason := unreachable(address)) is not None:
        raise UserError(reason)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RayError, ValueError) as error:
        raise UserError(no_cluster(address, f"{error}")) from error


def _own_devices(cfg: RLConfig, *, uses_gpus: bool) -> tuple[int, int, dict[str, str]]:
    """The CPUs and GPUs that a Ray of this host may give away, all but the trainers' devices, and
    the environment that it must be started in: its processes inherit that."""
    roles = cfg.cluster.devices(cfg.engine.tensor_parallel_size)
    total = sum(role.number for role in roles)
    words = " + ".join(role.words for role in roles)
    needed, num_cores = total - cfg.cluster.num_trainers, os.cpu_count() or 1
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
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """What processes inherit that are started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _visible_gpus() -> list[str]:
    """The GPUs of this process as CUDA names them, in the order of their indices."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


def _check_nodes(cluster: ClusterConfig, kind: str) -> None:
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
    own, context = processes(), ray.get_runtime_context()
    node = next(n for n in ray.nodes() if n["NodeID"] == context.get_node_id())
    if not node["Resources"].get("GPU"):
        return None
    mine = set(_visible_gpus()[: own.local_world_size])
    holder: Any = (
        ray.remote(num_cpus=0)(_Holder)
        .options(
            num_gpus=own.local_world_size,
            scheduling_strategy=NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
        )
        .remote()
    )
    try:
        held = set(ray.get(holder.gpus.remote(), timeout=_PLACING_S))
    except RayError as error:
        raise UserError(
            f"this host is part of the Ray cluster, which has not given its {own.local_world_size} "
            f"GPUs for training within {_PLACING_S:.0f} s. End what holds them: {error}"
        ) from error
    if held != mine:
        raise UserError(
            f"the trainers of this host use GPUs {sorted(mine)}, and its Ray gives them "
            f"{sorted(held)}: it holds others of them. End what does, or start Ray here with the "
            "engines' GPUs alone (CUDA_VISIBLE_DEVICES)."
        )
    return holder


def _place(cfg: RLConfig, *, uses_gpus: bool) -> PlacementGroup:
    """Devices for every engine, the ranks of one on one host, and then for every reference."""
    cluster, size = cfg.cluster, cfg.engine.tensor_parallel_size
    kind = "GPU" if uses_gpus else "CPU"
    sizes = [size] * cluster.num_engines + [1] * cluster.num_references
    placed = placement_group([{"CPU": n} | {kind: n} for n in map(float, sizes)], strategy="PACK")
    if not placed.wait(_PLACING_S):
        remove_placement_group(placed)
        total = int(ray.cluster_resources().get(kind, 0))
        free = int(ray.available_resources().get(kind, 0))
        words = [role.words for role in cluster.devices(size) if role.role != "trainer"]
        raise UserError(
            f"{' + '.join(words)} need {sum(sizes)} {kind}s, an engine's on one host; the cluster "
            f"has {total}, of which {free} are free. Use fewer, or end what holds them."
        )
    return placed


def _start(
    cfg: RLConfig, placed: PlacementGroup, role: Role, index: int, *, uses_gpus: bool
) -> RayWorker:
    """Begin to make a worker on its devices."""
    check_own_node()
    is_engine = role == "engine"
    actor = ray.remote(EngineRank if role == "engine" else ReferenceRank).options(
        num_cpus=1,
        num_gpus=1 if uses_gpus else 0,
        max_concurrency=_CALLS if is_engine else 1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placed,
            placement_group_bundle_index=index if is_engine else cfg.cluster.num_engines + index,
        ),
    )
    name, size = f"{role} {index}", cfg.engine.tensor_parallel_size if is_engine else 1
    # Ray makes these methods where no checker sees them.
    ranks: list[Any] = [actor.remote(cfg, role, name, rank, size) for rank in range(size)]
    return RayWorker(name, ranks)


def _await(handles: list[RayWorker], timeout_s: float) -> None:
    """Wait until all are made, or gone: these are started anew, as any that are lost later.

    Raises UserError for what was refused, with its own words, and TimeoutError.
    """
    deadline = monotonic() + timeout_s
    for handle in handles:
        with suppress(EngineLostError):
            handle.wait_until_made(max(deadline - monotonic(), 0.0))
