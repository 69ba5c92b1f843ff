"""An engine in a thread of its own, which makes its steps; other threads send it commands.

    worker = EngineWorker(engine, receive, name="engine 0")
    worker.submit(requests)
    polled = worker.poll(timeout_s=0.05)

All calls of the engine are made in that one thread. Commands are queued and run between two steps,
each returns its result, or raises, where it was given. The ranks of one tensor-parallel engine run
in lock-step: before each step the first sends the others the commands that come now.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hone.distributed.channel import broadcast, gather
from hone.distributed.pool import Pending
from hone.types import Completion, Engine, EngineLostError, EngineStats, Request, StopReason

__all__ = ["EngineWorker", "LockStep", "Polled", "Receive"]

T = TypeVar("T")
_Call = tuple[str, tuple[Any, ...]]
"""A method and its arguments."""

Receive = Callable[[Any, int], Any]
"""(spec, rank): take one delivery of weights into the engine; the result goes to the caller.

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

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        self.worker.on_finished(lambda: fn(self))


class LockStep:
    """How the ranks of one engine do the same between the same steps, over a gloo group of theirs.

    The timeout of `group` is how long one rank waits for another at a step, so it must exceed what
    their steps, and their start, can differ by. An idle first rank reports every `interval_s`, less
    than that timeout: ranks wait for work without end, but not for a machine that is gone.
    """

    def __init__(self, group: dist.ProcessGroup, *, interval_s: float = 10.0) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.interval_s = interval_s
        self._group = group

    def broadcast(self, commands: list[_Call] | None = None) -> list[_Call]:
        """The commands that run before the next step, from the first rank to all.

        Like `gather`, raises ConnectionError where another rank is gone.
        """
        with _naming_others():
            return broadcast(self._group, commands)

    def gather(self, value: T) -> list[T]:
        """The picklable value of every rank."""
        with _naming_others():
            return gather(self._group, value)


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
    returns what had finished. After a delivery that failed the worker waits for another.

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
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """With `decode` completions have their texts when they are asked for."""
        self.name = name
        self._decode = decode
        self.num_ranks = group.size if group is not None else 1
        self._engine = engine
        self._receive_weights = receive
        self._group = group
        self._commands: dict[str, Callable[..., Any]] = {
            "submit": self._submit,
            "abort": engine.abort,
            "receive": self._receive,
            "weight_version": lambda: engine.weight_version,
            "close": self._close,
        }
        # The driving thread alone looks at these.
        self._lacks_weights = False
        """A delivery has failed, or is under way."""
        self._is_closed = False
        # These are guarded by `_changed`.
        self._changed = threading.Condition()
        self._queue: deque[_Command] = deque()
        self._taken: list[_Command] = []
        """Commands that are being run."""
        self._finished: list[Completion] = []
        self._on_finished: Callable[[], object] = _ignore
        self._stats = engine.stats()
        self._beat = 0
        self._cause = ""
        """Why the worker has ended."""
        # A new thread begins with the first device, whatever this one uses.
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
        if group is None or group.rank == 0:
            self._thread.start()

    # -- commands, from any thread -------------------------------------------------------------

    def call(self, method: str, /, *args: Any) -> Pending:
        """Call a method of these, without waiting for it."""
        return _Poll(self, *args) if method == "poll" else self._queue_command(method, *args)

    def _queue_command(self, name: str, *args: Any) -> Future[Any]:
        command = _Command(name, args)
        with self._changed:
            if self._cause:
                command.future.set_exception(EngineLostError(self.name, self._cause))
            else:
                self._queue.append(command)
                self._changed.notify_all()
        return command.future

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. One that cannot be served fails by itself: `poll` returns a completion
        that says why (`Completion.error`)."""
        self._queue_command("submit", requests).result()

    def poll(self, timeout_s: float = 0.0) -> Polled:
        """What has finished; waits at most `timeout_s` for the first. Does not wait for a step."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._cause, timeout_s)
            if self._cause and not self._finished:
                raise EngineLostError(self.name, self._cause)
            finished, self._finished = self._finished, []
            polled = Polled(finished, self._stats, self._beat)
        if self._decode is not None:
            for completion in finished:
                completion.text = self._decode(completion.token_ids)
        return polled

    def on_finished(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, in place of any earlier one, when `poll` need not wait."""
        with self._changed:
            self._on_finished = callback
            self._tell_finished()

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return what they had. Those that have just finished are passed
        over: `poll` returns them."""
        return self._queue_command("abort", list(request_ids)).result()

    def receive(self, spec: Any, first_rank: int = 0) -> Any:
        """Take one delivery of weights between two steps.

        `first_rank` is the place of this engine's first rank among all that receive. After a
        failure no step is made until a delivery has succeeded.
        """
        return self._queue_command("receive", spec, first_rank).result()

    def weight_version(self) -> int:
        """Version of the weights that sample now."""
        return self._queue_command("weight_version").result()

    def close(self) -> None:
        """End after the step under way; unfinished requests are gone. May be called again."""
        with contextlib.suppress(EngineLostError):
            self._queue_command("close").result()
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
                announced = self._group.broadcast()
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
                self._group.broadcast([("close", ())])

    def _next_commands(self) -> list[_Command]:
        """Wait until there is something to do; take the commands that have come."""
        interval_s = self._group.interval_s if self._group is not None else None
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._cause or self._can_step, interval_s)
            self._taken = list(self._queue)
            self._queue.clear()
        if self._group is not None:
            self._group.broadcast([(command.name, command.args) for command in self._taken])
        return self._taken

    @property
    def _can_step(self) -> bool:
        return not (self._lacks_weights or self._is_closed) and self._engine.has_unfinished

    def _turn(self, commands: Sequence[_Command]) -> None:
        """Run commands, then make a step."""
        self._run(commands)
        finished: list[Completion] = []
        if self._can_step and not self._cause:
            finished = self._engine.step()
        self._publish(finished)

    def _run(self, commands: Sequence[_Command]) -> None:
        """Run commands. One has failed where it has failed on any rank."""
        if not commands:
            return
        values: list[Any] = []
        errors: list[Exception | None] = []
        for command in commands:
            value = error = None
            try:
                value = self._commands[command.name](*command.args)
            except (RuntimeError, ValueError, OSError) as raised:
                if command.name != "receive":
                    raise
                error = raised
            values.append(value)
            errors.append(error)
        if self._group is not None:
            everywhere = self._group.gather([_describe(error) if error else "" for error in errors])
            for rank, theirs in enumerate(everywhere):
                for number, text in enumerate(theirs):
                    if text and errors[number] is None:
                        errors[number] = RuntimeError(f"on rank {rank} of {self.name}: {text}")
        with self._changed:
            for command, value, error in zip(commands, values, errors, strict=True):
                # On every rank, or they would part ways.
                self._lacks_weights |= command.name == "receive" and error is not None
                if command.future.done():  # abandoned
                    continue
                if error is not None:
                    command.future.set_exception(error)
                else:
                    command.future.set_result(value)

    def _publish(self, finished: Sequence[Completion]) -> None:
        stats = self._engine.stats()
        with self._changed:
            self._beat += 1
            self._stats = stats
            if not self._cause:
                self._finished += finished
            if self._finished:
                self._changed.notify_all()
                self._tell_finished()

    def _tell_finished(self) -> None:
        """Where `poll` need not wait, say so. `_changed` is held."""
        if self._finished or self._cause:
            callback, self._on_finished = self._on_finished, _ignore
            callback()

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
            self._tell_finished()

    # -- what commands do ----------------------------------------------------------------------

    def _submit(self, requests: Sequence[Request]) -> None:
        try:
            self._engine.submit(requests)
        except ValueError:  # one that cannot be served must not keep the others out
            for request in requests:
                self._submit_alone(request)

    def _submit_alone(self, request: Request) -> None:
        try:
            self._engine.submit([request])
        except ValueError as error:
            failed = Completion.as_submitted(request, StopReason.ERROR, str(error))
            with self._changed:
                self._finished.append(failed)

    def _receive(self, spec: Any, first_rank: int) -> Any:
        rank = first_rank + (self._group.rank if self._group is not None else 0)
        self._lacks_weights = True
        received = self._receive_weights(spec, rank)
        self._lacks_weights = False
        return received

    def _close(self) -> None:
        self._is_closed = True


def _ignore() -> None:
    """Nobody is to be told."""


def _describe(error: Exception) -> str:
    """In one line, and where it was raised."""
    where = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {error}\n{where}"
