"""Calls a user's environment with a turn of the policy, and scores the episode where that ends it.

It runs in a worker, and knows nothing of processes, like `score.py`.
"""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hone.envs.calling import check_args
from hone.envs.env import Episode
from hone.rewards.said import sendable
from hone.rewards.score import (
    ENV_NAME,
    RewardFunction,
    Verdict,
    attempt,
    await_result,
    score,
)
from hone.rewards.session_player import SessionCall, SessionPlayer
from hone.rewards.shapes import FunctionScore, InvalidScoreError, read_score
from hone.types import FailureKind, Observation, Sample, StopReason
from hone.user_code.resolve import error_location

__all__ = ["EpisodeSoFar", "Player", "episode_of", "play", "read_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSoFar:
    """The input of an environment, and the totals of its episode."""

    given: Mapping[str, Any] | SessionCall
    """The fields of `hone.envs.Episode`, or the call of a session."""
    earned: float
    """Sum of the observations' rewards."""
    limit: StopReason | None
    """The limit for which the episode must end now, or None."""


def episode_of(sample: Sample, *, max_turns: int) -> EpisodeSoFar:
    """The episode of a sample whose last turn an environment is to answer."""
    reason = StopReason.MAX_TURNS if len(sample.turns) >= max_turns else StopReason.LENGTH
    return EpisodeSoFar(
        given={
            "turns": tuple(turn.text for turn in sample.turns),
            "stop_reason": str(sample.turns[-1].stop_reason),
            "must_end": sample.must_end,
            "state": sample.state,
            "seed": sample.seed,
            "prompt": sample.prompt.text,
            "answer": sample.prompt.answer,
            "task": sample.prompt.task,
            "metadata": dict(sample.prompt.metadata),
        },
        earned=math.fsum(turn.reward for turn in sample.turns),
        limit=reason if sample.must_end else None,
    )


def play(
    env: Player | SessionPlayer,
    functions: Sequence[RewardFunction],
    given: Mapping[str, Any],
    episode: EpisodeSoFar,
    *,
    on_call: Callable[[int], None],
    may_abstain: bool = False,
) -> Verdict:
    """Call the environment; where it ends the episode without a reward, call the functions.

    `on_call` gets the index of each function just before its call; the environment's index is
    `len(functions)`. `may_abstain` is that of `score`.
    """
    start = time.perf_counter()
    on_call(len(functions))
    outcome = attempt(env, episode.given)
    if isinstance(env, SessionPlayer):
        given = {**given, "environment": env.environment}
        if isinstance(outcome, Verdict) and outcome.failure is not FailureKind.INVALID:
            is_lost = not outcome.is_certain and episode.limit is not StopReason.DEADLINE
            outcome = replace(outcome, is_session_lost=is_lost)
    stop_reason = None
    if isinstance(outcome, Observation):
        if episode.limit is None:
            return Verdict(observation=outcome, seconds=time.perf_counter() - start)
        stop_reason, outcome = episode.limit, FunctionScore(outcome.reward)
    if isinstance(outcome, FunctionScore):
        if outcome.is_truncated:
            stop_reason = episode.limit or StopReason.MAX_TURNS
        is_scored = outcome.score is not None
        earned = episode.earned + outcome.earned
        if is_scored or earned:
            outcome = replace(outcome, score=(outcome.score or 0.0) + earned)
        called = [] if is_scored else functions
        outcome = score(called, given, of_env=outcome, on_call=on_call, may_abstain=may_abstain)
    return replace(outcome, stop_reason=stop_reason, seconds=time.perf_counter() - start)


class Player:
    """An environment, made from its class and `env.args`."""

    name = ENV_NAME

    def __init__(self, made: Any, path: str, args: Mapping[str, Any]) -> None:
        """Raises ValueError where `made`, which `path` names, cannot be made or has no method for a
        turn."""
        if inspect.isclass(made):
            check_args(path, made, args)
            try:
                made = made(**args)
            except (Exception, SystemExit) as error:  # foreign code may raise anything
                raise ValueError(f"making '{path}' failed: {error_location(error)}") from error
        step = getattr(made, "step", None)
        if not callable(step):
            raise ValueError(
                f"'{path}' has no method `step`; an environment is a class with "
                "`step(self, episode)`, which returns what it says, or a reward, or one with "
                "`start(self, row)` and `step(self, action)`"
            )
        try:
            inspect.signature(step).bind(None)
        except TypeError:
            raise ValueError(
                f"`step` of '{path}' takes {inspect.signature(step)}; it is called with the "
                "episode alone"
            ) from None
        self.function = step
        code = getattr(inspect.unwrap(step), "__code__", None)
        self.file: str | None = code.co_filename if code is not None else None

    def __call__(self, given: Mapping[str, Any]) -> FunctionScore | Observation:
        """Answer the last turn. Raises InvalidScoreError, or whatever the environment raises."""
        return read_answer(await_result(self.function(Episode(**given))))


def read_answer(answer: Any) -> FunctionScore | Observation:
    """An environment's answer as an observation or a score. Raises InvalidScoreError."""
    if isinstance(answer, str):
        answer = Observation(answer)
    elif isinstance(answer, Sequence) and not isinstance(answer, bytes):
        answer = Observation(cast("Sequence[Any]", answer))
    return _checked(answer) if isinstance(answer, Observation) else read_score(answer)


def _checked(observation: Observation) -> Observation:
    """The observation, ready to leave the worker. Raises InvalidScoreError for invalid content,
    reward or state."""
    content, ids, longest = observation.content, observation.token_ids, observation.max_tokens
    said = sendable(content)
    if not all(type(number) is int and number >= 0 for number in ids):
        raise InvalidScoreError("answered with an Observation whose token_ids are not all ids")
    if ids and content:
        raise InvalidScoreError("answered with an Observation of both content and token_ids")
    if longest is not None and not (type(longest) is int and longest > 0):
        raise InvalidScoreError(f"answered with max_tokens={longest!r}; allowed: 1 or more")
    if not all(type(text) is str and text for text in observation.stop):
        raise InvalidScoreError(f"answered with stop={observation.stop!r}; allowed: texts")
    read_score(observation.reward)
    try:
        json.dumps(observation.state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidScoreError(
            f"answered with a state that is not made of JSON values: {error}; it is kept in "
            "checkpoints, so use dicts with texts as keys, lists, texts and finite numbers"
        ) from None
    return replace(observation, content=said)
