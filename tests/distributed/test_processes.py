"""What torchrun says about a process is read in one place, whole or not at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hone
from hone.distributed.processes import Processes, Rendezvous, processes, rendezvous
from hone.errors import UserError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def start(monkeypatch, *values):
    """Set the variables in the order of NAMES; None unsets one."""
    for name, value in zip(NAMES, values, strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_without_torchrun_there_is_one_process(monkeypatch):
    start(monkeypatch, None, None, None, None)
    assert processes() == Processes(rank=0, world_size=1, local_rank=0, local_world_size=1)


def test_every_number_comes_from_its_variable(monkeypatch):
    start(monkeypatch, "13", "16", "5", "8")
    assert processes() == Processes(rank=13, world_size=16, local_rank=5, local_world_size=8)


@pytest.mark.parametrize(
    ("values", "got"),
    [
        ((None, "2", None, None), r"RANK=\(unset\), WORLD_SIZE=2"),
        (("0", "2", None, None), r"LOCAL_RANK=\(unset\), LOCAL_WORLD_SIZE=\(unset\)"),
        (("2", "2", "0", "1"), "RANK=2, WORLD_SIZE=2"),
        (("-1", "2", "0", "1"), "RANK=-1"),
        (("0", "two", "0", "1"), "WORLD_SIZE=two"),
        (("0", "2", "1", "1"), "LOCAL_RANK=1, LOCAL_WORLD_SIZE=1"),
        (("0", "1", "0", "2"), "WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2"),
    ],
)
def test_R22_a_wrong_environment_is_told_with_its_values(values, got, monkeypatch):
    start(monkeypatch, *values)
    with pytest.raises(UserError, match=f"the environment has .*{got}.*torchrun"):
        processes()


def test_where_processes_meet(monkeypatch):
    for name, value in {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert rendezvous() == Rendezvous("node7", 29500, has_server=False, attempt=0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert rendezvous() == Rendezvous("node7", 29500, has_server=True, attempt=2)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_R22_no_place_to_meet_is_told(name, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv(name)
    with pytest.raises(UserError, match=f"{name}.* unset.*torchrun"):
        rendezvous()


def test_nobody_else_reads_the_environment_of_torchrun():
    reads = re.compile(r"environ\W+(get\W+)?(RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC_)|getenv")
    package = Path(hone.__file__).parent
    readers = [path.name for path in package.rglob("*.py") if reads.search(path.read_text())]
    readers.remove("python.py")  # of `hone import`, which reads how scripts spell it
    assert readers == ["processes.py"]
    tree = [path for path in package.rglob("*.py") if '"WORLD_SIZE"' in path.read_text()]
    # Read; set for trainers and for the ranks of an engine; kept from a server of SGLang.
    names = ["processes.py", "server.py", "spawn.py", "worker_rank.py"]
    assert sorted(path.name for path in tree) == names
