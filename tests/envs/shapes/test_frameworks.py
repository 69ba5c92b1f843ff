"""Environments of installed packages, unmodified, against each framework's own loop on the same
scripted turns: equal observations, rewards and ends, number by number.

`make test-agents` runs them, in an environment of their own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.envs.shapes.driver import maker_of, play, row

pytestmark = pytest.mark.envs


# textarena


def arena_loop(
    name: str, turns: Sequence[str], seed: int, others: Any = None
) -> tuple[list[str], float | None, bool]:
    """textarena's own loop: what player 0 saw before each turn, its reward, and whether the game
    ended."""
    ta = pytest.importorskip("textarena")
    env = ta.make(name)
    env.reset(num_players=1 if others is None else 2, seed=seed)
    seen: list[str] = []
    script = iter(turns)
    is_over = False
    while not is_over:
        player, text = env.get_observation()
        if player == 0:
            turn = next(script, None)
            if turn is None:
                return seen, None, False
            seen.append(text)
        else:
            turn = others(text)
        is_over, _ = env.step(turn)
    rewards, _ = env.close()
    return seen, rewards[0], True


GAMES = [
    ("GuessTheNumber-v0", [f"[{n}]" for n in range(1, 21)]),
    ("GuessTheNumber-v0", ["no number", "neither"]),
    ("GuessTheNumber-v0-train", ["[3]", "[17]", "[9]"]),
    ("Secretary-v0", ["[continue]", "[continue]", "[accept]"]),
    ("Secretary-v0", ["[continue]"] * 6),
    ("ThreeCardMonte-v0", ["I watched. [1]"]),
    ("PegJump-v0", ["[4 2 1]", "[1 2 4]", "[13 8 4]", "nonsense", "nonsense"]),
    ("PegJump-v0-train", ["[4 2 1]", "[6 5 4]", "[0 0 0]"]),
    ("RushHour-v0", ["[A+1]", "[X+1]", "[Q-9]"]),
    ("Cryptarithm-v0", ["[S 9]", "[E 5]", "[S 1]", "[S 1]"]),
    ("Cryptarithm-v0-train", ["[S 9]", "[E 5]"]),
]


@pytest.mark.parametrize(("name", "turns"), GAMES)
@pytest.mark.parametrize("seed", [0, 7])
def test_games_of_textarena(name: str, turns: list[str], seed: int) -> None:
    seen, reward, is_over = arena_loop(name, turns, seed)
    played = play(maker_of(f"textarena:{name}").make(), row(seed=seed), turns, cut=False)
    shown = ""
    for text, new in zip(seen, [played.opening, *played.texts], strict=False):
        assert isinstance(new, str)
        shown = shown + new if text.startswith(shown) else new
        assert shown == text
    assert (played.end is not None) == is_over
    if is_over:
        assert len(played.said) == len(seen) - 1
        assert played.reward == reward


def test_an_opponent_of_textarena_plays_between_the_turns(tmp_path: Path) -> None:
    file = tmp_path / "opponent.py"
    file.write_text("def hold(observation):\n    return '[hold]'\n")
    turns = ["[roll]", "[hold]"] * 40
    seen, reward, is_over = arena_loop("PigDice-v0", turns, 3, others=lambda _: "[hold]")
    maker = maker_of("textarena:PigDice-v0", {"num_players": 2, "opponent": f"{file}:hold"})
    played = play(maker.make(), row(seed=3), turns, cut=False)
    assert "".join([str(played.opening), *played.texts][: len(seen)]) == seen[-1]
    assert (played.end is not None) == is_over
    if is_over:
        assert played.reward == reward


def test_a_game_of_textarena_by_class_shows_messages_as_lines() -> None:
    pytest.importorskip("textarena")
    by_class = maker_of(
        "textarena.envs.GuessTheNumber.env:GuessTheNumberEnv",
        {"min_number": 1, "max_number": 20, "max_turns": 10},
    )
    assert by_class.shape == "textarena"
    turns = ["[3]", "[11]", "[x]"]
    expected = play(maker_of("textarena:GuessTheNumber-v0").make(), row(), turns)
    assert play(by_class.make(), row(), turns) == expected


def test_what_textarena_cannot_play_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match="Did you mean 'TicTacToe-v0'"):
        maker_of("textarena:TicTacTo-v0")
    with pytest.raises(ValueError, match=r"num_players = 1: .*has to be 2"):
        maker_of("textarena:TicTacToe-v0")
    with pytest.raises(ValueError, match="needs an opponent"):
        maker_of("textarena:TicTacToe-v0", {"num_players": 2})


# Gymnasium


def gym_loop(
    name: str, args: dict[str, Any], actions: Sequence[int], seed: int
) -> tuple[list[str], float, bool, bool]:
    """Gymnasium's own loop: observations as text, the sum of rewards, and how it ended."""
    gym = pytest.importorskip("gymnasium")
    env = gym.make(name, **args)

    def shown(observation: Any) -> str:
        if args.get("render_mode") == "ansi":
            return env.render()
        plain = getattr(observation, "tolist", lambda: observation)()
        return json.dumps(plain, default=lambda value: value.tolist())

    observation, _ = env.reset(seed=seed)
    seen, total = ["\n" + shown(observation)], 0.0
    terminated = truncated = False
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        if terminated or truncated:
            break
        seen.append(shown(observation))
    env.close()
    return seen, total, terminated, truncated


TEXT_GAMES: list[tuple[str, dict[str, Any], list[int]]] = [
    ("Blackjack-v1", {}, [1, 1, 0]),
    ("FrozenLake-v1", {"render_mode": "ansi"}, [2, 2, 1, 1, 1, 2]),
    ("CliffWalking-v1", {}, [0, 1, 1, 2]),
    ("CliffWalking-v1", {"render_mode": "ansi", "is_slippery": True}, [0, 1, 2, 1]),
    ("CliffWalking-v1", {"max_episode_steps": 3}, [0, 0, 0, 0]),
    ("CartPole-v1", {}, [1] * 20),
    ("Acrobot-v1", {}, [0, 2, 2, 1]),
    ("MountainCar-v0", {}, [2, 0, 2]),
]


@pytest.mark.parametrize(("name", "args", "actions"), TEXT_GAMES)
@pytest.mark.parametrize("seed", [1, 12])
def test_games_of_gymnasium(name: str, args: dict[str, Any], actions: list[int], seed: int) -> None:
    seen, total, terminated, truncated = gym_loop(name, args, actions, seed)
    turns = [f"I take action {number}." for number in actions]
    played = play(maker_of(f"gymnasium:{name}", args).make(), row(seed=seed), turns)
    assert [played.opening, *played.texts] == seen[: 1 + len(played.said)]
    assert played.reward == pytest.approx(total, abs=0)
    assert played.end is not None
    assert played.end.truncated == (not terminated)
    assert len(played.said) == len(seen) - 1 - (not (terminated or truncated))


def test_a_turn_without_an_action_does_not_move_the_game() -> None:
    pytest.importorskip("gymnasium")
    maker = maker_of("gymnasium:CliffWalking-v1")
    played = play(maker.make(), row(), ["north", "0", "17", "no. 1, or 0"])
    straight = play(maker.make(), row(), ["0", "0"])
    assert played.texts[0] == "That names no action. Allowed: a whole number from 0 to 3."
    assert played.texts[2] == played.texts[0]
    assert [played.texts[1], played.end] == [straight.texts[0], straight.end]


def test_spaces_that_are_no_text_are_refused() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match=r"takes actions of Box.*ActionWrapper"):
        maker_of("gymnasium:Pendulum-v1")
    with pytest.raises(ValueError, match="making 'gymnasium:NoSuchGame-v0' failed"):
        maker_of("gymnasium:NoSuchGame-v0")


# reasoning-gym


def own_score(data: Any, answer: str, entry: dict[str, Any]) -> float:
    """The score by the data set; 0 where it raises for a wrong answer."""
    try:
        return float(data.score_answer(answer, entry))
    except Exception:  # noqa: BLE001
        assert answer != entry["answer"]
        return 0.0


def test_scores_of_reasoning_gym_after_a_round_through_json() -> None:
    """Rows are lines of JSON, in which tuples become lists: each data set must score them alike."""
    rg = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    from hone.envs.shapes.reasoning_gym import score_answer

    names = sorted(DATASETS)
    assert len(names) > 90
    wrong: list[str] = []
    for name in names:
        if name == "composite":
            continue
        data = rg.create_dataset(name, size=2, seed=11)
        for entry in itertools.islice(data, 2):
            columns = json.loads(json.dumps(entry, default=lambda value: value.tolist()))
            for answer in (entry["answer"] or "<none>", "no answer", ""):
                expected = own_score(data, answer, entry)
                got = score_answer(f"I say <answer>{answer}</answer>", columns)
                got_whole = score_answer(answer, columns, tag="") if answer else expected
                if (got, got_whole) != (expected, expected):
                    wrong.append(f"{name}: {answer!r:.40} {expected} {got} {got_whole}")
    assert wrong == []


def test_reasoning_gym_as_an_environment_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"source of rows.*reasoning_gym:score_answer"):
        maker_of("reasoning_gym:leg_counting")
