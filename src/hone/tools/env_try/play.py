"""Plays episodes of a recipe's environment by the runner and the scorer of training.

    with scorer_of(cfg, language) as scorer:
        for sample in Stage(cfg, language, scorer, say, audience).play(): ...

Only the engine is another one: a person, or a script, says what the policy says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from socket import socket
from typing import Protocol

from hone.config.env_try import EnvTryConfig
from hone.errors import UserError
from hone.rewards.scorer import Scorer
from hone.rollout.episodes import Episodes
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Runner, RunningGroup
from hone.tools.env_try.language import Language
from hone.tools.env_try.policy import ScriptedEngine
from hone.types import Prompt, Request, Sample, SamplingParams

__all__ = ["Audience", "Say", "Stage", "episodes_of", "sampling_of", "scorer_of"]

_log = logging.getLogger(__name__)


class Say(Protocol):
    """Says the policy's turn number `turn`, from 0, in the episode of a row; None to end it."""

    def __call__(self, row_id: str, turn: int) -> str | None: ...


class Audience(Protocol):
    """Sees an episode while it is played."""

    def begins(self, prompt: Prompt, number: int) -> None:
        """The episode of a row begins, row `number` from 1."""
        ...

    def before_turn(self, prompt: Prompt, sample: Sample | None) -> None:
        """The policy is about to take a turn. `prompt` is the one that it is given; `sample` has
        the earlier turns, None before the first turn of an environment without sessions."""
        ...

    def turn(self, number: int, text: str) -> None:
        """The policy has said its turn number `number`, from 0."""
        ...

    def starts_again(self, why: str) -> None:
        """The session was lost, and the episode is played again from its start."""
        ...

    def ends(self, sample: Sample) -> None:
        """The episode has ended."""
        ...


class TriedScorer(Scorer):
    """A scorer that remembers why a session was lost: a run plays such an episode again and goes
    on, but a person who tries the environment wants to see it."""

    last_failure = ""
    """The kind and the message of the last failure."""

    def poll(self, timeout_s: float = 0.0, *, wake: socket | None = None) -> list[Sample]:
        """As `Scorer.poll`."""
        done = super().poll(timeout_s, wake=wake)
        for sample in done:
            if sample.failure is not None:
                self.last_failure = f"{sample.failure}: {sample.failure_detail}"
        return done


def scorer_of(cfg: EnvTryConfig, language: Language) -> TriedScorer:
    """The scorer of the recipe, with one worker, that goes on whatever fails. Raises UserError and
    ValueError where environment or functions cannot be loaded."""
    if not cfg.env.is_set:
        raise UserError(
            "neither env.path nor env.tools is set, so there is no environment to play. Name one: "
            "`hone env try path/to/file.py:Class`, or --env.path"
        )
    if cfg.reward.model.path is not None:
        _log.warning(
            "reward.model.path is set, and no weights are loaded here: the rewards that are shown "
            "lack its part, and are not clipped"
        )
    reward = cfg.reward.model_copy(update={"num_workers": 1, "max_failure_rate": 1.0})
    return TriedScorer(
        reward,
        max_completion_tokens=language.max_tokens,
        env=cfg.env,
        tool_format=language.tool_format,
    )


def episodes_of(cfg: EnvTryConfig, language: Language, scorer: Scorer) -> Episodes:
    """Requests and samples as training makes them."""
    return Episodes(
        decode=language.decode,
        max_turns=scorer.max_turns,
        max_turn_tokens=scorer.max_turn_tokens if language.has_tokens else None,
        render=language.render,
        run_seed=cfg.run.seed,
        purpose="rollout",
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the episodes of a recipe's rows are played, one after the other."""

    cfg: EnvTryConfig
    language: Language
    scorer: TriedScorer
    say: Say
    audience: Audience

    def play(self) -> Iterator[Sample]:
        """Play an episode for each row, and yield the samples as they end."""
        for number, prompt in enumerate(self.language.prompts, start=1):
            yield self._play(prompt, number)

    def _play(self, prompt: Prompt, number: int) -> Sample:
        """Play the episode of a row."""
        language, scorer = self.language, self.scorer
        episodes = episodes_of(self.cfg, language, scorer)
        group_id = f"try-{number}"
        attempt = 0

        def next_text(request: Request) -> str | None:
            nonlocal attempt
            del request  # there is only one
            sample = runner.groups[group_id].episodes.get(0)
            if sample is not None and sample.attempt > attempt:
                attempt = sample.attempt
                self.audience.starts_again(scorer.last_failure)
            turn = 0 if sample is None else len(sample.turns)
            self.audience.before_turn(prompt if sample is None else sample.prompt, sample)
            text = self.say(prompt.id, turn)
            if text is not None:
                self.audience.turn(turn, text)
            return text

        engine = ScriptedEngine(next_text, language.encode, language.end_id)
        runner = Runner(engine, scorer, episodes)
        group = RunningGroup.of(
            prompt,
            sampling_of(self.cfg, language),
            episodes,
            group_id=group_id,
            indices=[0],
            order=number,
        )
        self.audience.begins(prompt, number)
        runner.submit([group])
        while runner.groups:
            runner.step()
        (sample,) = group.group.samples
        self.audience.ends(sample)
        return sample


def sampling_of(cfg: EnvTryConfig, language: Language) -> SamplingParams:
    """What bounds and ends the turns of an episode."""
    sampling = sampling_params(cfg.rollout, cfg.rollout.stop)
    return replace(sampling, max_tokens=language.max_tokens)
