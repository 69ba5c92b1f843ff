"""A pool of engines, used as one engine.

Requests go to the engine with the least to do; those of one prompt stay together, since they share
its keys and values. Each engine has one question open, what it has finished, and answers once there
is something: what a pool of a thousand engines costs is a message for each answer, and none for
asking again. What a lost engine was working on goes to the others and is sampled from its
beginning, with its own seed. So every request is answered exactly once, whatever becomes of
engines.

An engine that has just been started has no weights. It gets requests from the next delivery on.
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
from hone.types import Completion, EngineLostError, EngineStats, Request, StopReason

__all__ = ["EnginePool"]

_log = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest that a step waits for completions."""
LINGER_S, MAX_LINGER_S = 2e-4, 0.2
"""How long a step waits for further completions after the first, times the number of engines; and
at most. What a step costs, much of it for waking up, is shared by what came."""
POLL_S, MAX_EMPTY_PER_S = 10.0, 20.0
"""Longest that an engine leaves a question open: its answer shows that it makes steps. Longer with
many engines, of which at most so many answer in a second that nothing has finished; a quarter of
the time in which it must show progress, where that is less."""
MAX_REQUEST_RETRIES = 3
"""Engines that may die with a request before it is taken for the cause."""
SETTLE_S = 10.0
"""Longest that engines may take to close, or to notice that a delivery of weights has failed."""


@dataclass(slots=True, eq=False)
class _Member(Member[Request]):
    """An engine. It is ready once it has weights."""

    sent: list[Pending] = field(default_factory=list[Pending])
    """Calls whose end nobody has waited for yet."""
    poll: Pending | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    beat: int = -1
    busy: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """When it was at work, in seconds of this host's wall clock; what touches is one."""


class EnginePool(Pool[Request, _Member]):
    """The `SamplingEngine` protocol over several workers, and the `Receivers` of their weights.

    Workers reach `hone.engine.worker.EngineWorker`s whose weights are still to be delivered. Where
    no other engine has weights the start of a replacement is waited for.
    """

    role, task_words, first_call = "engine", "requests", ("weight_version",)

    def __init__(self, workers: Sequence[Worker], **supervision: Any) -> None:
        """Takes the arguments of `Pool`."""
        super().__init__(workers, **supervision)
        self._finished: list[Completion] = []
        self._num_losses: Counter[str] = Counter()
        """Engines that died with a request, of those that are still open."""
        self._totals = _counters(EngineStats())
        """Of all engines, lost ones too."""
        self._usage: float | None = 0.0
        """Of the fullest engine; None: it must be looked for."""
        self._answered: SimpleQueue[_Member] = SimpleQueue()
        """Engines whose poll has an answer."""
        self._to_ask: set[_Member] = set()
        """Engines that have got work, or have answered, since they were asked."""
        self._next_look_s = 0.0
        self._poll_s = min(max(POLL_S, len(workers) / MAX_EMPTY_PER_S), self._timeout_s / 4)
        self._look_s = min(LOOK_S, self._timeout_s / 4)
        """Silence after which an engine is looked at that has not answered."""
        self.weight_version = 0
        """Version that was delivered last; 0 before."""
        self._is_syncing = False
        self._receivers: list[_Member] = []
        """Who takes part in a delivery of weights."""
        self._deliveries: list[tuple[_Member, Pending]] = []

    # -- requests ------------------------------------------------------------------------------

    @property
    def needs_weights(self) -> bool:
        """No engine has the current weights: nothing is sampled until they are delivered again."""
        return not any(member.is_ready for member in self._members)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._owners or self._waiting or self._finished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; `<group>/<index>` of one group go to one engine.

        One that can never fit is returned by `step` with its error.
        """
        self._add((request.id, request) for request in requests)
        self._assign()

    def take_busy(self) -> dict[str, list[tuple[float, float]]]:
        """When each engine was at work since the last call, by its name: beginning and end, in
        seconds of the wall clock."""
        taken: dict[str, list[tuple[float, float]]] = {}
        for member in self._members:
            taken[member.worker.name], member.busy = member.busy, []
        return taken

    def step(self) -> list[Completion]:
        """What any engine has finished, waiting for a moment where that is nothing.

        Where no engine has weights, requests wait for the caller to deliver them (`needs_weights`):
        it may be about other things meanwhile. Raises WorkersLostError, and RuntimeError between
        `begin_sync` and `finish_sync`.
        """
        if self._is_syncing:
            raise RuntimeError("step() while weights are being delivered; repeat a failed delivery")
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
        """Withdraw requests and return what they had, with stop reason `abort`.

        Those that have just finished are passed over: `step` returns them.
        """
        request_ids, aborted = list(request_ids), list[Completion]()
        asked: dict[_Member, list[str]] = {}
        for request_id in request_ids:
            if (owner := self._owners.get(request_id)) is not None:
                asked.setdefault(owner, []).append(request_id)
        calls: list[tuple[_Member, Pending | None]] = []
        for member, theirs in asked.items():
            for call in member.sent:  # calls may overtake each other
                self._answer(member, "submit", call)
            member.sent.clear()
            calls.append((member, self._call(member, "abort", theirs)))
        for member, call in calls:
            for completion in self._answer(member, "abort", call, default=()):
                self._finish(member, completion.request_id)
                aborted.append(completion)
        for request_id in request_ids:  # some wait because their engine has just been lost
            if (request := self._drop_waiting(request_id)) is not None:
                aborted.append(Completion.as_submitted(request, StopReason.ABORT))
        return aborted

    def stats(self) -> EngineStats:
        """Of all engines together, as of the last `step`; usage is that of the fullest."""
        if self._usage is None:
            usages = (member.stats.kv_cache_usage for member in self._members)
            self._usage = max(usages, default=0.0)
        counted = dict(zip(_COUNTED, self._totals, strict=True))
        return EngineStats(kv_cache_usage=self._usage, **counted)

    def close(self) -> None:
        """End all engines; unfinished requests are gone."""
        deadline = monotonic() + min(SETTLE_S, self._timeout_s)
        for member in self._members:
            if member.starting is None:
                with contextlib.suppress(TimeoutError, EngineLostError, WorkersLostError):
                    member.worker.call("close").result(max(deadline - monotonic(), 0.0))
            member.worker.kill()

    # -- weights: the `Receivers` of a `BroadcastSync` -----------------------------------------

    def begin_sync(self) -> None:
        """Choose who takes part in the next delivery: all engines that have started by now.

        Others are waited for only where no engine has weights. After a delivery that failed this
        is how it is repeated: engines that were lost in it, or are still at it, are replaced first.
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
        """Processes of each engine that takes part, by its name."""
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
        """Engines that took part hold `version` and get requests.

        Raises what a delivery raised, TimeoutError where one has not ended.
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
        """Replace an engine that was lost in a delivery that failed, or does not come out of it."""
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
        """Ask engines that have work for what they finish next."""
        while members:
            member = members.pop()
            if member.poll is None and member.tasks:
                member.poll = self._call(member, "poll", self._poll_s)
                if member.poll is not None:
                    member.poll.add_done_callback(partial(self._on_answer, member))

    def _on_answer(self, member: _Member, poll: Pending) -> None:
        """In any thread."""
        del poll
        self._answered.put(member)

    def _take_answered(self, wait_s: float) -> set[_Member]:
        """Engines that have answered; waits for the first, and a moment for others."""
        members = set[_Member]()
        with contextlib.suppress(Empty):
            members.add(self._answered.get(timeout=wait_s))
            if wait_s:
                sleep(min(LINGER_S * len(self._members), MAX_LINGER_S))
            while True:
                members.add(self._answered.get_nowait())
        return members

    def _look_at(self, member: _Member) -> None:
        """Take what an engine has finished, and judge whether it is at work."""
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
        """An engine's `stats` are these from now on."""
        before, member.stats = member.stats, stats
        gained = map(sub, _counters(stats), _counters(before))
        self._totals = tuple(map(add, self._totals, gained))
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
        """Prompt, and what may still be sampled."""
        num_resumed = len(task.resumed.token_ids) if task.resumed is not None else 0
        return len(task.prompt_ids) + task.sampling.max_tokens - num_resumed

    def _send(self, member: _Member, tasks: Mapping[str, Request]) -> None:
        if (call := self._call(member, "submit", list(tasks.values()))) is not None:
            member.sent.append(call)
        self._to_ask.add(member)

    def _on_loss(self, member: _Member) -> None:
        gone = {"kv_cache_usage": 0.0, "kv_cache_bytes": 0, "weight_bytes": 0}
        stats = replace(member.stats, num_running=0, num_waiting=0, num_lost=1, **gone)
        self._count(member, stats)
        member.stats = EngineStats()

    def _retryable(self, tasks: Mapping[str, Request], cause: str) -> Iterator[tuple[str, Request]]:
        """A request that was there each time that engines died may be why, and fails alone."""
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
"""Pauses that are none."""
_COUNTED = [stat.name for stat in fields(EngineStats) if stat.name != "kv_cache_usage"]
_counters = cast("Callable[[EngineStats], tuple[Any, ...]]", attrgetter(*_COUNTED))
"""The counts of an engine, in this order."""


def _add_busy(busy: list[tuple[float, float]], busy_s: float) -> None:
    """An engine that answers now has been at work for `busy_s` since its answer before: at the end
    of that time, since it answers when something has finished, and waits for what is sent."""
    if busy_s <= 0:
        return
    now = time()
    start = now - busy_s
    if busy and start - busy[-1][1] < _BLINK_S:
        start = busy.pop()[0]
    busy.append((start, now))


def _drop_ended(calls: list[Pending]) -> None:
    """Take calls out that have returned; raises what they raised."""
    for call in filter(_may_have_ended, calls.copy()):
        with contextlib.suppress(TimeoutError):
            call.result(0.0)
            calls.remove(call)


def _may_have_ended(call: Pending) -> bool:
    """To ask is a tenth of the work of an exception."""
    return not isinstance(call, Future) or call.done()
