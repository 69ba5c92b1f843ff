"""The interface of environments, which users write for episodes of several turns: tools, simulated
users, games.

    class Calculator:
        def step(self, episode):
            if episode.turn.startswith("answer"):
                return float(episode.turn == f"answer {episode.answer}")  # a reward: the end
            return str(evaluate(episode.turn))  # an observation: one more turn

An environment is a class with one method, named in a recipe by `env.path`. It runs in the killable
workers of reward functions, with their deadline and memory limit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hone.types import Message, Observation

__all__ = ["Answer", "Env", "Episode"]

Answer = Observation | str | Sequence[Message] | float | Mapping[str, float] | None
"""The environment's answer to a turn. A text, messages, parts of a message (texts and images) or an
`Observation` are shown to the policy, which takes one more turn. A number ends the episode and is
its reward; so does a mapping with `score` and further numbers, which are logged. None ends the
episode too, and `reward.functions` score it. Rewards of earlier observations are added to the
reward."""


class Env(Protocol):
    """An environment. It is made once in each worker, with `env.args`, and shared by all episodes
    of that worker.

    The memory of an episode is `Episode.turns` and `Episode.state`, never `self`: another worker,
    in another process, may answer the next turn, also after the run was resumed. A call may also be
    repeated with the same state.
    """

    def step(self, episode: Episode) -> Answer | Awaitable[Answer]:
        """Answer the last turn. May be `async`.

        With `episode.must_end` no turn is left: an observation then ends the episode, and only its
        reward is used.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The view of a sample that an environment gets."""

    turns: tuple[str, ...]
    """The texts of the policy's turns; the environment answers the last one."""
    stop_reason: str
    """Why the last turn ended: `eos`, `stop_string` or `length`."""
    must_end: bool
    """No turn or token is left: only a reward can follow."""
    state: Any
    """`Observation.state` of the last observation that set one; None before."""
    seed: int
    """Equal in all samples of a group, so that they can play the same game."""
    prompt: str
    """The rendered prompt."""
    answer: str | None
    task: str
    metadata: Mapping[str, Any]
    """The remaining columns of the row."""

    @property
    def turn(self) -> str:
        """The text of the last turn."""
        return self.turns[-1]
