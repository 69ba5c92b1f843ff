"""Imports the function that a recipe names: `package.module:function` or
`path/to/file.py:function`. Every problem with the name or the function is a ValueError.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hone.errors import did_you_mean
from hone.user_code.inherited import inherited
from hone.user_code.signatures import needed_columns, shape_of, signature_problem

__all__ = ["check_signature", "error_location", "resolve"]


def resolve(spec: str, what: str = "reward function") -> Callable[..., Any]:
    """The function or class that `spec` names, inherited or imported. It runs the user's module, so
    call it only in a worker. `what` is its kind, for messages.

    Raises ValueError saying what is missing, with the nearest name where there is one.
    """
    if (function := inherited(spec)) is not None:
        return function
    location, colon, name = spec.rpartition(":")
    if not (colon and location and name):
        raise ValueError(
            f"'{spec}' does not name {_a(what)}; write `package.module:function` or "
            f"`path/to/file.py:function`"
        )
    is_file = location.endswith(".py") or "/" in location
    module = _import_file(spec, Path(location)) if is_file else _import_module(spec, location)
    try:
        function = getattr(module, name)
    except AttributeError:
        own = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        hint = did_you_mean(name, own) or f" Callables there: {', '.join(sorted(own)) or 'none'}."
        kind = what.split()[-1]
        raise ValueError(f"{location} has no {kind} '{name}' (from '{spec}').{hint}") from None
    if not callable(function):
        raise ValueError(
            f"'{spec}' is of type {type(function).__name__}, which cannot be called; name "
            f"{_a(what)}"
        )
    return function


def _a(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"


def check_signature(
    function: Callable[..., Any], spec: str, args: Mapping[str, Any], *, whole_groups: bool = False
) -> dict[str, Any]:
    """The `columns` that `function` needs besides a sample's arguments and `args`, and the
    `framework` in whose shape it is called.

    Raises ValueError where it cannot be called with them.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ValueError(
            f"'{spec}' does not show its parameters (it is written in C?); wrap it in a Python "
            f"function that names the arguments it needs"
        ) from None
    problem = signature_problem(parameters, spec, args, whole_groups=whole_groups)
    if problem is not None:
        raise ValueError(problem)
    return {
        "columns": needed_columns(parameters, args),
        "framework": shape_of(parameters).framework,
    }


def error_location(error: BaseException, file: str | None = None) -> str:
    """`file.py:12: ValueError: text` for an error in foreign code, at the innermost frame in
    `file`, or at the innermost frame of all where none is in `file`."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        (f for f in reversed(frames) if f.filename == file), frames[-1] if frames else None
    )
    where = f"{frame.filename}:{frame.lineno}: " if frame is not None else ""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - foreign __str__ may do anything
        text = "(its text cannot be shown)"
    return f"{where}{type(error).__name__}: {text}"


def _import_module(spec: str, location: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{location}.".startswith(f"{error.name}."):
            raise _import_error(spec, error) from error
        raise ValueError(
            f"no module '{error.name}' (from '{spec}'); it is looked for in the current folder and "
            f"in the installed packages"
        ) from None
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise _import_error(spec, error) from error


def _import_file(spec: str, path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")]
        hint = did_you_mean(path.name, siblings)
        raise ValueError(f"no file '{path}' (from '{spec}').{hint}")
    module_name = f"hone_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(module_name, path.resolve())
    if found is None or found.loader is None:
        raise ValueError(f"'{path}' is not a Python file (from '{spec}')")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that the file can import its neighbours
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise _import_error(spec, error) from error
    return module


def _import_error(spec: str, error: BaseException) -> ValueError:
    text = f"importing '{spec}' failed: {error_location(error)}"
    if isinstance(error, MemoryError) or "failed to map segment" in text:
        text += " (it may take `reward.memory_limit_gib` of address space)"
    return ValueError(text)
