"""The driver's side of programs that play episodes (`env.harness.command`), one for each sample.

A program is held like a session: its worker, its place among `env.concurrency`, its deadline and
its attempts are the same. Instead of turns it is asked whether it has ended, until the driver has
the turns that it asked for (`hone.door.harness`) and wants the score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from hone.envs.session import Action, DataRow, ModelAccess
from hone.images.parts import has_images
from hone.rewards.live_sessions import LiveSession, LiveSessions
from hone.rewards.play import EpisodeSoFar
from hone.rewards.pool import WorkerPool
from hone.rewards.session_player import SessionCall
from hone.rollout.settings import EnvConfig
from hone.types import Sample, StopReason

__all__ = ["LivePrograms", "OpenAccess"]

OpenAccess = Callable[[Sample], ModelAccess]
"""Opens the episode of a sample to the program that is about to start."""


class LivePrograms(LiveSessions):
    """The running programs of a scorer's samples, by the sample's id."""

    def __init__(
        self, pool: WorkerPool, cfg: EnvConfig, *, max_tokens: int, open_access: OpenAccess
    ) -> None:
        super().__init__(pool, cfg, max_tokens=max_tokens)
        self._open_access = open_access
        self._limits: dict[str, StopReason | None] = {}
        """Samples whose next call is the last one, with the limit that has ended the episode."""

    def end_next(self, sample: Sample, limit: StopReason | None) -> None:
        """Ask for the score with the next call: the program has ended, and the sample has its
        turns. `limit` is what has cut the episode."""
        self._limits[sample.id] = limit

    def _access(self, sample: Sample) -> ModelAccess | None:
        self._limits.pop(sample.id, None)  # of an earlier attempt
        return self._open_access(sample)

    def _row(self, sample: Sample) -> DataRow:
        """The row with the files of its images in its messages, as paths or bytes."""
        row, contents = super()._row(sample), sample.prompt.model_input.contents
        if not contents:
            return row
        from hone.images.store import STORE  # not for texts

        sources = [source for each in contents if (source := STORE.source(each.hash)) is not None]
        files = iter([source.file.source for source in sources if not source.number])
        messages = tuple(
            message | {"content": [_with_image(part, files) for part in message["content"]]}
            if has_images(message.get("content"))
            else message
            for message in row.messages
        )
        return replace(row, messages=messages)

    def _call(self, sample: Sample, live: LiveSession) -> EpisodeSoFar:
        if sample.id in self._limits:
            limit = self._limits.pop(sample.id)
            num_turns = sum(len(path.turns) for path in sample.paths.values())
            return EpisodeSoFar(
                given=_step(limit, num_turns, is_last=True), earned=0.0, limit=limit
            )
        limit = StopReason.DEADLINE if monotonic() > live.ends_at else None
        return EpisodeSoFar(given=_step(limit), earned=0.0, limit=None)


def _with_image(part: Mapping[str, Any], files: Iterator[Path | bytes]) -> Mapping[str, Any]:
    return {"type": "image", "image": next(files)} if part["type"] == "image" else part


def _step(limit: StopReason | None, num_turns: int = 0, *, is_last: bool = False) -> SessionCall:
    action = Action(
        text="",
        token_ids=(),
        content="",
        stop_reason=str(limit or ""),
        index=num_turns,
        must_end=is_last,
        tokens_left=0,
    )
    return SessionCall(kind="step", action=action)
