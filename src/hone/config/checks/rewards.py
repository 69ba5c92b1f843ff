"""Checks on reward functions. The user's files are parsed, never imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from hone.config.checks.finding import Finding, error, warning
from hone.config.extras import missing_extra
from hone.config.reward import BUILTIN_REWARDS, RewardConfig, RewardFunctionConfig
from hone.config.signatures import (
    missing_column,
    needed_columns,
    parsed_parameters,
    signature_problem,
)

__all__ = ["check_reward", "check_reward_columns", "needs_columns"]


def check_reward(reward: RewardConfig) -> Iterator[Finding]:
    """Functions, weights and workers."""
    if not reward.functions:
        yield error("reward.functions is empty; name at least one.", "reward.functions")
    elif all(function.weight == 0 for function in reward.functions):
        yield error(
            "every reward.functions.*.weight is 0, so every reward is 0; give at least one entry "
            "of reward.functions a weight.",
            "reward.functions",
        )
    for index, function in enumerate(reward.functions):
        key = f"reward.functions.{index}.fn"
        problem = _problem(function.fn)
        if problem is not None:
            yield error(f"{key} '{function.fn}': {problem}", key)
        elif (signature := _signature_problem(function)) is not None:
            yield error(f"{key}: {signature}.", key)
        elif function.fn == "math":
            missing = missing_extra("math_verify", needed_by=f"{key}=math")
            if missing is not None:
                yield error(f"{missing}.", key)
    cores = os.cpu_count() or 1
    if reward.num_workers is not None and reward.num_workers > 4 * cores:
        yield warning(
            f"reward.num_workers is {reward.num_workers} on {cores} CPU cores; more than one or "
            "two a core only takes memory.",
            "reward.num_workers",
        )
    if reward.max_failure_rate == 1:
        yield warning(
            "reward.max_failure_rate is 1: the run goes on even when no sample can be scored; "
            "use a value below 1.",
            "reward.max_failure_rate",
        )


def needs_columns(reward: RewardConfig) -> bool:
    """Whether a function asks for a column of the data by name, as far as its file tells."""
    return any(_needed(function) for function in reward.functions)


def check_reward_columns(
    reward: RewardConfig, rows: Sequence[tuple[str, Collection[str], Collection[str]]]
) -> Iterator[Finding]:
    """Whether rows of the data, each a place, its columns and those that rewards are given under
    their own names, have what the functions ask for. Functions are judged as far as parsing their
    files tells."""
    for index, function in enumerate(reward.functions):
        key = f"reward.functions.{index}.fn"
        for name in _needed(function):
            lacking = next((row for row in rows if name not in row[2]), None)
            if lacking is not None:
                place, columns, given = lacking
                problem = missing_column(function.fn, name, place, columns=columns, given=given)
                yield error(f"{key}: {problem}", key, f"reward.functions.{index}.args")


def _needed(function: RewardFunctionConfig) -> list[str]:
    parameters = parsed_parameters(function.fn) if ":" in function.fn else None
    return needed_columns(parameters or [], function.args)


def _signature_problem(function: RewardFunctionConfig) -> str | None:
    parameters = parsed_parameters(function.fn) if ":" in function.fn else None
    if parameters is None:
        return None
    return signature_problem(parameters, function.fn, function.args)


def _problem(fn: str) -> str | None:
    """What is wrong with the name of a reward function, or None."""
    target, colon, name = fn.rpartition(":")
    if not colon:
        if fn in BUILTIN_REWARDS:
            return None
        near = get_close_matches(fn, BUILTIN_REWARDS, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return (
            f"no built-in of that name.{hint} Built-ins: {', '.join(BUILTIN_REWARDS)}; your own: "
            "package.module:function or path/to/file.py:function."
        )
    if not target or not name.isidentifier():
        return "malformed; write package.module:function or path/to/file.py:function."
    if target.endswith(".py"):
        return _problem_in_file(Path(target), name)
    if not all(part.isidentifier() for part in target.split(".")):
        return f"'{target}' is neither a module's name nor a file that ends in .py."
    top = target.split(".")[0]
    if find_spec(top) is None and not Path(top).exists() and not Path(f"{top}.py").exists():
        return f"there is no module '{top}'; install it, or give the path of a .py file."
    return None


def _problem_in_file(path: Path, name: str) -> str | None:
    if not path.is_file():
        return f"there is no file '{path}'."
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as problem:
        return f"line {problem.lineno} of '{path}' is not valid Python: {problem.msg}."
    except (OSError, ValueError) as problem:
        return f"'{path}' cannot be read: {problem}."
    bound = _bound_names(tree)
    if name in bound or "*" in bound:
        return None
    functions = [x.name for x in tree.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    return f"'{path}' defines no '{name}'; its functions: {', '.join(functions) or 'none'}."


def _bound_names(tree: ast.Module) -> set[str]:
    """Every name that a module binds by a definition, an import or an assignment."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case _:
                pass
    return names
