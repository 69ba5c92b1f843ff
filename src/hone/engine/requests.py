"""Which requests an engine takes, and what it makes of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import count

from transformers import PreTrainedTokenizerBase

from hone.engine.detokenizer import StopStringWatcher
from hone.engine.sequence import Sequence
from hone.types import Completion, Request, SamplingParams

__all__ = ["RequestValidator", "check_request"]


class RequestValidator:
    """Makes sequences of requests that can be served, in the order of their submission.

    `tokenizer` serves stop strings alone; without one, requests with such are refused.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._arrivals = count()

    def take(self, requests: Iterable[Request], in_use: Collection[str]) -> dict[str, Sequence]:
        """A new sequence for each request, by its id.

        Raises ValueError, naming the request, for one that can never fit, is malformed, or has an
        id that is `in_use` or comes twice.
        """
        taken: dict[str, Sequence] = {}
        for request in requests:
            if request.id in in_use or request.id in taken:
                raise ValueError(f"request id {request.id!r} is already in use")
            taken[request.id] = self._sequence(request)
        return taken

    def _sequence(self, request: Request) -> Sequence:
        params = request.sampling
        stop_ids = self._eos_token_ids.union(params.stop_token_ids)
        if params.ignore_eos:
            stop_ids = frozenset[int]()
        check_request(
            request,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            stop_ids=stop_ids,
            has_tokenizer=self._tokenizer is not None,
        )
        watcher = None
        if params.stop and not params.ignore_eos and self._tokenizer is not None:
            watcher = StopStringWatcher(self._tokenizer, params.stop)
        return Sequence(
            request=request, arrival=next(self._arrivals), stop_ids=stop_ids, watcher=watcher
        )


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_model_len: int,
    stop_ids: Collection[int],
    has_tokenizer: bool,
) -> None:
    """Raise ValueError, naming the request, where it cannot be served as it stands.

    `stop_ids` are those that would end this request.
    """
    name = f"request {request.id!r}"
    params = request.sampling
    num_prompt = len(request.prompt_ids)
    if not num_prompt:
        raise ValueError(f"{name} has an empty prompt; it needs at least one token")
    _check_params(params, name)
    if num_prompt + params.max_tokens > max_model_len:
        raise ValueError(
            f"{name} can never fit: {num_prompt} prompt tokens + max_tokens={params.max_tokens} "
            f"exceed max_model_len={max_model_len}; shorten either, or raise engine.max_model_len"
        )
    resumed = request.resumed
    known = request.prompt_ids if resumed is None else (*request.prompt_ids, *resumed.token_ids)
    if min(known) < 0 or max(known) >= vocab_size:
        wrong = min(known) if min(known) < 0 else max(known)
        raise ValueError(
            f"{name} holds token id {wrong}, outside the model's vocabulary 0..{vocab_size - 1}; "
            "was it encoded with another tokenizer?"
        )
    if params.stop and not has_tokenizer:
        raise ValueError(f"{name} has stop strings {params.stop}: the engine needs a tokenizer")
    if resumed is not None:
        _check_resumed(resumed, params, stop_ids, name)


def _check_params(params: SamplingParams, name: str) -> None:
    checks = {
        f"max_tokens={params.max_tokens}, needed: at least 1": params.max_tokens >= 1,
        f"temperature={params.temperature}, needed: 0 (greedy), or 1e-6 or more, finite": (
            params.temperature == 0
            or (params.temperature >= 1e-6 and math.isfinite(params.temperature))
        ),
        f"top_p={params.top_p}, needed: above 0, at most 1": 0 < params.top_p <= 1,
        f"top_k={params.top_k}, needed: 0 (all) or more": params.top_k >= 0,
        f"min_p={params.min_p}, needed: at least 0, below 1": 0 <= params.min_p < 1,
        f"stop={params.stop}, needed: no empty string": all(params.stop),
    }
    for text, holds in checks.items():
        if not holds:
            raise ValueError(f"{name} has {text}")


def _check_resumed(
    resumed: Completion, params: SamplingParams, stop_ids: Collection[int], name: str
) -> None:
    num_tokens = len(resumed.token_ids)
    if not num_tokens == len(resumed.logprobs) == len(resumed.weight_versions):
        raise ValueError(
            f"{name} resumes {num_tokens} tokens with {len(resumed.logprobs)} log-probabilities "
            f"and {len(resumed.weight_versions)} weight versions; all three must be equally many"
        )
    if num_tokens >= params.max_tokens:
        raise ValueError(
            f"{name} resumes {num_tokens} tokens, which leaves none to sample of "
            f"max_tokens={params.max_tokens}"
        )
    if ended := [token_id for token_id in resumed.token_ids if token_id in stop_ids]:
        raise ValueError(f"{name} resumes a completion that has ended with stop id {ended[0]}")
