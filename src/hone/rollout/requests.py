"""Seeds and sampling parameters of requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from hone.rollout.settings import FilteredSamplingConfig, RolloutConfig
from hone.types import SamplingParams

__all__ = ["Decode", "request_seed", "sampling_params"]

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text, without end and padding tokens."""


def request_seed(run_seed: int, purpose: str, number: int, prompt_id: str, index: int) -> int:
    """Seed of one sample: 63 bits that depend only on these arguments, not on the worker or the
    time. So any number of workers draws the same samples.

    `number` distinguishes repeated draws of one prompt in a run.
    """
    key = f"{run_seed}/{purpose}/{number}/{prompt_id}/{index}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def sampling_params(
    cfg: RolloutConfig | FilteredSamplingConfig, stop: Sequence[str | int]
) -> SamplingParams:
    """The sampling parameters of a section's requests, with the stop strings and ids `stop`."""
    filters: dict[str, Any] = {}
    if isinstance(cfg, FilteredSamplingConfig):
        filters = {"top_p": cfg.top_p, "top_k": cfg.top_k, "min_p": cfg.min_p}
    return SamplingParams(
        max_tokens=cfg.max_completion_tokens,
        temperature=cfg.temperature,
        stop=tuple(text for text in stop if isinstance(text, str)),
        stop_token_ids=tuple(number for number in stop if isinstance(number, int)),
        **filters,
    )
