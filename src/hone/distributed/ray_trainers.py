"""Training processes on several nodes of a Ray cluster: an actor on each node runs torchrun.

The actors reserve the devices in Ray. torchrun, its rendezvous and the watch between processes are
those of a run that is started by hand.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hone.config.tree import RLConfig
from hone.distributed.listening import listen
from hone.distributed.processes import DEVICES_HELD, HONE_KEY
from hone.distributed.ray import PLACING_S, check_nodes, join, network_environment, why_lost
from hone.distributed.settings import ClusterConfig
from hone.distributed.signals import handling
from hone.errors import UserError

__all__ = ["run_on_nodes"]

_log = logging.getLogger(__name__)

_POLL_S = 1.0
_GRACE_S = 45.0
"""Time that the other nodes have to end after one has failed: torchrun waits for 30 s."""


class TrainerNode:
    """Actor that runs the training processes of one node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Address and free port of the rendezvous, if this is the first node."""
        host = ray.util.get_node_ip_address()
        with listen(host) as server:
            return host, server.getsockname()[1]

    def run(self, words: Sequence[str], folder: str, key: str) -> int:
        """Run torchrun with arguments `words` in `folder`, with the `key` of the run. Returns its
        exit code."""
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{socket.gethostname()} has no folder {folder!r}, in which the run was started. "
                "All nodes must see it under this path."
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=folder,
            env=os.environ | network_environment() | {DEVICES_HELD: "1", HONE_KEY: key},
        )
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Pass a signal on to torchrun."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def run_on_nodes(
    cfg: RLConfig, arguments: Sequence[str], newest_step: Callable[[], int | None]
) -> int:
    """Run `hone rl` with `arguments` in `cluster.num_trainers` processes,
    `cluster.devices_per_node` on each node. Returns the exit code.

    A lost node is named. If other nodes can replace it, the run is resumed there from the last
    checkpoint, whose step `newest_step` returns, but only once from the same step; otherwise the
    exit code is 1. Raises UserError if the cluster has not enough nodes with enough free devices.
    """
    cluster = cfg.cluster
    assert cluster.address is not None
    join(cluster.address, log_to_driver=True)
    try:
        has_gpus = "GPU" in ray.cluster_resources()
        uses_gpus = cfg.run.device == "cuda" or (cfg.run.device == "auto" and has_gpus)
        kind = "GPU" if uses_gpus else "CPU"
        placed, resumed_from = _reserve(cluster, kind), None
        while True:
            try:
                nodes = _Nodes(cfg, placed, uses_gpus=uses_gpus)
                code = nodes.run(arguments)
            finally:
                remove_placement_group(placed)
            step = newest_step()
            has_more = step is not None and step != resumed_from and cfg.run.resume == "auto"
            if not nodes.may_go_on or not has_more:
                return code
            try:
                placed = _reserve(cluster, kind)
            except UserError as error:
                _log.error("error: the run cannot go on without the node that is lost: %s", error)
                return code
            resumed_from = step
            _log.warning("warning: the run goes on from step %d, on the available nodes", step)
    finally:
        ray.shutdown()


def _reserve(cluster: ClusterConfig, kind: str) -> PlacementGroup:
    """Reserve the trainers' nodes."""
    check_nodes(cluster, kind)
    return _place(cluster.num_trainer_nodes, cluster.devices_per_node or 1, kind)


def _place(num_nodes: int, each: int, kind: str) -> PlacementGroup:
    """Reserve `each` devices on each of `num_nodes` nodes. Raises UserError."""
    bundle = {"CPU": float(each), kind: float(each)}
    placed = placement_group([bundle] * num_nodes, strategy="STRICT_SPREAD")
    if not placed.wait(PLACING_S):
        free = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
        remove_placement_group(placed)
        raise UserError(
            f"the trainers need {num_nodes} nodes with {each} free {kind}s and CPUs each; the "
            f"cluster's nodes have {free} {kind}s in all. End what holds them, or use fewer."
        )
    return placed


class _Nodes:
    """The running trainer nodes."""

    def __init__(self, cfg: RLConfig, placed: PlacementGroup, *, uses_gpus: bool) -> None:
        self._num_nodes = cfg.cluster.num_trainer_nodes
        self._each = each = cfg.cluster.devices_per_node or 1
        self.may_go_on = False
        """Whether a node was lost and no signal has asked the run to end."""
        actor = ray.remote(TrainerNode)
        self._actors: list[Any] = [
            actor.options(
                num_cpus=each,
                num_gpus=each if uses_gpus else 0,
                max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placed, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(self._num_nodes)
        ]

    def run(self, arguments: Sequence[str]) -> int:
        """Run torchrun on all nodes. Signals are forwarded to them."""
        try:
            addresses = ray.get([actor.address.remote() for actor in self._actors])
        except RayError as error:
            message = "error: a node is lost before its trainers have started: %s"
            _log.error(message, why_lost(error))
            return 1
        hosts, (host, port) = [name for name, _ in addresses], addresses[0]
        _log.info("starting %d trainers each on %s", self._each, ", ".join(hosts))
        key = secrets.token_hex(32)
        runs = [
            actor.run.remote(self._words(index, host, port, arguments), os.getcwd(), key)
            for index, actor in enumerate(self._actors)
        ]
        came: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            came.append(number)

        with handling(forward, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            code = self._wait(runs, hosts, came)
        self.may_go_on = self.may_go_on and not came
        return 128 + came[0] if code and came else code

    def _words(self, index: int, host: str, port: int, arguments: Sequence[str]) -> list[str]:
        return [
            f"--nnodes={self._num_nodes}",
            f"--node-rank={index}",
            f"--nproc-per-node={self._each}",
            f"--master-addr={host}",
            f"--master-port={port}",
            "-m",
            "hone",
            "rl",
            *arguments,
        ]

    def _wait(self, runs: Sequence[Any], hosts: Sequence[str], came: Sequence[int]) -> int:
        """Wait until all nodes have ended or one has failed. Returns the first exit code that is
        not 0."""
        waiting = {run: node for node, run in enumerate(runs)}
        code, num_sent, until = 0, 0, float("inf")
        while waiting and time.monotonic() < until:
            ended, _ = ray.wait([*waiting], num_returns=1, timeout=_POLL_S)
            for number in came[num_sent:]:
                self._send_signal(number)
            num_sent = len(came)
            for run in ended:
                failed = self._code_of(run, waiting.pop(run), hosts)
                if failed and not code:
                    code, until = failed, time.monotonic() + _GRACE_S
                    self._send_signal(signal.SIGTERM)
        return code

    def _code_of(self, run: Any, node: int, hosts: Sequence[str]) -> int:
        try:
            return ray.get(run)
        except RayError as error:
            self.may_go_on = True
            first = node * self._each
            _log.error(
                "error: node %s, with ranks %d to %d, is lost: %s. The run is resumed from the "
                "last checkpoint if other nodes are available, else by the same command.",
                hosts[node],
                first,
                first + self._each - 1,
                why_lost(error).rstrip("."),
            )
            return 1

    def _send_signal(self, number: int) -> None:
        for actor in self._actors:
            actor.send_signal.remote(number)
