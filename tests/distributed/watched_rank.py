"""One of several processes that work in phases as a run does, without a model; rank 1 falls ill.

The fault comes in step 2. Until then nothing is late, however long a busy machine takes: the
deadline of the watch is long, and becomes short when the other process knows that rank 1 is ill.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist

from hone.cli import main as cli
from hone.distributed import watch as watching
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.distributed.settings import ParallelConfig
from hone.distributed.store import connect
from hone.distributed.watch import Watch, read_progress
from hone.errors import UserError

PHASES = ("generate", "score", "train", "sync", "checkpoint")
SHORT_S, LONG_S = 3.0, 60.0
"""Deadlines of the watch once rank 1 is ill, where it must strike, and before."""
NUM_LOOKS = 5
"""How often the watch looks while rank 1 is late."""


def fall_ill(fault: str) -> None:
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(600)
        case "user error":
            raise ValueError("the planted mistake")
        case "bug":
            raise RuntimeError("the planted bug")
        case "quit":
            os._exit(3)
        case "late":
            _let_rank_0_look()
        case _:
            raise AssertionError(fault)


def _let_rank_0_look() -> None:
    """Come only after the watch of rank 0 has looked several times who is behind."""
    store = connect(processes())
    while (first := read_progress(store, 0)) is None or not first.collectives:
        time.sleep(0.01)
    while (now := read_progress(store, 0)) is None or now.updates < first.updates + NUM_LOOKS:
        time.sleep(0.01)


def await_illness(phase: str, fault: str, watch: Watch) -> None:
    """Return once rank 1 has fallen ill in this phase, and has said so as far as it can."""
    store = connect(processes())
    while True:
        other = read_progress(store, 1)
        is_there = other is not None and (other.step, other.phase) == (2, phase)
        if is_there and (fault != "hang" or "in fall_ill" in other.where):
            break
        time.sleep(0.01)
    watch._timeout_s = SHORT_S


def work(phase: str, mesh: Mesh) -> None:
    """What processes do together in a phase: messages, or many collectives, or one."""
    if phase == "train":
        for _ in range(20):
            dist.all_reduce(torch.ones(1000), group=mesh.data.group)
    else:
        mesh.gather(phase)


def run(argv: Sequence[str]) -> int:
    ill_phase, fault = argv
    own = processes()
    if fault == "both wrong":
        raise UserError("the planted mistake")
    if ill_phase == "start" and own.rank == 1:
        fall_ill(fault)
    with Watch(own, SHORT_S) as watch:
        if ill_phase != "start":
            watch._timeout_s = LONG_S
        watch.join()
        mesh = JoinedMesh.join(ParallelConfig(timeout_s=LONG_S), own, torch.device("cpu"))
        assert mesh.control is not None
        assert mesh.data.group is not None
        watch.follow([mesh.control, mesh.data.group])
        for step in range(1, 4):
            watch.begin_step(step)
            for phase in PHASES:
                watch.enter(phase)
                if (step, phase) == (2, ill_phase):
                    if own.rank == 1:
                        fall_ill(fault)
                    elif fault in ("hang", "stop"):
                        await_illness(phase, fault, watch)
                work(phase, mesh)
        dist.destroy_process_group()
    return 0


def main(phase: str, fault: str) -> None:
    """As the program of a run: it ends with the exit code of the command line."""
    if fault in ("kill", "quit") and os.environ.get("HONE_LAUNCHER"):
        # The launcher knows how rank 1 ended; rank 0 waits for it to say so, however late it is.
        watching._ERROR_REPORT_TIMEOUT_S = LONG_S
    module = ModuleType("hone.cli.rl")
    module.run = run  # type: ignore[attr-defined]
    sys.modules["hone.cli.rl"] = module
    sys.exit(cli.main(["rl", phase, fault]))
