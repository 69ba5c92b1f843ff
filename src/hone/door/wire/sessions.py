"""The routes of sessions: open, reward, end."""

from __future__ import annotations

import math
from typing import Any, cast

from hone.door.refusal import Refusal
from hone.door.sessions import FinishedSession, History, Session, Status
from hone.door.wire.fields import Fields, wrong
from hone.types import Reward, Sample

__all__ = ["read_opening", "read_status", "set_reward", "written_session"]


_MAX_DETAIL = 10_000
"""Most characters of a reason: it is kept with the session."""
_MAX_PARTS = 256


def read_opening(fields: Fields) -> tuple[History, int | None]:
    """The history and the seed of a new session. Raises Refusal."""
    history = fields.choice("history", ("linear", "tree"), "tree")
    return cast(History, history), fields.integer("seed")


def set_reward(fields: Fields, session: Session) -> None:
    """Set the reward of a session, or of one of its turns. Raises Refusal."""
    parts = {name: _finite(fields.part("parts"), name) for name in fields.mapping("parts")}
    if len(parts) > _MAX_PARTS:
        raise wrong("parts", f"has {len(parts)} entries, and may have {_MAX_PARTS}")
    if fields.get("reward") is None and not parts:
        raise wrong("reward", "is missing; give a number, or parts with a number each")
    total = sum(parts.values()) if fields.get("reward") is None else _finite(fields, "reward")
    if not math.isfinite(total):
        raise wrong("parts", f"must have a finite sum, got {total}")
    place = fields.integer("turn", least=0)
    if place is None:
        session.reward = Reward(total=total, parts=parts)
        return
    turns = session.tree.turns
    if place >= len(turns):
        raise Refusal(400, f"turn is {place}, and the session has {len(turns)}", field="turn")
    turns[place].reward = total


def read_status(fields: Fields) -> tuple[Status, str]:
    """How a session has ended, and why it has failed. Raises Refusal."""
    status = fields.choice("status", ("completed", "failed"), "completed")
    return cast(Status, status), fields.text("detail", "", most=_MAX_DETAIL)


def written_session(finished: FinishedSession, *, has_paths: bool) -> dict[str, Any]:
    """What the client gets of a session that has ended."""
    written: dict[str, Any] = {
        "session": finished.id,
        "status": finished.status,
        "reward": None if finished.reward is None else finished.reward.total,
        "num_turns": finished.num_turns,
        "num_paths": len(finished.paths),
        **finished.counts,
    }
    if has_paths:
        written["paths"] = [*map(_written_path, finished.paths)]
    return written


def _written_path(path: Sample) -> dict[str, Any]:
    written: dict[str, Any] = {
        "prompt_token_ids": list(path.prompt.token_ids),
        "token_ids": list(path.token_ids),
        "logprobs": list(path.logprobs),
        "weight_versions": list(path.weight_versions),
        "loss_mask": [bool(flag) for flag in path.loss_mask],
        "turns": [
            {"start": turn.start, "end": turn.end, "reward": turn.reward} for turn in path.turns
        ],
        "stop_reason": str(path.stop_reason),
    }
    num_asked = len(path.prompt.token_ids)
    contents = path.prompt.model_input.followed_by(path.model_input, num_asked).contents
    if contents:
        written["images"] = [
            {"hash": each.hash, "start": each.start, "num_tokens": each.num_tokens}
            for each in contents
        ]
    return written


def _finite(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if value is None:
        raise wrong(fields.path(name), "must be a number")
    return value
