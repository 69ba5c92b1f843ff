"""A request in progress in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hone.types import Completion, Request, Routes, StopReason

if TYPE_CHECKING:
    from hone.engine.detokenizer import StopStringWatcher

__all__ = ["Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, sampled values and KV blocks of one request.

    Keys and values of the first `num_computed` tokens are in the cache, or will be once the
    launched steps are complete; the other tokens are pending. A running sequence whose pending part
    is processed gets one more sampled token, which is then pending itself. The host learns its id a
    step later: until then it is *in flight*, counted but not in `token_ids`.
    """

    request: Request
    arrival: int
    """Position in the order of submission."""
    stop_ids: frozenset[int]
    watcher: StopStringWatcher | None = None

    token_ids: list[int] = field(default_factory=list[int])
    """Prompt and sampled tokens, as far as the host knows them."""
    logprobs: list[float] = field(default_factory=list[float])
    weight_versions: list[int] = field(default_factory=list[int])
    routes: Routes | None = None
    """Routes of the first tokens, as far as they were copied from the device: those of the passes
    that sampled the following tokens, not those of a recomputation."""

    num_computed: int = 0
    num_in_flight: int = 0
    """Tokens that are being sampled."""
    is_decoding: bool = False
    """Whether the prefill is complete: the only pending token is the one sampled last."""
    block_table: list[int] = field(default_factory=list[int])
    num_published: int = 0
    """Leading blocks that have been offered to the prefix cache."""
    num_matched: int = 0
    """Tokens of the longest published prefix at its admission, of which some were perhaps not
    reused."""
    chain: int = -1
    """Chain id of the last published block, see `BlockManager`."""
    slot: int = -1
    """Row of the device state; -1 while waiting."""
    has_ended: bool = False
    """Finished or aborted: tokens still in flight are dropped."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache on first admission; -1 before it."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        resumed = self.request.resumed
        if resumed is not None:
            self.token_ids += resumed.token_ids
            self.logprobs = list(resumed.logprobs)
            self.weight_versions = list(resumed.weight_versions)
            self.routes = resumed.routes
            if self.watcher is not None:
                for token_id in resumed.token_ids:
                    self.watcher.push(token_id)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of scheduling: priority, then arrival."""
        return self.request.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled after those in flight."""
        return self.request.sampling.max_tokens - len(self.logprobs) - self.num_in_flight

    def leave(self) -> None:
        """Drop slot, blocks and tokens in flight; the sequence waits again, to be recomputed."""
        self.slot, self.is_decoding = -1, False
        self.block_table = []
        self.num_computed = self.num_published = self.num_in_flight = 0

    def append(self, token_id: int, logprob: float, weight_version: int) -> StopReason | None:
        """Append a sampled token; returns the stop reason if the sequence ends with it."""
        if self.watcher is not None and token_id not in self.stop_ids:
            self.watcher.push(token_id)  # first: a tokenizer may raise
        self.logprobs.append(logprob)
        self.weight_versions.append(weight_version)
        self.token_ids.append(token_id)
        return self._stop_reason()

    def _stop_reason(self) -> StopReason | None:
        if not self.logprobs:
            return None
        if self.token_ids[-1] in self.stop_ids:
            return StopReason.EOS
        if self.watcher is not None and self.watcher.has_matched:
            return StopReason.STOP_STRING
        is_full = len(self.logprobs) == self.request.sampling.max_tokens
        return StopReason.LENGTH if is_full else None

    def completion(self, stop_reason: StopReason) -> Completion:
        """The completion with all tokens sampled so far, including the resumed part."""
        return Completion(
            request_id=self.request.id,
            token_ids=self.token_ids[len(self.request.prompt_ids) :],
            logprobs=self.logprobs,
            weight_versions=self.weight_versions,
            stop_reason=stop_reason,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            routes=self.routes,
        )
