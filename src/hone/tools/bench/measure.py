"""Drives an engine through requests and records each step.

An engine returns finished completions only, so all other numbers come from `Engine.stats()` after
each step. Times are those at which a result became *known* to the caller: an engine that keeps a
step in flight pays for it here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hone.types import Engine, Request

__all__ = ["DecodeStep", "EngineRun", "Measurement", "Step", "decode_steps", "measure"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine, as seen when it returned."""

    end_s: float
    """Seconds since the requests were submitted."""
    num_seqs: int
    """Number of sequences that ran: those that run now, and those that have just finished."""
    num_tokens: int
    """Number of sampled tokens that became known, over all sequences."""
    num_first_tokens: int
    """Number of requests whose first token became known."""
    num_finished: int
    finished_tokens: int
    """Prompt and output tokens of the requests that finished."""
    kv_cache_usage: float
    """Share of KV blocks in use, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """All steps from the submission of the requests to the last token."""

    steps: list[Step]
    num_cached_tokens: int
    """Number of prompt tokens that were served from the prefix cache."""
    num_preemptions: int

    @property
    def total_s(self) -> float:
        return self.steps[-1].end_s

    @property
    def step_s(self) -> list[float]:
        """Duration of each step in seconds, including the caller's own work."""
        ends = [0.0, *(step.end_s for step in self.steps)]
        return [end - start for start, end in pairwise(ends)]

    @property
    def first_token_s(self) -> list[float]:
        """Time from submission to the first known token, in seconds, ascending over the
        requests."""
        return [step.end_s for step in self.steps for _ in range(step.num_first_tokens)]

    def check_complete(self, requests: Sequence[Request]) -> None:
        """Raise RuntimeError unless every token of the requests was counted exactly once."""
        counted = {
            "tokens": (
                sum(step.num_tokens for step in self.steps),
                sum(request.sampling.max_tokens for request in requests),
            ),
            "first tokens": (sum(step.num_first_tokens for step in self.steps), len(requests)),
            "finished requests": (sum(step.num_finished for step in self.steps), len(requests)),
        }
        for what, (got, expected) in counted.items():
            if got != expected:
                raise RuntimeError(f"the engine has counted {got} {what}; expected: {expected}")


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Measurements of one engine."""

    name: str
    version: str
    start_s: float
    """Seconds to start the engine, including its weights."""
    warmup_s: float
    """Seconds of the first run, which may compile and capture graphs."""
    measured: Measurement

    @property
    def cold_start_s(self) -> float:
        """Seconds until the engine is at full speed: its start, plus the extra time of the first
        run."""
        return self.start_s + max(self.warmup_s - self.measured.total_s, 0.0)


def measure(
    engine: Engine,
    requests: Sequence[Request],
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> Measurement:
    """Submit all requests at once and step until the last has finished.

    `progress` is called after each step with the number of sampled tokens. Raises RuntimeError if
    the engine's counts do not add up to the requests' lengths.
    """
    lengths = {x.id: len(x.prompt_ids) + x.sampling.max_tokens for x in requests}
    before = known = engine.stats()
    steps: list[Step] = []
    start_s = clock()
    engine.submit(requests)
    while engine.has_unfinished:
        finished = engine.step()
        end_s = clock() - start_s
        stats = engine.stats()
        steps.append(
            Step(
                end_s=end_s,
                num_seqs=stats.num_running + len(finished),
                num_tokens=stats.num_generated_tokens - known.num_generated_tokens,
                num_first_tokens=stats.num_first_tokens - known.num_first_tokens,
                num_finished=len(finished),
                finished_tokens=sum(lengths[completion.request_id] for completion in finished),
                kv_cache_usage=stats.kv_cache_usage,
            )
        )
        known = stats
        progress(known.num_generated_tokens - before.num_generated_tokens)
    measurement = Measurement(
        steps,
        num_cached_tokens=known.num_cached_tokens - before.num_cached_tokens,
        num_preemptions=known.num_preemptions - before.num_preemptions,
    )
    measurement.check_complete(requests)
    return measurement


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step in which every sequence decoded and nothing else was computed."""

    duration_s: float
    num_seqs: int
    num_keys: int
    """Number of keys that were read, over all sequences: prompts, and all tokens before the sampled
    ones."""


def decode_steps(measurement: Measurement, requests: Sequence[Request]) -> list[DecodeStep]:
    """The pure decode steps, with the keys that they read.

    Requests of one priority get their first tokens in the order of submission, from which the keys
    of each step follow. Steps with a prompt or a preempted sequence in progress are left out. A
    preempted sequence is missing among the running ones; the first later step in which all have
    sampled again is the one that has recomputed its keys.
    """
    prompt_sums = [0, *accumulate(len(request.prompt_ids) for request in requests)]
    num_started = num_finished = num_generated = finished_tokens = 0
    recomputes = False
    steps: list[DecodeStep] = []
    for step, duration_s in zip(measurement.steps, measurement.step_s, strict=True):
        num_decoding = num_started - num_finished
        if 0 < num_decoding == step.num_seqs <= step.num_tokens and not step.num_first_tokens:
            num_keys = prompt_sums[num_started] + num_generated - finished_tokens
            if not recomputes:
                steps.append(DecodeStep(duration_s, num_decoding, num_keys))
            recomputes = False
        num_started += step.num_first_tokens
        num_finished += step.num_finished
        num_generated += step.num_tokens
        finished_tokens += step.finished_tokens
        recomputes |= step.num_seqs - step.num_finished < num_started - num_finished
    return steps
