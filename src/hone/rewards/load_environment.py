"""Loads the environment of a run in a worker: a stateless one, what makes sessions, or a program.

Only a worker with an environment imports this module and with it the shapes and tools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hone.envs.session import Session
from hone.envs.shapes import EnvMaker, made_from
from hone.envs.tools.load import Tools, make_tools
from hone.envs.tools.reading import argument_schemas, read_action
from hone.envs.tools.session import ToolSession, require_unique
from hone.envs.tools.tool import Tool
from hone.envs.tools.with_session import WithTools
from hone.rewards.environment import EnvFacts, EnvSpec
from hone.rewards.play import Player, read_answer
from hone.rewards.program import ProgramSession
from hone.rewards.session_player import SessionPlayer
from hone.user_code.resolve import resolve

__all__ = ["load_environment"]


def load_environment(
    spec: EnvSpec, folder: Path | None = None
) -> tuple[Player | SessionPlayer, EnvFacts]:
    """The environment and what it is. A program that plays episodes writes to `folder`. Raises
    ValueError where the environment cannot be loaded."""
    if spec.command is not None:
        make_program = partial(ProgramSession, spec.command, folder)
        facts = EnvFacts(shape="harness", has_sessions=True)
        return SessionPlayer(make_program, read_answer, file=None), facts
    tools = None
    if spec.tools:
        load = partial(resolve, what="tool")
        tools = make_tools(spec.tools, load=load, deadline_s=spec.timeout_s)
    maker = None
    if spec.path is not None:
        maker = made_from(spec.path, spec.args, resolve=resolve)
        if maker is None:
            if tools is not None:
                raise ValueError(
                    f"env.path '{spec.path}' is a stateless environment, with the method "
                    "`step(self, episode)`, and env.tools need one with sessions: "
                    "`start(self, row)` and `step(self, action)`. Unset one of the two keys"
                )
            player = Player(resolve(spec.path, "environment"), spec.path, spec.args)
            return player, EnvFacts(shape="stateless", has_sessions=False)
        if tools is not None and maker.tool_schemas and maker.make_with_tools is None:
            raise ValueError(
                f"env.path '{spec.path}' has tools of its own, which it runs itself, and env.tools "
                "names more. Make those methods of the class, or unset env.tools"
            )
    schemas = (
        *(tools.schemas if tools is not None else ()),
        *(maker.tool_schemas if maker is not None else ()),
    )
    require_unique([schema["function"]["name"] for schema in schemas])
    facts = EnvFacts(
        shape="tools" if maker is None else maker.shape,
        has_sessions=True,
        tools=schemas,
        needs_tool_format=tools is not None or (maker is not None and maker.needs_tool_format),
    )
    read = None
    if spec.tool_format is not None:
        of_tools = argument_schemas(schemas)
        read = partial(read_action, tool_format=spec.tool_format, schemas=of_tools)
    file = None if maker is None else maker.file
    return SessionPlayer(_make(spec, tools, maker), read_answer, read=read, file=file), facts


def _make(spec: EnvSpec, tools: Tools | None, maker: EnvMaker | None) -> Callable[[], Session]:
    """What makes the session of an episode."""
    if tools is None and (
        maker is None or not maker.needs_tool_format or not maker.make_with_tools
    ):
        assert maker is not None
        return maker.make

    def run_tools(own: Sequence[Tool] = ()) -> ToolSession:
        assert spec.tool_format is not None, "an environment that is described plays no episode"
        named = tools or Tools((), {}, spec.timeout_s)
        return named.session(
            own,
            tool_format=spec.tool_format,
            max_tool_calls=spec.max_tool_calls,
            max_parallel_calls=spec.max_parallel_calls,
        )

    def make() -> Session:
        if maker is None:
            return run_tools()
        if maker.make_with_tools is not None:
            return maker.make_with_tools(run_tools)
        return WithTools(maker.make(), run_tools())

    return make
