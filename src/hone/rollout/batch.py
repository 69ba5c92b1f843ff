"""Batch inference: a stream of prompts becomes groups of completions, in the order of the prompts.

    batch = Batch(prompts, Runner(engine, scorer, episodes), sampling=..., ...)
    while not batch.is_done:
        for number, samples in batch.step():
            ...

Memory holds the requests of a bounded window of prompts, the samples that wait for scores, and
finished groups that wait for an earlier group.
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
    """Groups of samples of numbered prompts; each is submitted, scored and returned once."""

    def __init__(
        self,
        prompts: Iterator[tuple[int, Prompt]],
        runner: Runner,
        *,
        sampling: SamplingParams,
        num_samples: int,
        max_in_engine: int,
    ) -> None:
        """`max_in_engine` is the number of samples that may need the engine at once; no further
        prompt is read beyond it."""
        self._prompts, self._runner, self._sampling = prompts, runner, sampling
        self._num_samples, self._max_in_engine = num_samples, max_in_engine
        self._window: deque[RunningGroup] = deque()
        """Groups that are unfinished, or that wait for an unfinished group before them."""
        self._has_prompts = True

    @property
    def is_done(self) -> bool:
        return not self._has_prompts and not self._window

    def step(self) -> list[tuple[int, list[Sample]]]:
        """Make one engine step; return the next finished groups with their prompts' numbers. Raises
        the errors of the prompts, the engine and the scorer."""
        runner = self._runner
        self._fill()
        runner.step()
        limit = _SCORING_SHARE * self._max_in_engine
        # Samples that wait for a session's place get one only if the engine goes on.
        while runner.scorer is not None and runner.scorer.pending - runner.num_waiting > limit:
            runner.poll(SCORE_WAIT_S)
        ended: list[tuple[int, list[Sample]]] = []
        while self._window and self._window[0].complete:
            entry = self._window.popleft()
            ended.append((entry.order, entry.group.samples))
        return ended

    def _fill(self) -> None:
        entries, room = list[RunningGroup](), self._max_in_engine - self._runner.num_unfinished
        while self._has_prompts and room > 0:
            number, prompt = next(self._prompts, (0, None))
            if prompt is None:
                self._has_prompts = False
                break
            entry = RunningGroup.of(
                prompt,
                self._sampling,
                self._runner.episodes,
                group_id=f"{number}",
                indices=range(self._num_samples),
                order=number,
            )
            entries.append(entry)
            room -= self._num_samples
        if entries:  # in one call, since an engine in another process gets one message a step
            self._window += entries
            self._runner.submit(entries)
