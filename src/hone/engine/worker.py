"""A thread that drives an engine; other threads send it commands.

    worker = EngineWorker(engine, receive, name="engine 0")
    worker.submit(requests)
    polled = worker.poll(timeout_s=0.05)

All calls of the engine are made in that one thread. Commands are queued and run between two steps;
each returns its result, or raises, in the calling thread. The ranks of one tensor-parallel engine
run in lock-step: before each step the first sends the others the commands that run next.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hone.distributed.channel import GroupChannel
from hone.distributed.pool import Pending
from hone.distributed.team import Team
from hone.images.sending import with_pixels
from hone.types import Completion, Engine, EngineLostError, EngineStats, Request, StopReason

__all__ = ["EngineWorker", "Polled", "Receive"]

_Call = tuple[str, tuple[Any, ...]]
"""A method and its arguments."""
IDLE_S = 10.0
"""Interval in seconds of heartbeats from the first of several ranks while it has no work. It is
less than the timeout of their channel: ranks wait for work without limit, but not for a machine
that is gone."""

Receive = Callable[[Any, int], Any]
"""Function (spec, rank) that receives one delivery of weights into the engine; its result goes to
the caller.

`spec` describes the source of the weights; `rank` is the place of this process among all receivers.
"""


class Polled(NamedTuple):
    """News of an engine since the previous poll."""

    completions: list[Completion]
    """Finished since then."""
    stats: EngineStats
    beat: int
    """Progress counter: an engine that has work and may step, but whose counter stands still, is
    hung."""


@dataclass(slots=True, eq=False)
class _Command:
    name: str
    args: tuple[Any, ...]
    future: Future[Any] = field(default_factory=Future[Any])


@dataclass(frozen=True, slots=True)
class _Poll:
    """A future that polls when its result is requested."""

    worker: EngineWorker
    wait_s: float

    def result(self, timeout_s: float, /) -> Polled:
        return self.worker.poll(min(timeout_s, self.wait_s))

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        self.worker.on_finished(lambda: fn(self))


class EngineWorker:
    """Drives an engine in a thread of its own; any other thread may send commands.

    Commands wait for the end of the step under way. A failure of the engine ends the worker: from
    then on every call raises EngineLostError with its traceback, except that `poll` first returns
    completions that had finished. After a failed delivery of weights the worker waits for another.

    With `ranks` the engine is one rank of several, which run the same commands between the same
    steps. The first takes commands; the others only `follow`. The timeout of that channel must
    exceed the largest difference in time between their steps, and between their starts.
    """

    def __init__(
        self,
        engine: Engine,
        receive: Receive,
        *,
        name: str = "engine",
        ranks: GroupChannel | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """With `decode`, completions have their texts when `poll` returns them."""
        self.name = name
        self._decode = decode
        self.num_ranks = ranks.size if ranks is not None else 1
        self._engine = engine
        self._receive_weights = receive
        self._ranks = ranks
        is_first = ranks is None or ranks.rank == 0
        self._team = Team(ranks, is_first=is_first, calls={"turn": self._follow_turn})
        self._commands: dict[str, Callable[..., Any]] = {
            "submit": self._submit,
            "abort": engine.abort,
            "receive": self._receive,
            "weight_version": lambda: engine.weight_version,
            "close": self._close,
        }
        # Only the driving thread reads these.
        self._lacks_weights = False
        """Whether a delivery of weights has failed or is under way."""
        self._is_closed = False
        # These are guarded by `_changed`.
        self._changed = threading.Condition()
        self._queue: deque[_Command] = deque()
        self._taken: list[_Command] = []
        """Commands that are running now."""
        self._finished: list[Completion] = []
        self._on_finished: Callable[[], object] = _ignore
        self._stats = engine.stats()
        self._beat = 0
        self._cause = ""
        """The error that ended the worker; None while it runs."""
        # A new thread begins with the first device, whatever this one uses.
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
        if is_first:
            self._thread.start()

    # -- commands, from any thread -------------------------------------------------------------

    def call(self, method: str, /, *args: Any) -> Pending:
        """Queue a call of one of the engine's methods, without waiting for it."""
        return _Poll(self, *args) if method == "poll" else self._queue_command(method, *args)

    def _queue_command(self, name: str, *args: Any) -> Future[Any]:
        if name == "submit":  # other ranks get the command from this one
            args = (with_pixels(args[0]),)
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
        """Finished completions and progress; waits at most `timeout_s` for the first completion,
        and never for the end of a step."""
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
        """Withdraw requests and return their unfinished completions. Requests that have just
        finished are skipped: `poll` returns them."""
        return self._queue_command("abort", list(request_ids)).result()

    def receive(self, spec: Any, first_rank: int = 0) -> Any:
        """Receive one delivery of weights between two steps.

        `first_rank` is the place of this engine's first rank among all receivers. After a failure
        no step is made until a delivery has succeeded.
        """
        return self._queue_command("receive", spec, first_rank).result()

    def weight_version(self) -> int:
        """Version of the weights that the engine samples with now."""
        return self._queue_command("weight_version").result()

    def close(self) -> None:
        """End after the current step; unfinished requests are dropped. May be called again."""
        with contextlib.suppress(EngineLostError):
            self._queue_command("close").result()
        self._thread.join()

    def kill(self) -> None:
        """Close without waiting, for an engine that may be hung."""
        self._end("it was killed")

    def follow(self) -> None:
        """Run as one of the other ranks: execute the commands of the first until it closes.

        Raises EngineLostError when the first is gone, and the errors of the engine.
        """
        try:
            self._team.follow()
        except ConnectionError as error:
            raise EngineLostError(self.name, f"a rank of it is gone: {error}") from error

    def _follow_turn(self, announced: Sequence[_Call]) -> None:
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
        except Exception as error:  # noqa: BLE001  later calls raise it
            self._end(_describe(error))
        with contextlib.suppress(ConnectionError):  # the others may have ended first
            self._team.finish(None)

    def _next_commands(self) -> list[_Command]:
        """Wait for commands or work; take the queued commands."""
        wait_s = None if self._ranks is None else IDLE_S
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._cause or self._can_step, wait_s)
            self._taken = list(self._queue)
            self._queue.clear()
        if self._ranks is not None:
            self._team.announce("turn", [(command.name, command.args) for command in self._taken])
        return self._taken

    @property
    def _can_step(self) -> bool:
        return not (self._lacks_weights or self._is_closed) and self._engine.has_unfinished

    def _turn(self, commands: Sequence[_Command]) -> None:
        """Run commands, then one step."""
        self._run(commands)
        finished: list[Completion] = []
        if self._can_step and not self._cause:
            finished = self._engine.step()
        self._publish(finished)

    def _run(self, commands: Sequence[_Command]) -> None:
        """Run commands. A command fails if it failed on any rank."""
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
        if self._ranks is not None:
            everywhere = self._ranks.gather([_describe(error) if error else "" for error in errors])
            for rank, theirs in enumerate(everywhere):
                for number, text in enumerate(theirs):
                    if text and errors[number] is None:
                        errors[number] = RuntimeError(f"on rank {rank} of {self.name}: {text}")
        with self._changed:
            for command, value, error in zip(commands, values, errors, strict=True):
                # Every rank must see the failure, or the ranks would diverge.
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
        """Call the callback of `on_finished` if `poll` need not wait. The caller has locked
        `_changed`."""
        if self._finished or self._cause:
            callback, self._on_finished = self._on_finished, _ignore
            callback()

    def _end(self, cause: str) -> None:
        """Let every later call raise; the driving thread ends at its next step."""
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

    # -- commands ------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[Request]) -> None:
        try:
            self._engine.submit(requests)
        except ValueError:  # an invalid request must not block the others
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
        rank = first_rank + (self._ranks.rank if self._ranks is not None else 0)
        self._lacks_weights = True
        received = self._receive_weights(spec, rank)
        self._lacks_weights = False
        return received

    def _close(self) -> None:
        self._is_closed = True


def _ignore() -> None:
    """Default callback, which does nothing."""


def _describe(error: Exception) -> str:
    """The error in one line, with the place where it was raised."""
    where = "".join(traceback.format_exception(error)).rstrip()
    return f"{type(error).__name__}: {error}\n{where}"
