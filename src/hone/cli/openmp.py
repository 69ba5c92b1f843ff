"""OpenMP's settings for a run on a CPU.

Its threads wait for each other thousands of times in a step, by default by spinning. Where other
programs are at work, one that has lost its core holds up all others, which burn the time that it
needs: a step then takes several times as long. Threads that sleep while they wait cost little on an
idle machine, and a small model gains nothing from a second thread.

OpenMP reads its settings when torch is loaded, so they are made before. Processes that are started
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
"""Variables that say how threads wait. The first is everybody's: GNU's libgomp (torch for Linux),
LLVM's libomp (torch for macOS) and Intel's libiomp5 obey it."""
_WEIGHTS_PER_THREAD = 1 << 18
"""Weights of a decoder layer that are worth a thread. Measured on two cores: 0.2 M in a layer train
as fast with one thread as with two, 0.8 M a fifth slower."""


def num_threads_for(shape: ModelShape, num_cores: int) -> int:
    """Threads that are worth starting for a model of this shape, at most `num_cores`."""
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
    or `cuda`) in `num_processes` processes of this host. What the user has set stays, and a run
    on a GPU is left alone, as is the number of threads for a model of unknown shape (None) or one
    that can use all cores.
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
        # Torch would start one thread a core, not two where a core has two.
        num_cores = psutil.cpu_count(logical=False) or usable
        environment["OMP_NUM_THREADS"] = str(min(num_threads, num_cores))
