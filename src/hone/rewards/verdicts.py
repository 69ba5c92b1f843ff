"""Judges a program: writes a 1 for each test that passes, and a 0 for each other one.

It runs in a second sandboxed process of a jail (`launcher.py`) with its own deadline, since tests
are code too, and a program may send anything. It calls the program over a link. A reward worker
reads only its verdicts.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import fractions
import functools
import importlib
import itertools
import json
import math
import os
import re
import symtable
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

from hone.rewards.peer import Link, Peer

__all__ = ["Call", "judge", "judge_calls", "own_names"]


# ---- values of a function ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A test of a function: its arguments and the expected value, as JSON values."""

    name: str
    given: Sequence[Any]
    value: Any
    may_be_wrapped: bool = True
    """The expected value may be the only item of a list."""

    @property
    def args(self) -> list[Any]:
        return [_with_numbers(item) for item in self.given]

    def accepts(self, value: Any) -> bool:
        """Whether a value equals the expected one by the rules of the data sets' own graders: a
        tuple equals a list.

        Source: `eval/testing_util.py` of APPS, which TACO's grader comes from, and
        `lcb_runner/evaluation/testing_util.py` of LiveCodeBench, whose values are never wrapped.
        """
        wanted = [self.value]
        if self.may_be_wrapped and isinstance(self.value, list) and self.value:
            wanted.append(self.value[0])
        return any(_as_lists(value) == _as_lists(item) for item in map(_with_numbers, wanted))


def _as_lists(value: Any) -> Any:
    """The value with all tuples converted to lists."""
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return value


def _with_numbers(value: Any) -> Any:
    """A dict whose keys are texts of whole numbers (JSON has no others) with numbers as keys; any
    other value unchanged."""
    if isinstance(value, dict) and all(re.fullmatch(r"-?\d+", key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def judge_calls(calls: str, link: Link, verdicts: int) -> NoReturn:
    """Run tests of a program's function one after the other, and write the verdicts."""
    peer = Peer(link, is_judge=True)
    function = None
    if _is_loaded(link):
        for call in [Call(**words) for words in json.loads(calls)]:
            try:
                function = function or _named(peer, call.name)
                passed = call.accepts(function(*call.args))
            except BaseException:  # noqa: BLE001 - whatever a program raises or answers
                passed = False
            os.write(verdicts, b"1" if passed else b"0")
    os._exit(0)


def _is_loaded(link: Link) -> bool:
    return link.receive() == {"loaded": True}


def _named(peer: Peer, name: str) -> Any:
    """The method of the program's `class Solution` with this name, or else the function."""
    if peer.has(["Solution"]):
        return getattr(peer.result("name", "Solution")(), name)
    return peer.result("name", name)


# ---- assertions ----------------------------------------------------------------------------------

_MODULES = (
    *("math", "cmath", "collections", "itertools", "functools", "operator", "copy", "re", "string"),
    *("random", "heapq", "bisect", "json", "decimal", "fractions", "statistics", "datetime"),
    *("time", "typing", "numpy"),
)
"""Modules that tests use without importing them, since most programs import them."""
_SHORT_NAMES = {"np": "numpy", "dt": "datetime"}
_HOLDERS = (builtins, math, collections, itertools, functools, fractions, copy)
"""Modules whose members tests use without importing them."""


@dataclass(frozen=True, slots=True)
class _Statement:
    """A top-level statement of a test."""

    code: CodeType
    names: frozenset[str]
    """Global names that it uses."""
    assigned: frozenset[str]
    """Global names that it assigns, other than by an import."""


def judge(tests: str, link: Link, verdicts: int) -> NoReturn:
    """Run assertions one after the other, and write the verdicts."""
    texts: list[str] = json.loads(tests)
    if _is_loaded(link):
        scopes = [_global_names(text) for text in texts]
        made = set[str]().union(*(made for _, made in scopes))
        pairs = zip(texts, scopes, strict=True)
        tests_statements = [_statements(text, used | made) for text, (used, made) in pairs]
        lender = _Lender(Peer(link, is_judge=True), list(itertools.chain(*tests_statements)), made)
        for statements in tests_statements:
            try:
                for statement in statements:
                    lender.lend(statement.names)
                    exec(statement.code, lender.names)
            except BaseException:  # noqa: BLE001 - whatever a test and its calls raise
                os.write(verdicts, b"0")
            else:
                os.write(verdicts, b"1")
    os._exit(0)


def _global_names(text: str) -> tuple[set[str], set[str]]:
    """The global names that a test uses, and those that it assigns."""
    used: set[str] = set()
    made: set[str] = set()
    scopes = [symtable.symtable(text, "test.py", "exec")]
    for scope in scopes:  # the list grows during the loop
        for symbol in filter(symtable.Symbol.is_global, scope.get_symbols()):
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                made.add(symbol.get_name())
        scopes += scope.get_children()
    return used - {"__name__"}, made


def _statements(text: str, global_names: Set[str]) -> list[_Statement]:
    body = ast.parse(text, "test.py").body
    features = [
        node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    statements: list[_Statement] = []
    for part in body:
        code = compile(ast.Module([*features, part], []), "test.py", "exec", dont_inherit=True)
        used: set[str] = set()
        assigned: set[str] = set()
        for node in ast.walk(part):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name) | ast.MatchMapping(rest=str(name)):
                    assigned.add(name)
                case ast.alias():
                    pass  # a module is the same for all who import it
                case _ if isinstance(name := getattr(node, "name", None), str):
                    assigned.add(name)  # functions, classes, exceptions, parts of a pattern
                case _:
                    pass
        names = (used | assigned) & global_names
        statements.append(_Statement(code, frozenset(names), frozenset(assigned & global_names)))
    return statements


def _linked(statements: Sequence[_Statement]) -> dict[str, Set[str]]:
    """For each assigned name, all names in statements that share assigned names with it, directly
    or through others."""
    assigned = set[str]().union(*(statement.assigned for statement in statements))
    linked: dict[str, Set[str]] = {}
    for statement in statements:
        names = statement.names
        joined = set(names).union(*(linked[name] for name in names if name in linked))
        linked |= dict.fromkeys(joined & assigned, joined)
    return linked


class _Lender:
    """Provides the names that tests use without assigning them, from the program or from well-known
    modules.

    A program that defines its own `set` could make `set(f(x)) == set(y)` true. So at most one of
    the built-in and well-known names in a statement is taken from the program, and only if the
    statement, and those linked to it by names that tests assign, use no other name of the program:
    then that name is what they test. In this case well-known functions that the program does not
    have are not provided, since an empty program would pass. The program's names are asked before
    the first test, so that no call can change the choice.
    """

    def __init__(self, peer: Peer, statements: Sequence[_Statement], made: Set[str]) -> None:
        """`made` are the names that tests assign."""
        self.names: dict[str, Any] = {"__name__": "test"}
        """The global names of tests."""
        self._peer = peer
        self._made = made
        self._linked = _linked(statements)
        self._lent: dict[str, Any] = {}
        known = set(filter(_is_known, set[str]().union(*(s.names for s in statements))))
        self._held = peer.has(known)
        self._own = peer.has(known, of_its_own=True)

    def lend(self, used: Set[str]) -> None:
        """Set `names` for a statement that uses the names `used`."""
        together = set(used).union(*(self._linked[name] for name in used if name in self._linked))
        own, known = self._divide(together)
        lent, names = self._lent, self.names
        of_tests = {name for name in names if name not in lent or names[name] is not lent[name]}
        for name in [name for name in lent if _is_known(name) and name not in of_tests]:
            del lent[name]  # it was provided for a statement with another choice
            names.pop(name, None)
        wanted = own | {name for name in used if not _is_known(name)}
        held = self._peer.has(wanted - of_tests)
        lent |= {name: self._peer.result("name", name) for name in sorted(held)}
        lent |= {name: _known(name) for name in known - of_tests}
        names |= {name: value for name, value in lent.items() if name not in of_tests}

    def _divide(self, together: Set[str]) -> tuple[Set[str], Set[str]]:
        """The well-known names among `together` that are taken from the program, and those that are
        taken from their modules."""
        known = set(filter(_is_known, together))
        if together - known - self._made:
            return set(), known
        modules = {name for name in known if name in _MODULES or name in _SHORT_NAMES}
        plain = {name for name in known - modules if hasattr(builtins, name)}
        functions = known - modules - plain
        kinds = (functions & self._own, plain & self._own, modules & self._own)
        own = next((kind for kind in kinds if kind), set[str]())
        if len(own) > 1:
            own = set[str]()
        imported = functions & (self._held - self._own)
        return own, (modules | plain | imported) - own


def _is_known(name: str) -> bool:
    return (
        name in _MODULES
        or name in _SHORT_NAMES
        or any(hasattr(holder, name) for holder in _HOLDERS)
    )


def _known(name: str) -> Any:
    if name not in _MODULES:
        for holder in _HOLDERS:
            if hasattr(holder, name):
                return getattr(holder, name)
    return importlib.import_module(_SHORT_NAMES.get(name, name))


def own_names(names: Mapping[str, Any]) -> set[str]:
    """The global names of a program whose values are not the well-known objects of these names."""

    def is_lent(name: str) -> bool:
        is_module = name in _MODULES or name in _SHORT_NAMES
        if is_module and _SHORT_NAMES.get(name, name) not in sys.modules:
            return False  # the program has not imported it; no need to import it here
        return _is_known(name) and names[name] is _known(name)

    return {name for name in names if not is_lent(name)}
