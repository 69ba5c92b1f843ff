"""A pool of remote engines, used as one engine.

Requests go to the engine with the least load; requests of one prompt go to the same engine, since
they share its KV cache. Each engine has one pending `poll` call, which returns once requests have
finished. So a pool costs one message for each answer and none for polling again: with 1,024 engines
and 10,000 samples in flight, 3 % of a core (benchmarks/README.md). The requests of a lost engine go
to the others and are sampled from the start, with their own seeds. So every request is answered
exactly once, whichever engines are lost.

A new engine has no weights and gets requests from the next weight sync on. In a pool whose engines
load their weights it gets them once it has started.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import add, attrgetter, sub
from queue import Empty, SimpleQueue
from time import monotonic, sleep, time
from typing import Any, cast

from hone.distributed.pool import LOOK_S, Member, Pending, Pool, Worker, WorkersLostError
from hone.images.sending import with_pixels
from hone.types import Completion, EngineLostError, EngineStats, Request, StopReason

__all__ = ["EnginePool"]

_log = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest wait of a step for completions."""
LINGER_S, MAX_LINGER_S = 2e-4, 0.2
"""Wait of a step for further completions after the first one: for each engine, and at most. The
cost of a step, mostly for waking up, is then shared by more completions."""
POLL_S, MAX_EMPTY_PER_S = 10.0, 20.0
"""Longest duration of a `poll` call: its answer shows that the engine makes steps. It is longer in
large pools, so that at most `MAX_EMPTY_PER_S` empty answers arrive a second, and at most a quarter
of the time in which an engine must show progress."""
MAX_REQUEST_RETRIES = 3
"""Number of engines lost while they had a request after which the request fails."""
SETTLE_S = 10.0
"""Longest that engines may take to close, or to notice that a delivery of weights has failed."""


@dataclass(slots=True, eq=False)
class _Member(Member[Request]):
    """An engine of the pool. It is ready once it has weights."""

    sent: list[Pending] = field(default_factory=list[Pending])
    """Pending `submit` calls."""
    poll: Pending | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    beat: int = -1
    busy: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Intervals of work (start, end), in seconds of this host's wall clock; adjacent ones are
    merged."""


class EnginePool(Pool[Request, _Member]):
    """Several engines as one `SamplingEngine`, and as the `Receivers` of a weight sync.

    Each worker calls a remote `hone.engine.worker.EngineWorker`. Where no engine has weights, a
    weight sync waits for the start of a replacement.
    """

    role, task_words, first_call = "engine", "requests", ("weight_version",)

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        load_weights: bool = False,
        max_requests: int | None = None,
        **supervision: Any,
    ) -> None:
        """`supervision` are the arguments of `Pool`. With `load_weights` the engines load their
        weights when they start, and none are sent to them. `max_requests` is the largest number of
        requests of an engine at a time, so that later ones can go to a restarted engine; None is no
        limit."""
        super().__init__(workers, **supervision)
        self._load_weights = load_weights
        self._max_requests = max_requests
        self._finished: list[Completion] = []
        self._num_losses: Counter[str] = Counter()
        """By id of an unfinished request, the number of engines lost while they had it."""
        self._totals = _counters(EngineStats())
        """Counters summed over all engines, including lost ones."""
        self._usage: float | None = 0.0
        """KV cache usage of the fullest engine; None: to be computed."""
        self._answered: SimpleQueue[_Member] = SimpleQueue()
        """Engines whose `poll` call has returned."""
        self._to_ask: set[_Member] = set()
        """Engines that have new requests, or have answered, since the last `poll` call."""
        self._next_look_s = 0.0
        self._poll_s = min(max(POLL_S, len(workers) / MAX_EMPTY_PER_S), self._timeout_s / 4)
        self._look_s = min(LOOK_S, self._timeout_s / 4)
        """Silence after which an engine's state is checked."""
        self.weight_version = 0
        """Version of the last weight sync; 0 before the first."""
        self._is_syncing = False
        self._receivers: list[_Member] = []
        """Engines that take part in the weight sync."""
        self._deliveries: list[tuple[_Member, Pending]] = []

    def await_starts(self) -> None:
        """Wait briefly for all engines that load their weights to report their start. Otherwise the
        first one to report would get all requests."""
        deadline = monotonic() + min(SETTLE_S, self._timeout_s)
        while monotonic() < deadline:
            self._check_starts()
            if all(member.starting is None for member in self._members):
                return
            sleep(WAIT_S)

    # -- requests ------------------------------------------------------------------------------

    @property
    def needs_weights(self) -> bool:
        """Whether no engine has the current weights: sampling waits for the next weight sync."""
        return not any(member.is_ready for member in self._members)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._owners or self._waiting or self._finished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; those of one group (`<group>/<index>`) go to the same engine.

        A request that can never fit is returned by `step` with its error.
        """
        self._add((request.id, request) for request in requests)
        self._assign()

    def take_busy(self) -> dict[str, list[tuple[float, float]]]:
        """The intervals of work (start, end) of each engine since the last call, by its name, in
        seconds of the wall clock."""
        taken: dict[str, list[tuple[float, float]]] = {}
        for member in self._members:
            taken[member.worker.name], member.busy = member.busy, []
        return taken

    def step(self) -> list[Completion]:
        """The completions that engines have finished; waits for a moment where there are none.

        Where no engine has weights, requests wait until the caller pushes them (`needs_weights`).
        Raises WorkersLostError, and RuntimeError between `begin_sync` and `finish_sync`.
        """
        if self._is_syncing:
            raise RuntimeError("step() while weights are being delivered; repeat a failed delivery")
        if self._load_weights:
            self._check_starts()
        self._assign()
        self._ask_all(self._to_ask)
        for member in self._take_answered(WAIT_S if self._owners and not self._finished else 0.0):
            self._look_at(member)
        if (now := monotonic()) >= self._next_look_s:
            self._next_look_s = now + self._look_s / 4
            for member in self._members:
                if member.tasks and now - member.looked_at > self._look_s:
                    self._look_at(member)
        if self._waiting and self.needs_weights:
            sleep(WAIT_S)
        finished, self._finished = self._finished, []
        for completion in finished:
            self._num_losses.pop(completion.request_id, None)
        return finished

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return their tokens so far, with stop reason `abort`.

        Requests that have just finished are left out: `step` returns them.
        """
        request_ids, aborted = list(request_ids), list[Completion]()
        ids_by_member: dict[_Member, list[str]] = {}
        for request_id in request_ids:
            if (owner := self._owners.get(request_id)) is not None:
                ids_by_member.setdefault(owner, []).append(request_id)
        calls: list[tuple[_Member, Pending | None]] = []
        for member, member_ids in ids_by_member.items():
            for call in member.sent:  # calls may overtake each other
                self._answer(member, "submit", call)
            member.sent.clear()
            calls.append((member, self._call(member, "abort", member_ids)))
        for member, call in calls:
            for completion in self._answer(member, "abort", call, default=()):
                self._finish(member, completion.request_id)
                aborted.append(completion)
        for request_id in request_ids:  # some are queued again, since their engine was lost
            if (request := self._drop_waiting(request_id)) is not None:
                aborted.append(Completion.as_submitted(request, StopReason.ABORT))
        return aborted

    def stats(self) -> EngineStats:
        """Statistics of all engines together, as of the last `step`; the KV cache usage is that of
        the fullest engine."""
        if self._usage is None:
            usages = (member.stats.kv_cache_usage for member in self._members)
            self._usage = max(usages, default=0.0)
        counted = dict(zip(_COUNTED, self._totals, strict=True))
        return EngineStats(kv_cache_usage=self._usage, **counted)

    def close(self) -> None:
        """End all engines and drop unfinished requests."""
        deadline = monotonic() + min(SETTLE_S, self._timeout_s)
        for member in self._members:
            if member.starting is None:
                with contextlib.suppress(TimeoutError, EngineLostError, WorkersLostError):
                    member.worker.call("close").result(max(deadline - monotonic(), 0.0))
            member.worker.kill()

    # -- weights: the `Receivers` of a `BroadcastSync` -----------------------------------------

    def begin_sync(self) -> None:
        """Choose the engines of the next delivery: all that have started by now.

        It waits for others only where no engine has weights. After a failed delivery, call it to
        repeat the delivery: engines that were lost in it, or do not return from it, are replaced
        first.
        """
        self._is_syncing = True
        deliveries, self._deliveries = self._deliveries, []
        deadline = monotonic() + min(SETTLE_S, self._timeout_s)
        for member, delivery in deliveries:
            self._judge(member, delivery, max(deadline - monotonic(), 0.0))
        deadline = monotonic() + self._start_timeout_s
        for index in range(len(self._members)):
            while (member := self._members[index]).starting is not None:
                wait_s = max(deadline - monotonic(), 0.0) if self.needs_weights else 0.0
                if self._poll_start(member, wait_s):
                    continue
                if not self.needs_weights:
                    break
                self._lose(member, "it has not started in time")
        self._receivers = [member for member in self._members if member.starting is None]

    @property
    def engine_ranks(self) -> Mapping[str, int]:
        """Number of ranks of each engine that takes part, by its name."""
        return {member.worker.name: member.worker.num_ranks for member in self._receivers}

    def start_receive(self, spec: Any) -> Sequence[Pending]:
        """Call `receive(spec, first rank)` of each engine that takes part, in this order."""
        first_rank = 0
        for member in self._receivers:
            try:
                call: Pending = member.worker.call("receive", spec, first_rank)
            except EngineLostError as error:
                call = failed = Future[Any]()
                failed.set_exception(error)
            self._deliveries.append((member, call))
            first_rank += member.worker.num_ranks
        return [call for _, call in self._deliveries]

    def finish_sync(self, version: int) -> None:
        """Give requests to the engines that took part, which have `version` now.

        Raises the error of a delivery, and TimeoutError where one has not ended.
        """
        for _, delivery in self._deliveries:
            delivery.result(0.0)
        self._deliveries = []
        for member in self._receivers:
            member.is_ready = True
            member.note_progress()
        self.weight_version = version
        self._is_syncing = False
        self._assign()

    def _judge(self, member: _Member, delivery: Pending, wait_s: float) -> None:
        """Replace an engine that was lost in a failed delivery, or does not return from it."""
        try:
            delivery.result(wait_s)
        except EngineLostError as error:
            self._lose(member, error.cause)
        except TimeoutError:
            self._lose(member, "it hangs in a delivery of weights that has failed")
        except (RuntimeError, ValueError, OSError) as error:
            _log.debug("%s can take weights again after %r", member.worker.name, error)

    # -- as a pool -----------------------------------------------------------------------------

    def _ask_all(self, members: set[_Member]) -> None:
        """Start a `poll` call on each of these engines that has requests."""
        while members:
            member = members.pop()
            if member.poll is None and member.tasks:
                member.poll = self._call(member, "poll", self._poll_s)
                if member.poll is not None:
                    member.poll.add_done_callback(partial(self._on_answer, member))

    def _on_answer(self, member: _Member, poll: Pending) -> None:
        """Called in any thread."""
        del poll
        self._answered.put(member)

    def _take_answered(self, wait_s: float) -> set[_Member]:
        """Engines that have answered; waits for the first, and briefly for others."""
        members = set[_Member]()
        with contextlib.suppress(Empty):
            members.add(self._answered.get(timeout=wait_s))
            if wait_s:
                sleep(min(LINGER_S * len(self._members), MAX_LINGER_S))
            while True:
                members.add(self._answered.get_nowait())
        return members

    def _look_at(self, member: _Member) -> None:
        """Take an engine's completions, and check that it makes progress."""
        if member.poll is None or not self._is_live(member):
            return
        polled = None
        try:
            _drop_ended(member.sent)
            if _may_have_ended(member.poll):
                with contextlib.suppress(TimeoutError):
                    polled = member.poll.result(0.0)
                    member.poll = None
                    self._to_ask.add(member)
        except EngineLostError as error:
            self._lose(member, error.cause)
            return
        if polled is not None:
            self._count(member, polled.stats)
            for completion in polled.completions:
                self._finish(member, completion.request_id)
                self._finished.append(completion)
        if polled is not None and polled.beat != member.beat:
            member.beat = polled.beat
            member.note_progress()
        else:
            member.note_silence()
        if member.tasks:
            state = "it answers, but makes no step" if polled is not None else "it does not answer"
            self._lose_silent(member, self._timeout_s, state)

    def _count(self, member: _Member, stats: EngineStats) -> None:
        """Replace an engine's statistics, and update the totals."""
        before, member.stats = member.stats, stats
        differences = map(sub, _counters(stats), _counters(before))
        self._totals = tuple(map(add, self._totals, differences))
        _add_busy(member.busy, stats.busy_s - before.busy_s)
        if self._usage is not None and stats.kv_cache_usage >= self._usage:
            self._usage = stats.kv_cache_usage
        elif before.kv_cache_usage == self._usage:
            self._usage = None

    def _new_member(self, index: int, worker: Worker, starting: Pending | None) -> _Member:
        return _Member(index, worker, starting)

    def _affinity(self, task_id: str) -> str:
        return task_id.rpartition("/")[0]

    def _cost(self, task: Request) -> int:
        """Tokens of the prompt, and tokens that may still be sampled."""
        num_resumed = len(task.resumed.token_ids) if task.resumed is not None else 0
        return len(task.prompt_ids) + task.sampling.max_tokens - num_resumed

    def _has_room(self, member: _Member) -> bool:
        return self._max_requests is None or len(member.tasks) < self._max_requests

    def _send(self, member: _Member, tasks: Mapping[str, Request]) -> None:
        if (call := self._call(member, "submit", with_pixels(tasks.values()))) is not None:
            member.sent.append(call)
        self._to_ask.add(member)

    def _on_start(self, member: _Member) -> None:
        if self._load_weights:
            member.is_ready = True
            member.note_progress()

    def _on_loss(self, member: _Member) -> None:
        gone = {"kv_cache_usage": 0.0, "kv_cache_bytes": 0, "weight_bytes": 0}
        stats = replace(member.stats, num_running=0, num_waiting=0, num_lost=1, **gone)
        self._count(member, stats)
        member.stats = EngineStats()

    def _retryable(self, tasks: Mapping[str, Request], cause: str) -> Iterator[tuple[str, Request]]:
        """The requests to sample again. One that several engines had when they died may be the
        cause: it fails instead."""
        for request_id, request in tasks.items():
            self._num_losses[request_id] += 1
            if self._num_losses[request_id] < MAX_REQUEST_RETRIES:
                yield request_id, request
                continue
            _log.warning("%s fails: %d engines died with it", request_id, MAX_REQUEST_RETRIES)
            error = (
                f"{MAX_REQUEST_RETRIES} engines died while they had it, the last of this: {cause}"
            )
            self._finished.append(Completion.as_submitted(request, StopReason.ERROR, error))


_BLINK_S = 0.02
"""Longest gap between two intervals of work that are merged, in seconds."""
_COUNTED = [stat.name for stat in fields(EngineStats) if stat.name != "kv_cache_usage"]
_counters = cast("Callable[[EngineStats], tuple[Any, ...]]", attrgetter(*_COUNTED))
"""The counters of `EngineStats` as a tuple, in the order of `_COUNTED`."""


def _add_busy(busy: list[tuple[float, float]], busy_s: float) -> None:
    """Add the interval of work that ends now and lasted `busy_s`, for an engine that answers now.
    The work lies at the end of the time since its last answer: it answers when requests finish, and
    before the work it waited for requests."""
    if busy_s <= 0:
        return
    now = time()
    start = now - busy_s
    if busy and start - busy[-1][1] < _BLINK_S:
        start = busy.pop()[0]
    busy.append((start, now))


def _drop_ended(calls: list[Pending]) -> None:
    """Remove calls that have returned. Raises their errors."""
    for call in filter(_may_have_ended, calls.copy()):
        with contextlib.suppress(TimeoutError):
            call.result(0.0)
            calls.remove(call)


def _may_have_ended(call: Pending) -> bool:
    """Whether `call.result` may return: a check costs a tenth of a TimeoutError."""
    return not isinstance(call, Future) or call.done()
