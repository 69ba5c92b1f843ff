"""Which process keeps the others waiting, and what it did last.

Each process publishes in the rendezvous store what it does: phase and step when they change, and
every few moments that it is alive, where its main thread is, and how many collectives it has
started in each group. A thread reads the same of the others. Where this process has not moved for
`trainer.parallel.timeout_s` and another one

* has started fewer collectives in a group that both are in, or
* has fallen silent (stopped, or its machine is gone),

this process names it on one screen and ends. Where the store, on another host, has not answered for
as long, this host is cut off, and the process ends as well. A process that fails says so in the
store before its connections break, and those that learn of it end silently: what a person reads is
the first error alone. A process that was killed is reported by the launcher or, without hone's, by
another.
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
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import psutil
import torch
import torch.distributed as dist

from hone.distributed.channel import Channel
from hone.distributed.listening import host_store
from hone.distributed.processes import Processes, Rendezvous, has_hone_launcher, rendezvous
from hone.distributed.signals import Came
from hone.errors import UserError

__all__ = [
    "BACKSTOP_S",
    "Claim",
    "LostPeerError",
    "Progress",
    "UnreachableError",
    "Watch",
    "advice",
    "claim",
    "claim_for",
    "connect",
    "prefixed",
    "read_progress",
    "read_report",
]

BACKSTOP_S = 15.0
"""How much later than the watch the backend's own timeout comes, which cannot name anybody."""

_CONNECT_S = 60.0
_REFUSED_S = 5.0
"""How long a store that a launcher serves may refuse connections: it is there before any
process."""
_ACKS_S = 10.0
"""How long one that ends for another's sake serves the store to those who do not know of it yet:
more than the longest interval in which they look."""
_ERROR_REPORT_TIMEOUT_S = 3.0
"""How long a process whose connection broke waits for another one to say why."""
_TOKEN = uuid.uuid4().hex
"""Marks this process's claims, to distinguish them from those of others."""
_LAUNCHER = -1
"""In place of a rank: the launcher reports why the run ends."""
_SPANS = Path(__file__).parents[1] / "observe" / "spans.py"
_NOT_THE_PLACE = (str(Path(torch.__file__).parent), str(_SPANS), contextlib.__file__, __file__, "<")
"""Files whose frames say nothing about where a process is: every phase begins in these."""


class LostPeerError(ConnectionError):
    """Another process is gone, or did not come."""


class UnreachableError(LostPeerError):
    """The store in which all meet is gone, or was never there."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a process publishes of itself."""

    rank: int
    pid: int
    host: str
    role: str = ""
    """What it trains, where not all train the same."""
    phase: str = "start"
    step: int = 0
    since: float = 0.0
    """Wall clock time at which the phase began."""
    where: str = ""
    """Where its main thread is."""
    collectives: Mapping[str, int] = field(default_factory=dict[str, int])
    """Collectives started in each group."""
    updates: int = 0
    """How often it has published."""
    is_done: bool = False

    def describe(self, now: float) -> str:
        """For example `rank 1 (pid 71): train of step 2 for 9.3 s, at learner.py:80 in train`."""
        return f"{self.name} (pid {self.pid}): {self.doing(now)}"

    @property
    def name(self) -> str:
        """For example `rank 1`; where not all train the same, `rank 1 (of the critic)`."""
        return f"rank {self.rank} (of the {self.role})" if self.role else f"rank {self.rank}"

    def doing(self, now: float) -> str:
        """The same without who it is."""
        step = f" of step {self.step}" if self.step else ""
        where = f", at {self.where}" if self.where else ""
        return f"{self.phase}{step} for {max(now - self.since, 0.0):.1f} s{where}"


def connect(own: Processes) -> dist.Store:
    """A connection to the store of the launcher, to the part of it that is ours. Where there is no
    launcher the first process serves it, until it ends.

    Raises UnreachableError where nobody answers, and UserError where nothing names its address, or
    one that is not the first process's.
    """
    place = rendezvous()
    if own.rank == 0 and not place.has_server:
        _serve(place.host, place.port)
    _await_server(place)
    try:
        store = dist.TCPStore(place.host, place.port, timeout=timedelta(seconds=_CONNECT_S))
    except dist.DistError as error:
        raise UnreachableError(_unanswered(place, error)) from error
    return prefixed(store, place.attempt)


@cache
def _serve(host: str, port: int) -> dist.TCPStore:
    """The store of the first process, at an address of its machine."""
    try:
        return host_store(host, port, timeout_s=_CONNECT_S)
    except OSError as error:
        raise UserError(
            f"the first process cannot serve a store at MASTER_ADDR and MASTER_PORT: {error}"
        ) from error


def _await_server(place: Rendezvous) -> None:
    """Return once something listens there. torch tries for twice as long, and tells of each
    failure in fifty lines."""
    began_s = time.monotonic()
    while True:
        try:
            socket.create_connection((place.host, place.port), _CONNECT_S).close()
            return
        except OSError as error:
            is_refused = place.has_server and isinstance(error, ConnectionRefusedError)
            if time.monotonic() - began_s > (_REFUSED_S if is_refused else _CONNECT_S):
                raise UnreachableError(_unanswered(place, error)) from error
        time.sleep(0.2)


def _unanswered(place: Rendezvous, error: Exception) -> str:
    return (
        f"{socket.gethostname()} gets no answer at {place.host}:{place.port}, where the processes "
        f"of this run meet: {error}. Has the run ended on that host, and why? Otherwise see that "
        "hosts reach each other (MASTER_ADDR, which no host may take for loopback, firewalls)."
    )


def prefixed(store: dist.Store, attempt: int = 0) -> dist.Store:
    """The part of the launcher's store that belongs to this module."""
    return dist.PrefixStore(f"hone/{attempt}", store)


def read_progress(store: dist.Store, rank: int) -> Progress | None:
    """What `rank` published last; None where it has published nothing yet."""
    key = f"progress/{rank}"
    return Progress(**json.loads(store.get(key))) if store.check([key]) else None


@dataclass(frozen=True, slots=True)
class Claim:
    """The right, of one among all processes and the launcher, to report why the run ends."""

    _store: dist.Store | None

    def reported(self, code: int) -> None:
        """Record that the report is written, and the exit code of the run."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._store.set("code", str(code))

    def wait_for_acks(self, own: Processes) -> None:
        """Stay until all other processes know that the run ends, where their store ends with this
        one: those that come later could not ask, and would wait for it. For as long as one of
        them tries at most."""
        if self._store is not None:
            _wait_for_acks(self._store, own, _CONNECT_S)


def _wait_for_acks(store: dist.Store, own: Processes, timeout_s: float) -> None:
    """As `Claim.wait_for_acks`. A launcher that serves the store ends with the processes of its
    host, and is there for those."""
    has_server = rendezvous().has_server
    if not own.is_beside_first or (own.rank > 0 and not has_server):
        return
    first = own.local_world_size if has_server else 1
    keys = [f"ack/{rank}" for rank in range(first, own.world_size)]
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(dist.DistError):
        while keys and not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


def claim(own: Processes) -> Claim | None:
    """Claim to be the one that reports why the run ends; None where another process does.

    SIGTERM is ignored from then on: a launcher that has seen another process die sends it, and
    would cut the report short, or have it written twice.
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
    except (LostPeerError, UserError, dist.DistError):  # nobody can be asked
        granted = Claim(None) if own.local_rank == 0 else None
    if granted is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return granted


def claim_for(rank: int | None, store: dist.Store) -> Claim | None:
    """As `claim`, with a store at hand; the launcher has no rank, and its claim is granted once."""
    by = f"{_LAUNCHER} {uuid.uuid4().hex}" if rank is None else f"{rank} {_TOKEN}"
    token = f"{by} {socket.gethostname()}"
    held = store.compare_set("reporter", "", token).decode()
    return Claim(store) if held == token else None


def _point_to_reporter(own: Processes, store: dist.Store) -> None:
    """Once on each host where nobody says why the run ends: who does, on which other one."""
    rank, _, host = store.get("reporter").decode().split()
    if own.local_rank == 0 and own.has_other_hosts and host != socket.gethostname():
        sys.stderr.write(
            f"error: rank {rank} has ended the run, and says why on its host, {host}\n"
        )
        sys.stderr.flush()


def read_report(store: dist.Store) -> tuple[int | None, int | None]:
    """Who has claimed to report why the run ends, and the exit code once it has.

    Each None as long as there is none; the rank also where it is the launcher.
    """
    reporter = int(store.get("reporter").split()[0]) if store.check(["reporter"]) else _LAUNCHER
    code = int(store.get("code")) if store.check(["code"]) else None
    return (None if reporter == _LAUNCHER else reporter), code


def advice(number: int | None) -> str:
    """The likely reason why a process is gone without an error, and what to do about it.

    `number` is the signal that ended it; None where that is not known.
    """
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
    """Publishes what this process does, and watches the others, while it is entered.

    With one process it does nothing. Raises LostPeerError, when it is left with the error of a
    broken connection, in its place.
    """

    def __init__(self, own: Processes, timeout_s: float) -> None:
        self._own, self._rank, self._size = own, own.rank, own.world_size
        self._timeout_s = timeout_s
        self._starter = os.getppid()  # once it is gone, another process is the parent
        self._interval_s = min(max(timeout_s / 20, 0.1), 5.0)
        self._store = connect(own) if own.world_size > 1 else None
        self._launcher_reports = has_hone_launcher()
        self._lock = threading.RLock()  # a signal may find the main thread inside
        self._ending = threading.RLock()
        self._has_reported = False
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hone-watch", daemon=True)
        self._guard = threading.Thread(target=self._run_guard, name="hone-guard", daemon=True)
        self._has_joined_thread = threading.Event()
        self._num_rounds = 0
        """In which the store has answered."""
        self._groups: list[dist.ProcessGroup] = []
        self._channels: list[Channel] = []
        self._has_joined = 0
        self._step = 0
        self._progress = Progress(own.rank, os.getpid(), socket.gethostname(), since=time.time())
        self._others: dict[int, Progress] = {}
        self._previous: Any = None
        """What SIGTERM did before."""
        self.terminated = Came()
        """SIGTERM, where what its handler raised may have been swallowed (`raising`)."""
        self.on_end: Callable[[str], None] | None = None
        """Called with the reason where this process ends the run for another one's sake."""
        self._updated_s: dict[int, float] = {}
        """When each of the others was seen to publish, by this process's monotonic clock."""

    @property
    def phase(self) -> str:
        """What this process does."""
        return self._progress.phase

    @property
    def step(self) -> int:
        """The step it does that for; 0 before the first."""
        return self._progress.step

    def begin_step(self, step: int) -> None:
        """From now on phases belong to this step."""
        self._step = step

    def enter(self, phase: str) -> None:
        """Say that this process begins something. Costs a few microseconds."""
        with self._lock:
            self._progress = replace(
                self._progress, phase=phase, step=self._step, since=time.time()
            )
        if self._store is not None:
            self._publish()

    def join(self) -> None:
        """Say that this process now waits for all others to come."""
        self._has_joined = 1
        self.enter("meeting the others")

    def take_role(self, role: str) -> None:
        """Say what this process trains, where not all train the same: groups of other roles are
        others, whatever their names."""
        with self._lock:
            self._progress = replace(self._progress, role=role)

    def follow(self, groups: Iterable[dist.ProcessGroup], channels: Iterable[Channel] = ()) -> None:
        """From now on compare with other processes how many collectives they have started in
        these, and in no others."""
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
        # Meanwhile the thread goes on: where another process reports an error, it ends this one.
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
        """A launcher that has seen a process die ends the others so: say first who it was.

        After an error this stays in place until that is reported.
        """
        if (gone := self._gone()) is not None and not self._launcher_reports:
            self._end(_lost_message(gone))
        self.terminated.number = number
        with contextlib.suppress(dist.DistError):
            self._mark_done()
        raise SystemExit(128 + number)

    def _mark_done(self) -> None:
        """Say that this process needs nobody any more, nor is needed."""
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
                self._has_joined_thread.set()  # from here on the store is asked for nothing new
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
        """End this process where the store does not answer: whoever asks it then, the watching
        thread as well, waits until the system gives the connection up, a quarter of an hour."""
        seen = num_waited = 0
        while not self._has_joined_thread.wait(self._interval_s):
            # Counted, not timed: a process that was stopped has asked for nothing meanwhile.
            seen, num_waited = self._num_rounds, 0 if self._num_rounds > seen else num_waited + 1
            if num_waited * self._interval_s > self._timeout_s:
                self._end_cut_off()

    def _end_cut_off(self) -> NoReturn:
        if self._own.local_rank == 0:  # all of this host find the same
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
        """Ranks that this one waits for: the silent ones, or else those that are behind."""
        waiting = [r for r in self._peers if r not in self._others or not self._others[r].is_done]
        silent = [rank for rank in waiting if rank in self._others and self._is_silent(rank)]
        return silent or [rank for rank in waiting if self._is_behind(rank)]

    def _is_behind(self, rank: int) -> bool:
        theirs = self._others[rank].collectives if rank in self._others else {}
        own = self._progress.collectives
        shared = own.keys() & (theirs.keys() | {"meeting"})
        return any(theirs.get(name, 0) < own[name] for name in shared)

    def _end_without(self, missing: Sequence[int], waited_s: float) -> NoReturn:
        """Name who did not come, unless somebody else has done so, and end this process."""
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
        """Leave at once: the main thread may be in a collective that never ends."""
        try:
            # A signal may bring the main thread here while the watching one reports.
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
        """Who is dead, if anybody: its end broke our connection. Waits a little for it to show."""
        deadline = time.monotonic() + _ERROR_REPORT_TIMEOUT_S
        while time.monotonic() < deadline:
            if (gone := self._gone()) is not None:
                if self._launcher_reports:
                    time.sleep(_ERROR_REPORT_TIMEOUT_S / 3)  # it knows more: how that process ended
                return _lost_message(gone).removeprefix("error: ")
            time.sleep(0.05)
        return None

    def _gone(self) -> Progress | None:
        """Of a process of this host that is dead and was not done, what it published last."""
        assert self._store is not None
        for rank in self._peers:
            try:
                last = self._others.get(rank) or read_progress(self._store, rank)
                if last is None or last.host != self._progress.host or _is_alive(last.pid):
                    continue
                last = read_progress(self._store, rank)  # it may have been done since
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
    """`file:line in function` of a thread's innermost frame outside of `_NOT_THE_PLACE`. Where a
    phase begins or ends, that is the frame of the phase, and not of who is called at its border."""
    frame: FrameType | None = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    borders = [n for n, each in enumerate(frames) if each.f_code.co_filename == str(_SPANS)]
    for each in frames[max(borders, default=-1) + 1 :]:
        code = each.f_code
        if not code.co_filename.startswith(_NOT_THE_PLACE):
            return f"{Path(code.co_filename).name}:{each.f_lineno} in {code.co_name}"
    return ""
