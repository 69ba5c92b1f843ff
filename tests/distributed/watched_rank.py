"""One of several processes that work in phases as a run does, without a model; rank 1 falls ill.

`python -m tests.distributed.watched_rank PHASE FAULT TIMEOUT_S`, as `hone.distributed.spawn` starts
it. The fault comes in step 2.
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

from hone.cli.main import main
from hone.config.errors import UserError
from hone.config.parallel import ParallelConfig
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.distributed.watch import Watch

PHASES = ("generate", "score", "train", "sync", "checkpoint")


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
            time.sleep(1.5)
        case _:
            raise AssertionError(fault)


def work(phase: str, mesh: Mesh) -> None:
    """What processes do together in a phase: messages, or many collectives, or one."""
    if phase == "train":
        for _ in range(20):
            dist.all_reduce(torch.ones(1000), group=mesh.data.group)
    else:
        mesh.gather(phase)


def run(argv: Sequence[str]) -> int:
    ill_phase, fault, timeout_s = argv[:3]  # the fourth marks whose processes these are
    own, parallel = processes(), ParallelConfig(timeout_s=float(timeout_s))
    if fault == "both wrong":
        raise UserError("the planted mistake")
    if ill_phase == "start" and own.rank == 1:
        fall_ill(fault)
    with Watch(own, parallel.timeout_s) as watch:
        watch.join()
        mesh = Mesh.join(parallel, own, torch.device("cpu"))
        assert mesh.control is not None
        assert mesh.data.group is not None
        watch.follow([mesh.control, mesh.data.group])
        for step in range(1, 4):
            watch.begin_step(step)
            for phase in PHASES:
                watch.enter(phase)
                if (step, phase, own.rank) == (2, ill_phase, 1):
                    fall_ill(fault)
                work(phase, mesh)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    module = ModuleType("hone.cli.rl")
    module.run = run  # type: ignore[attr-defined]
    sys.modules["hone.cli.rl"] = module
    sys.exit(main(["rl", *sys.argv[1:]]))
