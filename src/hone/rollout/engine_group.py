"""Several engines that drive themselves, used as one.

Requests are dealt to the engine with the least to do; those of one prompt stay together, since they
share its keys and values. Engines are asked in turn for what they have finished. One that is lost,
or shows no progress while it has work, is killed and started anew; what it was working on goes to
the others and is sampled from its beginning, with its own seed. So every request is answered
exactly once, whatever becomes of engines.

An engine that has just been started has no weights. It gets requests from the next delivery on.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from time import monotonic, sleep
from typing import Any

from hone.rollout.handles import EngineHandle, EnginesLostError, RecordEvent
from hone.types import Completion, EngineLostError, EngineStats, Request, StopReason
from hone.weights.protocol import Pending

__all__ = ["EngineGroup"]

_log = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest that a step waits for the first completion."""
MAX_LOSSES = 3
"""Engines that may die with a request before it is taken for the cause."""
LOOK_S = 1.0
"""Longest silence that one look counts: an engine is not silent while nobody asks it."""
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
class _Member:
    """One engine from its start to its end; what is started in its place is another."""

    index: int
    handle: EngineHandle
    starting: Pending | None
    """None once it has answered its first call."""
    has_weights: bool = False
    requests: dict[str, Request] = field(default_factory=dict[str, Request])
    """Given to it and not answered."""
    num_tokens: int = 0
    """Still to be computed for these, at most."""
    sent: list[Pending] = field(default_factory=list[Pending])
    """Calls whose end nobody has waited for yet."""
    poll: Pending | None = None
    stats: EngineStats = NO_STATS
    beat: int = -1
    silent_s: float = 0.0
    """Time, as far as anybody looked, without progress."""
    looked_at: float = 0.0

    def give(self, requests: Iterable[Request]) -> None:
        if not self.requests:
            self.silent_s, self.looked_at = 0.0, monotonic()
        for request in requests:
            self.requests[request.id] = request
            self.num_tokens += _num_tokens(request)

    def take_back(self, request_id: str) -> None:
        self.num_tokens -= _num_tokens(self.requests.pop(request_id))


class EngineGroup:
    """The `SamplingEngine` protocol over several hosts, and the `Receivers` of their weights.

    `handles` are engines whose weights are still to be delivered. An engine that has not answered,
    or shown progress while it had work, for `timeout_s` is taken for lost, killed, and replaced by
    `restart(index)`, which need not wait for it (None: engines in threads, whose memory cannot be
    freed, are not replaced). Where nobody else has weights its start is waited
    for, `start_timeout_s` (unset: `timeout_s`) at most. After `max_restarts` of these, in all,
    EnginesLostError names the engine and what it died of. One thread at a time may call.

    An exception of `sleep` or `wake` that leaves the engine in order has a note with its name.
    """

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        *,
        restart: Callable[[int], EngineHandle] | None,
        timeout_s: float,
        max_restarts: int,
        start_timeout_s: float | None = None,
    ) -> None:
        self._restart = restart
        self._timeout_s = timeout_s
        self._start_timeout_s = timeout_s if start_timeout_s is None else start_timeout_s
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._event: RecordEvent | None = None
        self._members = [
            _Member(index, handle, handle.call("weight_version"))
            for index, handle in enumerate(handles)
        ]
        self._owners: dict[str, _Member] = {}
        """Of every request that an engine has."""
        self._waiting: dict[str, dict[str, Request]] = {}
        """Requests that no engine has, by group and id."""
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

    def report_to(self, event: RecordEvent) -> None:
        """From now on call `event("engine_lost", name=..., restart=..., cause=...)` for each loss;
        `restart` is the number of the one that follows, None where none is left."""
        self._event = event

    # -- requests ------------------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        """Version that was delivered last; 0 before."""
        return self._weight_version

    @property
    def needs_weights(self) -> bool:
        """No engine has the current weights: nothing is sampled until they are delivered again."""
        return not any(member.has_weights for member in self._members)

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
        self._put_back(requests)
        self._deal()

    def step(self) -> list[Completion]:
        """What any engine has finished, waiting for a moment where that is nothing.

        Where no engine has weights, requests wait for the caller to deliver them (`needs_weights`):
        it may be about other things meanwhile. Raises EnginesLostError, and RuntimeError between
        `begin_sync` and `finish_sync`.
        """
        if self._is_syncing:
            raise RuntimeError("step() while weights are being delivered; repeat a failed delivery")
        self._deal()
        busy = [member for member in self._members if member.requests]
        for member in busy:  # all of them begin before one is waited for
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
            self._settle(member)
            calls.append((member, names, self._call(member, "abort", names)))
        for member, names, call in calls:
            for completion in self._answer(member, "abort", call, default=()):
                self._forget(member, completion.request_id)
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
                with contextlib.suppress(TimeoutError, EngineLostError, EnginesLostError):
                    call.result(max(deadline - monotonic(), 0.0))
            member.handle.kill()

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
                if not self._has_started(member, deadline) and not self.needs_weights:
                    break
        self._receivers = [member for member in self._members if member.starting is None]

    @property
    def engine_ranks(self) -> Mapping[str, int]:
        """Processes of each engine that takes part, by its name."""
        return {member.handle.name: member.handle.num_ranks for member in self._receivers}

    def start_receive(self, spec: Any) -> Sequence[Pending]:
        """Call `receive(spec, first rank)` of each engine that takes part, in this order."""
        first_rank = 0
        for member in self._receivers:
            try:
                call = member.handle.call("receive", spec, first_rank)
            except EngineLostError as error:
                call = _Failed(error)
            self._deliveries.append((member, call))
            first_rank += member.handle.num_ranks
        return [call for _, call in self._deliveries]

    def finish_sync(self, version: int) -> None:
        """Engines that took part hold `version` and get requests.

        Raises what a delivery raised, TimeoutError where one has not ended.
        """
        for _, delivery in self._deliveries:
            delivery.result(0.0)
        self._deliveries = []
        now = monotonic()
        for member in self._receivers:
            member.has_weights = True
            member.silent_s, member.looked_at = 0.0, now
        self._weight_version = version
        self._is_syncing = False
        self._deal()

    def _judge(self, member: _Member, delivery: Pending, wait_s: float) -> None:
        """Replace an engine that was lost in a delivery that failed, or does not come out of it."""
        try:
            delivery.result(wait_s)
        except EngineLostError as error:
            self._lose(member, error.cause)
        except TimeoutError:
            self._lose(member, "it hangs in a delivery of weights that has failed")
        except (RuntimeError, ValueError, OSError) as error:
            _log.debug("%s can take weights again after %r", member.handle.name, error)

    # -- dealing -------------------------------------------------------------------------------

    def _deal(self) -> None:
        """Give waiting requests, group by group, to the engine with the least to compute."""
        while self._waiting:
            members = [member for member in self._members if member.has_weights]
            if not members:
                return
            group = next(iter(self._waiting))
            requests = self._waiting.pop(group)
            member = min(members, key=lambda member: member.num_tokens)
            member.give(requests.values())
            self._owners.update(dict.fromkeys(requests, member))
            if (call := self._call(member, "submit", list(requests.values()))) is not None:
                member.sent.append(call)

    def _put_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._waiting.setdefault(_group_of(request.id), {})[request.id] = request

    def _withdraw(self, request_id: str) -> list[Completion]:
        """As `abort`, of a request that no engine has; nothing where it is unknown."""
        group = _group_of(request_id)
        request = self._waiting.get(group, {}).pop(request_id, None)
        if request is None:
            return []
        if not self._waiting[group]:
            del self._waiting[group]
        return [_unchanged(request)]

    def _forget(self, member: _Member, request_id: str) -> None:
        member.take_back(request_id)
        del self._owners[request_id]

    # -- asking --------------------------------------------------------------------------------

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
                self._forget(member, completion.request_id)
                self._finished.append(completion)
        now = monotonic()
        if self._is_held or self._is_asleep or (polled is not None and polled.beat != member.beat):
            member.silent_s = 0.0
        else:
            member.silent_s += min(now - member.looked_at, LOOK_S)
        member.looked_at = now
        if polled is not None:
            member.beat = polled.beat
        if member.requests and member.silent_s > self._timeout_s:
            state = "answers, but makes no step" if polled is not None else "does not answer"
            self._lose(member, f"no progress for {member.silent_s:.1f} s: it {state}")

    def _settle(self, member: _Member) -> None:
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

    def _call(self, member: _Member, method: str, *args: Any) -> Pending | None:
        """None where the engine is lost."""
        if not self._is_live(member):
            return None
        try:
            return member.handle.call(method, *args)
        except EngineLostError as error:
            self._lose(member, error.cause)
            return None

    def _answer(
        self, member: _Member, method: str, call: Pending | None, *, default: Any = None
    ) -> Any:
        """What a call returns, or `default` where its engine is lost."""
        if call is None or not self._is_live(member):
            return default
        try:
            return call.result(self._timeout_s)
        except EngineLostError as error:
            self._lose(member, error.cause)
        except TimeoutError:
            self._lose(member, f"no answer to {method} within {self._timeout_s:g} s")
        except (RuntimeError, ValueError) as error:
            error.add_note(f"in {method} of {member.handle.name}")
            raise
        return default

    def _try_to_close(self, member: _Member) -> Pending | None:
        """None where the engine is lost, or has not started yet."""
        with contextlib.suppress(TimeoutError, EngineLostError, RuntimeError, ValueError, OSError):
            if member.starting is not None:
                member.starting.result(0.0)
            return member.handle.call("close")
        return None

    # -- lost and found ------------------------------------------------------------------------

    def _is_live(self, member: _Member) -> bool:
        return self._members[member.index] is member

    def _lose(self, member: _Member, cause: str) -> None:
        """Kill an engine, take its requests back, and start another in its place."""
        if not self._is_live(member):
            return
        name = member.handle.name
        member.handle.kill()
        num_requests = len(member.requests)
        for request_id in member.requests:
            del self._owners[request_id]
        self._put_back(self._unsuspected(member.requests.values(), f"{name}: {cause}"))
        member.requests, member.num_tokens, member.has_weights = {}, 0, False
        self._gone = replace(
            _added(self._gone, member.stats), num_running=0, num_waiting=0, kv_cache_usage=0.0
        )
        member.stats = NO_STATS
        is_last = self._num_restarts == self._max_restarts
        if self._event is not None:
            restart = None if is_last else self._num_restarts + 1
            self._event("engine_lost", name=name, restart=restart, cause=cause)
        if self._restart is None:
            raise EnginesLostError(f"{name}, a thread of this process, has failed: {cause}")
        if is_last:
            raise EnginesLostError(
                f"{name} is lost, and {self._max_restarts} restarts of engines have been used up "
                f"(cluster.max_engine_restarts). What it died of: {cause}"
            )
        handle = self._restart(member.index)
        self._num_restarts += 1
        _log.warning(
            "%s is lost and started anew (restart %d of at most %d); its %d requests begin again: "
            "%s",
            name,
            self._num_restarts,
            self._max_restarts,
            num_requests,
            cause,
        )
        fresh = _Member(member.index, handle, None)
        self._members[member.index] = fresh
        fresh.starting = self._call(fresh, "weight_version")

    def _unsuspected(self, requests: Iterable[Request], cause: str) -> Iterator[Request]:
        """Those that another engine may try. Who was there each time that engines died may be why,
        and fails alone."""
        for request in requests:
            self._num_losses[request.id] += 1
            if self._num_losses[request.id] < MAX_LOSSES:
                yield request
                continue
            _log.warning("%s fails: %d engines died with it", request.id, MAX_LOSSES)
            error = f"{MAX_LOSSES} engines died while they had it, the last of this: {cause}"
            self._finished.append(
                replace(_unchanged(request), stop_reason=StopReason.ERROR, error=error)
            )

    def _has_started(self, member: _Member, deadline: float) -> bool:
        """Whether an engine has answered its first call; it then does as the others do.

        One that must be waited for and has not come at the deadline is lost.
        """
        assert member.starting is not None
        wait_s = max(deadline - monotonic(), 0.0) if self.needs_weights else 0.0
        try:
            member.starting.result(wait_s)
        except EngineLostError as error:
            self._lose(member, error.cause)
            return False
        except TimeoutError:
            if self.needs_weights:
                self._lose(member, "it has not started in time")
            return False
        except EnginesLostError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            self._lose(member, f"it could not be made: {error}")
            return False
        member.starting = None
        if self._is_held:
            self._answer(member, "hold", self._call(member, "hold"))
        return True


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
