"""Common parts of the machine checks: findings, and readings, each taken once.

torch is loaded in worker processes only, since a driver may hang. A reading that cannot be taken
raises ReadingError.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal, TypeVar

from hone.hardware import Peaks, max_gpus
from hone.observe.disk import temporary_directory

__all__ = ["START_S", "Device", "Finding", "Level", "Machine", "ReadingError", "judge"]

R = TypeVar("R")
Level = Literal["ok", "slow", "wrong"]

START_S = 90.0
"""Time for a process to load torch and open its device; a cold disk takes most of a minute."""
LOAD_S = 4.0
"""Duration of the load: copies for one half, matrix products for the other."""
_SMI_S = 30.0
_FAULTS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Reasons for a low clock that are faults. Reaching the power limit under load is none."""


class ReadingError(Exception):
    """Raised when a value cannot be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report."""

    level: Level
    """`slow`: a run works, but slower or nearer to a limit than it need be."""
    measured: str
    expected: str
    remedy: str = ""


def judge(measured: str, expected: str, *problems: tuple[object, Level, str]) -> Finding:
    """Finding of the first problem (condition, level, remedy) whose condition holds, else ok."""
    for condition, level, remedy in problems:
        if condition:
            return Finding(level, measured, expected, remedy)
    return Finding("ok", measured, expected)


@dataclass(frozen=True, slots=True)
class DriverGPU:
    """A GPU as NVIDIA's driver reports it. Clocks are in MHz, 0 if not reported."""

    uuid: str
    name: str
    clock: float
    max_clock: float
    slowed_by: tuple[str, ...]
    has_memory_errors: bool
    """Whether there were uncorrectable errors since the driver was loaded."""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver. `cuda` is the newest version that it supports, as `12.8`."""

    version: str
    cuda: str
    gpus: tuple[DriverGPU, ...]


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch. `cuda` is the version it is built for (None: CPU only), `problem` its
    message if it sees no GPU."""

    version: str
    cuda: str | None
    num_gpus: int
    problem: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as torch sees it, before any computation."""

    name: str
    uuid: str
    free_share: float
    """Free share of its memory, 0 to 1."""


class Worker:
    """A process that calls functions one after the other, and can be killed. It ignores Ctrl-C,
    prints nothing, ends with its parent, and keeps its temporary files and caches in `folder`."""

    def __init__(self, folder: str) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _settle, (folder,))
        # The process inherits blocked signals. A Ctrl-C that comes meanwhile reaches this process
        # afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._pid = self._pool.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def call(self, function: Callable[[int], R], index: int) -> Future[R]:
        """Call a function with `index` in the process. Function and result are pickled."""
        return self._pool.submit(function, index)

    def kill(self) -> None:
        if self._pid.exception() is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid.result(), signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)


def _settle(folder: str) -> None:
    tempfile.tempdir = folder
    os.environ.update(TMPDIR=folder, TRITON_CACHE_DIR=folder)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Machine:
    """This host and the folder of its runs. Context manager that ends its workers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.max_gpus = max_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        """Number of GPUs that a run may use, before the driver is asked. None: unknown."""
        self._workers: dict[int, Worker] = {}
        self._folder = temporary_directory("hone-doctor-")

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_workers(list(self._workers))
        self._folder.cleanup()

    @property
    def folder(self) -> str:
        """Folder for temporary files, removed at the end of the context."""
        return self._folder.name

    def ask(
        self,
        indices: Sequence[int],
        function: Callable[[int], R],
        timeout_s: float,
        meanwhile: Callable[[], object] = bool,
    ) -> list[R]:
        """Call a module's function for each index (of a GPU) in workers, at the same time.

        Raises ReadingError if one fails or takes too long. All of these workers are then ended, and
        the next caller gets new ones.
        """
        for index in indices:
            if index not in self._workers:
                self._workers[index] = self._start_worker()
        calls = {index: self._workers[index].call(function, index) for index in indices}
        meanwhile()
        wait(calls.values(), timeout_s, return_when=FIRST_EXCEPTION)
        try:
            # A failed call may be the reason why others do not answer: its error comes first.
            for index, call in sorted(calls.items(), key=lambda item: not item[1].done()):
                _check_answer(call, index, timeout_s)
            return [call.result() for call in calls.values()]
        except ReadingError:
            self._end_workers(indices)
            raise

    def _start_worker(self) -> Worker:
        try:
            return Worker(self.folder)
        # Queues between processes need semaphores, which are files in /dev/shm.
        except OSError as error:
            raise ReadingError(f"no process can be started: {error} (is /dev/shm full?)") from None

    def _end_workers(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._workers.pop(index).kill()

    @cached_property
    def driver(self) -> Driver:
        return _read_driver()

    @cached_property
    def torch(self) -> TorchBuild:
        return self.ask([0], _look_at_torch, START_S)[0]

    @cached_property
    def devices(self) -> list[Device]:
        return self.ask(range(self.torch.num_gpus), _look_at_device, START_S)

    @cached_property
    def under_load(self) -> tuple[list[Peaks], tuple[DriverGPU, ...]]:
        """Rates of the GPUs while all are busy, and the driver's report meanwhile."""
        gpus: tuple[DriverGPU, ...] = ()

        def read() -> None:
            nonlocal gpus
            time.sleep(0.6 * LOAD_S)
            with suppress(ReadingError):  # the check of the driver reports it
                gpus = _read_driver().gpus

        return self.ask(range(len(self.devices)), _measure, START_S, meanwhile=read), gpus


def _check_answer(call: Future[Any], index: int, timeout_s: float) -> None:
    """Raise ReadingError if there is no answer, or an error instead."""
    if not call.done():
        raise ReadingError(f"process {index} gave no answer within {timeout_s:.0f} s")
    error = call.exception()
    if error is not None:
        said = f"{error}".strip().partition("\n")[0]
        raise ReadingError(f"process {index} ended with {type(error).__name__}: {said}")


def _read_driver() -> Driver:
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=_SMI_S, check=False
        )
        if done.returncode:
            raise ReadingError(f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())}")
        log = ET.fromstring(done.stdout)
    except FileNotFoundError:
        raise ReadingError("nvidia-smi is not installed") from None
    except subprocess.TimeoutExpired:
        raise ReadingError(f"nvidia-smi: no answer within {_SMI_S:.0f} s") from None
    except ET.ParseError as error:
        raise ReadingError(f"nvidia-smi wrote no XML: {error}") from None
    version, cuda = log.findtext("driver_version", "?"), log.findtext("cuda_version", "?")
    return Driver(version, cuda, tuple(map(_driver_gpu, log.iterfind("gpu"))))


def _driver_gpu(gpu: ET.Element) -> DriverGPU:
    # Drivers before 535 write clocks_throttle_reason_ instead of clocks_event_reason_.
    active = {node.tag.partition("_reason_")[2] for node in gpu.iter() if node.text == "Active"}
    errors = (x.text for x in gpu.iterfind("ecc_errors/volatile//*") if "uncorrect" in x.tag)
    return DriverGPU(
        uuid=gpu.findtext("uuid", ""),
        name=gpu.findtext("product_name", ""),
        clock=_number(gpu.findtext("clocks/sm_clock")),
        max_clock=_number(gpu.findtext("max_clocks/sm_clock")),
        slowed_by=tuple(fault for fault in _FAULTS if fault in active),
        has_memory_errors=any(map(_number, errors)),
    )


def _number(text: str | None) -> float:
    """The number in `1980 MHz`; 0 for `N/A`."""
    word = (text or "").partition(" ")[0]
    return float(word) if word.isdecimal() else 0.0


def _look_at_torch(index: int) -> TorchBuild:
    import torch

    problem = ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except RuntimeError as error:
            problem = f"{error}".partition("\n")[0]
    num_gpus = 0 if problem else torch.cuda.device_count()
    return TorchBuild(torch.__version__, torch.version.cuda, num_gpus, problem)


def _look_at_device(index: int) -> Device:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.name, f"GPU-{properties.uuid}", free / total)


def _measure(index: int) -> Peaks:
    import torch

    from hone.observe.peaks import measure_peaks

    return measure_peaks(torch.device("cuda", index), torch.bfloat16, budget_s=LOAD_S)
