"""The session of environments that answer each turn with an observation, a reward, and whether the
episode is over: those of OpenRLHF, SkyRL-Gym, textarena, Gymnasium and OpenEnv.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hone.envs.session import Action, DataRow, End, Opening
from hone.types import Observation

__all__ = ["Reply", "SteppingSession"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment says to a turn."""

    observation: Observation
    """What the policy reads next, where the episode goes on."""
    reward: float | None
    """Reward of the turn. None: the environment gave none; where it gave none in the whole episode,
    `reward.functions` score it."""
    is_over: bool = False
    truncated: bool = False
    """It has ended at a limit of the environment's own."""


class SteppingSession(ABC):
    """Plays each turn once. A shape says how an episode begins, how a turn is played, and what to
    release.

    An observation that leaves no room for another turn is followed by `finish`. A second call for a
    turn never moves the game again: it is answered from the first.
    """

    _played: tuple[int, Reply] | None = None

    @abstractmethod
    async def start(self, row: DataRow) -> Opening:
        """Begin the episode."""

    @abstractmethod
    async def play(self, action: Action) -> Reply:
        """Play a turn."""

    @abstractmethod
    async def close(self) -> None:
        """Release what the environment holds."""

    def metrics(self) -> Mapping[str, float]:
        """Further numbers at the end of the episode."""
        return {}

    async def finish(self) -> End:
        """The end after an observation that was not shown. Its reward is added by those who hold
        the session; where the environment gave none, `reward.functions` score the episode."""
        reward = None if self._played is None else self._played[1].reward
        score = None if reward is None else 0.0
        return End(score=score, truncated=True, metrics=self.metrics())

    async def step(self, action: Action) -> Observation | End:
        """Answer a turn: with an observation, or with the end and the reward of the last turn.
        Rewards of earlier observations are added by those who hold the session."""
        if self._played is None or self._played[0] != action.index:
            self._played = action.index, await self.play(action)
        reply = self._played[1]
        if not (reply.is_over or action.must_end):
            return replace(reply.observation, reward=reply.reward or 0.0)
        return End(
            score=reply.reward,
            truncated=reply.truncated or not reply.is_over,
            metrics=self.metrics(),
        )
