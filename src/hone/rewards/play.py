"""A user's environment answers a turn of the policy; where that ends the episode, it is scored.

As `score.py`, this is the whole of it without processes; it runs in a worker.
"""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hone.envs.env import Episode
from hone.errors import did_you_mean
from hone.rewards.resolve import error_location, resolve
from hone.rewards.score import (
    ENV_NAME,
    RewardFunction,
    Verdict,
    attempt,
    await_result,
    score,
)
from hone.rewards.shapes import InvalidScoreError, Part, own_part
from hone.types import Observation, Sample, StopReason

__all__ = ["EpisodeSoFar", "Player", "episode_of", "play"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSoFar:
    """What an environment is given, and what has been counted of its episode."""

    given: Mapping[str, Any]
    """The fields of `hone.envs.Episode`."""
    earned: float
    """The sum of the observations' rewards."""
    limit: StopReason | None
    """Why it must end."""


def episode_of(sample: Sample, *, max_turns: int) -> EpisodeSoFar:
    """What an environment is asked of `sample`."""
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
    env: Player,
    functions: Sequence[RewardFunction],
    given: Mapping[str, Any],
    episode: EpisodeSoFar,
    *,
    on_call: Callable[[int], None],
) -> Verdict:
    """Ask the environment; where it ends the episode without a reward, call the functions.

    `on_call` gets the index of each function just before it is called, their number for the
    environment.
    """
    start = time.perf_counter()
    on_call(len(functions))
    outcome = attempt(env, episode.given)
    stop_reason = None
    if isinstance(outcome, Observation):
        if episode.limit is None:
            return Verdict(observation=outcome, seconds=time.perf_counter() - start)
        stop_reason, outcome = episode.limit, Part(outcome.reward)
    if isinstance(outcome, Part):
        is_scored = outcome.score is not None
        if is_scored or episode.earned:
            outcome = replace(outcome, score=(outcome.score or 0.0) + episode.earned)
        called = [] if is_scored else functions
        outcome = score(called, given, of_env=outcome, on_call=on_call)
    return replace(outcome, stop_reason=stop_reason, seconds=time.perf_counter() - start)


class Player:
    """An environment, made from its class and `env.args`."""

    name = ENV_NAME

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:
        """Raises ValueError where there is no such class, or it cannot be made."""
        made = resolve(path, "environment")
        if inspect.isclass(made):
            try:
                inspect.signature(made).bind(**args)
            except (TypeError, ValueError) as error:
                names = [name for name in inspect.signature(made).parameters if name != "self"]
                hint = next((did_you_mean(name, names) for name in args if name not in names), "")
                raise ValueError(
                    f"env.args do not fit '{path}', which takes {', '.join(names) or 'nothing'}: "
                    f"{error}.{hint}"
                ) from None
            try:
                made = made(**args)
            except (Exception, SystemExit) as error:  # foreign code may raise anything
                raise ValueError(f"making '{path}' failed: {error_location(error)}") from error
        step = getattr(made, "step", None)
        if not callable(step):
            raise ValueError(
                f"'{path}' has no method `step`; an environment is a class with "
                "`step(self, episode)`, which returns what it says, or a reward"
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

    def __call__(self, given: Mapping[str, Any]) -> Part | Observation:
        """Answer the last turn. Raises InvalidScoreError, or whatever the environment raises."""
        answer = self.function(Episode(**given))
        if inspect.isawaitable(answer):
            answer = await_result(answer)
        if isinstance(answer, str):
            answer = Observation(answer)
        elif isinstance(answer, Sequence) and not isinstance(answer, bytes):
            answer = Observation(_messages(answer))
        return _checked(answer) if isinstance(answer, Observation) else own_part(answer)


def _checked(observation: Observation) -> Observation:
    """Raise InvalidScoreError for what cannot be appended, counted or kept."""
    content, ids, longest = observation.content, observation.token_ids, observation.max_tokens
    if not isinstance(content, str):
        _messages(content)
    if not all(type(number) is int and number >= 0 for number in ids):
        raise InvalidScoreError("answered with an Observation whose token_ids are not all ids")
    if ids and content:
        raise InvalidScoreError("answered with an Observation of both content and token_ids")
    if longest is not None and not (type(longest) is int and longest > 0):
        raise InvalidScoreError(f"answered with max_tokens={longest!r}; allowed: 1 or more")
    if not all(type(text) is str and text for text in observation.stop):
        raise InvalidScoreError(f"answered with stop={observation.stop!r}; allowed: texts")
    own_part(observation.reward)
    try:
        json.dumps(observation.state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidScoreError(
            f"answered with a state that is not made of JSON values: {error}; it is kept in "
            "checkpoints, so use dicts with texts as keys, lists, texts and finite numbers"
        ) from None
    return observation


def _messages(answer: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    messages = tuple(answer)
    if not messages or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise InvalidScoreError(
            "answered with a list that is not of chat messages, such as "
            '[{"role": "user", "content": "..."}]'
        )
    for one in messages:
        if not isinstance(content := one.get("content", ""), str):
            raise InvalidScoreError(
                f"answered with a message whose content is {content!r:.80}; it must be text: "
                "a chat template would write Python's spelling of anything else"
            )
    try:
        json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError) as error:
        text = f"answered with messages that are not made of JSON values: {error}"
        raise InvalidScoreError(text) from None
    return messages
