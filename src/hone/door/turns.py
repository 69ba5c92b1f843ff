"""A request that is being sampled, with all who wait for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time

from hone.door.calls import CalledTool
from hone.door.prompts import AskedPrompt
from hone.door.refusal import Refusal
from hone.door.security import new_id
from hone.door.tree import Sampled
from hone.types import SamplingParams, StopReason

__all__ = ["Answer", "Asked", "AskedTurn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for."""

    prompt: AskedPrompt
    prompt_field: str
    """The name of the prompt in the request, for errors."""
    sampling: SamplingParams
    """Its `max_tokens` may be more than there is room for, its `seed` is not used."""
    seed: int | None = None
    reads_calls: bool = False
    """Whether the answer is read for tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request."""

    prompt_ids: tuple[int, ...]
    sampled: Sampled
    content: str
    """The text, without what belongs to calls and reasoning, and up to a stop string."""
    calls: tuple[CalledTool, ...] = ()
    reasoning: str = ""
    stopped_by: str | None = None
    """The stop string that ended it."""
    turn: int | None = None
    """Its place among the turns of its session, from 0."""

    @property
    def is_cut(self) -> bool:
        return self.sampled.stop_reason is StopReason.LENGTH

    @property
    def weight_version(self) -> int:
        """Version of the weights that sampled the last token."""
        return self.sampled.weight_versions[-1]


@dataclass(eq=False, slots=True)
class AskedTurn:
    """A request until it is answered, without its prompt: what waits or is remembered for long
    keeps no body. Only the event loop uses it."""

    stop: tuple[str, ...] = ()
    """Its stop strings."""
    reads_calls: bool = False
    """Whether the answer is read for tool calls."""
    streams: bool = False
    """Whether its tokens are shown while they are sampled."""
    answer: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    id: str = field(default_factory=new_id)
    created: int = field(default_factory=lambda: int(time()))
    prompt_ids: tuple[int, ...] = ()
    """Set once the prompt is rendered."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """What has been sampled so far, where it `streams` and the engine shows it; empty once the
    answer is there."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next change; then another event takes its place."""
    task: asyncio.Task[Answer] | None = None
    """Samples it."""
    num_readers: int = 0

    def __post_init__(self) -> None:
        # An error that nobody waits for any more is no news.
        self.answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def run(self, task: asyncio.Task[Answer]) -> None:
        """Take the answer of `task` once it is there."""
        self.task = task
        task.add_done_callback(self._settle)

    def show(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add new tokens."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self._note_change()

    @contextmanager
    def reading(self) -> Generator[None]:
        """Context manager of one who waits for the answer. Where the last one leaves before it is
        there, the turn is aborted."""
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1
            if not self.num_readers and not self.answer.done():
                self.answer.set_exception(_aborted())
                if self.task is not None:
                    self.task.cancel()

    def _settle(self, task: asyncio.Task[Answer]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.answer.done():
            return
        if task.cancelled():
            self.answer.set_exception(_aborted())
        elif error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(task.result())
            self.token_ids, self.logprobs = [], []
        self._note_change()

    def _note_change(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _aborted() -> Refusal:
    return Refusal(503, "the turn was aborted", code="aborted")
