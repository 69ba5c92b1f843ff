"""An engine over several processes that do other work too: the first drives it, the others follow.

    if ranks.rank == 0:
        groups = engine.lead(lambda: collector.collect(step))
    else:
        groups = engine.follow()             # the same groups

What the first rank does with the engine depends on when scores come, on signals, on other engines:
on nothing that the others know. So it announces its calls, which the others repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, TypeVar

from hone.engine.worker import LockStep
from hone.types import Completion, EngineStats, Request, SamplingEngine

__all__ = ["LockStepEngine"]

T = TypeVar("T")
KEEPALIVE_S = 5.0
"""How often ranks that wait are told that the first is there. Well below any timeout of theirs."""
_RESULT = "result"


class LockStepEngine:
    """The `SamplingEngine` of the first rank. Of the others it serves `follow` alone. Without
    `ranks` there are none.

    A rank that fails leaves the others waiting, until the watch or the launcher ends them.
    """

    def __init__(self, engine: SamplingEngine, ranks: LockStep | None) -> None:
        self._engine = engine
        self._ranks = ranks
        self._waiting: list[tuple[str, tuple[Any, ...]]] = []
        """Calls since the last step, which the others have not made yet."""
        self._last_message_s = monotonic()

    # -- of the first rank -----------------------------------------------------------------------

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

    def submit(self, requests: Sequence[Request]) -> None:
        """As `SamplingEngine.submit`."""
        self._engine.submit(requests)
        self._waiting.append(("submit", (list(requests),)))

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """As `SamplingEngine.abort`."""
        names = list(request_ids)
        self._waiting.append(("abort", (names,)))
        return self._engine.abort(names)

    def step(self) -> list[Completion]:
        """As `SamplingEngine.step`. Collective over the ranks."""
        self._announce("step")
        return self._engine.step()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def keep_waiting(self) -> None:
        """To be called now and then where no step is made: the others wait on."""
        if monotonic() - self._last_message_s > KEEPALIVE_S:
            self._broadcast()

    def lead(self, make: Callable[[], T]) -> T:
        """What `make` returns, which may call the engine; the others get it from `follow`."""
        value = make()
        self._announce(_RESULT, value)
        return value

    # -- of the others ---------------------------------------------------------------------------

    def follow(self) -> Any:
        """Make the calls of the first rank until it is through with `lead`; what that returned."""
        assert self._ranks is not None
        while True:
            for name, arguments in self._ranks.broadcast():
                if name == _RESULT:
                    return arguments[0]
                getattr(self._engine, name)(*arguments)

    def _announce(self, name: str, *arguments: Any) -> None:
        self._waiting.append((name, arguments))
        self._broadcast()

    def _broadcast(self) -> None:
        calls, self._waiting = self._waiting, []
        if self._ranks is not None:
            self._ranks.broadcast(calls)
        self._last_message_s = monotonic()
