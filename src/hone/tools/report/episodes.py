"""Episodes in the page: the turns of a sample, and which episodes of a run are worth a look.

    picks = EpisodePicks()
    for row in rows: picks.add(row.head, split="train", run="")
    picks.columns()  # {"last": [...], "longest": [...], "failed": [...], "worst": [...]}

Everything is read from the part of a row before its per-token fields, and needs no tokenizer.
`episodes.js` draws it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.observe.episode_rows import Said, TurnRecord, read_turns
from hone.tools.report.images import asked_of, images_of

__all__ = ["EpisodePicks", "branches_of", "turns_of"]

NUM_EACH = 5
"""Episodes of each kind."""
MAX_CHARS = 20_000
"""Longest text of one turn or message; more is cut in its middle."""


def turns_of(head: Mapping[str, Any], *, with_text: bool = True) -> list[dict[str, Any]] | None:
    """The turns of a row as the page draws them; None where the row has no texts of turns.

    Each says where in the sample's tokens it is, and `with_text` also what the policy said.
    """
    read = read_turns(head)
    if read is None:
        return None
    turns = [_turn(turn, with_text=with_text) for turn in read]
    for number, turn in enumerate(turns):
        if images := images_of(head, number):
            turn["images"] = images
    return turns


def branches_of(head: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The turns of each abandoned path of an episode, in the order in which they were sampled."""
    branches: Sequence[Mapping[str, Any]] = head.get("branches") or ()
    return [turns for branch in branches if (turns := turns_of(branch))]


def _turn(turn: TurnRecord, *, with_text: bool) -> dict[str, Any]:
    place = {"start": turn.start, "end": turn.end}
    if with_text:
        place = {"text": _cut(turn.text)} | place
    others = {
        "stop": turn.stop_reason,
        "reward": turn.reward or None,
        "policy_s": turn.policy_s,
        "env_s": turn.env_s,
        "observed": [_said(said) for said in turn.observed],
    }
    return place | {name: value for name, value in others.items() if value not in (None, [])}


def _said(said: Said) -> dict[str, Any]:
    values = {
        "role": said.role,
        "name": said.name,
        "text": _cut(said.text),
        "calls": [_call(call) for call in said.tool_calls],
    }
    return {name: value for name, value in values.items() if value or name == "text"}


def _call(call: Any) -> str:
    """A call of a tool, in one line."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return str(call)
    return f"{function.get('name', '')}({function.get('arguments', '')})"


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"


@dataclass(slots=True)
class EpisodePicks:
    """The last episode of a run, and its longest, failed and worst ones."""

    _num: int = 0
    _last: Mapping[str, Any] | None = None
    _longest: list[tuple[int, int, int, Mapping[str, Any]]] = field(
        default_factory=list[tuple[int, int, int, Mapping[str, Any]]]
    )
    """A heap of turns, tokens, number of arrival and episode; the shortest comes first."""
    _worst: list[tuple[float, int, Mapping[str, Any]]] = field(
        default_factory=list[tuple[float, int, Mapping[str, Any]]]
    )
    """A heap of the negative reward, number of arrival and episode; the best comes first."""
    _failed: deque[Mapping[str, Any]] = field(
        default_factory=lambda: deque[Mapping[str, Any]](maxlen=NUM_EACH)
    )

    def add(self, head: Mapping[str, Any], *, split: str, run: str = "") -> None:
        """Take note of a row, where it is an episode. `split` is the split of rows that name none,
        and `run` the name of the run where there are several."""
        # Only a session can fail before the first turn.
        has_no_turns = bool(head.get("failure")) and "attempt" in head and not head.get("turns")
        if read_turns(head) is None and not has_no_turns:
            return
        self._num += 1
        held = {**head, "split": head.get("split") or split, "run": run}
        self._last = held
        if head.get("failure"):
            self._failed.append(held)
            return
        length = len(head["turns"]), int(head.get("num_tokens") or 0)
        _keep(self._longest, (*length, self._num, held))
        if head.get("reward") is not None:
            _keep(self._worst, (-head["reward"], self._num, held))

    def columns(self) -> dict[str, list[dict[str, Any]]]:
        """The episodes of each kind, ready for JSON; kinds without any are left out."""
        kinds = {
            "last": [] if self._last is None else [self._last],
            "failed": [*reversed(self._failed)],
            "worst": [held for *_, held in sorted(self._worst, reverse=True)],
            "longest": [held for *_, held in sorted(self._longest, reverse=True)],
        }
        return {kind: [_episode(held) for held in each] for kind, each in kinds.items() if each}


def _keep(heap: list[Any], entry: tuple[Any, ...]) -> None:
    """Add to a heap, of which the largest `NUM_EACH` entries are kept."""
    (heapq.heappush if len(heap) < NUM_EACH else heapq.heappushpop)(heap, entry)


def _episode(head: Mapping[str, Any]) -> dict[str, Any]:
    turns = turns_of(head) or []
    values = {
        "id": head.get("id", ""),
        "run": head.get("run"),
        "split": head.get("split"),
        "step": head.get("step"),
        **(asked := asked_of(head)),
        "prompt": _cut(asked["prompt"]),
        "answer": head.get("answer"),
        "reward": head.get("reward"),
        "parts": head.get("reward_parts") or {},
        "failure": head.get("failure"),
        "detail": head.get("failure_detail"),
        "stop": head.get("stop_reason"),
        "tokens": head.get("num_tokens"),
        "attempt": head.get("attempt"),
        "turns": turns,
        "branches": branches_of(head),
    }
    return {name: value for name, value in values.items() if value not in (None, "", [], {})}
