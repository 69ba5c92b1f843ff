"""The parameters of reward functions, and whether they can be called with them.

The parameters of a function show its shape: hone's own, or that of TRL, verl or OpenRLHF, and it is
called as that framework calls it. The same rules serve functions that a worker has imported and
functions whose file is only parsed, before a run.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from hone.address import module_file, names_code
from hone.errors import did_you_mean
from hone.user_code.inherited import inherited

__all__ = [
    "ENVIRONMENTS",
    "GIVEN",
    "OWN",
    "SHAPES",
    "Shape",
    "missing_column",
    "needed_columns",
    "one_at_a_time",
    "parsed_class",
    "parsed_parameters",
    "shape_of",
    "signature_problem",
    "takes_labels",
]

GIVEN = ("completion", "prompt", "answer", "completion_ids", "task", "stop_reason", "metadata",
         "messages", "max_completion_tokens", "turns")  # fmt: skip
"""Names of the arguments that every sample provides."""

ENVIRONMENTS = "environments"
"""The parameter by which TRL's functions ask for the live objects of episodes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The calling convention of one framework's reward functions."""

    framework: str
    mark: str | None
    """The parameter by which a function of this shape is recognised."""
    given: tuple[str, ...]
    """Arguments that every call passes."""
    answer: str | None
    """The parameter for the answer of a row. Where a function requires it, each row must have an
    answer; None for OpenRLHF, which passes an empty label where there is none."""
    takes_columns: bool
    """Any other parameter may be a column of the data."""
    takes_lists: bool
    """Arguments are lists, so that one call can score several completions."""
    called_with: str
    """Description of the arguments, for messages."""


OWN = Shape("hone", None, GIVEN, "answer", takes_columns=True, takes_lists=False,
            called_with="one sample")  # fmt: skip
SHAPES = (
    Shape("TRL", "completions",
          ("prompts", "completions", "completion_ids", ENVIRONMENTS, "trainer_state",
           "log_metric", "log_extra", "answer", "task"),
          "answer", takes_columns=True, takes_lists=True, called_with="lists of one sample"),
    Shape("verl", "solution_str", ("data_source", "solution_str", "ground_truth", "extra_info"),
          "ground_truth", takes_columns=False, takes_lists=False, called_with="one sample"),
    Shape("OpenRLHF", "queries", ("queries", "prompts", "labels"), None,
          takes_columns=False, takes_lists=True,
          called_with="lists of one sample; a query is the prompt and the completion"),
)  # fmt: skip
"""The shapes of other frameworks; a function without a mark of theirs has the shape `OWN`."""

_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def shape_of(parameters: Iterable[Parameter]) -> Shape:
    """The shape that a signature shows. A function with `completion` has hone's shape, and other
    frameworks' names are columns for it, except `completions`: with both, the shape is TRL's and
    `signature_problem` refuses it."""
    names = {parameter.name for parameter in parameters}
    if "completion" in names and "completions" not in names:
        return OWN
    return next((shape for shape in SHAPES if shape.mark in names), OWN)


def signature_problem(
    parameters: Sequence[Parameter], spec: str, args: Mapping[str, Any], *, whole_groups: bool
) -> str | None:
    """Why the function `spec` cannot be called in its shape with `args` or `whole_groups`, or None.

    A required parameter that neither the shape nor `args` provides is taken for a column of the
    data, where the shape's framework passes columns.
    """
    shape = shape_of(parameters)
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    named = [p.name for p in parameters if p.kind not in _VARIABLE]
    if shape is not OWN and "completion" in named:
        return (
            f"'{spec}' takes `completion`, as hone's own functions, and `{shape.mark}`, as those "
            f"of {shape.framework}; keep one of them"
        )
    if whole_groups and not shape.takes_lists:
        return one_at_a_time(f"'{spec}', in {shape.framework}'s shape,")
    if whole_groups and any(
        parameter.name == ENVIRONMENTS and parameter.default is Parameter.empty
        for parameter in parameters
    ):
        return (
            f"'{spec}' takes `{ENVIRONMENTS}`, and whole_groups is true: each episode of a group "
            "has an environment in a process of its own, which has ended when the group is scored. "
            "Read what was said from `completions`, or leave whole_groups out"
        )
    for parameter in parameters:
        if parameter.kind is Parameter.POSITIONAL_ONLY and parameter.default is Parameter.empty:
            return (
                f"'{spec}' takes '{parameter.name}' by position only; arguments are passed by "
                f"name, so remove the `/` from its signature"
            )
    if clash := sorted(args.keys() & set(shape.given)):
        return f"args of '{spec}' set {clash}, which every sample brings; rename them"
    if not shape.takes_columns and (missing := _not_given(parameters, args, shape)):
        return (
            f"'{spec}' is called as {shape.framework}'s reward functions, by "
            f"{', '.join(shape.given)}, and also needs '{missing[0]}': give it a default, "
            "or a value in args"
        )
    if takes_all:
        return None
    if unknown := sorted(args.keys() - set(named)):
        hint = did_you_mean(unknown[0], named) or f" It takes: {', '.join(named) or 'nothing'}."
        return f"'{spec}' has no parameter '{unknown[0]}', which args set.{hint}"
    if not set(named) - args.keys():
        return (
            f"'{spec}' takes nothing of a sample, so it cannot tell one completion from another; "
            f"name what it needs among its parameters, such as `completion` and `answer`"
        )
    return None


def one_at_a_time(what: str) -> str:
    """Why `what` cannot be called with whole groups."""
    return (
        f"{what} scores one completion a call, and whole_groups is true. Let it take `completions` "
        "and columns as lists, as TRL's reward functions do, and return a list with a score for "
        "each, or leave whole_groups out"
    )


def needed_columns(parameters: Sequence[Parameter], args: Mapping[str, Any]) -> list[str]:
    """The columns of the data that a function requires: `answer` (whichever column has that role),
    and required parameters that neither its shape nor `args` provides."""
    shape = shape_of(parameters)
    required = {p.name for p in parameters if p.default is Parameter.empty}
    answer = ["answer"] if shape.answer in required else []
    return [*answer, *(_not_given(parameters, args, shape) if shape.takes_columns else [])]


def takes_labels(parameters: Sequence[Parameter]) -> bool:
    """Whether a function requires OpenRLHF's labels, which are empty where rows have no answer."""
    required = {p.name for p in parameters if p.default is Parameter.empty}
    return shape_of(parameters).framework == "OpenRLHF" and "labels" in required


def _not_given(parameters: Sequence[Parameter], args: Mapping[str, Any], shape: Shape) -> list[str]:
    """Required parameters that neither `args` nor the shape provides."""
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is Parameter.empty
        and parameter.kind not in _VARIABLE
        and parameter.name not in args
        and parameter.name not in shape.given
    ]


def missing_column(
    spec: str,
    name: str,
    lacking: Sequence[tuple[str, Collection[str]]],
    among: str,
    *,
    source: str = "data.train.N",
) -> str:
    """The message for rows that lack the column `name`, which the function `spec` requires.
    `lacking` are those rows, each with its place and its columns that are not null; `among` is the
    number of rows of `source`, in words."""
    place, columns = lacking[0]
    has = ", ".join(sorted(columns)) or "none"
    rows = f"{len(lacking):,} of {among} lack it, the first is {place} (which has: {has})"
    if name == "answer":
        default = ", or give the parameter a default where rows may lack it"
        return (
            f"'{spec}' needs the answer of each row, and {rows}. Name the column that has it with "
            f"{source}.columns.answer{default if names_code(spec) else ''}."
        )
    return (
        f"'{spec}' needs '{name}', which is not in its args, and {rows}."
        f"{did_you_mean(name, [*columns, *GIVEN])}"
    )


def parsed_parameters(spec: str) -> list[Parameter] | None:
    """The parameters in the source of `path/to/file.py:function` or `package.module:function`; None
    where they cannot be known without running the file, such as those of a decorated function. An
    inherited function is inspected instead.
    """
    if (function := inherited(spec)) is not None:
        with suppress(TypeError, ValueError):  # a function written in C may not show them
            return list(signature(function).parameters.values())
        return None
    node = _definition(spec)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    return _parameters(node.args)


def parsed_class(spec: str) -> ast.ClassDef | None:
    """The class in the source of `path/to/file.py:Class` or `package.module:Class`; None where it
    cannot be known without running the file."""
    node = _definition(spec)
    return node if isinstance(node, ast.ClassDef) and not node.decorator_list else None


def _definition(spec: str) -> ast.AST | None:
    """The only statement of a module that binds the name, at its top level; else None."""
    name = spec.rpartition(":")[2]
    try:
        tree = ast.parse(module_file(spec).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None  # reported elsewhere, or an installed module
    bindings = [node for node in ast.walk(tree) if _binds(node, name)]
    return bindings[0] if len(bindings) == 1 and bindings[0] in tree.body else None


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
