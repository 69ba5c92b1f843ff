"""An engine in a process of its own that shares the trainer's GPU, without a cluster.

Nobody divides the GPU's time: such a run says what is learned, not how fast.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from hone.config.plan import RunPlan
from hone.engine.worker import EngineWorker
from hone.loops.workers import Pools, build_engine_worker
from hone.rollout.engine_pool import EnginePool
from hone.types import EngineLostError

CALLS = 8
"""Calls of one engine that run side by side: the longest waits for weights."""
STARTING_S = 300.0
"""How long a process may take to import what it needs, and to make its engine."""


@contextmanager
def process_pools(plan: RunPlan) -> Generator[Pools]:
    """`cluster.num_engines` engines of one rank in processes of this host, in place of a cluster.

    On GPUs they share the trainer's. Nobody divides its memory among them: give each its part with
    `engine.kv_cache_gib`. Raises UserError as `build_engine_worker`.
    """
    role = plan.roles["engine"]
    assert role.axes.tensor == 1, "an engine of several ranks needs a cluster"

    def start(index: int) -> ProcessWorker:
        return ProcessWorker(plan, f"engine {index}")

    workers = [start(index) for index in range(role.num_workers)]
    pool = EnginePool(
        workers,
        restart=start,
        timeout_s=plan.cluster.engine_timeout_s,
        max_restarts=3,
        start_timeout_s=STARTING_S,
    )
    with closing(pool):
        for worker in workers:
            worker.made.result(STARTING_S)
        yield Pools(pool)


class ProcessWorker:
    """An engine in a process of its own on this machine, at the other end of a pipe."""

    num_ranks = 1

    def __init__(self, plan: RunPlan, name: str) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, plan, name), name=name)
        self._process.daemon = True
        self._process.start()
        theirs.close()  # or nobody would learn of its end
        # These are guarded by `_lock`.
        self._lock = threading.Lock()
        self._is_gone = False
        self.made: Future[Any] = Future()
        self._waiting: list[Future[Any] | None] = [self.made]
        """Calls by number, None once answered. The first is answered when the engine is made."""
        threading.Thread(target=self._read, name=f"{name} answers", daemon=True).start()

    def call(self, method: str, /, *args: Any) -> Future[Any]:
        """Call a method of the engine without waiting for it."""
        answer: Future[Any] = Future()
        with self._lock:
            if not self._is_gone:
                with contextlib.suppress(BrokenPipeError):  # `_read` is about to notice
                    self._pipe.send((len(self._waiting), method, args))
                self._waiting.append(answer)
                return answer
        raise self._lost()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def _read(self) -> None:
        while True:
            try:
                number, value, error = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            with self._lock:
                answer, self._waiting[number] = self._waiting[number], None
            assert answer is not None
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)
        self._process.join()
        with self._lock:
            self._is_gone = True
        for answer in self._waiting:
            if answer is not None:
                answer.set_exception(self._lost())

    def _lost(self) -> EngineLostError:
        return EngineLostError(self.name, f"its process ended with code {self._process.exitcode}")


def serve(pipe: Connection, plan: RunPlan, name: str) -> None:
    """Make an engine and answer calls, side by side, until the other end is closed or gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, who then closes this
    lock = threading.Lock()

    def answer(number: int, call: Callable[[], Any]) -> None:
        value = error = None
        try:
            value = call()
        except Exception as raised:  # noqa: BLE001 - belongs to the caller, whatever it is
            error = raised
        with lock:
            pipe.send((number, value, error))

    engines: list[EngineWorker] = []
    answer(0, lambda: engines.append(build_engine_worker(plan, name=name)))
    threads = ThreadPoolExecutor(CALLS)
    while engines:
        try:
            number, method, args = pipe.recv()
        except EOFError:
            os._exit(0)  # not waiting for calls that nobody waits for any more
        threads.submit(answer, number, partial(getattr(engines[0], method), *args))
