"""Calls the session of a worker: starts it, passes it the turns of its episode, and closes it.

It runs in a worker, which holds one session at a time (`fork_server.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hone.envs.session import Action, DataRow, End, Session
from hone.images.parts import is_parts
from hone.rewards import wire
from hone.rewards.score import ENV_NAME, await_result
from hone.rewards.shapes import DeadlineError, FunctionScore, InvalidScoreError, read_score
from hone.types import Observation

__all__ = ["SessionCall", "SessionPlayer"]

_LONGEST_TEXT = wire.MAX_RESULT_BYTES // 8
"""Most characters of an observation; in JSON each may take six bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCall:
    """One call of a session."""

    kind: Literal["start", "step", "finish"]
    """`finish`: what the session has said leaves no token for a turn."""
    row: DataRow | None = None
    """With `start`."""
    action: Action | None = None
    """With `step`."""
    reward: float = 0.0
    """With `finish`: the reward of the last observation."""
    is_overdue: bool = False
    """The episode has passed its deadline (`env.episode_timeout_s`)."""


class SessionPlayer:
    """Makes a session for each episode of its worker, one at a time."""

    name = ENV_NAME

    def __init__(
        self,
        make: Callable[[], Session],
        read_answer: Callable[[Any], FunctionScore | Observation],
        *,
        read: Callable[[Action], Action] | None = None,
        file: str | None,
    ) -> None:
        """`make` makes the session of one episode, `read_answer` reads what it answers, `read`
        reads the calls of tools in a turn, and `file` is its source, for messages."""
        self.file = file
        self._read = read
        self._make = make
        self._read_answer = read_answer
        self._session: Session | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """What the next call runs, for messages."""
        return self._make if self._session is None else self._session.step

    @property
    def environment(self) -> object:
        """The object of the running episode as its author knows it, for reward functions."""
        return getattr(self._session, "environment", self._session)

    def __call__(self, call: SessionCall) -> FunctionScore | Observation:
        """Start the session, or answer a turn. Raises InvalidScoreError, DeadlineError, or whatever
        the session raises."""
        if call.kind == "start":
            assert self._session is None, "a worker holds one session"
            assert call.row is not None
            self._session = self._make()
            return self._opening(await_result(self._session.start(call.row)))
        assert self._session is not None
        if call.kind == "finish":
            return self._finish(call, call.reward)
        assert call.action is not None
        action = call.action if self._read is None else self._read(call.action)
        answer = await_result(self._session.step(action))
        outcome = _score_of(answer) if isinstance(answer, End) else self._read_answer(answer)
        if not isinstance(outcome, Observation):
            return outcome
        if call.action.must_end:
            return self._finish(call, outcome.reward)
        return _shortened(outcome)

    def close(self) -> None:
        """Close the session, if there is one. What it raises then changes nothing any more."""
        session, self._session = self._session, None
        close = getattr(session, "close", None)
        if close is None:
            return
        try:
            await_result(close())
        except (Exception, SystemExit):  # noqa: BLE001 - foreign code; the episode has its outcome
            return

    def _finish(self, call: SessionCall, reward: float) -> FunctionScore:
        """The score of an episode that a limit ends; `reward` is that of the last observation."""
        finish = getattr(self._session, "finish", None)
        if finish is not None:
            answer = await_result(finish())
            outcome = _score_of(answer) if isinstance(answer, End) else read_score(answer)
            outcome = replace(outcome, earned=reward)
        elif call.is_overdue:
            raise DeadlineError(
                "the episode has passed its deadline (`env.episode_timeout_s`), and the session "
                "has no method `finish` that scores what there is"
            )
        else:
            outcome = FunctionScore(reward)
        return replace(outcome, is_truncated=True)

    def _opening(self, answer: Any) -> Observation:
        if answer is None:
            return Observation()
        outcome = self._read_answer(answer)
        if not isinstance(outcome, Observation):
            raise InvalidScoreError(
                f"`start` answered {answer!r:.80}; it says what goes before the first turn: a "
                "text, messages, an Observation, or None"
            )
        if outcome.reward or outcome.token_ids:
            raise InvalidScoreError(
                "`start` answered with an Observation that has a reward or token_ids; a prompt is "
                "text or messages, and no turn has earned a reward yet"
            )
        return _shortened(outcome)


def _shortened(observation: Observation) -> Observation:
    """The observation with texts that fit into the worker's answer: what a tool returns may depend
    on the policy, and must not fail the episode by its length. The driver cuts to tokens. Images
    stay whole."""
    content = observation.content
    if isinstance(content, str) or is_parts(content):
        return replace(observation, content=_with_short_texts(content, _LONGEST_TEXT))
    messages = [*content]
    limit = _LONGEST_TEXT // max(len(messages), 1)
    return replace(
        observation,
        content=tuple(
            message | {"content": _with_short_texts(message["content"], limit)}
            if "content" in message
            else message
            for message in messages
        ),
    )


def _with_short_texts(content: str | Sequence[dict[str, Any]], length: int) -> Any:
    """The content of a message whose texts have at most about `length` characters in all."""
    if isinstance(content, str):
        return _without_middle(content, length)
    num_texts = sum("text" in part for part in content)
    return [
        part | {"text": _without_middle(part["text"], length // num_texts)}
        if "text" in part
        else part
        for part in content
    ]


def _without_middle(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    num_left_out = len(text) - length
    start, end = text[: length // 2], text[len(text) - length // 2 :]
    return f"{start}\n... [{num_left_out:,} characters left out] ...\n{end}"


def _score_of(end: End) -> FunctionScore:
    """The score and the numbers of an end. Raises InvalidScoreError."""
    given: Mapping[str, Any] = end.score if isinstance(end.score, Mapping) else {"score": end.score}
    return replace(read_score({**given, **end.metrics}), is_truncated=end.truncated)
