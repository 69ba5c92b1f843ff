"""The recipes of agents, the calculator, the guessing game and the shell: inputs, one step, and
learning."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.config.load import load_config
from hone.config.plan import Devices, resolve
from hone.config.recipe import resolve_recipe
from hone.config.tree import RLConfig, SFTConfig
from hone.data.arithmetic import ALPHABET
from hone.envs.session import Action, DataRow
from hone.envs.tools.formats.registry import parse
from hone.envs.tools.reading import argument_schemas
from hone.envs.tools.schema import function_schema
from hone.families.model_facts import ModelFacts
from hone.recipes import shell_agent
from hone.recipes.agent_inputs import (
    CALL,
    DONE,
    GUESS,
    SILENCE,
    make_calculator,
    make_guessing,
    make_shell,
)
from hone.recipes.calculator import multiply
from hone.recipes.guessing import HigherOrLower
from hone.rules import findings
from tests.tables import table
from tests.tiny_runs import lines

NUMBERS = "1234567"
ROW = DataRow(
    prompt="?", messages=(), unrendered="?", answer=None, raw_answer=None, task="", columns={},
    seed=0, max_turns=3, max_tokens=12,
)  # fmt: skip
ACTION = Action(
    text="", token_ids=(), content="", stop_reason="stop_string", index=0, must_end=False,
    tokens_left=9,
)  # fmt: skip


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what `python -m hone.recipes.agent_inputs` writes."""
    monkeypatch.chdir(tmp_path)
    make_calculator(Path("runs/calculator"), 0)
    make_guessing(Path("runs/guessing"), 0)
    make_shell(Path("runs/shell"), 0)
    return tmp_path


OWN_PYTHON = f"--env.harness.command={shlex.quote(sys.executable)} -m hone.recipes.shell_agent"
"""Flag of `shell-rl`, whose `python` need not be the one of these tests."""


def play(seed: int, guesses: Sequence[str]) -> list[str | float]:
    """The answers to guesses until the game ends."""
    game = HigherOrLower(NUMBERS)
    game.start(replace(ROW, seed=seed))
    answers: list[str | float] = []
    for index, guess in enumerate(guesses):
        answers.append(game.step(replace(ACTION, text=guess, index=index, must_end=index == 2)))
        if isinstance(answers[-1], float):
            break
    return answers


def halve(seed: int) -> float:
    """The reward of halving what is left."""
    low, high = 0, 6
    guesses: list[str] = []
    while not isinstance(answer := play(seed, [*guesses, NUMBERS[middle := (low + high) // 2]])[-1],
                         float):  # fmt: skip
        guesses.append(NUMBERS[middle])
        low, high = (middle + 1, high) if answer == ">" else (low, middle - 1)
    return answer


def test_halving_wins_every_game_and_fixed_guesses_three_in_seven() -> None:
    assert [halve(seed) for seed in range(7)] == [1.0] * 7
    for guesses in product(NUMBERS, repeat=3):
        won = [play(seed, guesses)[-1] for seed in range(7)]
        assert sum(reward == 1.0 for reward in won) == len(set(guesses))


@table(
    "guesses, answers",
    [
        (["4", "6", "5"], [">", "<", 1.0]),
        (["4", "6", "7"], [">", "<", 0.0]),
        (["?5"], [1.0]),
        (["4", "??"], [">", 0.0]),
        ([""], [0.0]),
    ],
)
def test_the_game_answers(guesses: list[str], answers: list[str | float]) -> None:
    assert play(4, guesses) == answers


def test_the_taught_call_is_a_call_of_the_tool() -> None:
    (call,) = parse(
        CALL.format(37, 58), "pythonic", argument_schemas([function_schema(multiply)])
    ).calls
    assert (call.name, multiply(**call.arguments)) == ("multiply", 2146)


@pytest.mark.usefixtures("inputs")
def test_demonstrations_are_of_two_teachers_and_of_no_held_out_product() -> None:
    folder = Path("runs/calculator")
    first, used = (lines(folder / "demonstrations.jsonl")[start::2] for start in (0, 1))
    calls = [row["completion"].startswith("[") for row in first]
    assert 0.25 < sum(calls) / len(calls) < 0.35
    for row in used:
        question, call, told = (message["content"] for message in row["prompt"])
        a, b = map(int, question.rstrip("=").split("*"))
        assert call == CALL.format(a, b)
        assert row["completion"] == told == str(a * b)
    asked = {row["prompt"][0]["content"] for row in first}
    assert asked == {row["prompt"][0]["content"] for row in lines(folder / "train.jsonl")}
    assert not asked & {row["prompt"][0]["content"] for row in lines(folder / "eval.jsonl")}
    assert set("".join(asked)) <= set(ALPHABET)


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize("computes", [True, False])
def test_the_agent_scores_what_the_teachers_do(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("runs/shell")
    rows = [row for row in lines(folder / "demonstrations.jsonl") if len(row["prompt"]) == 1]
    commands = {row["prompt"][0]["content"]: row["completion"] for row in rows}
    computing = [command for command in commands.values() if GUESS not in command]
    assert 0.25 < len(computing) / len(commands) < 0.35
    asked: list[list[dict[str, str]]] = []

    def ask(messages: list[dict[str, str]]) -> str:
        asked.append([*messages])
        return commands[messages[0]["content"]] if len(messages) == 1 else DONE

    monkeypatch.setattr(shell_agent, "ask", ask)
    task = next(
        row
        for row in lines(folder / "train.jsonl")
        if (commands[row["prompt"][0]["content"]] in computing) == computes
    )
    score = shell_agent.play(
        {"messages": task["prompt"], "answer": task["answer"], "columns": task}
    )
    assert score == float(computes)
    question = task["prompt"][0]["content"]
    said = [message["content"] for message in asked[-1]]
    assert said == [question, commands[question], SILENCE]
    held_out = {row["prompt"][0]["content"] for row in lines(folder / "eval.jsonl")}
    assert not held_out & set(commands)


@pytest.mark.usefixtures("inputs")
@table("name", ["calculator-sft", "calculator-rl", "guessing-rl", "shell-sft", "shell-rl"])
def test_every_recipe_passes_its_check(name: str) -> None:
    flags = [f"--model.path=runs/{name.partition('-')[0]}/model"]
    flags += [OWN_PYTHON] if name == "shell-rl" else []
    tree = SFTConfig if name.endswith("sft") else RLConfig
    cfg = load_config(tree, resolve_recipe(name), flags)
    plan = resolve(cfg, ModelFacts.known(cfg.model.path), Devices(kind="cpu"), world_size=1)
    assert [finding.message for finding in findings(plan)] == []


@pytest.mark.usefixtures("inputs")
@table("name", ["calculator", "guessing", "shell"])
def test_one_step_plays_its_episodes(name: str) -> None:
    few = ["--run.steps=1", "--rollout.prompts_per_step=2", "--rollout.n_samples_per_prompt=4"]
    few += ["--eval.at_start=false", "--eval.every_n_steps=0", "--log.to=[]"]
    few += ["--trainer.optimizer.warmup_steps=0"]
    few += ["--log.samples_per_step=8", f"--model.path=runs/{name}/model"]
    few += [OWN_PYTHON] if name == "shell" else []
    assert main(["rl", f"{name}-rl", *few]) == 0
    samples = lines(Path("runs", name, "rl", "samples.jsonl"))
    assert len(samples) == 8
    assert all(sample["failure"] is None for sample in samples)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_guessing_game_is_learnt(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than any guesses that do not heed the answers, which win three games in seven."""
    monkeypatch.chdir(tmp_path)
    make_guessing(Path("runs/guessing"), seed)
    assert main(["rl", "guessing-rl", f"--run.seed={seed}"]) == 0
    first, last = held_out("guessing")
    assert first < 0.45
    assert last > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_calling_the_tool_is_learnt(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_calculator(Path("runs/calculator"), seed)
    assert main(["sft", "calculator-sft", f"--run.seed={seed}"]) == 0
    assert main(["rl", "calculator-rl", f"--run.seed={seed}"]) == 0
    first, last = held_out("calculator")
    assert 0.1 < first < 0.5
    assert last > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_commands_that_compute_are_learnt(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_shell(Path("runs/shell"), seed)
    assert main(["sft", "shell-sft", f"--run.seed={seed}"]) == 0
    assert main(["rl", "shell-rl", f"--run.seed={seed}", OWN_PYTHON]) == 0
    first, last = held_out("shell")
    assert first < 0.45
    assert last > 0.5


def held_out(name: str) -> tuple[float, float]:
    """The mean reward on held-out rows before and after."""
    with Path("runs", name, "rl", "metrics.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rewards = [row["eval/reward/mean"] for row in rows if "eval/reward/mean" in row]
    return rewards[0], rewards[-1]
