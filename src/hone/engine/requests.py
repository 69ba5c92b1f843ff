"""Validation of requests."""

from __future__ import annotations

import math

from hone.model_input import TEXT_ONLY, InputSpec
from hone.types import Request

__all__ = ["check_request"]


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_model_len: int,
    stop_ids: frozenset[int],
    has_tokenizer: bool,
    max_num_batched_tokens: int,
    inputs: InputSpec = TEXT_ONLY,
) -> None:
    """Raise ValueError, naming the request, where it cannot be served.

    `stop_ids` are the ids that would end this request, `max_num_batched_tokens` the most tokens of
    a step of the engine, `inputs` the inputs other than token ids that it computes.
    """
    params, num_prompt = request.sampling, len(request.prompt_ids)
    known = request.prompt_ids
    if (resumed := request.resumed) is not None:
        known = (*known, *resumed.token_ids)
    foreign = next((token_id for token_id in known if not 0 <= token_id < vocab_size), None)
    is_tempered = params.temperature >= 1e-6 and math.isfinite(params.temperature)
    refusal = inputs.refusal(request.model_input, num_prompt)
    longest = 0  # of the parts of the prompt that cannot be divided
    if inputs.attends_within:
        longest = max((each.num_tokens for each in request.model_input.contents), default=0)
    needs = [
        (num_prompt > 0, "has an empty prompt; it needs at least one token"),
        (params.max_tokens >= 1, f"has max_tokens={params.max_tokens}, needed: at least 1"),
        (
            params.temperature == 0 or is_tempered,
            f"has temperature={params.temperature}, needed: 0 (greedy), or 1e-6 or more, finite",
        ),
        (0 < params.top_p <= 1, f"has top_p={params.top_p}, needed: above 0, at most 1"),
        (params.top_k >= 0, f"has top_k={params.top_k}, needed: 0 (all) or more"),
        (0 <= params.min_p < 1, f"has min_p={params.min_p}, needed: at least 0, below 1"),
        (all(params.stop), f"has stop={params.stop}, needed: no empty string"),
        (
            num_prompt + params.max_tokens <= max_model_len,
            f"can never fit: {num_prompt} prompt tokens + max_tokens={params.max_tokens} exceed "
            f"max_model_len={max_model_len}; shorten either",
        ),
        (
            foreign is None,
            f"holds token id {foreign}, outside the model's vocabulary 0..{vocab_size - 1}; "
            "was it encoded with another tokenizer?",
        ),
        (
            has_tokenizer or not params.stop,
            f"has stop strings {params.stop}: the engine needs a tokenizer",
        ),
        (not refusal, refusal),
        (
            longest <= max_num_batched_tokens,
            f"has an image of {longest} tokens, which see each other in both directions and are "
            f"computed in one step; set engine.max_num_batched_tokens={max_num_batched_tokens} to "
            f"{longest} or more",
        ),
    ]
    if resumed is not None:
        num_tokens, num_logprobs = len(resumed.token_ids), len(resumed.logprobs)
        ended = next((token_id for token_id in resumed.token_ids if token_id in stop_ids), None)
        needs += [
            (
                num_tokens == num_logprobs == len(resumed.weight_versions),
                f"resumes {num_tokens} tokens with {num_logprobs} log-probabilities and "
                f"{len(resumed.weight_versions)} weight versions; all must be equally many",
            ),
            (
                num_tokens < params.max_tokens,
                f"resumes {num_tokens} tokens, which leaves none to sample of "
                f"max_tokens={params.max_tokens}",
            ),
            (ended is None, f"resumes a completion that has ended with stop id {ended}"),
        ]
    for holds, text in needs:
        if not holds:
            raise ValueError(f"request {request.id!r} {text}")
