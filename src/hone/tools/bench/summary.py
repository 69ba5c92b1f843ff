"""Summary of a measurement, with its share of the hardware limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hone.families.shape import ModelShape
from hone.hardware import Peaks
from hone.planner.roofline import decode_step_s, generation_time_s
from hone.tools.bench.measure import DecodeStep, EngineRun, decode_steps
from hone.tools.bench.workloads import Workload

__all__ = ["Decoding", "Limits", "Quantiles", "Summary", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The hardware limit: the roofline of a model."""

    shape: ModelShape
    peaks: Peaks
    bytes_per_value: int
    kv_bytes_per_value: int
    packs_rows: bool = False
    """Whether the layers' matrices are stored as int8."""
    max_num_seqs: int
    shares_prompts: bool
    """Whether equal prompts are prefilled once."""

    def total_s(self, workload: Workload) -> float:
        """Shortest time in seconds for a workload's actual lengths: its prompts at the matrix rate,
        and each decode step with all weights and every sequence's own keys read once."""
        prompts = [request.prompt_ids for request in workload.requests]
        prefilled = dict.fromkeys(prompts) if self.shares_prompts else prompts
        return generation_time_s(
            self.shape,
            self.peaks,
            workload.prompt_lengths,
            workload.output_lengths,
            max_num_seqs=self.max_num_seqs,
            prefill_lengths=[len(ids) for ids in prefilled],
            bytes_per_value=self.bytes_per_value,
            kv_bytes_per_value=self.kv_bytes_per_value,
            packs_rows=self.packs_rows,
        )

    def step_s(self, step: DecodeStep) -> float:
        """Shortest time for a decode step in seconds. With sliding windows all sequences count as
        equally long, the cheapest case."""
        keys: float = step.num_keys
        if self.shape.sliding_window is not None:
            seen = min(keys, step.num_seqs * self.shape.sliding_window)
            keys += self.shape.sliding_share * (seen - keys)
        return float(
            decode_step_s(
                self.shape,
                self.peaks,
                step.num_seqs,
                keys,
                bytes_per_value=self.bytes_per_value,
                kv_bytes_per_value=self.kv_bytes_per_value,
                packs_rows=self.packs_rows,
            )
        )


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of times in seconds, linearly interpolated."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        p50, p90, p99, largest = np.quantile(values, (0.5, 0.9, 0.99, 1)).tolist()
        return cls(p50, p90, p99, largest)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Medians of the pure decode steps at the largest batch that had any."""

    batch: int
    num_steps: int
    context: float
    """Mean number of keys that a sequence read."""
    step_s: float
    share_of_limit: float
    """Shortest possible time over the measured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The numbers of one engine on one workload."""

    total_s: float
    tokens_per_s: float
    """Output tokens over the total time."""
    share_of_limit: float
    """Shortest possible total time over the measured one."""
    decode: Decoding | None
    """None if no step was a pure decode step."""
    step_s: Quantiles
    first_token_s: Quantiles
    """Times from submission, which is the same for all requests, so that waiting counts."""
    kv_cache_usage_mean: float
    """Mean over time."""
    kv_cache_usage_max: float
    num_preemptions: int
    cached_prompt_share: float
    """Share of prompt tokens that came from the prefix cache."""
    start_s: float
    cold_start_s: float


def summarise(run: EngineRun, workload: Workload, limits: Limits) -> Summary:
    """Compute the summary of a run."""
    measured = run.measured
    usage = [step.kv_cache_usage for step in measured.steps]
    return Summary(
        total_s=measured.total_s,
        tokens_per_s=workload.num_output_tokens / measured.total_s,
        share_of_limit=limits.total_s(workload) / measured.total_s,
        decode=_decoding(decode_steps(measured, workload.requests), limits),
        step_s=Quantiles.of(measured.step_s),
        first_token_s=Quantiles.of(measured.first_token_s),
        kv_cache_usage_mean=float(np.average(usage, weights=measured.step_s)),
        kv_cache_usage_max=max(usage),
        num_preemptions=measured.num_preemptions,
        cached_prompt_share=measured.num_cached_tokens / sum(workload.prompt_lengths),
        start_s=run.start_s,
        cold_start_s=run.cold_start_s,
    )


def _decoding(steps: Sequence[DecodeStep], limits: Limits) -> Decoding | None:
    if not steps:
        return None
    batch = max(step.num_seqs for step in steps)
    full = [step for step in steps if step.num_seqs == batch]
    return Decoding(
        batch=batch,
        num_steps=len(full),
        context=statistics.median(step.num_keys / batch for step in full),
        step_s=statistics.median(step.duration_s for step in full),
        share_of_limit=statistics.median(limits.step_s(step) / step.duration_s for step in full),
    )
