"""The turns of an episode in a row of a sample file: written, and read again with their texts.

    row["turns"] = turn_rows(sample.turns, sample.text)
    for turn in read_turns(row): turn.text, turn.observed, turn.policy_s

A row has the whole text of its sample once. Turns and messages that are part of it are written as
`chars`, the index of the first character and the one after the last; only what the text does not
have is written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.types import Message, Turn

__all__ = ["Said", "TurnRecord", "is_episode", "read_turns", "text_of_row", "turn_rows"]

_DIGITS = 4
"""Decimal digits of times in seconds."""


def turn_rows(
    turns: Sequence[Turn], text: str | None, *, with_times: bool = False
) -> list[dict[str, Any]]:
    """The turns as JSON values. `text` is the text of the row, in which what they say is looked
    for; None, for a path without a text of its own, writes everything out.

    Where there is no environment the only turn is the whole text, and has no text of its own.
    `with_times` adds `policy_s` and `env_s`, which differ between two runs that are equal else.
    """
    rows: list[dict[str, Any]] = []
    has_env = text is None or is_episode(turns)
    begin = 0
    for turn in turns:
        row: dict[str, Any] = {
            "start": turn.start,
            "end": turn.end,
            "stop_reason": str(turn.stop_reason),
            "reward": turn.reward,
        }
        rows.append(row)
        if not has_env:
            continue
        place, begin = _placed("text", turn.text, text, begin)
        row |= place
        observed: list[dict[str, Any]] = []
        for message in turn.messages or ({"content": turn.observed},):
            content = message.get("content")
            if isinstance(content, str) and content:
                place, begin = _placed("content", content, text, begin)
                rest = {name: value for name, value in message.items() if name != "content"}
                observed.append(rest | place)
            elif turn.messages:
                observed.append(dict(message))
        if observed:
            row["observed"] = observed
        if with_times:
            times = {"policy_s": turn.policy_s, "env_s": turn.env_s}
            row |= {name: round(s, _DIGITS) for name, s in times.items() if s is not None}
    return rows


def is_episode(turns: Sequence[Turn]) -> bool:
    """Whether an environment has answered, so that a person wants to see turns."""
    return len(turns) > 1 or any(turn.is_answered for turn in turns)


def _placed(name: str, said: str, text: str | None, begin: int) -> tuple[dict[str, Any], int]:
    """Where `said` stands in `text` from `begin` on, or under `name` the words themselves; and
    where to look for what follows."""
    at = text.find(said, begin) if text else -1
    if at < 0:
        return {name: said}, begin
    return {"chars": [at, at + len(said)]}, at + len(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of the environment's."""

    role: str
    """Role of the message, such as `user` or `tool`; empty for a text without one."""
    text: str
    name: str = ""
    """Name of the tool that answers, where the message has one."""
    tool_calls: tuple[Any, ...] = ()
    """Calls of tools in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """A turn of the policy and what followed it, read from a row."""

    start: int
    """As `Turn.start`, with `end`."""
    end: int
    text: str
    stop_reason: str
    reward: float
    observed: tuple[Said, ...]
    policy_s: float | None
    env_s: float | None


def text_of_row(row: Mapping[str, Any]) -> str:
    """The text to which `chars` refer: that of a sample, or the completion in a row of
    `hone generate`."""
    text = row.get("text", row.get("completion", row.get("chosen", "")))
    if isinstance(text, list):  # a message
        text = text[0].get("content", "")
    return text if isinstance(text, str) else ""


def read_turns(row: Mapping[str, Any]) -> list[TurnRecord] | None:
    """The turns of a row with their texts. None where the row has no texts of turns: there was no
    environment, or an older version of hone has written it.

    Reads the rows of abandoned branches too, whose `observed` is a text.
    """
    turns: list[Mapping[str, Any]] = row.get("turns") or []
    if not turns or not all("chars" in turn or "text" in turn for turn in turns):
        return None
    text = text_of_row(row)
    return [_read_turn(turn, text) for turn in turns]


def _read_turn(turn: Mapping[str, Any], text: str) -> TurnRecord:
    observed = turn.get("observed") or ()
    messages: Sequence[Message] = [{"content": observed}] if isinstance(observed, str) else observed
    return TurnRecord(
        start=turn.get("start", 0),
        end=turn.get("end", 0),
        text=_read(turn, "text", text),
        stop_reason=str(turn.get("stop_reason", "")),
        reward=turn.get("reward") or 0.0,
        observed=tuple(
            Said(
                role=str(message.get("role") or ""),
                text=_read(message, "content", text),
                name=str(message.get("name") or ""),
                tool_calls=tuple(message.get("tool_calls") or ()),
            )
            for message in messages
        ),
        policy_s=turn.get("policy_s"),
        env_s=turn.get("env_s"),
    )


def _read(values: Mapping[str, Any], name: str, text: str) -> str:
    if "chars" in values:
        begin, end = values["chars"]
        return text[begin:end]
    said = values.get(name) or ""
    if isinstance(said, list):  # parts, of which the images have rows of their own
        return "".join(part.get("text", "[image]") for part in said)
    return str(said)
