"""Which arguments a reward function takes, beside those that it can be given.

The same rules serve a function that has been imported, in a worker, and one whose file is only
parsed, before a run.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any

__all__ = [
    "GIVEN",
    "did_you_mean",
    "missing_column",
    "needed_columns",
    "parsed_parameters",
    "signature_problem",
]

GIVEN = (
    "completion",
    "prompt",
    "answer",
    "completion_ids",
    "task",
    "stop_reason",
    "metadata",
    "messages",
    "max_completion_tokens",
)
"""Names of the arguments every sample has."""

_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def signature_problem(
    parameters: Sequence[Parameter], spec: str, args: Mapping[str, Any]
) -> str | None:
    """Why the function `spec` cannot be called with a sample's arguments and `args`, or None.

    A required parameter that is neither in `GIVEN` nor in `args` is taken for a column of the data.
    """
    names = [parameter.name for parameter in parameters]
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    if "completions" in names:
        return (
            f"'{spec}' takes a list, `completions`; a reward is called once a sample, so take "
            f"`completion` and return one number"
        )
    for parameter in parameters:
        if parameter.kind is Parameter.POSITIONAL_ONLY and parameter.default is Parameter.empty:
            return (
                f"'{spec}' takes '{parameter.name}' by position only; arguments are passed by "
                f"name, so remove the `/` from its signature"
            )
    if clash := sorted(args.keys() & set(GIVEN)):
        return f"args of '{spec}' set {clash}, which every sample brings; rename them"
    if takes_all:
        return None
    named = [p.name for p in parameters if p.kind not in _VARIABLE]
    if unknown := sorted(args.keys() - set(named)):
        hint = did_you_mean(unknown[0], named) or f" It takes: {', '.join(named) or 'nothing'}."
        return f"'{spec}' has no parameter '{unknown[0]}', which args set.{hint}"
    if not set(named) - args.keys():
        return (
            f"'{spec}' takes nothing of a sample, so it cannot tell one completion from another; "
            f"name what it needs among its parameters, such as `completion` and `answer`"
        )
    return None


def needed_columns(parameters: Sequence[Parameter], args: Mapping[str, Any]) -> list[str]:
    """Required parameters that only a column of the data can give."""
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is Parameter.empty
        and parameter.kind not in _VARIABLE
        and parameter.name not in args
        and parameter.name not in GIVEN
    ]


def missing_column(
    spec: str, name: str, place: str, *, columns: Collection[str], given: Collection[str]
) -> str:
    """What to tell where a row with `columns`, of which functions are given `given` under their
    own names, lacks one that a function asks for."""
    has = ", ".join(sorted(columns)) or "none"
    return (
        f"'{spec}' needs '{name}', which is neither in its args nor a column that it is given of "
        f"{place} (columns: {has}).{did_you_mean(name, [*given, *GIVEN])} The columns of the "
        "prompt, the answer and the task go by the names `prompt`, `answer` and `task`."
    )


def parsed_parameters(spec: str) -> list[Parameter] | None:
    """The parameters of `path/to/file.py:function` or `package.module:function` as they are
    written; None where they cannot be known without running the file, as of a decorated function.
    """
    location, _, name = spec.rpartition(":")
    is_file = location.endswith(".py")
    path = Path(location) if is_file else Path(*location.split(".")).with_suffix(".py")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None  # said elsewhere, or a module that is installed
    found = [node for node in ast.walk(tree) if _binds(node, name)]
    if len(found) != 1 or found[0] not in tree.body:
        return None
    (node,) = found
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    return _parameters(node.args)


def _binds(node: ast.AST, name: str) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.Import() | ast.ImportFrom():
            return any((alias.asname or alias.name) == name for alias in node.names)
        case ast.Name(ctx=ast.Store()):
            return node.id == name
        case _:
            return False


def _parameters(given: ast.arguments) -> list[Parameter]:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list[ast.expr | None](
        given.defaults
    )
    kinds = [Parameter.POSITIONAL_ONLY] * len(given.posonlyargs)
    kinds += [Parameter.POSITIONAL_OR_KEYWORD] * len(given.args)
    rows = list(zip(positional, kinds, defaults, strict=True))
    rows += [(given.vararg, Parameter.VAR_POSITIONAL, None)] if given.vararg else []
    rows += [
        (argument, Parameter.KEYWORD_ONLY, default)
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    rows += [(given.kwarg, Parameter.VAR_KEYWORD, None)] if given.kwarg else []
    return [
        Parameter(argument.arg, kind, default=Parameter.empty if default is None else default)
        for argument, kind, default in rows
    ]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A sentence that names the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""
