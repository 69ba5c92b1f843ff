"""One request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hone.engine.detokenizer import StopStringWatcher
from hone.types import Completion, Request, StopReason

__all__ = ["Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, sampled values and KV blocks of one request.

    The first `num_computed` tokens have keys and values in the cache; the rest are pending. A
    running sequence whose pending part is processed gets one more sampled token, which is then
    pending itself, so a decoding sequence always has exactly one pending token.
    """

    request: Request
    arrival: int
    """Position in the order of submission."""
    stop_ids: frozenset[int]
    watcher: StopStringWatcher | None = None

    token_ids: list[int] = field(default_factory=list[int])
    """Prompt and sampled tokens."""
    logprobs: list[float] = field(default_factory=list[float])
    weight_versions: list[int] = field(default_factory=list[int])

    num_computed: int = 0
    block_table: list[int] = field(default_factory=list[int])
    num_published: int = 0
    """Leading blocks that have been offered to the prefix cache."""
    chain: int = -1
    """Chain id of the last published block, see `BlockManager`."""
    slot: int = -1
    """Row of the runner's per-sequence buffers; -1 while waiting."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache on first admission; -1 before it."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)
        resumed = self.request.resumed
        if resumed is not None:
            self.token_ids += resumed.token_ids
            self.logprobs = list(resumed.logprobs)
            self.weight_versions = list(resumed.weight_versions)
            if self.watcher is not None:
                for token_id in resumed.token_ids:
                    self.watcher.push(token_id)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: who is served first."""
        return self.request.priority, self.arrival

    def append(self, token_id: int, logprob: float, weight_version: int) -> StopReason | None:
        """Take a sampled token; returns why the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.weight_versions.append(weight_version)
        if token_id in self.stop_ids:
            return StopReason.EOS
        if self.watcher is not None and self.watcher.push(token_id):
            return StopReason.STOP_STRING
        if len(self.logprobs) == self.request.sampling.max_tokens:
            return StopReason.LENGTH
        return None

    def completion(self, stop_reason: StopReason) -> Completion:
        """What was sampled so far, the resumed part included."""
        return Completion(
            request_id=self.request.id,
            token_ids=self.token_ids[len(self.request.prompt_ids) :],
            logprobs=self.logprobs,
            weight_versions=self.weight_versions,
            stop_reason=stop_reason,
            num_cached_tokens=max(self.num_cached_tokens, 0),
        )
