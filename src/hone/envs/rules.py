"""Rules on tools. The user's files are parsed, never imported."""

from __future__ import annotations

from collections.abc import Iterator

from hone.address import module_file
from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, unused
from hone.config.rules.view import Details
from hone.errors import did_you_mean
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


RULES = (
    error("env.tools", each=_wrong_tools, says="env.tools holds '{spec}'", why="{problem}",
          fix="correct env.tools"),
    unused("env.(tool_format|max_tool_calls|max_parallel_calls|max_observation_tokens)",
           "env.path = unset", "not env.tools", instead="name tools in env.tools"),
)  # fmt: skip
