"""Tools and interactions of verl, as `actor_rollout_ref.rollout.multi_turn` names them.

    env:
      path: "verl:tools.yaml"                    # multi_turn.tool_config_path
      path: "verl:functions.py"                  # multi_turn.function_tool_path
      path: "verl:interactions.yaml"             # multi_turn.interaction_config_path
      path: "verl:tools.yaml,interactions.yaml"  # several together
      path: "my_tool.py:MyTool"                  # a class; args: {config: ..., tool_schema: ...}

Played as `ToolAgentLoop` of verl 0.7 to 0.9 plays them. Tools and interactions are made once in a
worker. For each call of a tool: `create(create_kwargs=...)`, `execute(id, arguments, agent_data=)`
and `release(id)`. For each episode `start_interaction(id, **interaction_kwargs)`, and after each
turn without a call `generate_response(id, messages, **interaction_kwargs)`; the keyword arguments
are those of `extra_info` in the row. A turn without a call ends an episode without an interaction.
After the last turn nothing is called. What tools and interactions reward is not the reward: reward
functions find it in `extra_info`, as `tool_rewards` and `turn_scores`.

hone differs on purpose in this:

- Calls are checked, limited and counted as those of `env.tools`: arguments that do not fit the
  schema, and calls beyond `env.max_parallel_calls`, are answered with an error. verl passes the
  ones to the tool, and drops the others.
- Long answers are cut in the middle, in tokens (`env.max_observation_tokens`). verl cuts them in
  characters.
- `agent_data` has no ids and no images.
- `finalize_interaction` is called at the end of each episode. verl's loop leaves it out.
- What an interaction raises is a failure of the sample. In verl it ends the run.
- Images and videos in answers are refused, and so is `extra_info.tool_selection`.
- With `env.args.count_rewards` the sum of `tool_rewards` and `turn_scores` is the reward, and
  `reward.functions` are not called.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from hone.config.recipe import read_recipe
from hone.envs.calling import awaited
from hone.envs.session import Action, DataRow, End
from hone.envs.shapes.maker import EnvMaker, Resolve, RunTools, Source, probe
from hone.envs.shapes.reading import messages_of, number_of, text_of
from hone.envs.shapes.verl_bases import bases, missing_part
from hone.envs.tools.session import ToolSession
from hone.envs.tools.tool import Tool, ToolLostError
from hone.errors import UserError
from hone.types import Message, Observation

__all__ = ["AgentData", "VerlSession", "by_files", "files_problem", "maker"]

_LOOP = "tool_agent"
"""The agent loop of verl that is played here."""
_EXAMPLE = "`verl:tools.yaml`, `verl:functions.py`, or several with commas between them"


def by_files(names: str, args: Mapping[str, Any], resolve: Resolve) -> EnvMaker:
    """The maker of `verl:FILE,FILE`. Raises ValueError for a file that is none, and for tools that
    cannot be made."""
    if problem := files_problem(names):
        raise ValueError(problem)
    if unknown := [name for name in args if name != "count_rewards"]:
        raise ValueError(
            f"env.args.{unknown[0]} is not known; with 'verl:{names}' there is count_rewards, and "
            "what tools are made with is in the file"
        )
    parts = _Parts()
    with bases():
        for name in _files(names):
            if name.endswith(".py"):
                parts.add_functions(name)
            else:
                parts.add_config(name, resolve)
    return _maker(parts, count_rewards=bool(args.get("count_rewards")), file=None)


def files_problem(names: str) -> str | None:
    """Why `verl:NAMES` names no files, or None."""
    for name in _files(names) or [""]:
        if not name.endswith((".py", ".yaml", ".yml")):
            return f"'verl:{name}' is no file of tools or interactions; write {_EXAMPLE}"
        if not Path(name).is_file():
            return f"there is no file '{name}' (from 'verl:{names}')"
    return None


def maker(source: Source) -> EnvMaker:
    """The maker of one class: a tool, or an interaction. Raises ValueError for an agent loop, and
    where the class cannot be made."""
    if any(base.__name__ == "AgentLoopBase" for base in source.type.__mro__):
        raise ValueError(
            f"'{source.path}' has a loop of its own, which calls an engine of verl. Write what it "
            "says between turns as a class with `start`, `step` and `close`, or name its tools"
        )
    args = {"config": {}, **source.args}
    count_rewards = bool(args.pop("count_rewards", False))
    parts = _Parts()
    if hasattr(source.type, "generate_response"):
        name = args["config"].get("name") or _usual_name(source.type)
        parts.interactions[name] = probe(source.path, source.found, args)
    else:
        with bases():
            args["tool_schema"] = _schema(args.get("tool_schema"))
        parts.add(probe(source.path, source.found, args), source.path)
    return _maker(parts, count_rewards=count_rewards, file=source.file)


@dataclass
class AgentData:
    """What tools get as `agent_data`, and reward functions as their environment."""

    request_id: str = field(default_factory=lambda: uuid4().hex)
    messages: list[Message] = field(default_factory=list[Message])
    """The conversation so far."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    turn_scores: list[float] = field(default_factory=list[float])
    """What the interaction has scored, one number a turn."""
    user_turns: int = 0
    assistant_turns: int = 0
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """For tools that keep something during an episode. Reward functions of verl find it in their
    `extra_info`."""
    image_data: None = None
    video_data: None = None
    rewards_by_call: list[list[float]] = field(default_factory=list[list[float]])
    """One number for each call, or none where the tool gave none."""

    @property
    def tool_rewards(self) -> list[float]:
        """What tools have rewarded, in the order of their calls, however long each took."""
        return [reward for rewards in self.rewards_by_call for reward in rewards]


class VerlSession:
    """An episode with tools, an interaction, or both."""

    def __init__(self, parts: _Parts, run_tools: RunTools, *, count_rewards: bool) -> None:
        self.environment = AgentData()
        self._interactions = parts.interactions
        self._count_rewards = count_rewards
        own = [
            Tool(schema, partial(_called, tool, self.environment))
            for schema, tool in zip(parts.schemas, parts.tools.values(), strict=True)
        ]
        self._tools = run_tools(own)
        self._interaction: Any = None
        self._kwargs: Mapping[str, Any] = {}

    async def start(self, row: DataRow) -> None:
        """Start the interaction that the row names. Raises ValueError where it names none."""
        info: Mapping[str, Any] = row.columns.get("extra_info") or {}
        agent = row.columns.get("agent_name") or _LOOP
        if agent != _LOOP:
            raise ValueError(
                f"the row has the agent_name '{agent}', and {_LOOP} alone is played; leave the "
                "column out, or such rows"
            )
        if info.get("tool_selection"):
            raise ValueError(
                "the row has extra_info.tool_selection, and all rows of a run see all tools; leave "
                "it out, or train on rows with one selection"
            )
        data = self.environment
        data.messages = messages_of(row)
        data.tools_kwargs = info.get("tools_kwargs") or {}
        await self._tools.start(row)
        if self._interactions:
            self._kwargs = info.get("interaction_kwargs") or {}
            chosen = self._chosen(self._kwargs.get("name"))
            await awaited(chosen.start_interaction(data.request_id, **self._kwargs))
            self._interaction = chosen

    async def step(self, action: Action) -> Sequence[Message] | Observation | End:
        """Make the calls of the turn; else let the interaction answer it; else end the episode."""
        data = self.environment
        data.assistant_turns += 1
        data.messages.append(_said(action))
        if action.tool_calls or action.parse_error:
            if action.must_end:
                await self._tools.step(action)  # counts calls that are not made
                return self._end(truncated=True)
            answers = await self._tools.answer(action)
            data.messages.extend(answers)
            data.user_turns += 1
            return answers
        if self._interaction is None or action.must_end:
            return self._end(truncated=self._interaction is not None)
        is_over, said, score, *_ = await awaited(
            self._interaction.generate_response(data.request_id, data.messages, **self._kwargs)
        )
        data.user_turns += 1
        if score is not None:
            data.turn_scores.append(number_of(score))
        if is_over:
            return self._end(truncated=False)
        message: Message = {"role": "user", "content": text_of(said)}
        data.messages.append(message)
        return [message]

    def finish(self) -> End:
        """The end where the last answer leaves no token for a turn."""
        return self._end(truncated=True)

    async def close(self) -> None:
        """End the interaction, and servers of `env.tools`."""
        try:
            if self._interaction is not None:
                finalize = self._interaction.finalize_interaction
                takes_id = bool(inspect.signature(finalize).parameters)
                ids = [self.environment.request_id] if takes_id else []
                await awaited(finalize(*ids))
        finally:
            await self._tools.close()

    def _end(self, *, truncated: bool) -> End:
        data = self.environment
        data.extra_fields |= {
            "turn_scores": data.turn_scores,
            "tool_rewards": data.tool_rewards,
            "num_turns": data.user_turns + data.assistant_turns + 1,
        }
        earned = {"tools/reward": data.tool_rewards, "interaction/score": data.turn_scores}
        sums = {name: float(sum(numbers)) for name, numbers in earned.items() if numbers}
        return End(
            score=sum(sums.values()) if self._count_rewards else None,
            truncated=truncated,
            metrics={**self._tools.metrics(), **sums},
        )

    def _chosen(self, name: str | None) -> Any:
        if name is None and len(self._interactions) == 1:
            return next(iter(self._interactions.values()))
        if name not in self._interactions:
            known = ", ".join(self._interactions)
            raise ValueError(
                f"extra_info.interaction_kwargs of the row has the name {name!r}; interactions: "
                f"{known}"
            )
        return self._interactions[name]


class _Parts:
    """The tools and interactions of a worker."""

    def __init__(self) -> None:
        self.tools: dict[str, Any] = {}
        self.interactions: dict[str, Any] = {}
        self.schemas: list[dict[str, Any]] = []

    def add(self, tool: Any, where: str) -> None:
        """Add a tool. Raises ValueError for a second one of a name."""
        schema = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        name = schema["function"]["name"]
        if name in self.tools:
            raise ValueError(f"two tools have the name '{name}' (from '{where}'); rename one")
        self.tools[name] = tool
        self.schemas.append(schema)

    def add_functions(self, file: str) -> None:
        """Add the functions of a file with verl's decorator."""
        try:
            load = importlib.import_module("verl.tools.function_tool").load_function_tools_from_path
            functions = load(file)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # foreign code may raise anything
            raise ValueError(_failed(file, error)) from error
        if not functions:
            raise ValueError(f"'{file}' has no function with the decorator `@function_tool`")
        for function in functions:
            self.add(function, file)

    def add_config(self, file: str, resolve: Resolve) -> None:
        """Add what a file in YAML lists under `tools` and `interaction`."""
        values = read_recipe(Path(file)).values
        tools, interactions = values.get("tools") or [], values.get("interaction") or []
        if not (tools or interactions):
            has = ", ".join(values) or "nothing"
            raise ValueError(
                f"'{file}' has {has}, and neither a list `tools` nor a list `interaction`"
            )
        for entry in tools:
            kind, config = _entry(entry, file, resolve)
            if config.get("type", "native") != "native":
                raise ValueError(
                    f"'{file}' has a tool of the type {config['type']}; name the server in "
                    "env.tools as mcp:COMMAND or mcp:https://..."
                )
            schema = _schema(entry.get("tool_schema"))
            self.add(_made(kind, file, config=config, tool_schema=schema), file)
        for entry in interactions:
            kind, config = _entry(entry, file, resolve)
            name = entry.get("name") or _usual_name(kind)
            if name in self.interactions:
                raise ValueError(f"'{file}' has two interactions '{name}'; rename one")
            self.interactions[name] = _made(kind, file, config={**config, "name": name})


def _maker(parts: _Parts, *, count_rewards: bool, file: str | None) -> EnvMaker:
    session = partial(VerlSession, parts, count_rewards=count_rewards)
    return EnvMaker(
        shape="verl",
        make=lambda: session(partial(ToolSession, tool_format="hermes")),
        make_with_tools=session,
        needs_tool_format=bool(parts.tools),
        schemas=parts.schemas,
        file=file,
    )


async def _called(tool: Any, data: AgentData, /, **arguments: Any) -> str:
    """The text of a tool's answer. Raises whatever the tool raises; such a call has earned 0."""
    rewards = [0.0]
    data.rewards_by_call.append(rewards)
    if not hasattr(tool, "execute"):
        raw = await tool.call(arguments)
        response, reward, *_ = raw if isinstance(raw, tuple) else (raw, 0.0)
        text = _text(response if hasattr(response, "text") else _shown(response))
    else:
        kwargs = data.tools_kwargs.get(tool.name) or {}
        made = await awaited(tool.create(create_kwargs=kwargs.get("create_kwargs") or {}))
        instance = made if isinstance(made, str) else made[0]
        try:
            response, reward, *_ = await awaited(tool.execute(instance, arguments, agent_data=data))
            text = _text(response)
        finally:
            await awaited(tool.release(instance))
    rewards[:] = [] if reward is None else [number_of(reward)]
    return text


def _shown(value: Any) -> str:
    """What a function returned, as verl writes it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _text(response: Any) -> str:
    """The text of an answer. Raises ToolLostError for images and videos: no call could avoid it."""
    if isinstance(response, str):
        return response
    for kind in ("image", "video"):
        if getattr(response, kind, None):
            raise ToolLostError(f"a tool returned an {kind}, and hone shows texts alone")
    return response.text or ""


def _said(action: Action) -> Message:
    """A turn as a message, as verl keeps it."""
    if not action.tool_calls:
        return {"role": "assistant", "content": action.text}
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        | ({"id": call.id} if call.id else {})
        for call in action.tool_calls
    ]
    return {"role": "assistant", "content": action.content, "tool_calls": calls}


def _usual_name(kind: type) -> str:
    """The name of an interaction that has none, as verl makes it."""
    return (kind.__name__.removesuffix("Interaction") or kind.__name__).lower()


def _files(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _entry(entry: Any, file: str, resolve: Resolve) -> tuple[Any, dict[str, Any]]:
    """The class of an entry of a file, and its configuration. Raises ValueError."""
    name = entry.get("class_name") if isinstance(entry, Mapping) else None
    if not isinstance(name, str) or "." not in name:
        raise ValueError(f"'{file}' has an entry without class_name, as my_tools.MyTool: {entry!r}")
    config = dict(entry.get("config") or {})
    if "${" in json.dumps([config, entry.get("tool_schema")], default=str):
        raise ValueError(f"'{file}' refers to values by ${{...}}; write the values")
    try:
        return resolve(":".join(name.rsplit(".", 1)), "tool"), config
    except ValueError as error:
        raise ValueError(_failed(file, error)) from error


def _failed(file: str, error: BaseException) -> str:
    """The message for code that cannot be imported or made."""
    text = f"'{file}': {error}"
    if module := missing_part(error):
        text += (
            f". It needs {module} of verl, which is not installed here; install verl in hone's "
            f"environment, or put what it takes of {module} into a file of your own"
        )
    elif "verl." in text and "no module 'verl" in text:
        text += "; install verl in hone's environment, or copy the class into a file of your own"
    return text


def _schema(written: Any) -> Any:
    """A schema in the class that verl's tools expect."""
    if written is None or not isinstance(written, Mapping):
        return written
    schemas = importlib.import_module("verl.tools.schemas")
    return schemas.OpenAIFunctionToolSchema.model_validate(written)


def _made(kind: Callable[..., Any], file: str, **arguments: Any) -> Any:
    try:
        return kind(**arguments)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(
            f"making {name} of '{file}' failed: {type(error).__name__}: {error}"
        ) from error
