"""The session of an episode with tools: it answers each turn's calls, and ends at a turn without.

calls of a turn ──check──► error texts
                 └───────► run at the same time ──► messages of the role `tool`, in their order
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Protocol, cast

from hone.envs.session import Action, DataRow, End, ToolCall
from hone.envs.tools.check import argument_problem
from hone.envs.tools.formats.registry import FORMATS
from hone.envs.tools.tool import Tool, ToolError, ToolLostError
from hone.errors import UserError, did_you_mean
from hone.images.parts import says_image
from hone.types import Message

__all__ = ["Server", "ToolSession", "require_unique"]

_KINDS = ("parse", "unknown_tool", "arguments", "raised", "over_limit")
"""Kinds of errors that the policy is answered with; each is counted as `tools/errors_KIND`."""


class Server(Protocol):
    """What runs for as long as an episode, and serves some of its tools."""

    def start(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    content: str | list[Any]
    error: str = ""
    """Its kind, where it is an error."""


class ToolSession:
    """Runs the tools that the policy calls. `read_action` reads the calls of a turn.

    A turn without calls ends the episode, without a score: `reward.functions` give it. Every call
    gets one answer, and what is wrong with it is the answer.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        tool_format: str,
        max_tool_calls: int | None = None,
        max_parallel_calls: int = 8,
        servers: Sequence[Server] = (),
    ) -> None:
        """`servers` are started before the first turn and closed with the session."""
        require_unique([tool.name for tool in tools])
        self._tools = {tool.name: tool for tool in tools}
        self._format = FORMATS[tool_format]
        self._max_calls = max_tool_calls
        self._max_parallel = max_parallel_calls
        self._servers = servers
        self._threads = ThreadPoolExecutor(max_parallel_calls, "hone-tool")
        self._num_calls = self._num_unanswered = 0
        self._num_errors = dict.fromkeys(_KINDS, 0)
        self._seconds = 0.0

    async def start(self, row: DataRow) -> None:
        """Start the servers. Raises ToolLostError where one cannot be reached."""
        await self._on_threads([server.start for server in self._servers])

    async def step(self, action: Action) -> Sequence[Message] | End:
        """The answers to the calls of a turn, in their order, and one for what could not be read;
        the end where there is neither, or no turn is left in which an answer could be read.

        Raises ToolLostError, MemoryError, and TypeError for a result that is neither text nor JSON.
        """
        if action.must_end:
            self._num_unanswered += len(action.tool_calls)
            return self.end(truncated=bool(action.tool_calls or action.parse_error))
        return await self.answer(action) or self.end()

    async def answer(self, action: Action) -> list[Message]:
        """The messages that answer the calls of a turn; none where it has no calls."""
        start, before = perf_counter(), self._num_calls
        self._num_calls += len(action.tool_calls)
        answers = await _all_of(
            self._answer(call, place, before + place)
            for place, call in enumerate(action.tool_calls)
        )
        self._seconds += perf_counter() - start
        messages = [
            _message(answer.content, call)
            for call, answer in zip(action.tool_calls, answers, strict=True)
        ]
        if action.parse_error:
            unread = _error("parse", f"a call was not understood: {action.parse_error}")
            answers.append(unread)
            messages.append(self._message_without_call(unread.content, action.index))
        for answer in answers:
            if answer.error:
                self._num_errors[answer.error] += 1
        return messages

    def end(self, *, truncated: bool = False) -> End:
        """The end of the episode, without a score, and what was counted."""
        return End(score=None, truncated=truncated, metrics=self.metrics())

    def finish(self) -> End:
        """The end of an episode in which the last answers leave no token for a turn."""
        return self.end(truncated=True)

    def metrics(self) -> dict[str, float]:
        """Calls, errors by kind, and the seconds in which calls ran, since the start."""
        return {
            "tools/calls": float(self._num_calls),
            "tools/errors": float(sum(self._num_errors.values())),
            **{f"tools/errors_{kind}": float(n) for kind, n in self._num_errors.items()},
            "tools/unanswered_calls": float(self._num_unanswered),
            "tools/seconds": self._seconds,
        }

    async def close(self) -> None:
        """End the servers. Threads that still run a tool are left behind, in a worker that ends."""
        try:
            await self._on_threads([server.close for server in self._servers])
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _message_without_call(self, content: str | list[Any], turn: int) -> Message:
        """The answer to what was no call. Templates that refuse an answer without an id also leave
        out one whose id an earlier answer had."""
        message: Message = {"role": "tool", "content": content}
        number = turn % 10_000
        return message | ({"tool_call_id": f"error{number:04d}"} if self._format.needs_ids else {})

    async def _on_threads(self, functions: Sequence[Callable[[], None]]) -> None:
        loop = asyncio.get_running_loop()
        await _all_of(loop.run_in_executor(self._threads, function) for function in functions)

    async def _answer(self, call: ToolCall, place: int, before: int) -> _Answer:
        """The answer to a call: the `place`-th of its turn, after `before` calls in the episode."""
        if place >= self._max_parallel:
            return _error(
                "over_limit",
                f"at most {self._max_parallel} calls are run in a turn, and this one was not run",
            )
        if self._max_calls is not None and before >= self._max_calls:
            return _error(
                "over_limit",
                f"at most {self._max_calls} calls are run in all, and this one was not run; answer "
                "without tools",
            )
        if (tool := self._tools.get(call.name)) is None:
            names = ", ".join(self._tools)
            hint = did_you_mean(call.name, self._tools)
            return _error("unknown_tool", f"there is no tool '{call.name}'.{hint} Tools: {names}.")
        if problem := argument_problem(call.arguments, tool.parameters):
            return _error("arguments", f"{call.name}: {problem}")
        return await self._run(tool, call)

    async def _run(self, tool: Tool, call: ToolCall) -> _Answer:
        made = partial(tool.function, **call.arguments)
        try:
            if inspect.iscoroutinefunction(tool.function):
                result = await made()
            else:
                loop = asyncio.get_running_loop()
                raised, result = await loop.run_in_executor(self._threads, _attempt, made)
                if raised is not None:
                    raise raised
                if inspect.isawaitable(result):
                    result = await result
        except (ToolLostError, MemoryError):
            raise
        except ToolError as error:
            return _Answer(_text(str(error)), "raised")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code
            return _error("raised", f"{type(error).__name__}: {_words(error)}")
        return _Answer(_result(result, tool.name))


def require_unique(names: Sequence[str]) -> None:
    """Raise UserError where two tools have one name."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise UserError(
                f"two tools have the name '{name}', so a call could mean either; rename one"
            )


async def _all_of(work: Any) -> list[Any]:
    """The results of all awaitables, once all have ended. Raises the first error among them."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _attempt(function: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    """The error of a call, or None, and its result. A future cannot carry StopIteration."""
    try:
        return None, function()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything
        return error, None


def _message(content: str | list[Any], call: ToolCall) -> Message:
    message: Message = {"role": "tool", "name": call.name}
    if call.id:
        message["tool_call_id"] = call.id
    return message | {"content": content}


def _error(kind: str, text: str) -> _Answer:
    return _Answer(_text(json.dumps({"error": text}, ensure_ascii=False)), kind)


def _result(value: Any, name: str) -> str | list[Any]:
    """The result of a tool as content of a message: text, or parts with an image among them. Raises
    TypeError, which fails the episode: a mistake in the tool, which no call of the policy could
    avoid."""
    if isinstance(value, str):
        return _text(value)
    if hasattr(value, "getbands"):  # an image of pillow
        return [{"type": "image", "image": value}]
    # A value without a type is the tool's JSON, whatever the names in it.
    if isinstance(value, list) and any(isinstance(x, Mapping) and says_image(x) for x in value):
        return cast("list[Any]", value)
    try:
        return _text(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the tool '{name}' returned {value!r:.80} of type {type(value).__name__}, which is "
            f"neither text nor JSON ({error}); return a text, lists, dicts, numbers and texts, an "
            "image of pillow, or parts of a message"
        ) from error


def _text(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer encodes."""
    return text.encode("utf-8", "replace").decode()


def _words(error: BaseException) -> str:
    with suppress(Exception):  # foreign __str__ may do anything
        return str(error)
    return "(its text cannot be shown)"
