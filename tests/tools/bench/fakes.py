"""An engine whose every step takes a known time, and a shape whose limits fit on a napkin."""

from __future__ import annotations

from hone.families.shape import ModelShape
from hone.hardware import Peaks
from hone.tools.bench.summary import Limits
from hone.types import Completion, EngineStats, Request, SamplingParams, StopReason


def request(name: str, num_prompt: int, max_tokens: int) -> Request:
    return Request(
        id=name,
        prompt_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


class FakeEngine:
    """A step takes 1 s, and half a second for each prompt token in it."""

    def __init__(self, max_num_seqs: int = 2, *, forgets: str = "") -> None:
        self.now = 100.0
        self.forgets = forgets
        self.max_num_seqs = max_num_seqs
        self._waiting: list[Request] = []
        self._running: dict[str, tuple[Request, int]] = {}
        self._counts = {"num_generated_tokens": 0, "num_first_tokens": 0, "num_cached_tokens": 7}

    def clock(self) -> float:
        return self.now

    def submit(self, requests) -> None:
        self._waiting += requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Completion]:
        self.now += 1.0
        self._counts["num_generated_tokens"] += len(self._running)
        self._running = {name: (x, n + 1) for name, (x, n) in self._running.items()}
        while self._waiting and len(self._running) < self.max_num_seqs:
            new = self._waiting.pop(0)
            self.now += 0.5 * len(new.prompt_ids)
            self._running[new.id] = (new, 1)
            self._counts["num_generated_tokens"] += 1
            self._counts["num_first_tokens"] += 1
            self._counts["num_cached_tokens"] += 1
        done = {name for name, (x, n) in self._running.items() if n == x.sampling.max_tokens}
        finished = [
            self._completion(*self._running[name]) for name in self._running if name in done
        ]
        self._running = {name: x for name, x in self._running.items() if name not in done}
        return finished

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=len(self._running) / 4,
            num_preemptions=0,
            num_prompt_tokens=0,
            num_steps=0,
            busy_s=0.0,
            **{k: 0 if k == self.forgets else v for k, v in self._counts.items()},
        )

    def _completion(self, request: Request, num_tokens: int) -> Completion:
        return Completion(
            request_id=request.id,
            token_ids=[0] * num_tokens,
            logprobs=[0.0] * num_tokens,
            weight_versions=[0] * num_tokens,
            stop_reason=StopReason.LENGTH,
        )


SHAPE = ModelShape.from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "head_dim": 4,
        "intermediate_size": 8,
        "vocab_size": 10,
        "tie_word_embeddings": True,
    }
)
"""Attention 64, MLP 96, norms 12, head 40: 212 parameters, 424 bytes; 16 bytes a key."""


def limits(
    shape: ModelShape = SHAPE,
    *,
    shares_prompts: bool = True,
    flops_per_s: float = 1e15,
    kv_bytes_per_value: int = 2,
) -> Limits:
    """At 1,000 bytes/s: 0.424 s for the weights and 0.016 s a key. Products are free by default."""
    return Limits(
        shape=shape,
        peaks=Peaks("napkin", 1000.0, flops_per_s, "measured"),
        bytes_per_value=2,
        kv_bytes_per_value=kv_bytes_per_value,
        max_num_seqs=2,
        shares_prompts=shares_prompts,
    )
