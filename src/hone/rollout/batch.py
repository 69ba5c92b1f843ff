"""Many prompts in, groups of completions out, in the order of the prompts.

    batch = Batch(prompts, engine=engine, scorer=scorer, ...)
    while not batch.is_done:
        for number, samples in batch.step():
            ...

Only so many requests are in the engine at once, which is what is in memory, and groups that a
longer one before them keeps waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hone.rollout.buffer import SCORE_WAIT_S, SampleScorer
from hone.rollout.episodes import Episodes
from hone.rollout.requests import requests_for
from hone.types import Completion, Prompt, Sample, SamplingEngine, SamplingParams

__all__ = ["Batch"]

_SCORING_SHARE = 4
"""So many times what the engine may hold may wait for scores before it waits too."""


@dataclass(slots=True)
class _Group:
    number: int
    prompt: Prompt
    samples: dict[int, Sample]
    """That have ended, by index."""
    unscored: list[Sample] = field(default_factory=list[Sample])
    """That are to be scored."""


class Batch:
    """Groups of samples of numbered prompts, each submitted, scored and handed out once.

    What is submitted when depends on the engine's steps alone, so that devices that share an engine
    do the same; without a scorer samples have no reward.
    """

    def __init__(
        self,
        prompts: Iterator[tuple[int, Prompt]],
        *,
        engine: SamplingEngine,
        scorer: SampleScorer | None,
        episodes: Episodes,
        sampling: SamplingParams,
        num_samples: int,
        max_in_engine: int,
    ) -> None:
        self._prompts, self._engine, self._scorer = prompts, engine, scorer
        self._episodes, self._sampling = episodes, sampling
        self._num_samples, self._max_in_engine = num_samples, max_in_engine
        self._groups: dict[str, _Group] = {}
        """Unfinished, or behind one that is, by id."""
        self._order: deque[str] = deque()
        self._num_in_engine = 0
        self._has_prompts = True

    @property
    def is_done(self) -> bool:
        return not self._has_prompts and not self._groups

    def step(self) -> list[tuple[int, list[Sample]]]:
        """A step of the engine, or a moment's wait for scores; the next groups, with their numbers,
        that have ended. Raises as the prompts, the engine and the scorer do."""
        self._fill()
        if self._engine.has_unfinished:
            for completion in self._engine.step():
                self._take(completion)
        self._poll()
        ended: list[tuple[int, list[Sample]]] = []
        while self._order and len(self._groups[self._order[0]].samples) == self._num_samples:
            group = self._groups.pop(self._order.popleft())
            ended.append((group.number, [group.samples[i] for i in range(self._num_samples)]))
        return ended

    def _fill(self) -> None:
        while self._has_prompts and self._num_in_engine < self._max_in_engine:
            number, prompt = next(self._prompts, (0, None))
            if prompt is None:
                self._has_prompts = False
                return
            name = f"{number}"
            self._groups[name] = _Group(number, prompt, {})
            self._order.append(name)
            self._engine.submit(
                requests_for(
                    prompt,
                    self._sampling,
                    group_id=name,
                    num_samples=self._num_samples,
                    run_seed=self._episodes.run_seed,
                    purpose=self._episodes.purpose,
                    number=0,
                )
            )
            self._num_in_engine += self._num_samples

    def _take(self, completion: Completion) -> None:
        self._num_in_engine -= 1
        name = completion.request_id
        group = self._groups[name.partition("/")[0]]
        sample = self._episodes.begin(group.prompt, name, number=0)
        self._episodes.take(sample, completion, max_tokens=self._sampling.max_tokens)
        if self._scorer is None:
            self._finish(sample)
            return
        group.unscored.append(sample)
        if not self._scorer.takes_whole_groups or len(group.unscored) == self._num_samples:
            self._scorer.submit(*sorted(group.unscored, key=lambda one: one.index))
            group.unscored.clear()

    def _poll(self) -> None:
        """Take what has been scored. The engine waits where too much has not."""
        while self._scorer is not None and self._scorer.pending:
            is_behind = self._scorer.pending > _SCORING_SHARE * self._max_in_engine
            waits = is_behind or not self._engine.has_unfinished
            for sample in self._scorer.poll(SCORE_WAIT_S if waits else 0.0):
                self._finish(sample)
            if not is_behind:
                return

    def _finish(self, sample: Sample) -> None:
        self._groups[sample.id.partition("/")[0]].samples[sample.index] = sample
