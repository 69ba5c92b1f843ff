"""What tells one version of a user's function from another, without running it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

from hone.address import names_code
from hone.user_code.inherited import inherited

__all__ = ["code_digest", "module_file"]


def module_file(spec: str) -> Path:
    """The file of `path/to/file.py:name`, or of `package.module:name` in the current folder; it
    need not exist."""
    location = spec.rpartition(":")[0]
    is_file = location.endswith(".py")
    return Path(location) if is_file else Path(*location.split(".")).with_suffix(".py")


def code_digest(spec: str) -> str | None:
    """A short digest of the code that the function or class `spec` has: of its whole file, or of
    the bytecode and the defaults of one that is inherited, whose place in a notebook may change,
    with what it uses of its module and its captured variables. Not of its file: that is the program
    which trains, of which any line may have changed. None where neither is here, as of built-in
    ones and of installed packages.

    Other modules that it imports are not looked at.
    """
    if (function := inherited(spec)) is not None:
        content = repr([*_parts(function, set())]).encode()
    elif names_code(spec) and module_file(spec).is_file():
        content = module_file(spec).read_bytes()
    else:
        return None
    return sha256(content).hexdigest()[:12]


def _parts(function: Callable[..., Any], seen: set[int]) -> Iterator[Any]:
    """What a function does; nothing in it that names a place in a file or in memory. `seen` are the
    ids of functions that it is part of."""
    if isinstance(function, functools.partial):
        yield from _parts(function.func, seen)
        yield _plain([*function.args, *function.keywords.items()])
        return
    if isinstance(function, type):
        for name, held in sorted(vars(function).items()):
            if callable(held):
                yield name, [*_parts(held, seen)]
            elif not name.startswith("__"):
                yield name, _plain([held])
        return
    function = getattr(function, "__func__", function)  # of a method
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):  # an instance that can be called
        function = type(function).__call__
        code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield from _code_parts(code)
        yield _plain([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()])
        yield [*_used(function, code, seen)]


def _used(function: Any, code: CodeType, seen: set[int]) -> Iterator[Any]:
    """What a function uses beside its arguments: of its own module and of those around it."""
    seen.add(id(code))
    own = function.__globals__
    named = {name: own[name] for name in sorted(_names(code)) if name in own}
    named |= inspect.getclosurevars(function).nonlocals
    for name, value in named.items():
        members = vars(value) if isinstance(value, type) else {name: value}
        for key, one in members.items():
            inner = getattr(one, "__code__", None)
            if not isinstance(inner, CodeType):
                # Of a class `__firstlineno__` and the like say where it is.
                yield name, [] if key.startswith("__") else _plain([one])
            elif one.__globals__ is own and id(inner) not in seen:
                yield name, [*_parts(one, seen)]


def _names(code: CodeType) -> Iterator[str]:
    """All names that the code and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _plain(values: Sequence[Any]) -> list[Any]:
    """Those whose text says what they are, and not where."""
    return [value for value in values if isinstance(value, str | int | float | tuple | None)]


def _code_parts(code: CodeType) -> Iterator[Any]:
    yield code.co_code
    yield code.co_names
    yield code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield [*_code_parts(constant)]
        else:
            yield sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
