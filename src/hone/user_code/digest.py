"""Digests of users' functions, which change with their code, without running it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from types import CodeType
from typing import Any

from hone.address import module_file, names_code
from hone.user_code.inherited import inherited

__all__ = ["code_digest"]


def code_digest(spec: str) -> str | None:
    """A digest (12 hex digits) of the code of the function or class `spec`.

    For `path/to/file.py:name` it covers the whole file. For an inherited function it covers the
    bytecode, the defaults, captured variables and what it uses of its own module, but neither the
    file, of which any other line may change between runs, nor line numbers, which move in a
    notebook. None for built-in functions and installed packages. Other modules that the code
    imports are not covered.
    """
    if (function := inherited(spec)) is not None:
        content = repr([*_parts(function, set())]).encode()
    elif names_code(spec) and module_file(spec).is_file():
        content = module_file(spec).read_bytes()
    else:
        return None
    return sha256(content).hexdigest()[:12]


def _parts(function: Callable[..., Any], seen: set[int]) -> Iterator[Any]:
    """What a function does, without file names, line numbers and memory addresses. `seen` has the
    ids of the code of functions that are being visited."""
    if isinstance(function, functools.partial):
        yield from _parts(function.func, seen)
        yield _plain([*function.args, *function.keywords.items()])
        return
    if isinstance(function, type):
        for name, member in sorted(vars(function).items()):
            if callable(member):
                yield name, [*_parts(member, seen)]
            elif not name.startswith("__"):
                yield name, _plain([member])
        return
    function = getattr(function, "__func__", function)  # unwraps a method
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):  # an instance with `__call__`
        function = type(function).__call__
        code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield from _code_parts(code)
        yield _plain([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()])
        yield [*_used(function, code, seen)]


def _used(function: Any, code: CodeType, seen: set[int]) -> Iterator[Any]:
    """The globals of its module and the captured variables that a function uses."""
    seen.add(id(code))
    module_names = function.__globals__
    used = {name: module_names[name] for name in sorted(_names(code)) if name in module_names}
    used |= inspect.getclosurevars(function).nonlocals
    for name, value in used.items():
        members = vars(value) if isinstance(value, type) else {name: value}
        for key, member in members.items():
            inner = getattr(member, "__code__", None)
            if not isinstance(inner, CodeType):
                # `__firstlineno__` and the like of a class are left out: they say where it stands.
                yield name, [] if key.startswith("__") else _plain([member])
            elif member.__globals__ is module_names and id(inner) not in seen:
                yield name, [*_parts(member, seen)]


def _names(code: CodeType) -> Iterator[str]:
    """All names that the code and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _plain(values: Sequence[Any]) -> list[Any]:
    """The values whose repr has no memory address."""
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
