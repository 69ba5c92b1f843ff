"""Games of textarena, by registered name (`textarena:GuessTheNumber-v0`) or by class.

A turn's text is the action, as it is. The game's own observation is what the policy reads: at the
start the instructions, after a turn what is new. Most games show the whole history each time, and
then only its new part is appended, since the policy has the rest; a game that shows its text anew
(boards of `-train` versions) has it appended whole. An observation of messages (`-raw` versions,
and classes) becomes lines as textarena's `LLMObservationWrapper` writes them.

The policy is player 0. Other players are one callable from observation to action, like textarena's
agents: `env.args.opponent`, with `env.args.num_players`; other args are the game's. The reward is
that of player 0 when the game is over; a game that is cut by a limit of hone has earned none and
counts 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hone.envs.session import Action, DataRow, Opening
from hone.envs.shapes.maker import EnvMaker, Resolve, Source, probe
from hone.envs.shapes.reading import finite_numbers
from hone.envs.shapes.stepping import Reply, SteppingSession
from hone.errors import did_you_mean
from hone.extras import import_extra
from hone.types import Observation

__all__ = ["by_name", "maker"]

_POLICY = 0
_LARGEST_SEED = 2**31
"""Games pass their seed to generators that take 32 bits."""


@dataclass(frozen=True, slots=True)
class _Players:
    num: int
    opponent: Callable[[str], str] | None


def by_name(name: str, args: Mapping[str, Any], resolve: Resolve) -> EnvMaker:
    """The maker of `textarena:NAME`. Raises ValueError for an unknown name, and where the game does
    not start with these players."""
    arena = import_extra("textarena", needed_by="env.path")
    registry = arena.envs.registration.ENV_REGISTRY
    if name not in registry:
        raise ValueError(f"textarena has no game '{name}'.{did_you_mean(name, registry)}")
    players, others = _players(args, resolve)
    return _checked(f"textarena:{name}", partial(arena.make, name), others, players, file=None)


def maker(source: Source) -> EnvMaker:
    """The maker of a class or function. Raises ValueError as `by_name` does."""
    players, args = _players(source.args, source.resolve)
    return _checked(source.path, source.found, args, players, file=source.file)


def _players(args: Mapping[str, Any], resolve: Resolve) -> tuple[_Players, dict[str, Any]]:
    """The players that `env.args` name, and the game's own arguments."""
    others = dict(args)
    num, opponent = others.pop("num_players", 1), others.pop("opponent", None)
    if type(num) is not int or num < 1:
        raise ValueError(f"env.args.num_players is {num!r}; allowed: a whole number from 1")
    if (num > 1) != (opponent is not None):
        raise ValueError(
            f"env.args has num_players = {num} and opponent = {opponent!r}; a game of several "
            "players needs an opponent, `path/to/file.py:Name`, a function from the observation's "
            "text to an action, or a class whose objects are such functions; a game of one needs "
            "none"
        )
    if opponent is None:
        return _Players(num, None), others
    found: Any = resolve(opponent, "opponent")
    return _Players(num, found() if isinstance(found, type) else found), others


def _checked(
    path: str,
    create: Callable[..., Any],
    args: Mapping[str, Any],
    players: _Players,
    file: str | None,
) -> EnvMaker:
    game = probe(path, create, args)
    try:
        game.reset(num_players=players.num, seed=0)
    except Exception as error:  # foreign code may raise anything
        raise ValueError(
            f"'{path}' does not start with env.args.num_players = {players.num}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return EnvMaker(
        shape="textarena",
        make=lambda: TextArenaSession(create(**args), players),
        file=file,
    )


class TextArenaSession(SteppingSession):
    """A game of the policy, alone or against scripted players."""

    def __init__(self, game: Any, players: _Players) -> None:
        self._game = game
        self._players = players
        self._shown = ""
        self._info: Mapping[str, Any] = {}

    async def start(self, row: DataRow) -> Opening:
        """Reset the game with the seed of the row, and show what it says to the policy."""
        self._game.reset(num_players=self._players.num, seed=row.seed % _LARGEST_SEED)
        text = self._observe()
        if text is None:
            raise ValueError("the game was over before the policy's first turn")
        return text

    async def play(self, action: Action) -> Reply:
        """Play the turn, and the turns of the others."""
        is_over, _ = self._game.step(action.text)
        text = None if is_over else self._observe()
        if text is not None:
            return Reply(observation=Observation(text), reward=0.0)
        rewards, infos = self._game.close()
        self._info = infos.get(_POLICY, {})
        return Reply(observation=Observation(), reward=float(rewards[_POLICY]), is_over=True)

    def metrics(self) -> Mapping[str, float]:
        """What the game says about the policy at its end: invalid moves, its own count of turns."""
        return finite_numbers(self._info)

    async def close(self) -> None:
        """A game holds nothing."""

    def _observe(self) -> str | None:
        """Let the others play until it is the policy's turn. What is new to it, or None where the
        game is over."""
        while True:
            player, observation = self._game.get_observation()
            text = self._text(observation)
            if player == _POLICY:
                new = text.removeprefix(self._shown) if isinstance(observation, str) else text
                self._shown = text
                return new
            assert self._players.opponent is not None
            is_over, _ = self._game.step(self._players.opponent(text))
            if is_over:
                return None

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        names = {-1: "GAME", **self._game.state.role_mapping}
        return "".join(
            f"\n[{names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, _ in observation
        )
