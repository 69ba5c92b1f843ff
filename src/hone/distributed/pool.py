"""A pool of workers: distributes tasks, watches progress, replaces lost workers.

A worker is a thread, a local process or a Ray actor, all called in the same way. A task goes to the
worker with the smallest load. A worker that is gone, or makes no progress while it has tasks, is
killed and replaced. Its tasks wait for another worker, which starts them from the beginning.

                 waits for                          is unblocked by
    task ──► _waiting ── a ready worker with room ◄── a result, a start, weights delivered
                │ send
                ▼
             a member ── its worker's progress ◄───── loss: back to _waiting

Engines (`hone.rollout.engine_pool`) and scorers (`hone.rollout.scorer_pool`) are subclasses, which
define how a task is sent and how results come back.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from hone.types import EngineLostError

__all__ = [
    "Member",
    "Pending",
    "Pool",
    "RecordEvent",
    "ThreadWorker",
    "Worker",
    "WorkersLostError",
]

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Longest silence that one check adds: a worker that is not asked is not silent."""

Task = TypeVar("Task")
M = TypeVar("M", bound="Member[Any]")

RecordEvent = Callable[..., None]
"""Called with the kind of an event and its fields by name."""


class WorkersLostError(ConnectionError):
    """Raised when lost workers cannot be replaced: the restarts are used up, they were threads of
    this process, or the Ray node under them is gone too."""


class Pending(Protocol):
    """The future result of a call."""

    def result(self, timeout_s: float, /) -> Any:
        """Return the result, or raise the call's exception. Raises TimeoutError if there is no
        result yet (ask again), and EngineLostError if there will be none."""
        ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call `fn` once, in any thread, when the result or an error is available."""
        ...


class Worker(Protocol):
    """A thread, a local process or a Ray actor. Of several ranks the first one takes the calls."""

    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int:
        """Number of processes of this worker."""
        ...

    def call(self, method: str, /, *args: Any) -> Pending:
        """Call a method without waiting for it. Calls may overtake each other. Raises
        EngineLostError if the worker is known to be gone."""
        ...

    def kill(self) -> None:
        """Kill the worker at once, in any state."""
        ...


class ThreadWorker:
    """A worker whose methods run one after the other in a thread of this process. A thread that
    hangs cannot be ended and is abandoned."""

    num_ranks = 1

    def __init__(self, name: str, target: object) -> None:
        self.name = name
        self._target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"hone-{name}")

    def call(self, method: str, /, *args: Any) -> Future[Any]:
        return self._thread.submit(getattr(self._target, method), *args)

    def kill(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, eq=False)
class Member(Generic[Task]):
    """One worker from its start to its end. Its replacement is another member."""

    index: int
    worker: Worker
    starting: Pending | None
    """Result of its first call, or None once that has arrived."""
    is_ready: bool = False
    """Whether it may get tasks."""
    tasks: dict[str, Task] = field(default_factory=dict[str, Task])
    """Tasks that were sent to it and are not finished."""
    load: int = 0
    """Total cost of `tasks`."""
    silent_s: float = 0.0
    """Observed time without progress."""
    looked_at: float = field(default_factory=lambda: monotonic())

    def note_progress(self) -> None:
        self.silent_s, self.looked_at = 0.0, monotonic()

    def note_silence(self) -> None:
        now = monotonic()
        self.silent_s += min(now - self.looked_at, LOOK_S)
        self.looked_at = now


class Pool(ABC, Generic[Task, M]):
    """A pool of workers, its tasks by id, and the members that have them. Not thread-safe.

    A worker that is lost, or does not answer within `timeout_s`, is replaced by `restart(index)`,
    which may return before the worker is ready. With `restart` None (threads, whose memory cannot
    be freed), or after `max_restarts` restarts in all, WorkersLostError names the worker and the
    cause.
    """

    role: str
    """Role name in the events `<role>_lost`."""
    task_words: str
    """Noun for tasks in messages, as `requests`."""
    first_call: tuple[Any, ...]
    """Method and arguments of the call that a worker answers once it has started."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        restart: Callable[[int], Worker] | None,
        timeout_s: float,
        max_restarts: int,
        start_timeout_s: float | None = None,
    ) -> None:
        """`start_timeout_s` limits the start of a worker (default: `timeout_s`)."""
        self._restart = restart
        self._timeout_s = timeout_s
        self._start_timeout_s = timeout_s if start_timeout_s is None else start_timeout_s
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._event: RecordEvent | None = None
        self._owners: dict[str, M] = {}
        """The member that has a task, by task id."""
        self._waiting: dict[str, dict[str, Task]] = {}
        """Tasks that no worker has, by affinity and task id."""
        self._members = [
            self._new_member(index, worker, worker.call(*self.first_call))
            for index, worker in enumerate(workers)
        ]

    def report_to(self, event: RecordEvent) -> None:
        """Call `event("<role>_lost", name=..., restart=..., cause=...)` for each loss from now on.
        `restart` is the number of the restart that follows, or None."""
        self._event = event

    # -- methods of subclasses -------------------------------------------------------------------

    @abstractmethod
    def _new_member(self, index: int, worker: Worker, starting: Pending | None) -> M: ...

    @abstractmethod
    def _cost(self, task: Task) -> int:
        """The amount of work of a task, in any unit."""

    @abstractmethod
    def _send(self, member: M, tasks: Mapping[str, Task]) -> None:
        """Send tasks to the worker. They are already in `member.tasks`."""

    def _affinity(self, task_id: str) -> str:
        """Affinity key: waiting tasks with the same key go to one worker together."""
        return task_id

    def _has_room(self, member: M) -> bool:
        """Whether a ready member may get another task."""
        del member
        return True

    def _retryable(self, tasks: Mapping[str, Task], cause: str) -> Iterator[tuple[str, Task]]:
        """Tasks of a lost worker that another worker may try."""
        del cause
        yield from tasks.items()

    def _on_start(self, member: M) -> None:
        """Called when a worker has answered its first call."""

    def _on_loss(self, member: M) -> None:
        """Called when a worker has been killed and its tasks are taken back."""

    # -- tasks -----------------------------------------------------------------------------------

    def _add(self, tasks: Iterable[tuple[str, Task]]) -> None:
        """Append tasks to the waiting ones."""
        for task_id, task in tasks:
            self._waiting.setdefault(self._affinity(task_id), {})[task_id] = task

    def _assign(self) -> None:
        """Assign waiting tasks to the ready workers with the smallest load, as long as they have
        room. Each worker gets its tasks in one message."""
        while self._waiting:
            ready = [m for m in self._members if m.is_ready]
            least = [(member.load, member.index) for member in ready]
            heapify(least)
            shares: dict[M, dict[str, Task]] = {}
            while self._waiting and least:
                member = self._members[least[0][1]]
                if not self._has_room(member):
                    break
                tasks = self._waiting.pop(next(iter(self._waiting)))
                if not member.tasks:
                    member.note_progress()
                member.tasks |= tasks
                member.load += sum(map(self._cost, tasks.values()))
                heapreplace(least, (member.load, member.index))
                self._owners.update(dict.fromkeys(tasks, member))
                shares.setdefault(member, {}).update(tasks)
            for member, tasks in shares.items():
                if self._is_live(member):
                    self._send(member, tasks)
            if not shares:
                return

    def _finish(self, member: M, task_id: str) -> None:
        """Remove a task from its worker."""
        member.load -= self._cost(member.tasks.pop(task_id))
        del self._owners[task_id]

    def _drop_waiting(self, task_id: str) -> Task | None:
        """Remove a waiting task and return it. None if there is no such waiting task."""
        tasks = self._waiting.get(self._affinity(task_id), {})
        task = tasks.pop(task_id, None)
        if task is not None and not tasks:
            del self._waiting[self._affinity(task_id)]
        return task

    # -- calls -----------------------------------------------------------------------------------

    def _call(self, member: M, method: str, *args: Any) -> Pending | None:
        """Call a worker's method. None if the worker is lost."""
        if not self._is_live(member):
            return None
        try:
            return member.worker.call(method, *args)
        except EngineLostError as error:
            self._lose(member, error.cause)
            return None

    def _answer(self, member: M, method: str, call: Pending | None, *, default: Any = None) -> Any:
        """The result of a call, or `default` if its worker is lost."""
        if call is None or not self._is_live(member):
            return default
        try:
            return call.result(self._timeout_s)
        except EngineLostError as error:
            self._lose(member, error.cause)
        except TimeoutError:
            self._lose(member, f"no answer to {method} within {self._timeout_s:g} s")
        except (RuntimeError, ValueError) as error:
            error.add_note(f"in {method} of {member.worker.name}")
            raise
        return default

    # -- starts and losses -----------------------------------------------------------------------

    def _is_live(self, member: M) -> bool:
        return self._members[member.index] is member

    def _poll_start(self, member: M, wait_s: float) -> bool:
        """Whether a worker has started within `wait_s`. A worker that could not be built is treated
        as lost."""
        assert member.starting is not None
        try:
            member.starting.result(wait_s)
        except TimeoutError:
            return False
        except EngineLostError as error:
            self._lose(member, error.cause)
            return False
        except WorkersLostError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            self._lose(member, f"it could not be made: {error}")
            return False
        member.starting = None
        self._on_start(member)
        return True

    def _check_starts(self) -> None:
        """Check which workers have started, without waiting."""
        for index in range(len(self._members)):
            member = self._members[index]
            if member.starting is None or self._poll_start(member, 0.0):
                continue
            if self._is_live(member):
                member.note_silence()
                self._lose_silent(member, self._start_timeout_s, "it has not started")

    def _lose_silent(self, member: M, timeout_s: float, state: str) -> None:
        """Treat a member without progress for `timeout_s` as lost."""
        if member.silent_s > timeout_s:
            self._lose(member, f"no progress for {member.silent_s:.1f} s: {state}")

    def _lose(self, member: M, cause: str) -> None:
        """Kill a worker, take its tasks back, and start a replacement."""
        if not self._is_live(member):
            return
        name, tasks = member.worker.name, member.tasks
        member.worker.kill()
        for task_id in tasks:
            del self._owners[task_id]
        member.tasks, member.load, member.is_ready = {}, 0, False
        self._put_first(self._retryable(tasks, f"{name}: {cause}"))
        self._on_loss(member)
        is_last = self._restart is None or self._num_restarts == self._max_restarts
        if self._event is not None:
            restart = None if is_last else self._num_restarts + 1
            self._event(f"{self.role}_lost", name=name, restart=restart, cause=cause)
        if self._restart is None:
            raise WorkersLostError(f"{name}, a thread of this process, has failed: {cause}")
        if is_last:
            raise WorkersLostError(
                f"{name} is lost, and {self._max_restarts} restarts of {self.role}s have been used "
                f"up. What it died of: {cause}"
            )
        worker = self._restart(member.index)
        self._num_restarts += 1
        _log.warning(
            "%s is lost and replaced (restart %d of at most %d); its %d %s start again: %s",
            name,
            self._num_restarts,
            self._max_restarts,
            len(tasks),
            self.task_words,
            cause,
        )
        fresh = self._new_member(member.index, worker, None)
        self._members[member.index] = fresh
        fresh.starting = self._call(fresh, *self.first_call)

    def _put_first(self, tasks: Iterable[tuple[str, Task]]) -> None:
        others, self._waiting = self._waiting, {}
        self._add(tasks)
        for affinity, theirs in others.items():
            self._waiting.setdefault(affinity, {}).update(theirs)
