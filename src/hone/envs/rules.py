"""Rules on tools, and on programs that play episodes. The files of users are parsed alone."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator

from hone.address import module_file
from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, unused
from hone.config.rules.view import Details
from hone.errors import did_you_mean
from hone.extras import missing_extra
from hone.user_code.inherited import inherited
from hone.user_code.signatures import parsed_class

__all__ = ["RULES"]


def _wrong_tools(view: Facts) -> Iterator[Details]:
    """Entries that name no tool, as far as that shows without running anything."""
    specs: tuple[str, ...] = view["env.tools"]
    for place, spec in enumerate(specs):
        if (problem := _problem(spec)) is None and spec in specs[:place]:
            problem = "it is named twice; remove one"
        if problem is not None:
            yield {"spec": spec, "problem": problem}


def _problem(spec: str) -> str | None:
    if inherited(spec) is not None:
        return None
    if spec.startswith("mcp:"):
        has_target = bool(spec.removeprefix("mcp:").strip())
        return None if has_target else "no command and no URL follows `mcp:`"
    location, _, name = spec.rpartition(":")
    if not location or not name.isidentifier():
        return (
            "it is malformed; write path/to/file.py:function, package.module:function, or "
            "mcp:COMMAND ARGUMENTS or mcp:https://... for a server"
        )
    file = module_file(spec)
    if location.endswith(".py") and not file.is_file():
        hint = did_you_mean(file.name, [each.name for each in file.parent.glob("*.py")])
        return f"there is no file '{file}'.{hint}"
    if parsed_class(spec) is not None:
        return "it is a class, and a tool is a function; an environment is named in env.path"
    return None


def _wrong_command(view: Facts) -> Iterator[Details]:
    """Why no program can be started, as far as that shows without starting it."""
    command: str = view["env.harness.command"]
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield {"problem": f"it is no command of a shell: {error}"}
        return
    if not words:
        yield {"problem": "it names no program"}
    elif shutil.which(words[0]) is None:
        yield {"problem": f"there is no program '{words[0]}' here that can be run"}


def _no_server(view: Facts) -> Iterator[Details]:
    """The packages without which programs cannot ask the policy."""
    del view
    for package in ("starlette", "uvicorn"):
        if (missing := missing_extra(package, needed_by="env.harness.command")) is not None:
            yield {"missing": missing}


RULES = (
    error("env.harness.command", each=_wrong_command,
          says="env.harness.command is '{env.harness.command}'", why="{problem}",
          fix="correct env.harness.command"),
    error("env.harness.command", each=_no_server, says="{missing}"),
    error("env.harness.command", "env.path",
          why="a program that plays an episode has no environment besides itself",
          fix="remove env.harness.command | unset env.path"),
    error("env.harness.command", "env.tools",
          why="a program that plays an episode has tools of its own",
          fix="remove env.harness.command | leave env.tools out"),
    error("env.harness.command", "reward.model.path",
          why="a reward model reads the messages of the data, and a program may send others",
          fix="remove reward.model.path | unset env.harness.command"),
    error("env.harness.command", "algorithm.routing_replay",
          why="the experts of tokens that a program has asked for are not recorded",
          fix="algorithm.routing_replay = false | unset env.harness.command"),
    unused("env.turn_timeout_s", "env.harness.command",
           instead="bound the episode of a program by env.episode_timeout_s"),
    unused("env.history", "env.harness.command = unset",
           instead="name a program in env.harness.command"),
    error("env.tools", each=_wrong_tools, says="env.tools holds '{spec}'", why="{problem}",
          fix="correct env.tools"),
    unused("env.(tool_format|max_tool_calls|max_parallel_calls|max_observation_tokens)",
           "env.path = unset", "not env.tools", instead="name tools in env.tools"),
)  # fmt: skip
