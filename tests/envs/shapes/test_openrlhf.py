"""Agents of OpenRLHF, against its own `MultiTurnAgentExecutor` on a scripted engine: equal texts of
turns and feedback, where the turns lie, rewards, scores and logs."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hone.extras import is_installed
from tests.envs.shapes.driver import action, maker_of, play, row

AGENTS = '''
import random

{base}


class Guess(AgentInstanceBase):
    """Guess the label: nearer guesses earn more; five guesses at most."""

    def __init__(self, *args, **kwargs):
        self.count = 0

    async def reset(self, states, **kwargs):
        return {{"observation": states["observation"] + "Numbers to 20.\\n"}}

    async def step(self, states, **kwargs):
        self.count += 1
        n = len(states["observation_text"])
        guess = int(states["action_text"].removesuffix("<end>"))
        assert states["action_text"] != str(guess)  # special tokens are part of it
        reward = number(1 / (1 + abs(guess - int(states["label"]))))
        done = reward.item() == 1 or self.count == 5
        return {{
            "rewards": reward,
            "scores": number(float(reward.item() == 1)),
            "environment_feedback": "" if done else f"\\nno, {{self.count}} used, {{n}} read\\n",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {{"guesses": number(self.count), "text": "x", "bad": float("nan")}},
        }}


class Stops(AgentInstanceBase):
    """Asks for stop strings, and gives no scores."""

    def __init__(self):
        pass

    async def step(self, state_dict, **kwargs):
        params = state_dict["sampling_params"]
        params.stop = ["<end>"]
        return {{
            "rewards": number(0.25), "environment_feedback": " >", "done": False,
            "sampling_params": params,
        }}


class Rewrites(AgentInstanceBase):
    def __init__(self):
        pass

    async def reset(self, states, **kwargs):
        return {{"observation": "another prompt"}}

    async def step(self, states, **kwargs):
        raise AssertionError


def number(value):
    import numpy

    return numpy.asarray([value]) if random.random() < 0.5 else numpy.float64(value)
'''
ALONE = """
class AgentInstanceBase:
    async def reset(self, states, **kwargs):
        return states
"""
OF_PACKAGE = "from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor"
EXECUTOR = """

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Guess)
"""


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """The agents without OpenRLHF."""
    file = tmp_path / "agents.py"
    file.write_text(AGENTS.format(base=ALONE))
    return file


def test_an_agent_by_hand(alone: Path) -> None:
    maker = maker_of(f"{alone}:Guess")
    assert (maker.shape, maker.file, maker.needs_tool_format) == ("OpenRLHF", str(alone), False)
    turns = [action(text, 0, ended_by="<end>") for text in ("3", "6", "7")]
    played = play(maker.make(), row(answer=7), turns, cut=False)
    assert played.opening is not None
    assert (played.opening.content, played.opening.role) == ("Numbers to 20.\n", None)
    first = len("Play.\nNumbers to 20.\n")
    assert played.said[0] == f"\nno, 1 used, {first} read\n"
    second = first + len("3<end>") + len(played.said[0])
    assert played.said[1:] == [f"\nno, 2 used, {second} read\n"]
    assert played.rewards == [0.2, 0.5]
    assert played.reward == 1.7
    assert played.end is not None
    assert played.end.metrics == {"guesses": 3.0, "scores": 1.0}


def test_stop_strings_of_an_agent_hold_for_the_next_turn(alone: Path) -> None:
    session = maker_of(f"{alone}:Stops").make()

    async def steps() -> Any:
        await session.start(row())
        return await session.step(action("a", 0)), await session.step(action("b", 1, must_end=True))

    said, end = asyncio.run(steps())
    assert (said.content, said.role, said.reward, said.stop) == (" >", None, 0.25, ("<end>",))
    assert (end.score, end.truncated, end.metrics) == (0.25, True, {})


def test_an_agent_that_rewrites_the_prompt_fails(alone: Path) -> None:
    with pytest.raises(ValueError, match="rewrote the prompt, which begins with 'Play"):
        play(maker_of(f"{alone}:Rewrites").make(), row(), ["x"])


def test_a_file_of_openrlhf_is_played_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.envs.shapes.openrlhf.is_installed", lambda _: False)
    file = tmp_path / "agents.py"
    loop = "\n\nclass Loop(AgentExecutor):\n    async def execute(self, *_): ...\n"
    file.write_text(AGENTS.format(base=OF_PACKAGE) + EXECUTOR + loop)
    before = dict(sys.modules)
    for name in ("Guess", "AgentExecutor"):
        turns = ["6<end>", "7<end>"]
        played = play(maker_of(f"{file}:{name}").make(), row(answer=7), turns, cut=False)
        assert played.reward == 1.5
    assert {name for name in sys.modules if name.startswith("openrlhf")} <= before.keys()
    with pytest.raises(ValueError, match="has a loop of its own, which calls an engine"):
        maker_of(f"{file}:Loop")


# OpenRLHF's own executor


@pytest.fixture
def openrlhf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`openrlhf.utils.agent` by its file: the package itself needs DeepSpeed and Ray."""
    if not is_installed("openrlhf"):
        pytest.skip("openrlhf is not installed")
    root = Path(str(importlib.util.find_spec("openrlhf").origin)).parent  # type: ignore[union-attr]
    log = SimpleNamespace(init_logger=logging.getLogger)
    name = "openrlhf.utils.agent"
    for module in ("openrlhf", "openrlhf.utils"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, "openrlhf.utils.logging_utils", log)  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location(name, root / "utils/agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def tokenizer(*, text: str, **_: Any) -> Mapping[str, Any]:
    return {"input_ids": np.asarray([[ord(letter) for letter in text]])}


class Engine:
    """Gives the scripted turns, one id a letter."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns = list(turns)

    async def generate(self, prompt_ids: Any, params: Any, multi_modal_data: Any = None) -> Any:
        text = self.turns.pop(0)
        output = SimpleNamespace(token_ids=[*map(ord, text)], text=text, finish_reason="stop")
        return SimpleNamespace(outputs=[output])


def executed(openrlhf: ModuleType, agents: Any, turns: Sequence[str], label: Any) -> Any:
    """OpenRLHF's own loop."""
    executor = openrlhf.MultiTurnAgentExecutor(agents)
    params = SimpleNamespace(max_tokens=10, logprobs=None)
    return asyncio.run(executor.execute("Play.\n", label, params, 1000, tokenizer, Engine(turns)))


@pytest.mark.envs
@pytest.mark.parametrize("turns", [["3", "6", "7"], ["7"], ["1", "2", "3", "4", "5", "6"]])
@pytest.mark.parametrize("name", ["Guess", "AgentExecutor"])
def test_openrlhf_plays_the_same(
    openrlhf: ModuleType, tmp_path: Path, name: str, turns: list[str]
) -> None:
    file = tmp_path / "agents.py"
    file.write_text(AGENTS.format(base=OF_PACKAGE) + EXECUTOR)
    maker = maker_of(f"{file}:{name}")
    assert maker.shape == "OpenRLHF"
    raw = [f"{turn}<end>" for turn in turns]
    played = play(
        maker.make(),
        row(answer="7"),
        [action(turn, 0, ended_by="<end>") for turn in turns],
        cut=False,
    )
    expected = executed(openrlhf, sys.modules["hone_reward_agents"].Guess, raw, "7")
    assert played.end is not None
    assert played.reward == pytest.approx(expected["reward"], abs=1e-12)
    assert played.end.metrics["scores"] == expected["scores"].item()
    assert played.end.metrics["guesses"] == expected["extra_logs"]["guesses"].item()
    # The text and the places of the turns, rebuilt from what the session said.
    assert played.opening is not None
    text, ranges = f"Play.\n{played.opening.content}", list[tuple[int, int]]()
    for turn, said in zip(raw, [*played.said, ""], strict=False):
        ranges.append((len(text), len(text) + len(turn)))
        text += turn + said
    assert ranges == expected["action_ranges"]
    assert text == "".join(map(chr, expected["observation_tokens"]))
