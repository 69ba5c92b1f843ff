"""A pool of engines, used as one engine.

Requests go to the engine with the least to do; those of one prompt stay together, since they share
its keys and values. Engines are asked in turn for what they have finished. What a lost engine was
working on goes to the others and is sampled from its beginning, with its own seed. So every request
is answered exactly once, whatever becomes of engines.

An engine that has just been started has no weights. It gets requests from the next delivery on.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from time import monotonic, sleep
from typing import Any

from hone.distributed.pool import Member, Pending, Pool, Worker, WorkersLostError
from hone.types import Completion, EngineLostError, EngineStats, Request, StopReason

__all__ = ["EnginePool"]

_log = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest that a step waits for the first completion."""
MAX_REQUEST_RETRIES = 3
"""Engines that may die with a request before it is taken for the cause."""
SETTLE_S = 10.0
"""Longest that engines may take to close, or to notice that a delivery of weights has failed."""
NO_STATS = EngineStats(
    num_running=0,
    num_waiting=0,
    kv_cache_usage=0.0,
    num_preemptions=0,
    num_prompt_tokens=0,
    num_cached_tokens=0,
    num_generated_tokens=0,
    num_steps=0,
    busy_s=0.0,
    num_first_tokens=0,
)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A call that could not be made."""

    error: EngineLostError

    def result(self, timeout_s: float) -> Any:
        del timeout_s
        raise self.error


@dataclass(slots=True, eq=False)
class _Member(Member[Request]):
    """An engine. It is ready once it has weights."""

    sent: list[Pending] = field(default_factory=list[Pending])
    """Calls whose end nobody has waited for yet."""
    poll: Pending | None = None
    stats: EngineStats = NO_STATS
    beat: int = -1


class EnginePool(Pool[Request, _Member]):
    """The `SamplingEngine` protocol over several workers, and the `Receivers` of their weights.

    Workers reach `hone.engine.worker.EngineWorker`s whose weights are still to be delivered. Where
    no other engine has weights the start of a replacement is waited for. An exception of `sleep` or
    `wake` that leaves the engine in order has a note with its name.
    """

    role, task_words, first_call = "engine", "requests", ("weight_version",)

    def __init__(self, workers: Sequence[Worker], **supervision: Any) -> None:
        """Takes the arguments of `Pool`."""
        super().__init__(workers, **supervision)
        self._finished: list[Completion] = []
        self._num_losses: Counter[str] = Counter()
        """Engines that died with a request, of those that are still open."""
        self._gone = NO_STATS
        """Counters of engines that are lost."""
        self._weight_version = 0
        self._is_held = False
        self._is_asleep = False
        self._is_syncing = False
        self._receivers: list[_Member] = []
        """Who takes part in a delivery of weights."""
        self._deliveries: list[tuple[_Member, Pending]] = []

    # -- requests ------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Version that was delivered last; 0 before."""
        return self._weight_version

    @property
    def needs_weights(self) -> bool:
        """No engine has the current weights: nothing is sampled until they are delivered again."""
        return not any(member.is_ready for member in self._members)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._owners or self._waiting or self._finished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; `<group>/<index>` of one group go to one engine.

        One that can never fit is returned by `step` with its error. Raises ValueError, and queues
        none, where an id is in use.
        """
        ids: set[str] = set()
        for request in requests:
            waits = request.id in self._waiting.get(_group_of(request.id), ())
            if waits or request.id in self._owners or request.id in ids:
                raise ValueError(f"request id {request.id!r} is already in use")
            ids.add(request.id)
        self._add((request.id, request) for request in requests)
        self._assign()

    def step(self) -> list[Completion]:
        """What any engine has finished, waiting for a moment where that is nothing.

        Where no engine has weights, requests wait for the caller to deliver them (`needs_weights`):
        it may be about other things meanwhile. Raises WorkersLostError, and RuntimeError between
        `begin_sync` and `finish_sync`.
        """
        if self._is_syncing:
            raise RuntimeError("step() while weights are being delivered; repeat a failed delivery")
        self._assign()
        busy = [member for member in self._members if member.tasks]
        for member in busy:  # all are asked before one is waited for
            if member.poll is None:
                member.poll = self._call(member, "poll", WAIT_S)
        deadline = monotonic() + WAIT_S
        for member in busy:
            if member.poll is not None:
                self._look_at(member, deadline)
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
        aborted: list[Completion] = []
        asked: dict[int, list[str]] = {}
        for name in request_ids:
            if (owner := self._owners.get(name)) is not None:
                asked.setdefault(owner.index, []).append(name)
            else:
                aborted += self._withdraw(name)
        calls: list[tuple[_Member, list[str], Pending | None]] = []
        for index, names in asked.items():
            member = self._members[index]
            self._await_sent(member)
            calls.append((member, names, self._call(member, "abort", names)))
        for member, names, call in calls:
            for completion in self._answer(member, "abort", call, default=()):
                self._finish(member, completion.request_id)
                aborted.append(completion)
            if not self._is_live(member):
                for name in names:
                    aborted += self._withdraw(name)
        return aborted

    def stats(self) -> EngineStats:
        """Of all engines together, as of the last `step`; usage is that of the fullest."""
        total = self._gone
        for member in self._members:
            total = _added(total, member.stats)
        return total

    # -- all engines ---------------------------------------------------------------------------

    def hold(self) -> None:
        """No engine makes a step until `release`."""
        self._on_all("hold")
        self._is_held = True

    def release(self) -> None:
        """Go on after `hold`."""
        self._on_all("release")
        self._is_held = False

    def sleep(self) -> None:
        """Free all KV caches. Where one engine refuses, none sleeps."""
        self._on_all("sleep", undo="wake")
        self._is_asleep = True

    def wake(self) -> None:
        """Allocate all KV caches again. Where one engine cannot, none wakes."""
        self._on_all("wake", undo="sleep")
        self._is_asleep = False

    def close(self) -> None:
        """End all engines; unfinished requests are gone."""
        calls = [(member, self._try_to_close(member)) for member in self._members]
        deadline = monotonic() + min(SETTLE_S, self._timeout_s)
        for member, call in calls:
            if call is not None:
                with contextlib.suppress(TimeoutError, EngineLostError, WorkersLostError):
                    call.result(max(deadline - monotonic(), 0.0))
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
                if not self._is_there(member, deadline) and not self.needs_weights:
                    break
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
                call = member.worker.call("receive", spec, first_rank)
            except EngineLostError as error:
                call = _Failed(error)
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
        self._weight_version = version
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

    def _withdraw(self, request_id: str) -> list[Completion]:
        """As `abort`, of a request that no engine has; nothing where it is unknown."""
        request = self._drop_waiting(request_id)
        return [] if request is None else [_unchanged(request)]

    # -- as a pool -----------------------------------------------------------------------------

    def _look_at(self, member: _Member, deadline: float) -> None:
        """Take what an engine has finished, and judge whether it is at work."""
        assert member.poll is not None
        polled = None
        try:
            _drop_ended(member.sent)
            wait_s = 0.0 if self._finished else max(deadline - monotonic(), 0.0)
            with contextlib.suppress(TimeoutError):
                polled = member.poll.result(wait_s)
                member.poll = None
        except EngineLostError as error:
            self._lose(member, error.cause)
            return
        if polled is not None:
            member.stats = polled.stats
            for completion in polled.completions:
                self._finish(member, completion.request_id)
                self._finished.append(completion)
        has_progressed = polled is not None and polled.beat != member.beat
        if self._is_held or self._is_asleep or has_progressed:
            member.note_progress()
        else:
            member.note_silence()
        if polled is not None:
            member.beat = polled.beat
        if member.tasks:
            state = "it answers, but makes no step" if polled is not None else "it does not answer"
            self._lose_silent(member, self._timeout_s, state)

    def _await_sent(self, member: _Member) -> None:
        """Wait for what has been sent: calls may overtake each other."""
        for call in member.sent.copy():
            self._answer(member, "submit", call)
        member.sent.clear()

    def _on_all(self, method: str, *, undo: str = "") -> None:
        """Call a method of all engines that have started; where one refuses, undo the others."""
        members = [member for member in self._members if member.starting is None]
        calls = [(member, self._call(member, method)) for member in members]
        done: list[_Member] = []
        refusals: list[Exception] = []
        for member, call in calls:
            try:
                self._answer(member, method, call)
            except (RuntimeError, ValueError) as error:
                refusals.append(error)
            else:
                done.append(member)
        if not refusals:
            return
        for member in done if undo else ():
            if self._is_live(member):
                self._answer(member, undo, self._call(member, undo))
        raise refusals[0]

    def _try_to_close(self, member: _Member) -> Pending | None:
        """None where the engine is lost, or has not started yet."""
        with contextlib.suppress(TimeoutError, EngineLostError, RuntimeError, ValueError, OSError):
            if member.starting is not None:
                member.starting.result(0.0)
            return member.worker.call("close")
        return None

    def _new_member(self, index: int, worker: Worker, starting: Pending | None) -> _Member:
        return _Member(index, worker, starting)

    def _affinity(self, task_id: str) -> str:
        return _group_of(task_id)

    def _cost(self, task: Request) -> int:
        return _num_tokens(task)

    def _send(self, member: _Member, tasks: Mapping[str, Request]) -> None:
        if (call := self._call(member, "submit", list(tasks.values()))) is not None:
            member.sent.append(call)

    def _on_start(self, member: _Member) -> None:
        if self._is_held:
            self._answer(member, "hold", self._call(member, "hold"))

    def _on_loss(self, member: _Member) -> None:
        self._gone = replace(
            _added(self._gone, member.stats), num_running=0, num_waiting=0, kv_cache_usage=0.0
        )
        member.stats = NO_STATS

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
            self._finished.append(
                replace(_unchanged(request), stop_reason=StopReason.ERROR, error=error)
            )

    def _is_there(self, member: _Member, deadline: float) -> bool:
        """Whether an engine has started. One that must be waited for, since no other has weights,
        and has not started at the deadline is lost."""
        wait_s = max(deadline - monotonic(), 0.0) if self.needs_weights else 0.0
        if self._poll_start(member, wait_s):
            return True
        if self._is_live(member) and self.needs_weights:
            self._lose(member, "it has not started in time")
        return False


def _group_of(request_id: str) -> str:
    return request_id.rpartition("/")[0] or request_id


def _num_tokens(request: Request) -> int:
    """Prompt and what may still be sampled."""
    num_resumed = len(request.resumed.token_ids) if request.resumed is not None else 0
    return len(request.prompt_ids) + request.sampling.max_tokens - num_resumed


def _unchanged(request: Request) -> Completion:
    """What an aborted request had when it was submitted."""
    if request.resumed is not None:
        return replace(request.resumed, request_id=request.id, stop_reason=StopReason.ABORT)
    return Completion(
        request_id=request.id,
        token_ids=[],
        logprobs=[],
        weight_versions=[],
        stop_reason=StopReason.ABORT,
    )


def _added(a: EngineStats, b: EngineStats) -> EngineStats:
    """Counters add up; usage is the larger."""
    total: dict[str, Any] = {
        stat.name: getattr(a, stat.name) + getattr(b, stat.name) for stat in fields(EngineStats)
    }
    total["kv_cache_usage"] = max(a.kv_cache_usage, b.kv_cache_usage)
    return EngineStats(**total)


def _drop_ended(calls: list[Pending]) -> None:
    """Take calls out that have returned; raises what they raised."""
    for call in calls.copy():
        with contextlib.suppress(TimeoutError):
            call.result(0.0)
            calls.remove(call)
