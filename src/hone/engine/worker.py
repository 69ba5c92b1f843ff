"""An engine in a thread of its own, which makes its steps; other threads send it commands.

    worker = EngineWorker(engine, receive, name="engine 0")
    worker.submit(requests)
    polled = worker.poll(timeout_s=0.05)

All calls of the engine are made in that one thread. Commands are queued and run between two steps,
each returns its result, or raises, where it was given. The ranks of one tensor-parallel engine run
in lock-step: the first tells the others, before each step, the commands that come now.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hone.distributed.pool import Pending
from hone.types import Completion, Engine, EngineLostError, EngineStats, Request, StopReason

__all__ = ["EngineWorker", "LockStep", "Polled", "Receive"]

T = TypeVar("T")

Receive = Callable[[Any, int], Any]
"""(spec, rank): take one delivery of weights into the engine; returns what is to be told of it.

`spec` says where the weights come from; `rank` is the place of this process among all that receive.
"""


class Polled(NamedTuple):
    """What has become of an engine since it was last asked."""

    completions: list[Completion]
    """Finished since then."""
    stats: EngineStats
    beat: int
    """Counts what the engine has done: while it has work and may step, one that stands is hung."""


@dataclass(slots=True, eq=False)
class _Command:
    name: str
    args: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future[Any])


@dataclass(frozen=True, slots=True)
class _Poll:
    """Polls when its result is asked for: nothing has to wait for it before."""

    worker: EngineWorker
    wait_s: float

    def result(self, timeout_s: float, /) -> Polled:
        return self.worker.poll(min(timeout_s, self.wait_s))


class LockStep:
    """What the ranks of one engine tell each other, over a gloo group of theirs.

    The timeout of `group` is how long one rank waits for another at a step, so it must exceed what
    their steps, and their start, can differ by. An idle first rank reports every `interval_s`, less
    than that timeout: ranks wait for work without end, but not for a machine that is gone.
    """

    def __init__(self, group: dist.ProcessGroup, *, interval_s: float = 10.0) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.interval_s = interval_s
        self._group = group

    def announce(self, commands: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """The first rank tells the others what runs before its next step.

        Like all calls here, raises ConnectionError where another rank is gone.
        """
        payload = pickle.dumps(commands) if commands else b""
        self._broadcast(torch.tensor([len(payload)]))
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def listen(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What the first rank announces next."""
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        if not size:
            return []
        payload = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(payload)
        return pickle.loads(payload.numpy().tobytes())

    def gather(self, value: T) -> list[T]:
        """The picklable value of every rank."""
        values: list[Any] = [None] * self.size
        with _naming_others():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _broadcast(self, tensor: torch.Tensor) -> None:
        with _naming_others():
            dist.broadcast(tensor, group=self._group, group_src=0)


@contextlib.contextmanager
def _naming_others() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"another rank is gone or does not answer: {error}") from error


class EngineWorker:
    """Drives an engine in a thread of its own and is commanded from any other.

    Commands wait for the end of the step under way. A failure of the engine ends the worker: from
    then on every call raises EngineLostError with its traceback, but for `poll`, which first
    returns what had finished. What `submit`, `sleep`, `wake` and `receive` refuse is the caller's
    error alone.

    With `group` the engine is one rank of several. The first is commanded; the others do nothing
    but `follow`.
    """

    def __init__(
        self,
        engine: Engine,
        receive: Receive,
        *,
        name: str = "engine",
        group: LockStep | None = None,
    ) -> None:
        self.name = name
        self.num_ranks = group.size if group is not None else 1
        self._engine = engine
        self._receive_weights = receive
        self._group = group
        self._commands: dict[str, Callable[..., Any]] = {
            "submit": self._submit,
            "abort": self._abort,
            "hold": lambda: self._pauses.add("held"),
            "release": lambda: self._pauses.discard("held"),
            "receive": self._receive,
            "sleep": self._sleep,
            "wake": self._wake,
            "stats": engine.stats,
            "weight_version": lambda: engine.weight_version,
            "close": lambda: self._pauses.add("closed"),
        }
        # The driving thread alone looks at these.
        self._open: set[str] = set()
        """Requests that the engine has not finished."""
        self._pauses: set[str] = set()
        """Why no step is made: held, asleep, without weights, closed."""
        # These are guarded by `_changed`.
        self._changed = threading.Condition()
        self._queue: deque[_Command] = deque()
        self._taken: list[_Command] = []
        """Commands that are being run."""
        self._finished: list[Completion] = []
        self._stats = engine.stats()
        self._beat = 0
        self._cause = ""
        """Why the host has ended."""
        # A new thread begins with the first device, whatever this one uses.
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
        if group is None or group.rank == 0:
            self._thread.start()

    # -- commands, from any thread -------------------------------------------------------------

    def call(self, method: str, /, *args: Any) -> Pending:
        """Call a method of these, without waiting for it."""
        if method == "poll":
            return _Poll(self, *args)
        return self._start(method, *args)

    def _start(self, command: str, /, *args: Any) -> Future[Any]:
        """Queue a command, named like the methods here. Not for `poll`."""
        order = _Command(command, args)
        with self._changed:
            if self._cause:
                order.future.set_exception(EngineLostError(self.name, self._cause))
            else:
                self._queue.append(order)
                self._changed.notify_all()
        return order.future

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError, and queues none, where an id is in use.

        One that can never fit, or is malformed, fails by itself: `poll` returns a completion that
        says so (`Completion.error`).
        """
        self._start("submit", requests).result()

    def poll(self, timeout_s: float = 0.0) -> Polled:
        """What has finished; waits at most `timeout_s` for the first. Does not wait for a step."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._cause, timeout_s)
            if self._cause and not self._finished:
                raise EngineLostError(self.name, self._cause)
            finished, self._finished = self._finished, []
            return Polled(finished, self._stats, self._beat)

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return what they had. Those that have just finished are passed
        over: `poll` returns them."""
        return self._start("abort", list(request_ids)).result()

    def hold(self) -> None:
        """Make no step until `release`; requests keep what they have."""
        self._start("hold").result()

    def release(self) -> None:
        """Go on after `hold`."""
        self._start("release").result()

    def receive(self, spec: Any, first_rank: int = 0) -> Any:
        """Take one delivery of weights between two steps.

        `first_rank` is the place of this engine's first rank among all that receive. After a
        failure no step is made until a delivery has succeeded.
        """
        return self._start("receive", spec, first_rank).result()

    def sleep(self) -> None:
        """Free the KV cache and make no step until `wake`."""
        self._start("sleep").result()

    def wake(self) -> None:
        """Allocate the KV cache again, and go on."""
        self._start("wake").result()

    def stats(self) -> EngineStats:
        """A snapshot at the next end of a step; `poll` brings the one of the last."""
        return self._start("stats").result()

    def weight_version(self) -> int:
        """Version of the weights that sample now."""
        return self._start("weight_version").result()

    def close(self) -> None:
        """End after the step under way; unfinished requests are gone. May be called again."""
        with contextlib.suppress(EngineLostError):
            self._start("close").result()
        self._thread.join()

    def kill(self) -> None:
        """As `close`, but do not wait for an engine that may be hung."""
        self._end("it was killed")

    def follow(self) -> None:
        """Be one of the other ranks: do what the first announces until it closes.

        Raises EngineLostError when the first is gone, and what the engine raises.
        """
        assert self._group is not None
        assert self._group.rank > 0
        while not self._is_closed:
            try:
                announced = self._group.listen()
            except ConnectionError as error:
                raise EngineLostError(self.name, f"its first rank is gone: {error}") from error
            self._turn([_Command(name, args) for name, args in announced])
            self._finished.clear()  # the first rank returns them

    # -- the driving thread --------------------------------------------------------------------

    def _drive(self) -> None:
        if self._cuda_device is not None:
            torch.cuda.set_device(self._cuda_device)
        try:
            while not self._cause and not self._is_closed:
                self._turn(self._next_commands())
            self._end("it was closed")
        except Exception as error:  # noqa: BLE001  whoever calls from now on is told
            self._end(_describe(error))
        if self._group is not None and not self._is_closed:
            with contextlib.suppress(ConnectionError):  # they may have gone first
                self._group.announce([("close", ())])

    def _next_commands(self) -> list[_Command]:
        """Wait until there is something to do; take the commands that have come."""
        interval_s = self._group.interval_s if self._group is not None else None
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._cause or self._can_step, interval_s)
            self._taken = list(self._queue)
            self._queue.clear()
        if self._group is not None:
            self._group.announce([(command.name, command.args) for command in self._taken])
        return self._taken

    @property
    def _is_closed(self) -> bool:
        return "closed" in self._pauses

    @property
    def _can_step(self) -> bool:
        return not self._pauses and self._engine.has_unfinished

    def _turn(self, commands: Sequence[_Command]) -> None:
        """Run commands, then make a step."""
        self._run(commands)
        finished: list[Completion] = []
        if self._can_step and not self._cause:
            finished = self._engine.step()
            self._open.difference_update(done.request_id for done in finished)
        self._publish(finished)

    def _run(self, commands: Sequence[_Command]) -> None:
        if not commands:
            return
        values: list[Any] = []
        errors: list[Exception | None] = []
        for command in commands:
            value = error = None
            try:
                value = self._commands[command.name](*command.args)
            except Exception as raised:
                if not _is_refusal(command.name, raised):
                    raise
                error = raised
            values.append(value)
            errors.append(error)
        if self._group is not None:
            self._take_over_errors(self._group, errors)
        for command, error in zip(commands, errors, strict=True):
            if command.name == "receive" and error is not None:
                self._pauses.add("without weights")  # on every rank, or they would part ways
        with self._changed:
            for command, value, error in zip(commands, values, errors, strict=True):
                if command.future.done():  # abandoned
                    continue
                if error is not None:
                    command.future.set_exception(error)
                else:
                    command.future.set_result(value)

    def _take_over_errors(self, group: LockStep, errors: list[Exception | None]) -> None:
        """A command has failed where it has failed on any rank."""
        everywhere = group.gather([_describe(error) if error else "" for error in errors])
        for rank, theirs in enumerate(everywhere):
            for number, text in enumerate(theirs):
                if text and errors[number] is None:
                    errors[number] = RuntimeError(f"on rank {rank} of {self.name}: {text}")

    def _publish(self, finished: Sequence[Completion]) -> None:
        stats = self._engine.stats()
        with self._changed:
            self._beat += 1
            self._stats = stats
            if not self._cause:
                self._finished += finished
            if self._finished:
                self._changed.notify_all()

    def _end(self, cause: str) -> None:
        """From now on every call raises; the driving thread leaves at its next step."""
        with self._changed:
            if self._cause:
                return
            self._cause = cause
            for command in (*self._taken, *self._queue):
                if not command.future.done():
                    command.future.set_exception(EngineLostError(self.name, cause))
            self._taken = []
            self._queue.clear()
            self._changed.notify_all()

    # -- what commands do ----------------------------------------------------------------------

    def _submit(self, requests: Sequence[Request]) -> None:
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or not self._open.isdisjoint(ids):
            taken = next(name for name in ids if name in self._open or ids.count(name) > 1)
            raise ValueError(f"request id {taken!r} is already in use")
        try:
            self._engine.submit(requests)
        except ValueError:
            self._submit_singly(requests)
        else:
            self._open.update(ids)

    def _submit_singly(self, requests: Sequence[Request]) -> None:
        """One that cannot be served must not keep the others out."""
        failed: list[Completion] = []
        for request in requests:
            try:
                self._engine.submit([request])
            except ValueError as error:
                failed.append(_failure(request, str(error)))
            else:
                self._open.add(request.id)
        with self._changed:
            self._finished += failed

    def _abort(self, request_ids: Sequence[str]) -> list[Completion]:
        withdrawn = self._engine.abort(request_ids)
        self._open.difference_update(completion.request_id for completion in withdrawn)
        return withdrawn

    def _receive(self, spec: Any, first_rank: int) -> Any:
        rank = first_rank + (self._group.rank if self._group is not None else 0)
        self._pauses.add("without weights")
        received = self._receive_weights(spec, rank)
        self._pauses.remove("without weights")
        return received

    def _sleep(self) -> None:
        self._engine.sleep()
        self._pauses.add("asleep")

    def _wake(self) -> None:
        self._engine.wake()
        self._pauses.discard("asleep")


def _is_refusal(command: str, error: Exception) -> bool:
    """Whether an engine that raised this goes on as before. Others are broken somewhere."""
    if command == "submit":
        return isinstance(error, ValueError)
    refuses = command in ("receive", "sleep", "wake")
    return refuses and isinstance(error, (RuntimeError, ValueError, OSError))


def _failure(request: Request, error: str) -> Completion:
    return Completion(
        request_id=request.id,
        token_ids=[],
        logprobs=[],
        weight_versions=[],
        stop_reason=StopReason.ERROR,
        error=error,
    )


def _describe(error: Exception) -> str:
    """In one line, and where it was raised."""
    where = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {error}\n{where}"
