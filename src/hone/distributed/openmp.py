"""OpenMP settings for a run on a CPU.

OpenMP's threads wait for each other thousands of times in a step, by default by spinning. If other
programs are at work, a thread that has lost its core delays all others, which spin on the cores
that it needs: a step then takes several times as long. Threads that sleep while they wait cost
little on an idle machine. With them a small model gains nothing from a second thread (0.57 against
0.58 s a step on two cores). Two threads with a short spin take 0.44 s on an idle machine, but 0.93
s next to one busy program, where one thread still takes 0.58 s (benchmarks/README.md).

OpenMP reads its settings when torch is loaded, so they are set before. Processes that are started
later inherit them.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import psutil

from hone.families.shape import ModelShape
from hone.hardware import max_gpus, num_usable_cores

__all__ = ["num_threads_for", "set_up_openmp"]

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables that set how threads wait. The first is read by GNU's libgomp (torch for Linux), LLVM's
libomp (torch for macOS) and Intel's libiomp5."""
_WEIGHTS_PER_THREAD = 1 << 18
"""Weights per decoder layer that justify one thread. Measured on two cores: a layer of 0.2 M
weights trains as fast with one thread as with two, one of 0.8 M a fifth slower."""


def num_threads_for(shape: ModelShape, num_cores: int) -> int:
    """Number of useful threads for a model of this shape, at most `num_cores`."""
    return max(
        1, min(num_cores, shape.active_body_params // shape.num_layers // _WEIGHTS_PER_THREAD)
    )


def set_up_openmp(
    device: str,
    shape: ModelShape | None,
    *,
    num_processes: int = 1,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Set how OpenMP's threads wait, and how many there are, for a run on `device` (`auto`, `cpu`
    or `cuda`) in `num_processes` processes of this host.

    Variables that the user has set are kept, and a run on a GPU is left alone. So is the number of
    threads for a model of unknown shape (None) or one that can use all cores.
    """
    has_gpu = max_gpus(environment.get("CUDA_VISIBLE_DEVICES")) != 0
    if device == "cuda" or (device == "auto" and has_gpu):
        return
    if not any(name in environment for name in _WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    if "OMP_NUM_THREADS" in environment or shape is None:
        return
    usable = num_usable_cores()
    num_threads = num_threads_for(shape, max(usable // num_processes, 1))
    if num_threads < usable:
        # As torch does by default: one thread per physical core.
        num_cores = psutil.cpu_count(logical=False) or usable
        environment["OMP_NUM_THREADS"] = str(min(num_threads, num_cores))
