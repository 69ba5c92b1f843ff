"""`POST /inference/v1/generate`: token ids in, token ids out, as vLLM has it.

{"token_ids": [1, 5], "sampling_params": {"max_tokens": 8, "temperature": 1.0, "logprobs": 1}}
{"request_id": ..., "choices": [{"token_ids": [7, 2], "finish_reason": "stop",
    "logprobs": {"content": [{"token": "token_id:7", "logprob": -0.1}, ...]}}]}
"""

from __future__ import annotations

from typing import Any

from hone.door.prompts import TokenPrompt
from hone.door.turns import Answer, Asked, AskedTurn
from hone.door.wire.asking import sampling_of
from hone.door.wire.fields import Fields, wrong
from hone.types import SamplingParams

__all__ = ["read_generate", "token_logprobs", "written_generate"]


def read_generate(fields: Fields, defaults: SamplingParams) -> Asked:
    """The request. Raises Refusal."""
    if fields.flag("stream"):
        raise wrong("stream", "is true, and this route does not stream")
    fields.refuse({"features": ()}, "this route takes ids of text alone; send messages with images")
    params = fields.part("sampling_params")
    if params.get("logprobs") not in (None, 0, 1, True, False):
        raise wrong(
            params.path("logprobs"), "must be 0 or 1: log-probs are of sampled tokens alone"
        )
    ids = fields.token_ids("token_ids")
    if not ids:
        raise wrong("token_ids", "must have at least one token id")
    return Asked(
        prompt=TokenPrompt(ids),
        prompt_field="token_ids",
        sampling=sampling_of(params, defaults, max_tokens=("max_tokens",)),
        seed=params.integer("seed"),
    )


def written_generate(turn: AskedTurn, answer: Answer, model: str) -> dict[str, Any]:
    """The answer."""
    sampled = answer.sampled
    return {
        "request_id": turn.id,
        "model": model,
        "choices": [
            {
                "index": 0,
                "token_ids": list(sampled.token_ids),
                "finish_reason": "length" if answer.is_cut else "stop",
                "logprobs": {"content": token_logprobs(sampled.token_ids, sampled.logprobs)},
            }
        ],
        "usage": {
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": len(sampled.token_ids),
            "total_tokens": len(answer.prompt_ids) + len(sampled.token_ids),
        },
        "weight_version": answer.weight_version,
    }


def token_logprobs(token_ids: Any, logprobs: Any) -> list[dict[str, Any]]:
    """Log-probabilities with tokens by their ids."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
