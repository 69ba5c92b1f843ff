"""Images of environments in the shapes of other frameworks, and of tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hone.envs.session import ToolCall
from hone.envs.tools.session import ToolSession
from hone.envs.tools.tool import function_tool
from hone.rewards.play import read_answer
from hone.types import Observation
from tests.envs.shapes.driver import action, maker_of, play, row

CODE = '''
from tests.vision.examples import picture


class Agent:
    """An agent of OpenRLHF."""

    def __init__(self, feedback="a<image>b<|vision_start|><|image_pad|><|vision_end|>c", number=2):
        self.feedback, self.number = feedback, number

    async def reset(self, states, **kwargs):
        return states

    async def step(self, states, **kwargs):
        images = [picture(n) for n in range(self.number)]
        return {"rewards": 0.0, "done": False, "environment_feedback": self.feedback,
                "environment_images": images}


class Screen:
    """An environment of TRL."""

    def reset(self, **columns):
        return [{"type": "image", "image": picture(1)}, {"type": "text", "text": "what is it?"}]

    def look(self, number: int) -> list:
        """Look.

        Args:
            number: At what
        """
        return [{"type": "text", "text": f"{number}"}, {"type": "image", "image": picture(number)}]
'''


def look(number: int) -> Any:
    """Look at a number.

    Args:
        number: The number
    """
    from tests.vision.examples import picture

    shown = picture(number)
    return (
        shown if number < 5 else [{"type": "text", "text": "no"}, {"type": "image", "image": shown}]
    )


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path / "code.py"


def kinds(content: Any) -> list[str]:
    """The parts that leave the worker, with the words of texts."""
    found = read_answer(Observation(content))
    assert isinstance(found, Observation)
    return [part.get("text", part["type"]) for part in found.content]  # pyright: ignore


def test_images_of_an_agent_stand_where_its_feedback_names_them(code: Path) -> None:
    said = play(maker_of(f"{code}:Agent").make(), row(), ["x"], cut=False).said[0]
    assert kinds(said) == ["a", "image", "b", "image", "c"]
    args = {"feedback": "look", "number": 2}
    said = play(maker_of(f"{code}:Agent", args).make(), row(), ["x"], cut=False).said[0]
    assert kinds(said) == ["", "image", "", "image", "look"]
    args = {"feedback": "<image>", "number": 2}
    with pytest.raises(ValueError, match=r"2 `environment_images`, and .* has 1 marks"):
        play(maker_of(f"{code}:Agent", args).make(), row(), ["x"], cut=False)


def test_content_lists_of_trl_are_shown(code: Path) -> None:
    turn = action("", 0, calls=[ToolCall(name="look", arguments={"number": 7})])
    played = play(maker_of(f"{code}:Screen").make(), row(), [turn], cut=False)
    assert kinds(played.opening) == ["image", "what is it?"]
    ((message,),) = played.said
    assert message["role"] == "tool"
    assert kinds(message["content"]) == ["7", "image"]


def test_a_tool_returns_an_image() -> None:
    async def answers() -> list[Any]:
        session = ToolSession([function_tool(look)], tool_format="hermes")
        calls = [ToolCall(name="look", arguments={"number": n}) for n in (1, 7)]
        try:
            return list(await session.step(action("", 0, calls=calls)))  # pyright: ignore
        finally:
            await session.close()

    first, second = asyncio.run(answers())
    assert kinds(first["content"]) == ["image"]
    assert kinds(second["content"]) == ["no", "image"]
