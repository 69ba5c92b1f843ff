"""Runs over hosts that share neither network nor files, unless a test says so (`hosts`)."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hone.config.load import dump_config
from tests.cluster.hosts import (
    HERE,
    PYTHON,
    SCRATCH,
    Command,
    Host,
    give_second_interface,
    hosts,
)
from tests.tiny_runs import lines, tiny_config, write_inputs

TIMEOUT_S = 30
"""`trainer.parallel.timeout_s`: less than torch or gloo wait for anything by themselves."""
START_S = 800.0
"""Ends a run that hangs. Two hosts need a minute, most of it for the import of torch."""


@contextmanager
def two_hosts(
    folder: Path, *, shared: bool = False, lacking: tuple[str, str] | None = None, **sections: Any
) -> Generator[tuple[Host, Host]]:
    """`north` and `south` with the inputs of a tiny run and its recipe, in one folder or in a copy
    each, of which one is `lacking` something: which host, and what."""
    inputs = folder / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    run = {"steps": 2, "dir": HERE / "run"} | sections.pop("run", {})
    trainer = {"parallel": {"timeout_s": TIMEOUT_S}}
    cfg = tiny_config(HERE, HERE / "run", run=run, trainer=trainer, **sections)
    (inputs / "recipe.yaml").write_text(dump_config(cfg))
    for name in () if shared else ("north", "south"):
        shutil.copytree(inputs, folder / name)
    if lacking is not None:
        name, what = lacking
        lost = folder / name / what
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    with hosts(folder, "north", "south", shared=inputs if shared else None) as (north, south):
        yield north, south


def start(hosts: Sequence[Host], *words: str, **environment: str) -> list[Command]:
    """One process on each host, rank 0 on the first."""
    return [
        host.start(
            *(PYTHON, "-m", "torch.distributed.run", "--nnodes", f"{len(hosts)}"),
            *("--nproc-per-node", "1", "--node-rank", f"{rank}"),
            *("--master-addr", hosts[0].address, "--master-port", "29500"),
            *("-m", "hone", "rl", "recipe.yaml", *words),
            **environment,
        )
        for rank, host in enumerate(hosts)
    ]


def errors(command: Command) -> list[str]:
    """What hone has said of an error."""
    return [line for line in command.told.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_two_hosts_train_what_one_does(tmp_path: Path) -> None:
    """Started as the documentation has it, with the folder of the run on all hosts; beside it two
    processes of one host."""
    with two_hosts(tmp_path, shared=True) as (north, south):
        words = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
        words += ("--rdzv-endpoint", f"{north.name}:29500", "--rdzv-id", "any")
        torchrun = (PYTHON, "-m", "torch.distributed.run", *words, "-m", "hone", "rl")
        runs = [host.start(*torchrun, "recipe.yaml") for host in (north, south)]
        for run in runs:
            assert run.wait(START_S) == 0, run.told
        assert north.running == south.running == []
        north.run(PYTHON, "-m", "hone", "rl", "recipe.yaml", "--run.dir", "one", "--nproc", "2")
        found = [
            load_file(north.folder / f"{run}/model/model.safetensors") for run in ("run", "one")
        ]
        rows = lines(north.folder / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.slow
@pytest.mark.parametrize("lacks", [0, 1], ids=["first", "other"])
@pytest.mark.parametrize("what", ["model", "train.jsonl", "rewards.py"])
def test_a_file_that_one_host_lacks_is_named_with_the_host(
    tmp_path: Path, what: str, lacks: int
) -> None:
    """And all end, the other one with a word on where the reason is."""
    name = ("north", "south")[lacks]
    with two_hosts(tmp_path, lacking=(name, what)) as both:
        runs = start(both)
        for run in runs:
            assert run.wait(START_S) == 1, run.told
        assert [host.running for host in both] == [[], []]
        (reason,) = errors(runs[lacks])
        assert reason.startswith(f"error: rank {lacks} on {name}: "), reason
        assert f"'{HERE / what}'" in reason, reason
        where = f"rank {lacks} has ended the run, and says why on its host, {name}"
        assert errors(runs[1 - lacks]) == [f"error: {where}"]


@pytest.mark.slow
def test_a_folder_of_the_run_that_hosts_do_not_share_is_refused(tmp_path: Path) -> None:
    """Before anything is loaded; and nothing of it is left."""
    with two_hosts(tmp_path) as (north, south):
        runs = start((north, south))
        for run in runs:
            assert run.wait(START_S) == 1, run.told
        (reason,) = [line for run in runs for line in errors(run) if "says why" not in line]
        told = f"run.dir '{HERE / 'run'}' of north is another folder, or none, on south"
        assert told in reason
        assert not (north.folder / "run").exists()
        assert not (south.folder / "run").exists()


@pytest.mark.slow
def test_a_checkpoint_that_lies_scattered_over_hosts(tmp_path: Path) -> None:
    """Is refused with the host that lacks its parts, and goes on once they are brought together."""
    with two_hosts(tmp_path, shared=True) as both:
        for run in start(both):
            assert run.wait(START_S) == 0, run.told
    whole = tmp_path / "inputs/run"
    parts = [path.relative_to(whole) for path in whole.rglob("*rank1*")]
    assert parts
    scattered = tmp_path / "scattered"
    for name in ("north", "south"):
        shutil.copytree(tmp_path / "inputs", scattered / name)
    for part in parts:
        (scattered / "north/run" / part).unlink()
    longer = ("--run.steps", "3")
    with hosts(scattered, "north", "south") as both:
        runs = start(both, *longer)
        for run in runs:
            assert run.wait(START_S) == 1, run.told
        (reason,) = [line for run in runs for line in errors(run) if "says why" not in line]
        assert "of north is another folder, or none, on south" in reason
        assert "copy into it what an earlier launch has left on each" in reason
        assert (both[0].folder / "run/checkpoints").is_dir()
    together = tmp_path / "together"
    together.mkdir()
    with hosts(together, "north", "south", shared=tmp_path / "inputs") as both:
        runs = start(both, *longer)
        for run in runs:
            assert run.wait(START_S) == 0, run.told
        assert "going on after step 2" in runs[0].told


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 1], ids=["first", "other"])
def test_a_host_that_is_cut_off_is_named_on_both_sides(tmp_path: Path, cut: int) -> None:
    """Nothing tells either of them: packets are lost. Both end, so that no GPU stays taken."""
    with two_hosts(tmp_path, shared=True, run={"steps": 5000}) as both:
        runs = start(both)
        rows = both[0].folder / "run/metrics.jsonl"
        runs[0].await_(lambda: len(lines(rows)) > 2, START_S)
        both[cut].cut_off()
        for run in runs:
            assert run.wait(2 * TIMEOUT_S + 30) == 1, run.told
        (with_store,), (without,) = map(errors, runs)
        assert re.match(r"error: rank 1 did not come: pid \d+ on south is in ", with_store)
        assert "has been silent for" in with_store
        assert without.startswith(f"error: south, with rank 1, is cut off: {both[0].address}:29500")
        assert f"has not answered for {TIMEOUT_S} s (trainer.parallel.timeout_s)" in without
        assert [host.running for host in both] == [[], []]


@pytest.mark.slow
def test_an_interface_over_which_nothing_comes_is_told_and_can_be_changed(tmp_path: Path) -> None:
    """The name of each host stands for its second one, as on many clusters: what gloo announces is
    of no use to the other host."""
    set_right = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    with two_hosts(tmp_path, shared=True) as both:
        for index, host in enumerate(both, start=1):
            give_second_interface(host, f"10.88.{index}.1")
        runs = start(both)
        for run in runs:
            assert run.wait(START_S) == 1, run.told
        (reason,) = [line for run in runs for line in errors(run) if "says why" not in line]
        assert re.match(r"error: rank (0 on north|1 on south) could not connect to the", reason)
        assert set_right.keys() <= set(re.findall(r"\w+", reason)), reason
        runs = start(both, **set_right)
        for run in runs:
            assert run.wait(START_S) == 0, run.told


@pytest.mark.slow
def test_ray_over_hosts_ends_well_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainers and an engine, a device each. Then a host is without the weights, which
    the others have: it is named, whoever is there and wherever its error is told."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_inputs(inputs, num_kv_heads=2)
    with hosts(tmp_path, "north", "south", "west", shared=inputs) as cluster:
        first = cluster[0]
        ray, port = Path(PYTHON).parent / "ray", 6379
        for host in cluster:
            host.run("cp", "-r", HERE / "model", SCRATCH)
            words = ["--head", "--port", f"{port}", "--temp-dir", f"{SCRATCH / 'ray'}"]
            words += ["--include-dashboard", "false"]
            if host is not first:
                words = ["--address", f"{first.address}:{port}"]
            words += ["--node-ip-address", host.address, "--num-cpus", "1"]
            host.run(ray, "start", *words, timeout_s=START_S)
        of_ray = [set(host.running) for host in cluster]
        nodes = {"num_trainers": 2, "num_engines": 1, "num_nodes": 3, "devices_per_node": 1}
        cfg = tiny_config(
            HERE,
            HERE / "run",
            run={"steps": 2},
            model={"path": f"{SCRATCH / 'model'}"},
            cluster={**nodes, "address": f"{first.address}:{port}"},
            algorithm={"correction": {"kind": "tis"}},
        )
        (inputs / "recipe.yaml").write_text(dump_config(cfg))
        run = first.start(PYTHON, "-m", "hone", "rl", "recipe.yaml")
        assert run.wait(3 * START_S) == 0, run.told
        assert [row["step"] for row in lines(inputs / "run/metrics.jsonl")] == [1, 2]
        assert_alone(cluster, of_ray)

        cluster[-1].run("mv", SCRATCH / "model", SCRATCH / "away")
        run = first.start(PYTHON, "-m", "hone", "rl", "recipe.yaml", "--run.dir", "other")
        assert run.wait(3 * START_S) == 1, run.told
        assert re.search(rf"error: .* on west: .*'{SCRATCH / 'model'}'", run.told), run.told
        assert_alone(cluster, of_ray)


def assert_alone(cluster: Sequence[Host], of_ray: Sequence[set[str]]) -> None:
    """Nothing but Ray runs there. Its workers that wait for work are its own."""
    until = time.monotonic() + 300
    left = [["?"]]
    while any(left) and time.monotonic() < until:
        time.sleep(0.5)
        left = [
            [line for line in host.running if line not in before and "ray::IDLE" not in line]
            for host, before in zip(cluster, of_ray, strict=True)
        ]
    assert not any(left), left


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model.safetensors", "train.jsonl"])
def test_other_weights_or_data_on_a_host_are_no_run(tmp_path: Path, what: str) -> None:
    """Of the same size: each rank would read its shards, or its prompts, of another model."""
    with two_hosts(tmp_path) as both:
        (file,) = both[1].folder.rglob(what)
        content = bytearray(file.read_bytes())
        content[-20:-10] = content[-20:-10].swapcase()[::-1]
        file.write_bytes(content)
        runs = start(both)
        for run in runs:
            assert run.wait(START_S) == 1, run.told
        (reason,) = [line for run in runs for line in errors(run) if "says why" not in line]
        assert f"is not the same on south as on north: {what}. Each host" in reason
