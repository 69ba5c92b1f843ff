"""Seeds and distributions of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from hone.config.rollout import FilteredSamplingConfig, RolloutConfig
from hone.types import SamplingParams

__all__ = ["Decode", "request_seed", "sampling_params"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, without those that end or pad."""


def request_seed(run_seed: int, purpose: str, number: int, prompt_id: str, index: int) -> int:
    """Seed of one sample: 63 bits that depend on what it is, not on where or when it is drawn.

    `number` tells apart the times that one prompt is sampled in a run.

    Computed before any splitting, so any number of workers draws the same samples.
    """
    key = f"{run_seed}/{purpose}/{number}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def sampling_params(
    cfg: RolloutConfig | FilteredSamplingConfig, stop: Sequence[str | int]
) -> SamplingParams:
    """What the requests of a section share; `stop` ends them."""
    kept: dict[str, Any] = {}
    if isinstance(cfg, FilteredSamplingConfig):
        kept = {"top_p": cfg.top_p, "top_k": cfg.top_k, "min_p": cfg.min_p}
    return SamplingParams(
        max_tokens=cfg.max_completion_tokens,
        temperature=cfg.temperature,
        stop=tuple(text for text in stop if isinstance(text, str)),
        stop_token_ids=tuple(number for number in stop if isinstance(number, int)),
        **kept,
    )
