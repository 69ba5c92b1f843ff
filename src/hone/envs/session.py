"""The interface of environments with a live object for each episode: tools, simulated users, games
that keep their state on `self`, servers to which a connection is held.

    class Guess:
        def start(self, row):
            self.number = row.seed % 100
            return "Guess my number, from 0 to 99."       # appended to the prompt

        def step(self, action):
            if action.text.strip() == str(self.number):
                return 1.0                                # a reward: the end
            return "Wrong, once more."                    # an observation: one more turn

        def close(self):
            ...                                           # always called once

A session is made, used and closed in one worker process, which serves no other episode meanwhile.
So it may block, hold connections and keep globals. Its worker may be killed at a deadline; then the
episode is played again from its start, with the same seed, by a new session (`env.retries`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.envs.env import Answer
from hone.types import Message, Observation

__all__ = ["Action", "DataRow", "End", "ModelAccess", "Opening", "Session", "ToolCall"]

Opening = Observation | str | Sequence[Message] | None
"""What a session says before the first turn. A text, or parts of a message (texts and images), are
appended to the last message of the prompt, or to the prompt itself where there is no chat template.
Messages are appended to the prompt's messages. None: the prompt stands as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccess:
    """Where a program asks the policy for the turns of one episode."""

    base_url: str
    """Address of the episode's routes; `/v1/chat/completions` and others follow it."""
    api_key: str
    """Key of this episode alone."""
    name: str
    """Name of the model in requests and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """The row of the data that an episode plays."""

    prompt: str
    """The rendered prompt."""
    messages: tuple[Message, ...]
    """The messages of the prompt, as the chat template rendered them; empty without one."""
    unrendered: str | list[Message]
    """The prompt in the row: text or messages, before any template."""
    answer: str | None
    raw_answer: Any
    """The answer in the row, before it is converted to text."""
    task: str
    columns: Mapping[str, Any]
    """The columns of the row."""
    seed: int
    """Equal in all samples of a group, so that they can play the same game."""
    max_turns: int
    """Most turns of the policy in the episode."""
    max_tokens: int
    """Longest episode after the prompt, in tokens."""
    model: ModelAccess | None = None
    """With `env.harness.command`: where its program asks the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the policy has written."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The id that the policy gave it; empty where its format has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A turn of the policy, for the session that answers it."""

    text: str
    """The turn exactly as its tokens spell it, special ones too, without the token that ended
    it."""
    ended_by: str = ""
    """The text of the token that ended it, such as `<|im_end|>`; empty where no token did."""
    opened: str = ""
    """The tag at the end of the text before the turn, such as `<think>`, which the turn closes;
    else empty."""
    token_ids: tuple[int, ...]
    """The sampled ids of the turn, with the token that ended it."""
    content: str
    """What the turn says besides its reasoning and its calls of tools. Equal to `text` where calls
    are not read (`env.tool_format`)."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""
    """Why something that looks like a call of a tool is none; empty where all calls were read."""
    stop_reason: str
    """Why the turn ended: `eos`, `stop_string` or `length`."""
    index: int
    """Number of the turn, from 0."""
    must_end: bool
    """No turn, token or time is left: only a reward can follow."""
    tokens_left: int
    """Tokens that are left of the episode, for observations and turns together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of an episode. A session may also return the score alone."""

    score: float | Mapping[str, float] | None
    """As in `Answer`: a number, or a mapping with `score` and further numbers. None:
    `reward.functions` score the episode."""
    truncated: bool = False
    """The environment has cut the episode at a limit of its own."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers, which are logged."""


class Session(Protocol):
    """One episode. Each method may be `async`; all calls of a worker share one event loop.

    A session may also have a method `finish() -> float | Mapping | End | None`, the score of an
    episode that a limit ends: no turn, token or time is left, and the session has not ended it.
    Without one, such an episode has the rewards of its observations.
    """

    def start(self, row: DataRow) -> Opening | Awaitable[Opening]:
        """Begin the episode, before the first turn."""
        ...

    def step(self, action: Action) -> Answer | End | Awaitable[Answer | End]:
        """Answer a turn, as `Env.step` does. With `action.must_end` an observation ends the episode
        too, by `finish`."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Release what the session holds. Called once, after the end or a failure of the episode.
        Where the worker was killed, at a deadline or with the end of the run, it cannot be called;
        processes that the session started are killed with it. A session that holds nothing may
        leave it out."""
        ...
