"""What the checks of a machine share: findings, and readings, each taken once.

torch is loaded in worker processes alone, since a driver may hang. A reading that cannot be taken
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

__all__ = ["START_S", "Device", "Finding", "Level", "Machine", "ReadingError", "judge"]

R = TypeVar("R")
Level = Literal["ok", "slow", "wrong"]

START_S = 90.0
"""For a process to load torch and meet its device; a cold disk takes most of a minute."""
LOAD_S = 4.0
"""Copies for one half, matrix products for the other."""
_SMI_S = 30.0
_FAULTS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")
"""Why a clock is low. To reach the power limit under load is no fault."""


class ReadingError(Exception):
    """Something could not be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report."""

    level: Level
    """`slow`: a run works, and is slower or nearer to a limit than it need be."""
    measured: str
    expected: str
    remedy: str = ""


def judge(measured: str, expected: str, *problems: tuple[object, Level, str]) -> Finding:
    """The first problem (condition, level, remedy) whose condition holds, else ok."""
    for condition, level, remedy in problems:
        if condition:
            return Finding(level, measured, expected, remedy)
    return Finding("ok", measured, expected)


@dataclass(frozen=True, slots=True)
class DriverGPU:
    """A GPU as NVIDIA's driver tells of it; clocks in MHz, 0 where it does not."""

    uuid: str
    name: str
    clock: float
    max_clock: float
    slowed_by: tuple[str, ...]
    has_memory_errors: bool
    """Uncorrectable ones since the driver was loaded."""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver; `cuda` is the newest that it serves, as `12.8`."""

    version: str
    cuda: str
    gpus: tuple[DriverGPU, ...]


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """torch as runs find it; `cuda` is what it is built for (None: CPUs), `problem` what it says
    where it sees no GPU."""

    version: str
    cuda: str | None
    num_gpus: int
    problem: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as torch sees it, before anything is computed there."""

    name: str
    uuid: str
    free_share: float
    """Of its memory, 0 to 1."""


class Worker:
    """A process that calls functions one after the other, and can be killed. It ignores Ctrl-C,
    prints nothing, ends with us, and has its temporary files and caches in `folder`."""

    def __init__(self, folder: str) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _settle, (folder,))
        # The process inherits what is blocked; a Ctrl-C that comes meanwhile reaches us afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._pid = self._pool.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def call(self, function: Callable[[int], R], index: int) -> Future[R]:
        """Function and result are pickled."""
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
    """This host, and where its runs go. Leaving it ends its workers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.max_gpus = max_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        """That a run may use, before anybody asks the driver; None: not known."""
        self._workers: dict[int, Worker] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hone-doctor-")

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_workers(list(self._workers))
        self._folder.cleanup()

    @property
    def folder(self) -> str:
        """For temporary files, gone when this is left."""
        return self._folder.name

    def ask(
        self,
        indices: Sequence[int],
        function: Callable[[int], R],
        timeout_s: float,
        meanwhile: Callable[[], object] = bool,
    ) -> list[R]:
        """What a function of a module says of each index (of a GPU), called in workers at once.

        Raises ReadingError where one fails or takes too long; all of these workers are then ended,
        and whoever asks next gets new ones.
        """
        for index in indices:
            if index not in self._workers:
                self._workers[index] = self._start_worker()
        calls = {index: self._workers[index].call(function, index) for index in indices}
        meanwhile()
        wait(calls.values(), timeout_s, return_when=FIRST_EXCEPTION)
        try:
            # One that has failed is why others may not answer: its reason comes first.
            for index, call in sorted(calls.items(), key=lambda item: not item[1].done()):
                _check_answer(call, index, timeout_s)
            return [call.result() for call in calls.values()]
        except ReadingError:
            self._end_workers(indices)
            raise

    def _start_worker(self) -> Worker:
        try:
            return Worker(self.folder)
        except OSError as error:  # queues between processes need semaphores, which are files there
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
        """What the GPUs reach while all of them work, and what the driver says meanwhile."""
        told: tuple[DriverGPU, ...] = ()

        def read() -> None:
            nonlocal told
            time.sleep(0.6 * LOAD_S)
            with suppress(ReadingError):  # which the check of the driver tells
                told = _read_driver().gpus

        return self.ask(range(len(self.devices)), _measure, START_S, meanwhile=read), told


def _check_answer(call: Future[Any], index: int, timeout_s: float) -> None:
    """Raise ReadingError where there is no answer, or an error in its place."""
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
    # Drivers before 535 say clocks_throttle_reason_ in place of clocks_event_reason_.
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
    """Of `1980 MHz`; 0 of `N/A`."""
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
    found = torch.cuda.get_device_properties(index)
    return Device(found.name, f"GPU-{found.uuid}", free / total)


def _measure(index: int) -> Peaks:
    import torch

    from hone.observe.peaks import measure_peaks

    return measure_peaks(torch.device("cuda", index), torch.bfloat16, budget_s=LOAD_S)
