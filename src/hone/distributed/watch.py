"""Watchdog: finds the process that keeps the others waiting, and what it did last.

Each process publishes its progress in the rendezvous store: phase and step when they change, and at
short intervals a sign of life, the position of its main thread, and the number of collectives that
it has started in each group. A thread reads the progress of the others. If this process has not
moved for `trainer.parallel.timeout_s` and another one

* has started fewer collectives in a group that both are in, or
* has fallen silent (stopped, or its machine is gone),

this process prints which one it is, and ends. If a store on another host has not answered for as
long, this host is cut off, and the process ends as well. A process that fails records it in the
store before its connections break, and the others end silently, so that only the first error is
printed. A killed process is reported by hone's launcher or, without it, by another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import psutil
import torch
import torch.distributed as dist

from hone.distributed.channel import Channel
from hone.distributed.processes import Processes, has_hone_launcher, rendezvous
from hone.distributed.signals import PendingSignal
from hone.distributed.store import CONNECT_S, LostPeerError, connect
from hone.errors import UserError

__all__ = [
    "Claim",
    "Progress",
    "Watch",
    "advice",
    "claim",
    "claim_for",
    "read_progress",
    "read_report",
]

_ACKS_S = 10.0
"""Time for which a process that ends because another one failed goes on serving the store to
processes that do not know of it yet. Longer than the longest interval in which they look."""
_ERROR_REPORT_TIMEOUT_S = 3.0
"""Time that a process whose connection broke waits for another one to report the cause."""
_TOKEN = uuid.uuid4().hex
"""Marks this process's claims, to distinguish them from those of others."""
_LAUNCHER = -1
"""Stands for a rank if the launcher reports why the run ends."""
_SPANS = Path(__file__).parents[1] / "observe" / "spans.py"
_UNINFORMATIVE_FILES = (
    str(Path(torch.__file__).parent),
    str(_SPANS),
    contextlib.__file__,
    __file__,
    "<",
)
"""Files whose frames do not show the position of a process: every phase begins in them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that a process publishes."""

    rank: int
    pid: int
    host: str
    role: str = ""
    """Role of the process if the run trains several models."""
    phase: str = "start"
    step: int = 0
    since: float = 0.0
    """Wall clock time at which the phase began."""
    where: str = ""
    """Position of its main thread."""
    collectives: Mapping[str, int] = field(default_factory=dict[str, int])
    """Collectives started in each group."""
    updates: int = 0
    """Number of publications."""
    is_done: bool = False

    def describe(self, now: float) -> str:
        """Describe process and activity, as `rank 1 (pid 71): train of step 2 for 9.3 s, at
        learner.py:80 in train`."""
        return f"{self.name} (pid {self.pid}): {self.doing(now)}"

    @property
    def name(self) -> str:
        """`rank 1`, or `rank 1 (of the critic)` if the run trains several models."""
        return f"rank {self.rank} (of the {self.role})" if self.role else f"rank {self.rank}"

    def doing(self, now: float) -> str:
        """Describe the activity only, as `train of step 2 for 9.3 s, at learner.py:80 in train`."""
        step = f" of step {self.step}" if self.step else ""
        where = f", at {self.where}" if self.where else ""
        return f"{self.phase}{step} for {max(now - self.since, 0.0):.1f} s{where}"


def read_progress(store: dist.Store, rank: int) -> Progress | None:
    """The latest published progress of `rank`, or None."""
    key = f"progress/{rank}"
    return Progress(**json.loads(store.get(key))) if store.check([key]) else None


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to report why the run ends. One process, or the launcher, gets it."""

    _store: dist.Store | None

    def reported(self, code: int) -> None:
        """Record that the report is written, and the exit code of the run."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._store.set("code", str(code))

    def wait_for_acks(self, own: Processes) -> None:
        """Wait until all other processes know that the run ends, if their store ends with this
        process: later requests would hang. Waits no longer than one of them tries."""
        if self._store is not None:
            _wait_for_acks(self._store, own, CONNECT_S)


def _wait_for_acks(store: dist.Store, own: Processes, timeout_s: float) -> None:
    """Wait as `Claim.wait_for_acks`. A launcher that serves the store outlives the processes of its
    host, so these need not be waited for."""
    has_server = rendezvous().has_server
    if not own.is_on_first_host or (own.rank > 0 and not has_server):
        return
    first = own.local_world_size if has_server else 1
    keys = [f"ack/{rank}" for rank in range(first, own.world_size)]
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(dist.DistError):
        while keys and not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


def claim(own: Processes) -> Claim | None:
    """Claim the report of why the run ends. None if another process has it.

    From then on SIGTERM is ignored: a launcher that has seen another process die sends it, and the
    report would be cut short or written twice.
    """
    if own.world_size == 1:
        return Claim(None)
    try:
        store = connect(own)
        granted = claim_for(own.rank, store)
        store.set(f"ack/{own.rank}", "1")
        if granted is None:
            _point_to_reporter(own, store)
            _wait_for_acks(store, own, _ACKS_S)
    except (LostPeerError, UserError, dist.DistError):  # no store can be asked
        granted = Claim(None) if own.local_rank == 0 else None
    if granted is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return granted


def claim_for(rank: int | None, store: dist.Store) -> Claim | None:
    """Claim the report in the given store. `rank` is None for the launcher, whose claim is granted
    once."""
    by = f"{_LAUNCHER} {uuid.uuid4().hex}" if rank is None else f"{rank} {_TOKEN}"
    token = f"{by} {socket.gethostname()}"
    winner = store.compare_set("reporter", "", token).decode()
    return Claim(store) if winner == token else None


def _point_to_reporter(own: Processes, store: dist.Store) -> None:
    """Print once, on each host without the report, which process reports why the run ends, and on
    which host."""
    rank, _, host = store.get("reporter").decode().split()
    if own.local_rank == 0 and own.has_other_hosts and host != socket.gethostname():
        sys.stderr.write(
            f"error: rank {rank} has ended the run, and says why on its host, {host}\n"
        )
        sys.stderr.flush()


def read_report(store: dist.Store) -> tuple[int | None, int | None]:
    """The rank that has claimed the report of why the run ends, and the exit code once it is
    written. Each is None until then; the rank is also None if the launcher reports."""
    reporter = int(store.get("reporter").split()[0]) if store.check(["reporter"]) else _LAUNCHER
    code = int(store.get("code")) if store.check(["code"]) else None
    return (None if reporter == _LAUNCHER else reporter), code


def advice(number: int | None) -> str:
    """The likely reason why a process died without an error, and a remedy. `number` is the signal
    that ended it, or None if unknown."""
    match number:
        case None | signal.SIGKILL:
            reason = (
                "Most likely the host, or the container, ran out of memory and the kernel killed "
                "it (`dmesg` tells). Start fewer processes or free memory of the host, then give "
                "the same command again"
            )
        case signal.SIGBUS:
            reason = (
                "Most likely /dev/shm or the disk is full. Make room, then give the same command "
                "again"
            )
        case signal.SIGSEGV | signal.SIGABRT | signal.SIGILL | signal.SIGFPE:
            reason = (
                "Native code has crashed: what it wrote is above. PYTHONFAULTHANDLER=1 in the "
                "environment shows where. Then give the same command again"
            )
        case _:
            reason = (
                "Somebody, or what schedules this machine, has ended it. Give the same command "
                "again"
            )
    return f"{reason}: `hone rl` and `hone sft` go on from their last checkpoint."


class Watch:
    """Context manager that publishes this process's progress and watches the others. With one
    process it does nothing.

    If the block ends with the error of a broken connection, LostPeerError is raised instead once
    the dead process is known.
    """

    def __init__(self, own: Processes, timeout_s: float) -> None:
        self._own, self._rank, self._size = own, own.rank, own.world_size
        self._timeout_s = timeout_s
        self._starter = os.getppid()  # once it is gone, the parent id changes
        self._interval_s = min(max(timeout_s / 20, 0.1), 5.0)
        self._store = connect(own) if own.world_size > 1 else None
        self._launcher_reports = has_hone_launcher()
        self._lock = threading.RLock()  # a signal handler may run while the main thread has it
        self._ending = threading.RLock()
        self._has_reported = False
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hone-watch", daemon=True)
        self._guard = threading.Thread(target=self._run_guard, name="hone-guard", daemon=True)
        self._has_joined_thread = threading.Event()
        self._num_rounds = 0
        """Number of rounds in which the store has answered."""
        self._groups: list[dist.ProcessGroup] = []
        self._channels: list[Channel] = []
        self._has_joined = 0
        self._step = 0
        self._progress = Progress(own.rank, os.getpid(), socket.gethostname(), since=time.time())
        self._others: dict[int, Progress] = {}
        self._previous: Any = None
        """Previous handler of SIGTERM."""
        self.terminated = PendingSignal()
        """A SIGTERM whose exception may have been swallowed (see `raising`)."""
        self.on_end: Callable[[str], None] | None = None
        """Called with the reason if this process ends the run because of another one."""
        self._updated_s: dict[int, float] = {}
        """When each of the others last published, by this process's monotonic clock."""

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._progress.phase

    @property
    def step(self) -> int:
        """The current step, 0 before the first one."""
        return self._progress.step

    def begin_step(self, step: int) -> None:
        """Set the current step."""
        self._step = step

    def enter(self, phase: str) -> None:
        """Set the current phase and publish it. Costs a few microseconds."""
        with self._lock:
            self._progress = replace(
                self._progress, phase=phase, step=self._step, since=time.time()
            )
        if self._store is not None:
            self._publish()

    def join(self) -> None:
        """Announce that this process waits for all others to join."""
        self._has_joined = 1
        self.enter("meeting the others")

    def take_role(self, role: str) -> None:
        """Set the role of this process if the run trains several models. Groups of different roles
        are different even if their names are equal."""
        with self._lock:
            self._progress = replace(self._progress, role=role)

    def follow(self, groups: Iterable[dist.ProcessGroup], channels: Iterable[Channel] = ()) -> None:
        """From now on compare the number of collectives in these groups and channels, and in no
        others, with other processes."""
        self._groups, self._channels = list(groups), list(channels)

    def __enter__(self) -> Self:
        if self._store is not None:
            self._updated_s = dict.fromkeys(self._peers, time.monotonic())
            self._publish()
            self._thread.start()
            if self._own.has_other_hosts:
                self._guard.start()
            if threading.current_thread() is threading.main_thread():
                self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._store is None:
            return
        # Meanwhile the thread runs on: if another process reports an error, it ends this process.
        lost = self._lost() if isinstance(error, RuntimeError | ConnectionError) else None
        self._stopped.set()
        self._thread.join()
        self._has_joined_thread.set()
        if lost is not None:
            raise LostPeerError(lost) from error
        if error is None:
            self._mark_done()
            if self._previous is not None:
                signal.signal(signal.SIGTERM, self._previous)
            if (number := self.terminated.take()) is not None:
                raise SystemExit(128 + number)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, with which a launcher ends the others once one process has died. Names
        the dead process first.

        After an error this handler stays until the error is reported.
        """
        if (gone := self._gone()) is not None and not self._launcher_reports:
            self._end(_lost_message(gone))
        self.terminated.number = number
        with contextlib.suppress(dist.DistError):
            self._mark_done()
        raise SystemExit(128 + number)

    def _mark_done(self) -> None:
        """Publish that this process is done: it waits for nobody, and nobody waits for it."""
        with self._lock:
            self._progress = replace(self._progress, is_done=True)
        self._publish()

    # -- this process --------------------------------------------------------------------------

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _publish(self) -> None:
        assert self._store is not None
        with self._lock:
            self._progress = replace(
                self._progress,
                where=_where(self._main),
                collectives=self._collectives(),
                updates=self._progress.updates + 1,
            )
            self._store.set(f"progress/{self._rank}", json.dumps(asdict(self._progress)))

    def _collectives(self) -> dict[str, int]:
        world = self._progress.role
        started = {f"{world}{group.group_name}": _num_started(group) for group in self._groups}
        started |= {channel.group_name: channel.num_started for channel in self._channels}
        return {"meeting": self._has_joined, **started}

    # -- the others ----------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._store is not None
        moved, moved_at = self._own_position(), time.monotonic()
        while not self._stopped.wait(self._interval_s):
            try:
                self._publish()
                self._read_others()
                has_failed = self._has_failed()
                gone = None if has_failed or self._launcher_reports else self._gone()
            except dist.DistError:
                self._end(f"error: the process that started this run is gone (pid {self._starter})")
            if has_failed:
                self._has_joined_thread.set()  # stops `_run_guard`: the store is no longer polled
                with contextlib.suppress(dist.DistError):
                    self._store.set(f"ack/{self._rank}", "1")
                    _point_to_reporter(self._own, self._store)
                    _wait_for_acks(self._store, self._own, _ACKS_S)
                self._end("")
            if gone is not None:
                self._end(_lost_message(gone))
            self._num_rounds += 1
            position = self._own_position()
            if position != moved:
                moved, moved_at = position, time.monotonic()
            waited_s = time.monotonic() - moved_at
            if waited_s > self._timeout_s and (missing := self._missing()):
                self._end_without(missing, waited_s)

    def _run_guard(self) -> None:
        """End this process if the store does not answer. The main and the watching thread would
        wait for it until the system gives up the connection, a quarter of an hour."""
        seen = num_waited = 0
        while not self._has_joined_thread.wait(self._interval_s):
            # Rounds are counted, not seconds: a process that was stopped has sent no request
            # meanwhile.
            seen, num_waited = self._num_rounds, 0 if self._num_rounds > seen else num_waited + 1
            if num_waited * self._interval_s > self._timeout_s:
                self._end_cut_off()

    def _end_cut_off(self) -> NoReturn:
        if self._own.local_rank == 0:  # all processes of this host find the same
            place, now = rendezvous(), time.time()
            sys.stderr.write(
                f"error: {socket.gethostname()}, with rank {self._rank}, is cut off: {place.host}:"
                f"{place.port}, where the processes of this run meet, has not answered for "
                f"{self._timeout_s:g} s (trainer.parallel.timeout_s). Is that host gone, or the "
                f"network between them? {self._progress.describe(now)}\n"
            )
            sys.stderr.flush()
        os._exit(1)

    def _own_position(self) -> tuple[Any, ...]:
        own = self._progress
        return own.phase, own.step, own.since, tuple(own.collectives.items())

    def _read_others(self) -> None:
        assert self._store is not None
        for rank in self._peers:
            last = read_progress(self._store, rank)
            if last is not None and last != self._others.get(rank):
                self._others[rank] = last
                self._updated_s[rank] = time.monotonic()

    def _has_failed(self) -> bool:
        assert self._store is not None
        return self._store.check(["reporter"])

    def _silent_s(self, rank: int) -> float:
        return time.monotonic() - self._updated_s[rank]

    def _is_silent(self, rank: int) -> bool:
        return self._silent_s(rank) > max(5 * self._interval_s, 2.0)

    def _missing(self) -> list[int]:
        """Ranks that this one waits for: the silent ones, or, if none is silent, those that are
        behind."""
        waiting = [r for r in self._peers if r not in self._others or not self._others[r].is_done]
        silent = [rank for rank in waiting if rank in self._others and self._is_silent(rank)]
        return silent or [rank for rank in waiting if self._is_behind(rank)]

    def _is_behind(self, rank: int) -> bool:
        theirs = self._others[rank].collectives if rank in self._others else {}
        own = self._progress.collectives
        shared = own.keys() & (theirs.keys() | {"meeting"})
        return any(theirs.get(name, 0) < own[name] for name in shared)

    def _end_without(self, missing: Sequence[int], waited_s: float) -> NoReturn:
        """Name the missing ranks, unless another process has done so, and end this process."""
        first, *others = missing
        also = f" (and {len(others)} others)" if others else ""
        screen = "\n".join(
            [
                f"error: {self._name(first)}{also} did not come: {self._last_progress(first)}",
                f"Rank {self._rank} has waited for {waited_s:.1f} s; "
                f"trainer.parallel.timeout_s is {self._timeout_s:g}. Raise it if that is what the "
                "work takes; otherwise see what that process does. All of them:",
                *self._all_described(),
            ]
        )
        self._end(screen)

    def _name(self, rank: int) -> str:
        last = self._others.get(rank)
        return f"rank {rank}" if last is None else last.name

    def _last_progress(self, rank: int) -> str:
        last = self._others.get(rank)
        if last is None:
            return "it has not been heard of since the start"
        description = last.doing(time.time())
        if self._is_silent(rank):
            description += (
                f", and has been silent for {self._silent_s(rank):.1f} s (stopped, or its machine "
                "gone?)"
            )
        return f"pid {last.pid} on {last.host} is in {description}"

    def _all_described(self) -> list[str]:
        known = {**self._others, self._rank: self._progress}
        now = time.time()
        return [
            f"  {known[rank].describe(now)}" if rank in known else f"  rank {rank}: never heard of"
            for rank in range(self._size)
        ]

    def _end(self, message: str) -> NoReturn:
        """End the process at once, without cleanup: the main thread may be in a collective that
        never ends."""
        try:
            # A signal handler of the main thread may call this while the watching thread reports.
            with self._ending:
                if message and not self._has_reported and self._may_report():
                    self._has_reported = True
                    sys.stderr.write(f"{message}\n")
                    sys.stderr.flush()
                    if self.on_end is not None:
                        self.on_end(message.removeprefix("error: "))
        finally:
            os._exit(1)

    def _may_report(self) -> bool:
        assert self._store is not None
        try:
            granted = claim_for(self._rank, self._store) is not None
            if granted:
                self._store.set(f"ack/{self._rank}", "1")
            return granted
        except dist.DistError:
            return self._own.local_rank == 0

    # -- broken connections --------------------------------------------------------------------

    def _lost(self) -> str | None:
        """Message that names the dead process whose end broke a connection, or None. Waits a short
        time for it to show."""
        deadline = time.monotonic() + _ERROR_REPORT_TIMEOUT_S
        while time.monotonic() < deadline:
            if (gone := self._gone()) is not None:
                if self._launcher_reports:
                    # The launcher knows how that process ended.
                    time.sleep(_ERROR_REPORT_TIMEOUT_S / 3)
                return _lost_message(gone).removeprefix("error: ")
            time.sleep(0.05)
        return None

    def _gone(self) -> Progress | None:
        """The last progress of a process of this host that died before it was done, or None."""
        assert self._store is not None
        for rank in self._peers:
            try:
                last = self._others.get(rank) or read_progress(self._store, rank)
                if last is None or last.host != self._progress.host or _is_alive(last.pid):
                    continue
                last = read_progress(self._store, rank)  # it may have become done in between
            except dist.DistError:
                continue
            if last is not None and not last.is_done:
                return last
        return None


def _lost_message(gone: Progress) -> str:
    return (
        f"error: {gone.name} (pid {gone.pid}) is gone without an error of its own, in "
        f"{gone.doing(time.time())}.\n{advice(None)}"
    )


def _num_started(group: dist.ProcessGroup) -> int:
    return group._get_sequence_number_for_group()  # pyright: ignore  # not in torch's stubs


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _where(thread: int) -> str:
    """Position of a thread as `file:line in function`: its innermost frame outside of
    `_UNINFORMATIVE_FILES`. At the border of a phase it is the frame of the phase, not of a function
    called there."""
    frame: FrameType | None = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    borders = [n for n, each in enumerate(frames) if each.f_code.co_filename == str(_SPANS)]
    for each in frames[max(borders, default=-1) + 1 :]:
        code = each.f_code
        if not code.co_filename.startswith(_UNINFORMATIVE_FILES):
            return f"{Path(code.co_filename).name}:{each.f_lineno} in {code.co_name}"
    return ""
