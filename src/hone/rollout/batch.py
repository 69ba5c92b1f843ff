"""A stream of prompts in, groups of completions out, in the order of the prompts.

    batch = Batch(prompts, Runner(engine, scorer, episodes), sampling=..., ...)
    while not batch.is_done:
        for number, samples in batch.step():
            ...

Memory holds the requests of a bounded window of prompts, the samples that wait for scores, and the
groups that are kept back by a longer one before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hone.rollout.runner import SCORE_WAIT_S, Runner, RunningGroup
from hone.types import Prompt, Sample, SamplingParams

__all__ = ["Batch"]

_SCORING_SHARE = 4
"""Samples that may wait for scores, as a multiple of `max_in_engine`, before the engine waits."""


class Batch:
    """Groups of samples of numbered prompts, each submitted, scored and handed out once."""

    def __init__(
        self,
        prompts: Iterator[tuple[int, Prompt]],
        runner: Runner,
        *,
        sampling: SamplingParams,
        num_samples: int,
        max_in_engine: int,
    ) -> None:
        """`max_in_engine` bounds the samples that may need the engine at once, above which no
        further prompt is read."""
        self._prompts, self._runner, self._sampling = prompts, runner, sampling
        self._num_samples, self._max_in_engine = num_samples, max_in_engine
        self._window: deque[RunningGroup] = deque()
        """Groups that are unfinished, or behind one that is."""
        self._has_prompts = True

    @property
    def is_done(self) -> bool:
        return not self._has_prompts and not self._window

    def step(self) -> list[tuple[int, list[Sample]]]:
        """Make one step; the next groups, with their numbers, that have ended. Raises as the
        prompts, the engine and the scorer do."""
        runner = self._runner
        self._fill()
        runner.step()
        limit = _SCORING_SHARE * self._max_in_engine
        while runner.scorer is not None and runner.scorer.pending > limit:
            runner.poll(SCORE_WAIT_S)
        ended: list[tuple[int, list[Sample]]] = []
        while self._window and self._window[0].complete:
            entry = self._window.popleft()
            ended.append((entry.order, entry.group.samples))
        return ended

    def _fill(self) -> None:
        while self._has_prompts and self._runner.num_unfinished < self._max_in_engine:
            number, prompt = next(self._prompts, (0, None))
            if prompt is None:
                self._has_prompts = False
                return
            entry = RunningGroup.of(
                prompt,
                self._sampling,
                self._runner.episodes,
                group_id=f"{number}",
                indices=range(self._num_samples),
                order=number,
            )
            self._window.append(entry)
            self._runner.submit([entry])
