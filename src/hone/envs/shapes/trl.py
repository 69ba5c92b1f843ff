"""Environments of TRL, as `GRPOTrainer(environment_factory=...)` takes them.

    class Calculator:                              # made without arguments
        def reset(self, **columns):                # the columns of the row
            self.total = 0
            return "Reach 10."                     # ends the last message of the prompt; or None

        def add(self, number: int) -> int:         # each public method is a tool
            '''Add a number.

            Args:
                number: What to add.
            '''
            self.total += number
            return self.total

        def get_reward(self) -> float:             # optional; else reward.functions score
            return float(self.total == 10)

As in TRL 1.16: public methods of the class are the tools, in alphabetical order; a result is the
text of a `tool` message with the tool's name; an exception of a tool, an unknown name, and
arguments that do not fit become `{'error': ...}`; a turn without a call ends the episode; calls of
the last turn (`max_tool_calling_iterations`, here `env.max_turns - 1`) are not made. Synchronous
tools of a turn run one after another in the order of their calls, then asynchronous ones at the
same time.

hone differs on purpose in this:

- Results come back in the order of the calls. In TRL those of asynchronous tools come last.
- A call that cannot be read is answered with an error. In TRL it ends the episode.
- An exception in `reset` or `get_reward` is a failure of the sample. In TRL it ends the run.
- `get_reward` is the reward alone. In TRL it is added to those of reward functions.
- Each episode has an object of its own. TRL makes as many as a batch has rows, and resets them.
- Of content lists, texts and images are shown; other parts are refused.
- The class may take `env.args`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hone.envs.calling import awaited
from hone.envs.session import Action, DataRow, End, Opening, ToolCall
from hone.envs.shapes.maker import EnvMaker, Source
from hone.envs.shapes.reading import content_of, is_content, number_of
from hone.types import Message

__all__ = ["TRLSession", "maker", "tool_names"]

_NO_TOOLS = ("reset", "get_reward")


def tool_names(kind: type) -> list[str]:
    """The methods that TRL takes for tools, in its order."""
    functions = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in functions if name not in _NO_TOOLS and not name.startswith("_")]


def maker(source: Source) -> EnvMaker:
    """The maker of a class or function. Raises ValueError where an object cannot be made."""
    tools = _tools(source.probe())
    return EnvMaker(
        shape="TRL",
        make=lambda: TRLSession(source.create()),
        needs_tool_format=True,
        tools=list(tools.values()),
        file=source.file,
    )


class TRLSession:
    """An episode of one environment."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._tools = _tools(env)
        self._num_played = 0
        self._num_calls = self._num_failed = 0

    async def start(self, row: DataRow) -> Opening:
        """Call `reset` with the columns of the row."""
        said = await awaited(self._env.reset(**row.columns))
        return None if said is None else content_of(said)

    async def step(self, action: Action) -> list[Message] | End:
        """Make the calls of the turn, or end the episode where it has none."""
        wants_more = bool(action.tool_calls or action.parse_error)
        # The calls of a turn are made once.
        if not wants_more or action.must_end or action.index < self._num_played:
            return await self._end(truncated=wants_more)
        self._num_played = action.index + 1
        results = await self._results(action.tool_calls)
        answers = [
            _message(call, result) for call, result in zip(action.tool_calls, results, strict=True)
        ]
        if action.parse_error:
            self._num_failed += 1
            unread = ToolCall(name="unknown", arguments={})
            answers.append(_message(unread, {"error": action.parse_error}))
        return answers

    async def finish(self) -> End:
        """The end where the last results leave no token for a turn."""
        return await self._end(truncated=True)

    async def close(self) -> None:
        """TRL closes nothing: a method `close` would be a tool."""

    async def _end(self, *, truncated: bool) -> End:
        get_reward = getattr(self._env, "get_reward", None)
        score = None if get_reward is None else await awaited(get_reward())
        return End(
            score=None if score is None else number_of(score),
            truncated=truncated,
            metrics={
                "tools/calls": float(self._num_calls),
                "tools/errors": float(self._num_failed),
            },
        )

    async def _results(self, calls: tuple[ToolCall, ...]) -> list[Any]:
        """The results of calls, in their order."""
        started = [self._start(call) for call in calls]
        results = await asyncio.gather(*map(_outcome, started))
        self._num_calls += len(calls)
        self._num_failed += sum(isinstance(result, _Failure) for result in results)
        return results

    def _start(self, call: ToolCall) -> Any:
        """The result of a synchronous tool, or what is to be awaited for an asynchronous one."""
        try:
            if call.name not in self._tools:
                raise ValueError(f"Tool {call.name} not found.")
            return self._tools[call.name](**call.arguments)
        except MemoryError:
            raise  # the worker's limit, which is no answer to a call
        except Exception as error:  # noqa: BLE001 - the policy reads what a tool raises
            return _Failure(error)


class _Failure(dict[str, str]):
    """The answer to a call that failed, as TRL writes it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error=str(error))


async def _outcome(started: Any) -> Any:
    try:
        return await awaited(started)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the policy reads what a tool raises
        return _Failure(error)


def _tools(env: Any) -> Mapping[str, Callable[..., Any]]:
    return {name: getattr(env, name) for name in tool_names(type(env))}


def _message(call: ToolCall, result: Any) -> Message:
    content = content_of(result) if is_content(result) else str(result)
    ids = {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", "name": call.name, **ids, "content": content}
