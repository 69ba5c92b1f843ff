"""Environments of verifiers 0.1 and 0.2: `verifiers:ID`, or `load_environment` by path.

The environment's own `run_rollout` plays the episode, with a client of ours in place of an API's:
where it asks the model for a message, that request is what the policy reads, and the policy's turn
is its answer. So `setup_state`, `env_response`, stop conditions, tools and rubrics are those of the
environment, called in its own order.

- The rows of the data are the environment's rows: `prompt`, and `answer`, `info`, `example_id` and
  others where it has them. docs/environments.md has a script that writes them.
- Each request must extend the one before, which holds for environments that do not rewrite their
  history. A request that does not is a failure of the session.
- Where a limit of hone ends the episode, the environment gets its own OverlongPromptError, on which
  it ends its rollout and is scored.
- An `error` that the environment records is a failure of the session, never a reward of 0. A reward
  function that raises counts 0 in verifiers, and so here.
- Rubrics that compare the rollouts of a group are refused.

verifiers 0.4 has another interface, programs that call a model over HTTP, and is not played here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hone.envs.session import Action, DataRow, End, Opening
from hone.envs.shapes.maker import EnvMaker, Source
from hone.envs.shapes.reading import finite_numbers, messages_of, text_of
from hone.extras import import_extra
from hone.types import Message

__all__ = ["by_id", "maker"]


def by_id(name: str, args: Mapping[str, Any]) -> EnvMaker:
    """The maker of `verifiers:ID`: the module of that name, which must be installed. Raises
    ValueError where the environment cannot be loaded."""
    vf = import_extra("verifiers", needed_by="env.path")
    if not hasattr(vf, "load_environment"):
        raise ValueError(
            f"'verifiers:{name}' needs verifiers 0.1 or 0.2; {vf.__version__} is installed, whose "
            "environments are programs that call a model over HTTP"
        )
    try:
        env = vf.load_environment(name, **args)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise ValueError(
            f"loading 'verifiers:{name}' failed: {type(error).__name__}: {error}"
        ) from error
    return _maker(f"verifiers:{name}", env, file=None)


def maker(source: Source) -> EnvMaker:
    """The maker of a class or function. Its object plays all episodes, as in verifiers."""
    return _maker(source.path, source.probe(), file=source.file)


def _maker(path: str, env: Any, file: str | None) -> EnvMaker:
    if env.requires_group_rollouts:
        raise ValueError(
            f"the rubric of '{path}' compares the rollouts of a group, and a session scores one. "
            "Write such rewards as `reward.functions` with whole_groups, for an environment that "
            "ends episodes without a reward"
        )
    tools = list(env.tool_defs or ())
    return EnvMaker(
        shape="verifiers",
        make=lambda: VerifiersSession(env),
        needs_tool_format=bool(tools),
        schemas=[_schema(tool) for tool in tools],
        file=file,
    )


def _schema(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


class VerifiersSession:
    """A rollout of an environment, which waits for the policy wherever it asks for the model."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._requests: asyncio.Queue[list[Message]] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None
        self._seen: list[tuple[str, str]] = []
        """Role and text of each message of the conversation so far."""
        self._num_answered = 0

    async def start(self, row: DataRow) -> Opening:
        """Begin the rollout, up to its first request."""
        self._seen = list(map(_words, messages_of(row)))
        given = {"example_id": 0, **row.columns, "prompt": messages_of(row)}
        rollout = self._env.run_rollout(given, _client(self._respond), "policy", {})
        self._rollout = asyncio.ensure_future(rollout)
        request = await self._until_request()
        if request is None:
            raise ValueError(f"the rollout ended before its first turn: {_ended(self._result())}")
        return self._new(request) or None

    async def step(self, action: Action) -> str | Sequence[Message] | End:
        """Give the rollout the policy's turn, and run it to its next request or its end."""
        is_asked = not self._is_over()
        if is_asked and action.index == self._num_answered:
            self._num_answered += 1
            message = _assistant(action)
            self._seen.append(_words(message))
            self._answers.put_nowait(_response(message, action))
            request = await self._until_request()
            if request is not None and not action.must_end:
                return self._new(request) or ""
        return await self.finish()

    async def finish(self) -> End:
        """End the rollout, where it waits for a turn, and return its score."""
        if not self._is_over():
            # The next turn does not fit, and this is verifiers' own way to say so.
            errors = import_extra("verifiers", needed_by="env.path", module="verifiers.errors")
            self._answers.put_nowait(errors.OverlongPromptError("no turn or token is left"))
            await self._until_request()
        result = self._result()
        if result.get("error") is not None:
            raise RuntimeError(f"the rollout ended with an error: {_ended(result)}")
        return End(
            score=float(result["reward"]),
            truncated=bool(result.get("is_truncated")),
            metrics=finite_numbers(result.get("metrics") or {}),
        )

    async def close(self) -> None:
        """Stop the rollout, where it still waits."""
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            with suppress(asyncio.CancelledError):
                await self._rollout

    async def _respond(self, *, prompt: Sequence[Any], **_: Any) -> Any:
        """What the environment calls for the model's message to `prompt`."""
        self._requests.put_nowait([_plain(message) for message in prompt])
        answer = await self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _is_over(self) -> bool:
        return self._rollout is not None and self._rollout.done()

    async def _until_request(self) -> list[Message] | None:
        """Run the rollout until it asks for the model: the messages, or None at its end."""
        assert self._rollout is not None
        asked = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None

    def _new(self, request: list[Message]) -> list[Message]:
        """The messages of a request after the conversation so far. Raises ValueError where it does
        not begin with that."""
        words, num = list(map(_words, request)), len(self._seen)
        if words[:num] != self._seen:
            differs = next(
                (i for i in range(num) if words[i : i + 1] != [self._seen[i]]), len(words)
            )
            raise ValueError(
                f"the environment rewrote message {differs} of the conversation; only messages "
                "after it are possible"
            )
        self._seen = words
        return request[num:]

    def _result(self) -> Mapping[str, Any]:
        """The output of the rollout. Raises what it raised."""
        assert self._rollout is not None
        return self._rollout.result()


def _ended(result: Mapping[str, Any]) -> str:
    return f"{result.get('error')!r:.300}, stop condition {result.get('stop_condition')}"


def _words(message: Message) -> tuple[str, str]:
    return message["role"], text_of(message.get("content"))


def _plain(message: Any) -> Message:
    """A message of verifiers as one of the chat template: text, and nothing that is unset."""
    plain: Message = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    return {**plain, "content": text_of(plain.get("content"))}


def _assistant(action: Action) -> Message:
    message: Message = {"role": "assistant", "content": action.content}
    if action.reasoning:
        message["reasoning_content"] = action.reasoning
    if action.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{action.index}_{number}",
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments)),
            }
            for number, call in enumerate(action.tool_calls)
        ]
    return message


def _response(message: Message, action: Action) -> Any:
    """The policy's turn as the response of a client of verifiers."""
    types = import_extra("verifiers", needed_by="env.path", module="verifiers.types")
    is_cut = action.stop_reason == "length"
    finish = "tool_calls" if action.tool_calls else "stop"
    answer = types.ResponseMessage(
        **message, finish_reason="length" if is_cut else finish, is_truncated=is_cut
    )
    return types.Response(id=str(action.index), created=0, model="policy", message=answer)


def _client(respond: Any) -> Any:
    """A client of verifiers whose `get_response` is `respond`. What else a client must have, is for
    that method alone."""
    clients = import_extra("verifiers", needed_by="env.path", module="verifiers.clients")
    unused = dict.fromkeys(clients.Client.__abstractmethods__)
    kind = type("Policy", (clients.Client,), {**unused, "get_response": staticmethod(respond)})
    return kind(None)
