"""A run over the nodes of a cluster, each with room for one engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from hone.config.load import dump_config
from hone.config.tree import RLConfig
from hone.distributed.worker_rank import WorkerSpec
from hone.errors import UserError
from hone.observe.resumed_run import newest_step
from tests.tiny_runs import lines, tiny_config, write_inputs

pytest.importorskip("ray")

from hone.distributed import ray as on_ray
from hone.distributed import worker_rank


def test_gloo_takes_the_interface_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the host's name, which may be loopback."""

    def of(family: int, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    there = {
        "lo": [of(socket.AF_INET, "127.0.0.1")],
        "eth1": [of(socket.AF_PACKET, "42:b5:ca:e0:e4:78"), of(socket.AF_INET, "10.9.0.1")],
    }
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    for own, found in (("10.9.0.1", {"GLOO_SOCKET_IFNAME": "eth1"}), ("10.9.0.2", {})):
        monkeypatch.setattr(on_ray.ray.util, "get_node_ip_address", lambda own=own: own)
        assert on_ray.network_environment() == found
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # of somebody who knows better
    monkeypatch.setattr(on_ray.ray.util, "get_node_ip_address", lambda: "10.9.0.1")
    assert on_ray.network_environment() == {}


def test_a_ray_of_this_host_is_on_loopback_and_has_a_token_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the environment says, and though Ray was imported before."""
    from ray import _raylet as raylet
    from ray._private import services

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    on_ray._read_settings()
    tokens: list[str] = []
    for _ in range(2):
        with on_ray._private():
            assert services.get_node_ip_address() == "127.0.0.1"
            assert raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN
            tokens.append(os.environ["RAY_AUTH_TOKEN"])
            used = raylet.AuthenticationTokenLoader.instance().get_token_for_http_header()
            assert tokens[-1] in f"{used}"
        on_ray._read_settings()
        assert raylet.get_authentication_mode() == raylet.AuthenticationMode.DISABLED
        assert "RAY_AUTH_TOKEN" not in os.environ
    assert len({*tokens}) == 2
    assert min(map(len, tokens)) == 64


def test_no_other_user_enters_the_folder_of_a_ray_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sockets are there, and Ray lets everybody exchange what lies below."""
    started = Mock()
    monkeypatch.setattr(on_ray.ray, "init", started)
    place = tmp_path / "made"
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    for _ in range(2):
        on_ray._start(2, 0)
    folders = [Path(call.kwargs["_temp_dir"]).parent for call in started.call_args_list]
    assert [folder.parent for folder in folders] == [place] * 2
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 2
    assert len({*folders}) == 2


def refuse(role: str, cfg: RLConfig, name: str) -> None:
    raise FileNotFoundError(f"no tokenizer found at model.path={cfg.model.path!r}")


def test_what_an_engine_lacks_is_told_with_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trainer reports it, from a host where the file may be."""
    nodes = {"num_engines": 1, "num_nodes": 2, "address": "10.9.0.1:6379"}
    cfg = tiny_config(tmp_path, tmp_path / "run", cluster=nodes)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(on_ray, "network_environment", dict)
    monkeypatch.setattr(socket, "gethostname", lambda: "west")
    rank = on_ray.EngineRank(WorkerSpec("engine 0", "engine", 1, "builds:it", cfg), 0)
    monkeypatch.setattr(worker_rank, "resolve_name", lambda name: refuse)
    with pytest.raises(UserError, match=r"^engine 0 on west: no tokenizer found at model\.path="):
        rank.start(("10.9.0.1", 1), "a key")


@pytest.mark.slow
def test_two_nodes_with_an_engine_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of one machine share its address and its files, so that placement, joining and weights
    are shown here, and networks are not."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from ray.cluster_utils import Cluster

    write_inputs(tmp_path, num_kv_heads=2)
    steps = 2
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cfg = tiny_config(
            tmp_path,
            tmp_path / "run",
            run={"steps": steps},
            cluster={"num_engines": 2, "num_nodes": 2, "address": cluster.address},
            algorithm={"correction": {"kind": "tis"}},
        )
        (tmp_path / "recipe.yaml").write_text(dump_config(cfg))
        run = subprocess.run(
            [sys.executable, "-m", "hone", "rl", "recipe.yaml"],
            cwd=tmp_path,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    finally:
        cluster.shutdown()
    assert run.returncode == 0, run.stderr
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[0]["off_policy/parity/kl"] < 1e-6
    assert "is lost" not in run.stderr


def write_recipe(folder: Path, address: str, **sections: Any) -> None:
    """Of a run with two trainers and an engine, on three nodes of one device each."""
    nodes = {"num_trainers": 2, "num_engines": 1, "num_nodes": 3, "devices_per_node": 1}
    cfg = tiny_config(
        folder,
        folder / "run",
        cluster={**nodes, "address": address},
        algorithm={"correction": {"kind": "tis"}},
        **sections,
    )
    (folder / "recipe.yaml").write_text(dump_config(cfg))


@pytest.mark.slow
def test_one_command_starts_trainers_on_two_nodes_beside_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the three nodes has room for one process, so that none is given away twice."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from ray.cluster_utils import Cluster

    write_inputs(tmp_path, num_kv_heads=2)
    steps = 2
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        write_recipe(tmp_path, cluster.address, run={"steps": steps})
        run = subprocess.run(
            [sys.executable, "-m", "hone", "rl", "recipe.yaml"],
            cwd=tmp_path,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    finally:
        cluster.shutdown()
    assert run.returncode == 0, run.stdout + run.stderr
    assert "starting 1 trainers each on" in run.stderr
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[0]["off_policy/parity/kl"] < 1e-6


@pytest.mark.slow
def test_a_dead_node_of_trainers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    from ray.cluster_utils import Cluster

    write_inputs(tmp_path, num_kv_heads=2)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        write_recipe(tmp_path, cluster.address, run={"steps": 5000})
        run = subprocess.Popen(
            [sys.executable, "-m", "hone", "rl", "recipe.yaml"],
            cwd=tmp_path,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        rows, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 600
        while not rows.exists():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for node in nodes:  # one of them at least has a trainer
            cluster.remove_node(node, allow_graceful=False)
        told, _ = run.communicate(timeout=600)
    finally:
        cluster.shutdown()
    assert run.returncode == 1, told
    assert "is lost: " in told, told
    assert "error: node " in told, told
    assert "with ranks " in told, told


@pytest.mark.slow
def test_a_run_goes_on_where_a_node_is_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers on two of three nodes, of which one dies; what its node has left behind on this
    machine is no part of the cluster any more."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    import ray
    from ray.cluster_utils import Cluster

    write_inputs(tmp_path, num_kv_heads=2)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(3))}
        write_recipe(tmp_path, cluster.address, run={"steps": 400}, checkpoint={"every_n_steps": 1})
        log = tmp_path / "log"
        with log.open("w") as written:
            run = subprocess.Popen(
                [sys.executable, "-m", "hone", "rl", "recipe.yaml"],
                cwd=tmp_path,
                env=dict(os.environ),
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        rows, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 600

        def await_(what: Callable[[], bool]) -> None:
            while not what():
                assert run.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.3)

        def is_saved() -> bool:
            return rows.exists() and (newest_step(tmp_path / "run") or 0) >= 1

        await_(is_saved)
        ray.init(cluster.address, namespace="watching")
        (trainers,) = (
            table["bundles_to_node_id"]
            for table in ray.util.placement_group_table().values()
            if table["strategy"] == "STRICT_SPREAD" and table["state"] == "CREATED"
        )
        ray.shutdown()
        dead = next(nodes[name] for name in reversed([*trainers.values()]) if name in nodes)
        cluster.remove_node(dead, allow_graceful=False)
        await_(lambda: "the run goes on from step" in log.read_text())
        resumed = int(re.findall(r"the run goes on from step (\d+)", log.read_text())[-1])
        await_(lambda: lines(rows)[-1]["step"] >= resumed + 2)
        run.send_signal(signal.SIGTERM)
        code = run.wait(timeout=600)
    finally:
        cluster.shutdown()
    told = log.read_text()
    assert "is lost: " in told, told
    assert code == 128 + signal.SIGTERM, told
    steps = [row["step"] for row in lines(rows)]
    assert steps == list(range(1, len(steps) + 1))
