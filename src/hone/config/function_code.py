"""What tells one version of a user's function from another, without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

from hone.config.address import names_code
from hone.config.inherited import inherited

__all__ = ["code_digest", "module_file"]


def module_file(spec: str) -> Path:
    """The file of `path/to/file.py:name`, or of `package.module:name` in the current folder; it
    need not exist."""
    location = spec.rpartition(":")[0]
    is_file = location.endswith(".py")
    return Path(location) if is_file else Path(*location.split(".")).with_suffix(".py")


def code_digest(spec: str) -> str | None:
    """A short digest of the code that the function or class `spec` has: of its file, or of the
    bytecode and the defaults of one that is inherited, whose place in a notebook may change. None
    where neither is here, as of built-in ones and of installed packages.

    What else the function uses, such as globals and captured variables, is not looked at.
    """
    if (function := inherited(spec)) is not None:
        content = repr([*_parts(function)]).encode()
    elif names_code(spec) and module_file(spec).is_file():
        content = module_file(spec).read_bytes()
    else:
        return None
    return sha256(content).hexdigest()[:12]


def _parts(function: Callable[..., Any]) -> Iterator[Any]:
    """What a function does; nothing in it that names a place in a file or in memory."""
    if isinstance(function, functools.partial):
        yield from _parts(function.func)
        yield _plain([*function.args, *function.keywords.items()])
        return
    function = getattr(function, "__func__", function)  # of a method
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):  # an instance that can be called
        function = type(function).__call__
        code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield from _code_parts(code)
        yield _plain([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()])


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
