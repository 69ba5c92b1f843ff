"""What a user writes to make episodes of many turns: tools, simulated users, games.

    class Calculator:
        def step(self, episode):
            if episode.turn.startswith("answer"):
                return float(episode.turn == f"answer {episode.answer}")  # the reward: it ends
            return str(evaluate(episode.turn))  # what the environment says: one more turn

A class of one method, named in a recipe by `env.path`. It runs in the killable workers of reward
functions, with their deadline and memory limit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hone.types import Message, Observation

__all__ = ["Answer", "Env", "Episode"]

Answer = Observation | str | Sequence[Message] | float | Mapping[str, float] | None
"""Of a turn. A text, messages or an `Observation` go before the policy, which takes one more turn.
A number ends the episode as its reward; so does a mapping with `score` and further numbers, which
are logged. None ends it too, and `reward.functions` score it. The rewards of observations are
added."""


class Env(Protocol):
    """Made once in each worker, with `env.args`; all episodes of the worker share it.

    What an episode has to remember is in `Episode.turns` and `Episode.state`, never on `self`: the
    next turn may be answered by another worker, in another process, after the run was resumed. A
    call may also be repeated from the same state.
    """

    def step(self, episode: Episode) -> Answer | Awaitable[Answer]:
        """Answer the last turn. May be `async`.

        Where `episode.must_end`, no turn is left: an observation then ends the episode, and of it
        only the reward counts.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an environment sees of a sample."""

    turns: tuple[str, ...]
    """The policy's texts; the last one is to be answered."""
    stop_reason: str
    """Why the last turn ended: `eos`, `stop_string` or `length`."""
    must_end: bool
    """No turn or token is left: there is only a score to come."""
    state: Any
    """Of the last observation that set one; None before."""
    seed: int
    """Equal in all samples of a group, so that they can be of one and the same game."""
    prompt: str
    """As rendered."""
    answer: str | None
    task: str
    metadata: Mapping[str, Any]
    """The remaining columns of the row."""

    @property
    def turn(self) -> str:
        """The text to be answered."""
        return self.turns[-1]
