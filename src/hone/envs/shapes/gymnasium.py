"""Text games of Gymnasium, by registered id (`gymnasium:FrozenLake-v1`) or by class.

From text to action:

- `Discrete`: the last whole number in the turn. Where there is none, or it is no action, the
  policy is answered with the range of actions, and the game does not move.
- `Text`: the turn without blanks around it, where the space contains it.

From observation to text:

- with `env.args.render_mode: ansi`: what the environment draws,
- else the observation: a text as it is, anything else as JSON. `Discrete`, `Text`, `MultiDiscrete`,
  `MultiBinary`, small `Box`, and `Tuple` and `Dict` of these.

Other spaces are refused when the environment is loaded. What the numbers mean is the prompt's to
say. Rewards of all steps are added; `truncated` of Gymnasium is that of hone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hone.envs.session import Action, DataRow, Opening
from hone.envs.shapes.maker import EnvMaker, Source, probe
from hone.envs.shapes.stepping import Reply, SteppingSession
from hone.extras import import_extra
from hone.types import Observation

__all__ = ["by_name", "maker"]

_MOST_NUMBERS = 64
"""Numbers in the largest `Box` that is written as text."""
_WHOLE_NUMBER = re.compile(r"-?\d+")


def by_name(name: str, args: Mapping[str, Any]) -> EnvMaker:
    """The maker of `gymnasium:ID`. Raises ValueError where there is no such id, or a space does not
    fit."""
    gym = import_extra("gymnasium", needed_by="env.path")
    return _maker(f"gymnasium:{name}", partial(gym.make, name), args, file=None)


def maker(source: Source) -> EnvMaker:
    """The maker of a class or function. Raises ValueError where a space does not fit."""
    return _maker(source.path, source.found, source.args, file=source.file)


def _maker(
    path: str, create: Callable[..., Any], args: Mapping[str, Any], file: str | None
) -> EnvMaker:
    env = probe(path, create, args)
    action, observation = env.action_space, env.observation_space
    draws = env.render_mode == "ansi"
    env.close()
    if _kind(action) not in ("Discrete", "Text"):
        raise ValueError(
            f"'{path}' takes actions of {action}; a turn's text becomes an action of a Discrete or "
            "Text space alone. Wrap the environment (gymnasium.ActionWrapper)"
        )
    if not draws and not _is_writable(observation):
        raise ValueError(
            f"'{path}' has observations of {_kind(observation)}{observation.shape or ''}, which "
            f"are not written as text (at most {_MOST_NUMBERS} numbers in a Box). Set "
            "env.args.render_mode to ansi where it draws text, or wrap it "
            "(gymnasium.ObservationWrapper)"
        )
    return EnvMaker(
        shape="Gymnasium", make=lambda: GymnasiumSession(create(**args), draws=draws), file=file
    )


class GymnasiumSession(SteppingSession):
    """An episode of one environment."""

    def __init__(self, env: Any, *, draws: bool) -> None:
        self._env = env
        self._draws = draws

    async def start(self, row: DataRow) -> Opening:
        """Reset with the seed of the row, and show the first observation below the prompt."""
        observation, _ = self._env.reset(seed=row.seed)
        return "\n" + self._shown(observation)

    async def play(self, action: Action) -> Reply:
        """Make a step, where the turn names an action."""
        chosen = _action(action.text, self._env.action_space)
        if chosen is None:
            refusal = f"That names no action. {_allowed(self._env.action_space)}"
            return Reply(observation=Observation(refusal), reward=0.0)
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        is_over = bool(terminated or truncated)
        return Reply(
            observation=Observation("" if is_over else self._shown(observation)),
            reward=float(reward),
            is_over=is_over,
            truncated=bool(truncated and not terminated),
        )

    async def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _shown(self, observation: Any) -> str:
        return self._env.render() if self._draws else _written(observation)


def _action(text: str, space: Any) -> int | str | None:
    """The action that a turn names, or None."""
    if _kind(space) == "Text":
        found = text.strip()
    else:
        numbers = _WHOLE_NUMBER.findall(text)
        if not numbers:
            return None
        found = int(numbers[-1])
    return found if space.contains(found) else None


def _allowed(space: Any) -> str:
    if _kind(space) == "Text":
        return f"Allowed: a text of {space.min_length} to {space.max_length} characters."
    return f"Allowed: a whole number from {space.start} to {space.start + space.n - 1}."


def _kind(space: Any) -> str:
    return type(space).__name__


def _is_writable(space: Any) -> bool:
    match _kind(space):
        case "Discrete" | "Text" | "MultiDiscrete" | "MultiBinary":
            return True
        case "Box":
            return int(space.low.size) <= _MOST_NUMBERS
        case "Tuple":
            return all(map(_is_writable, space.spaces))
        case "Dict":
            return all(map(_is_writable, space.spaces.values()))
        case _:
            return False


def _written(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, ensure_ascii=False, default=lambda value: value.tolist())
