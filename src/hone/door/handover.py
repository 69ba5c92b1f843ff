"""Between the server and the thread that owns the runner.

    event loop of the server                          thread that owns the runner
    await handover.sample(prompt, ...)  ──queue──►    runner.open            (`take`)
                                                      runner.step
      the future of the request  ◄──call_soon──────   turns that have ended  (`give`)

The event loop never waits for the engine, and the thread never for a request while it has others.
`serve` is the loop of a thread that does nothing else; whoever steps the runner for other reasons
calls `take` before and `give` after each step.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hone.door.refusal import Refusal
from hone.door.tree import Sampled
from hone.engine.base import EngineBase
from hone.rollout.runner import Runner
from hone.types import Prompt, Sample, SamplingEngine, SamplingParams

__all__ = ["Handover", "Progress", "TokensSince", "shown_tokens"]

Progress = Callable[[Sequence[int], Sequence[float]], None]
"""Gets new token ids of a turn that is being sampled, and their log-probabilities; called in the
event loop."""
TokensSince = Callable[[str, int], tuple[Sequence[int], Sequence[float]]]
"""Token ids and log-probabilities of a running request from a token on: `Engine.tokens_since`."""
_RETRY_AFTER_S = 1
"""Seconds after which a client that met a full queue, or a change of weights, may ask again."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Waiting:
    """A request of the event loop."""

    prompt: Prompt
    sampling: SamplingParams
    number: int
    on_tokens: Progress | None
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Sampled]
    owner: str
    """Id of the sample whose runner serves it; empty: any runner."""
    runner: Runner | None = None
    """Set with `episode_id` once a runner has it."""
    episode_id: str = ""
    num_shown: int = 0
    """Tokens that `on_tokens` has got."""


class Handover:
    """Takes requests from an event loop to a runner, and their turns back."""

    def __init__(self, *, max_requests: int) -> None:
        """At most `max_requests` are sampled or wait at once."""
        self._max_requests = max_requests
        self.on_call: Callable[[], object] = lambda: None
        """Called in the event loop after each request, to wake up a thread that waits for something
        else."""
        self._lock = threading.Lock()
        self._has_news = threading.Condition(self._lock)
        # Guarded by the lock.
        self._new: dict[_Waiting, None] = {}
        """Requests that the runner has not got, in their order."""
        self._cancelled: list[_Waiting] = []
        """Requests that the runner has got and shall close."""
        self._num_open = 0
        self._refusal: Refusal | None = None
        """Why no request is taken now."""
        self._is_closed = False
        # Of the thread that owns the runner.
        self._opening: deque[_Waiting] = deque()
        """Requests that the runner gets now, until it has them."""
        self._waiting: dict[str, _Waiting] = {}
        """Requests that the runner has, by the id of the episode."""

    # -- in the event loop -----------------------------------------------------------------------

    async def sample(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        number: int,
        on_tokens: Progress | None = None,
        owner: str = "",
    ) -> Sampled:
        """One turn after `prompt`, with the seed of sample 0 of group `number` of this prompt. With
        an `owner` it is sampled by the runner that has the sample of this id, once that takes it.

        Where the caller is cancelled, the turn is aborted. Raises Refusal where the queue is full,
        weights are being changed, or the engine cannot serve the request.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(
            prompt=prompt,
            sampling=sampling,
            number=number,
            on_tokens=on_tokens,
            loop=loop,
            future=loop.create_future(),
            owner=owner,
        )
        with self._lock:
            self._require_place()
            self._num_open += 1
            self._new[waiting] = None
            self._has_news.notify()
        self.on_call()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            self._withdraw(waiting)
            raise
        finally:
            with self._lock:
                self._num_open -= 1

    def require_place(self) -> None:
        """Raise the Refusal that `sample` would raise now for any request."""
        with self._lock:
            self._require_place()

    def _require_place(self) -> None:
        if self._refusal is not None:
            raise self._refusal.again()
        if self._num_open >= self._max_requests:
            raise Refusal(
                429,
                f"{self._num_open} requests are sampled or wait, as many as serve.max_requests "
                "allows; ask again",
                code="queue_full",
                retry_after_s=_RETRY_AFTER_S,
            )

    def _withdraw(self, waiting: _Waiting) -> None:
        """Forget a request at once where the runner has not got it: it may be long until somebody
        steps the runner, and prompts take memory."""
        with self._lock:
            if waiting in self._new:
                del self._new[waiting]
            else:
                self._cancelled.append(waiting)
                self._has_news.notify()

    # -- in any thread ---------------------------------------------------------------------------

    def close(self) -> None:
        """Let `serve` return. New requests are refused from now on, and so are those that no runner
        has: maybe nobody takes them any more."""
        with self._lock:
            self._is_closed = True
            self._refusal = refusal = _closed()
            new = [*self._new]
            self._new.clear()
            self._has_news.notify()
        _refuse(new, refusal)

    # -- in the thread that owns the runner ------------------------------------------------------

    def serve(self, runner: Runner, tokens_since: TokensSince | None = None) -> None:
        """Drive the runner until `close`, which aborts the turns that it samples. Without work it
        waits for requests. Raises the errors of the engine, after all requests are refused."""
        refusal = _closed()
        try:
            while not self._is_closed:
                self.take(runner, waits=not runner.has_requests)
                if runner.has_requests:
                    self.give(runner, runner.step().turns, tokens_since)
            # Also those that were cancelled since the last `take`.
            self._drop(runner, refusal)
        except Exception:
            refusal = Refusal(503, "the engine is lost, and the server ends", code="engine_lost")
            raise
        finally:
            self._refuse_all(refusal)

    def take(self, runner: Runner, *, waits: bool = False) -> None:
        """Give the runner what has come since the last call; with `waits` wait for the first, or
        for `close`. Requests with another owner are kept for its runner."""
        with self._lock:
            while waits and not (self._new or self._cancelled or self._is_closed):
                self._has_news.wait()
            for waiting in [w for w in self._new if _is_of(w, runner)]:
                del self._new[waiting]
                self._opening.append(waiting)
            cancelled, self._cancelled = self._cancelled, []
        while self._opening:
            self._open(self._opening[0], runner)
            self._opening.popleft()
        for waiting in cancelled:
            if self._waiting.pop(waiting.episode_id, None) is not None:
                assert waiting.runner is not None
                waiting.runner.close(waiting.episode_id)

    def give(
        self, runner: Runner, turns: Iterable[Sample], tokens_since: TokensSince | None = None
    ) -> list[Sample]:
        """Answer the requests whose turns have ended, and show new tokens to those who want to see
        them. Returns the turns of other callers."""
        others = list[Sample]()
        news: dict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = {}
        for sample in turns:
            waiting = self._waiting.pop(sample.id, None)
            if waiting is None:
                others.append(sample)
                continue
            runner.close(sample.id)
            answer = partial(_answer, waiting.future, _sampled(sample))
            news.setdefault(waiting.loop, []).append(answer)
        if tokens_since is not None:
            for waiting in self._waiting.values():
                if waiting.on_tokens is None or waiting.runner is not runner:
                    continue
                ids, logprobs = tokens_since(waiting.episode_id, waiting.num_shown)
                if ids:
                    waiting.num_shown += len(ids)
                    show = partial(waiting.on_tokens, ids, logprobs)
                    news.setdefault(waiting.loop, []).append(show)
        for loop, calls in news.items():
            _call(loop, calls)
        return others

    def drop(self, runner: Runner) -> None:
        """Close the turns that the runner samples, and refuse their requests."""
        self._drop(runner, Refusal(503, "the episode is dropped", code="dropped"))

    @property
    def owners(self) -> set[str]:
        """Owners of the requests that runners have."""
        return {waiting.owner for waiting in self._waiting.values()}

    def _drop(self, runner: Runner, refusal: Refusal) -> None:
        for waiting in [w for w in self._waiting.values() if w.runner is runner]:
            del self._waiting[waiting.episode_id]
            runner.close(waiting.episode_id)
            _refuse([waiting], refusal)

    def _open(self, waiting: _Waiting, runner: Runner) -> None:
        try:
            episode_id = runner.open(waiting.prompt, waiting.sampling, number=waiting.number)
        except ValueError as error:  # the engine cannot serve it
            _refuse([waiting], Refusal(400, f"the engine refuses the request: {error}"))
            return
        waiting.runner, waiting.episode_id = runner, episode_id
        self._waiting[episode_id] = waiting

    def _refuse_all(self, refusal: Refusal) -> None:
        with self._lock:
            self._refusal = refusal
            waiting = [*self._waiting.values(), *self._opening, *self._new]
            self._new.clear()
            self._cancelled.clear()
        self._waiting.clear()
        self._opening.clear()
        _refuse(waiting, refusal)


def shown_tokens(engine: SamplingEngine) -> TokensSince | None:
    """What shows the tokens of running requests. An engine in another process shows none."""
    return engine.tokens_since if isinstance(engine, EngineBase) else None


def _closed() -> Refusal:
    return Refusal(503, "the server ends", code="closed")


def _is_of(waiting: _Waiting, runner: Runner) -> bool:
    """Whether the runner serves a request."""
    return not waiting.owner or waiting.owner.rpartition("/")[0] in runner.groups


def _sampled(sample: Sample) -> Sampled | Refusal:
    if sample.failure is not None:
        return Refusal(
            503,
            f"the engine could not serve the request: {sample.failure_detail}",
            code="engine_error",
        )
    if not all(map(math.isfinite, sample.logprobs)):
        return Refusal(503, "the engine gave a log-probability that is not finite")
    return Sampled(
        token_ids=tuple(sample.token_ids),
        logprobs=tuple(sample.logprobs),
        weight_versions=tuple(sample.weight_versions),
        text=sample.text,
        stop_reason=sample.stop_reason,
    )


def _refuse(requests: Iterable[_Waiting], refusal: Refusal) -> None:
    for request in requests:
        _call(request.loop, [partial(_answer, request.future, refusal.again())])


def _call(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], object]]) -> None:
    """Make calls in the event loop, all at once. A loop that is closed has no use for them."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _answer(future: asyncio.Future[Any], result: Sampled | Refusal) -> None:
    if future.done():  # its caller was cancelled
        return
    if isinstance(result, Refusal):
        future.set_exception(result)
    else:
        future.set_result(result)
