"""Driving an engine through requests, and what is noted after each step.

An engine returns finished completions only, so all else is read from `Engine.stats()` after each
step. Times are those at which something became *known* to the caller: an engine that keeps a step
in flight pays for it here.
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
    """Sequences that ran: those that run now, and those that have just finished."""
    num_tokens: int
    """Sampled tokens that became known, over all sequences."""
    num_first_tokens: int
    """Requests whose first token became known."""
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
    """Prompt tokens that were served from the prefix cache."""
    num_preemptions: int

    @property
    def total_s(self) -> float:
        return self.steps[-1].end_s

    @property
    def step_s(self) -> list[float]:
        """Duration of each step, the caller's own work included."""
        ends = [0.0, *(step.end_s for step in self.steps)]
        return [end - start for start, end in pairwise(ends)]

    @property
    def first_token_s(self) -> list[float]:
        """For each request, ascending: from its submission until its first token was known."""
        return [step.end_s for step in self.steps for _ in range(step.num_first_tokens)]

    def check_complete(self, requests: Sequence[Request]) -> None:
        """Raise RuntimeError unless every token of the requests was counted, and once."""
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
    """What was measured of one engine."""

    name: str
    version: str
    start_s: float
    """From nothing to an engine that takes requests, weights included."""
    warmup_s: float
    """The first run, which may compile and capture."""
    measured: Measurement

    @property
    def cold_start_s(self) -> float:
        """Until the engine is at full speed: its start, and what the first run took longer."""
        return self.start_s + max(self.warmup_s - self.measured.total_s, 0.0)


def measure(
    engine: Engine,
    requests: Sequence[Request],
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> Measurement:
    """Submit all requests at once and step until the last has finished.

    `progress` is called after each step with the tokens that have been sampled.
    Raises RuntimeError where the engine's counts do not add up to the requests' lengths.
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
    """A step in which every sequence decoded, and nothing else was computed."""

    duration_s: float
    num_seqs: int
    num_keys: int
    """Keys that were read, over all sequences: prompts, and all tokens before the sampled ones."""


def decode_steps(measurement: Measurement, requests: Sequence[Request]) -> list[DecodeStep]:
    """The pure decode steps, with the keys that they read.

    Requests of one priority get their first tokens in the order of submission, which tells whose
    keys are read. Steps with a prompt or a preempted sequence under way are left out. A sequence
    that was preempted is missing among those that run; the first step after that in which all have
    sampled again is the one that has computed its keys anew.
    """
    prompt_sums = [0, *accumulate(len(request.prompt_ids) for request in requests)]
    num_started = num_finished = num_generated = finished_tokens = 0
    recomputes = False
    found: list[DecodeStep] = []
    for step, duration_s in zip(measurement.steps, measurement.step_s, strict=True):
        num_decoding = num_started - num_finished
        if 0 < num_decoding == step.num_seqs <= step.num_tokens and not step.num_first_tokens:
            num_keys = prompt_sums[num_started] + num_generated - finished_tokens
            if not recomputes:
                found.append(DecodeStep(duration_s, num_decoding, num_keys))
            recomputes = False
        num_started += step.num_first_tokens
        num_finished += step.num_finished
        num_generated += step.num_tokens
        finished_tokens += step.finished_tokens
        recomputes |= step.num_seqs - step.num_finished < num_started - num_finished
    return found
