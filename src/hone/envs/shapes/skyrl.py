"""Environments of SkyRL-Gym: subclasses of `BaseTextEnv`, by class or by registered name.

Played as `SkyRLGymGenerator.agent_loop` of SkyRL 0.3 plays them: made for each episode with
`env_config` (here `env.args`) and `extras` (the columns of the row and `max_turns`), then
`init(prompt)`, and `step(text)` for each turn; rewards of steps are added. hone differs on purpose
in this:

- `init` may append to the prompt, not rewrite it: the ids of the prompt are made once.
- `postprocessed_action` is ignored: the tokens that were sampled stay.
- Where a step that does not end the episode has no observations, SkyRL appends only the header of
  the next turn; here an empty message of the user stands before it.
- An exception is a failure of the sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from hone.envs.calling import check_args
from hone.envs.session import Action, DataRow, Opening
from hone.envs.shapes.maker import EnvMaker, Source
from hone.envs.shapes.reading import appended_opening, finite_numbers, messages_of, number_of
from hone.envs.shapes.stepping import Reply, SteppingSession
from hone.errors import did_you_mean
from hone.extras import import_extra
from hone.types import Observation

__all__ = ["by_name", "maker"]

_GIVEN = ("env_config", "extras")


def by_name(name: str, args: Mapping[str, Any]) -> EnvMaker:
    """The maker of `skyrl:NAME`. Raises ValueError for a name that is not registered."""
    gym = import_extra("skyrl_gym", needed_by="env.path")
    registry = gym.envs.registration.registry
    if name not in registry:
        raise ValueError(
            f"skyrl_gym has no environment '{name}'.{did_you_mean(name, registry)} It has: "
            f"{', '.join(sorted(registry))}; name a class of your own by its file"
        )
    return _maker(partial(gym.make, name), args, file=None)


def maker(source: Source) -> EnvMaker:
    """The maker of a class. Raises ValueError for a function, and for a class that does not take
    `env_config` and `extras`."""
    if not inspect.isclass(source.found):
        raise ValueError(
            f"'{source.path}' is a function; an environment of SkyRL-Gym is made from each row, so "
            "name its class, which takes `env_config` and `extras`"
        )
    check_args(source.path, source.found, {}, given=_GIVEN)
    return _maker(source.found, source.args, file=source.file)


def _maker(create: Any, args: Mapping[str, Any], file: str | None) -> EnvMaker:
    config: Any = {}
    if args:  # SkyRL's configurations are read by attribute and by key
        config = import_extra("omegaconf", needed_by="env.args").OmegaConf.create(dict(args))
    made = partial(create, env_config=config)
    return EnvMaker(shape="SkyRL-Gym", make=lambda: SkyRLSession(made), file=file)


class SkyRLSession(SteppingSession):
    """An episode of one environment, which is made when the row is known."""

    def __init__(self, create: Any) -> None:
        self._create = create
        self._env: Any = None

    async def start(self, row: DataRow) -> Opening:
        """Make the environment and call `init`. Raises ValueError where it rewrites the prompt."""
        self._env = self._create(extras={**row.columns, "max_turns": row.max_turns})
        prompt = messages_of(row)
        changed, _ = self._env.init(messages_of(row))
        return appended_opening(prompt, changed, "`init` of the environment")

    async def play(self, action: Action) -> Reply:
        """Call `step` with the text of the turn."""
        output = self._env.step(action.text)
        messages = [dict(message) for message in output["observations"]]
        return Reply(
            observation=Observation(messages or ""),
            reward=number_of(output["reward"]),
            is_over=bool(output["done"]),
        )

    def metrics(self) -> Mapping[str, float]:
        """The numbers of `get_metrics`."""
        return finite_numbers(self._env.get_metrics())

    async def close(self) -> None:
        """Close the environment, where it was made."""
        if self._env is not None:
            self._env.close()
