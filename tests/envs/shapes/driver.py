"""Plays sessions with scripted turns, as reward workers do."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hone.envs import shapes
from hone.envs.session import Action, DataRow, End, Opening, Session, ToolCall
from hone.types import Message, Observation
from hone.user_code.resolve import resolve

__all__ = ["Played", "action", "maker_of", "play", "play_async", "row"]


def maker_of(path: str, args: Mapping[str, Any] | None = None) -> shapes.EnvMaker:
    """The maker of an environment that is played by sessions."""
    made = shapes.made_from(path, args or {}, resolve=resolve)
    assert made is not None
    return made


def row(prompt: str | list[Message] = "Play.", **columns: Any) -> DataRow:
    """A row whose prompt is rendered as its texts in lines."""
    seed, max_turns = columns.pop("seed", 3), columns.pop("max_turns", 8)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = columns.get("answer")
    return DataRow(
        prompt="".join(f"{message['content']}\n" for message in messages),
        messages=tuple(messages),
        unrendered=prompt,
        answer=None if answer is None else str(answer),
        raw_answer=answer,
        task="",
        columns={"prompt": prompt, **columns},
        seed=seed,
        max_turns=max_turns,
        max_tokens=1000,
    )


def action(
    text: str, index: int, *, calls: Sequence[ToolCall] = (), must_end: bool = False, **fields: Any
) -> Action:
    made = Action(
        text=text,
        token_ids=tuple(map(ord, text)),
        content=text,
        tool_calls=tuple(calls),
        stop_reason="eos",
        index=index,
        must_end=must_end,
        tokens_left=1000,
    )
    return replace(made, **fields)


@dataclass
class Played:
    """What a session said."""

    opening: Opening = None
    said: list[Any] = field(default_factory=list)
    """The observations after each turn but the last: texts or messages."""
    rewards: list[float] = field(default_factory=list)
    """Their rewards."""
    end: End | None = None
    """None where the script ended before the episode."""

    @property
    def reward(self) -> float | None:
        """The reward of the episode, as `rewards/play.py` adds it."""
        assert self.end is not None
        earned = sum(self.rewards)
        assert not isinstance(self.end.score, Mapping)
        return self.end.score if not earned else (self.end.score or 0.0) + earned

    @property
    def texts(self) -> list[str]:
        """The texts of the observations."""
        return [
            said if isinstance(said, str) else "".join(message["content"] for message in said)
            for said in self.said
        ]


def play(session: Session, data: DataRow, turns: Sequence[Any], *, cut: bool = True) -> Played:
    """Play the turns, texts or actions. With `cut` the last of them `must_end`."""
    return asyncio.run(play_async(session, data, turns, cut=cut))


async def play_async(
    session: Session, data: DataRow, turns: Sequence[Any], *, cut: bool = True
) -> Played:
    """As `play`, in an event loop that runs already."""
    played = Played()
    try:
        played.opening = await _result(session.start(data))
        for index, turn in enumerate(turns):
            must_end = cut and index == len(turns) - 1
            given = turn if isinstance(turn, Action) else action(turn, index)
            answer = await _result(
                session.step(replace(given, index=index, must_end=must_end or given.must_end))
            )
            if isinstance(answer, float):
                answer = End(score=answer)
            if isinstance(answer, End):
                played.end = answer
                break
            if not isinstance(answer, Observation):
                answer = Observation(answer)
            played.said.append(answer.content)
            played.rewards.append(answer.reward)
    finally:
        await _result(session.close())
    return played


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
