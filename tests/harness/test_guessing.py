"""The guessing game as a program (`benchmarks/agent_harness.py`) is the session's game."""

from __future__ import annotations

import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hone.config.load import load_config
from hone.config.recipe import resolve_recipe
from hone.config.tree import RLConfig
from hone.recipes.guessing import HigherOrLower
from hone.types import Request, Sample, SamplingParams
from tests.cli.test_agent_recipes import ACTION, NUMBERS, ROW
from tests.harness.played import group_of, played
from tests.rollout.fakes import draw

PROGRAM = Path(__file__).parents[2] / "benchmarks/agent_harness.py"
STOPPED = SamplingParams(max_tokens=40, stop=tuple(NUMBERS))


def guess(request: Request) -> str:
    """A digit with something before it, and now and then none."""
    number = draw(request.sampling.seed)
    return "??" if number % 8 == 7 else f"?{NUMBERS[number % 8]}"


def answers_of(sample: Sample) -> list[str | float]:
    """What the session says to the same guesses."""
    game = HigherOrLower(NUMBERS)
    game.start(replace(ROW, seed=sample.seed))
    return [
        game.step(replace(ACTION, text=turn.text, index=index, must_end=index == 2))
        for index, turn in enumerate(sample.turns)
    ]


def test_the_program_plays_the_game_of_the_session(tmp_path: Path) -> None:
    command = {"command": shlex.join([sys.executable, "-S", str(PROGRAM)])}
    with played(tmp_path, "", guess, harness=command, max_turns=3) as game:
        samples = game.play(
            *(
                group_of(
                    game.episodes,
                    group_id=f"1-{number}",
                    number=number,
                    indices=range(8),
                    sampling=replace(STOPPED, seed=number),
                )
                for number in range(4)
            )
        )
    rewards: list[float] = []
    for sample in samples:
        assert sample.failure is None, sample.failure_detail
        assert sample.reward is not None
        *said, reward = answers_of(sample)
        assert [turn.observed for turn in sample.turns[:-1]] == said
        assert sample.reward.total == reward
        assert sample.prompt.text == "hello"
        rewards.append(sample.reward.total)
    assert 0.0 in rewards
    assert 1.0 in rewards
    assert {len(sample.turns) for sample in samples} == {1, 2, 3}


def test_the_form_of_the_benchmark_makes_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    harness = runpy.run_path(str(PROGRAM))["harness"]
    cfg = load_config(RLConfig, resolve_recipe("guessing-rl"), harness("guessing", tmp_path))
    assert cfg.env.path is None
    assert cfg.env.harness.command is not None
    assert shlex.split(cfg.env.harness.command)[-1] == str(PROGRAM)
    with pytest.raises(ValueError, match="none for calculator"):
        harness("calculator", tmp_path)
