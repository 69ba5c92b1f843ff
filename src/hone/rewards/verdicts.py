"""Judge what a program gives: a 1 for each test that passes, a 0 for another.

This is what the second process of a jail does (`launcher.py`): it asks a program by a link, behind
walls and until a deadline of its own, since tests are code too and what a program sends is its own
choice. Its verdicts are all that a reward worker reads.
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
    """A test of a function: what it is called with, and the value that is wanted, as JSON has
    them."""

    name: str
    given: Sequence[Any]
    value: Any
    may_be_wrapped: bool = True
    """The value that is wanted may stand in a list of its own."""

    @property
    def args(self) -> list[Any]:
        return [_with_numbers(one) for one in self.given]

    def accepts(self, value: Any) -> bool:
        """Whether a value counts as the one wanted, as the data sets' own graders have it: a tuple
        is a list.

        Source: `eval/testing_util.py` of APPS, which TACO's grader comes from, and
        `lcb_runner/evaluation/testing_util.py` of LiveCodeBench, whose values are never wrapped.
        """
        wanted = [self.value]
        if self.may_be_wrapped and isinstance(self.value, list) and self.value:
            wanted.append(self.value[0])
        return any(_as_lists(value) == _as_lists(one) for one in map(_with_numbers, wanted))


def _as_lists(value: Any) -> Any:
    """A value in which tuples are lists, as JSON has them."""
    if isinstance(value, list | tuple):
        return [_as_lists(one) for one in value]
    if isinstance(value, dict):
        return {key: _as_lists(one) for key, one in value.items()}
    return value


def _with_numbers(value: Any) -> Any:
    """A dict whose keys are all whole numbers, which JSON makes texts; anything else as it is."""
    if isinstance(value, dict) and all(re.fullmatch(r"-?\d+", key) for key in value):
        return {int(key): one for key, one in value.items()}
    return value


def judge_calls(calls: str, link: Link, verdicts: int) -> NoReturn:
    """Call a function of a program with all arguments, one after the other."""
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
    """The method of `class Solution` of the name, or else the function."""
    if peer.has(["Solution"]):
        return getattr(peer.result("name", "Solution")(), name)
    return peer.result("name", name)


# ---- assertions ----------------------------------------------------------------------------------

_MODULES = (
    *("math", "cmath", "collections", "itertools", "functools", "operator", "copy", "re", "string"),
    *("random", "heapq", "bisect", "json", "decimal", "fractions", "statistics", "datetime"),
    *("time", "typing", "numpy"),
)
"""Modules that tests use without importing them, since programs mostly have."""
_SHORT_NAMES = {"np": "numpy", "dt": "datetime"}
_HOLDERS = (builtins, math, collections, itertools, functools, fractions, copy)
"""Whose names tests use the same way."""


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement of a test, at its outermost level."""

    code: CodeType
    names: frozenset[str]
    """Global names that stand in it."""
    assigned: frozenset[str]
    """Those that it gives a value, other than by an import."""


def judge(tests: str, link: Link, verdicts: int) -> NoReturn:
    """Run tests one after the other."""
    texts: list[str] = json.loads(tests)
    if _is_loaded(link):
        scopes = [_global_names(text) for text in texts]
        made = set[str]().union(*(made for _, made in scopes))
        pairs = zip(texts, scopes, strict=True)
        found = [_statements(text, used | made) for text, (used, made) in pairs]
        lender = _Lender(Peer(link, is_judge=True), list(itertools.chain(*found)), made)
        for statements in found:
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
    """The global names that a test uses, and those that it gives a value itself."""
    used: set[str] = set()
    made: set[str] = set()
    scopes = [symtable.symtable(text, "test.py", "exec")]
    for scope in scopes:  # which grows
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
        one for one in body if isinstance(one, ast.ImportFrom) and one.module == "__future__"
    ]
    found: list[_Statement] = []
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
        found.append(_Statement(code, frozenset(names), frozenset(assigned & global_names)))
    return found


def _linked(statements: Sequence[_Statement]) -> dict[str, Set[str]]:
    """By the names that statements assign, the names of all that have to do with them."""
    assigned = set[str]().union(*(one.assigned for one in statements))
    found: dict[str, Set[str]] = {}
    for one in statements:
        joined = set(one.names).union(*(found[name] for name in one.names if name in found))
        found |= dict.fromkeys(joined & assigned, joined)
    return found


class _Lender:
    """What tests use and have not made: of the program, and of well-known modules.

    With `set` of its own a program could make `set(f(x)) == set(y)` true. So where a statement has
    built-in and well-known names, one of them is the program's own at most, and only where no other
    name of the program stands in it, nor in a statement that it shares a name with which tests
    assign: it is what they test. Well-known functions that the program does not have are not lent
    then, since it would pass with nothing. It is settled before the first test, so that no program
    can change it in a call.
    """

    def __init__(self, peer: Peer, statements: Sequence[_Statement], made: Set[str]) -> None:
        """`made` are the names that tests give a value."""
        self.names: dict[str, Any] = {"__name__": "test"}
        """The global names of tests."""
        self._peer = peer
        self._made = made
        self._linked = _linked(statements)
        self._lent: dict[str, Any] = {}
        known = set(filter(_is_known, set[str]().union(*(one.names for one in statements))))
        self._held = peer.has(known)
        self._own = peer.has(known, of_its_own=True)

    def lend(self, used: Set[str]) -> None:
        """Make `names` what a statement needs in which the names `used` stand."""
        together = set(used).union(*(self._linked[name] for name in used if name in self._linked))
        own, known = self._divide(together)
        lent, names = self._lent, self.names
        of_tests = {name for name in names if name not in lent or names[name] is not lent[name]}
        for name in [name for name in lent if _is_known(name) and name not in of_tests]:
            del lent[name]  # of a statement where it was divided in another way
            names.pop(name, None)
        wanted = own | {name for name in used if not _is_known(name)}
        held = self._peer.has(wanted - of_tests)
        lent |= {name: self._peer.result("name", name) for name in sorted(held)}
        lent |= {name: _known(name) for name in known - of_tests}
        names |= {name: one for name, one in lent.items() if name not in of_tests}

    def _divide(self, together: Set[str]) -> tuple[Set[str], Set[str]]:
        """Of the well-known names among those that stand together, the program's own, and those
        that are lent for what they are."""
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
    """Those of a program's global names that are not what tests are lent for them."""

    def is_lent(name: str) -> bool:
        is_module = name in _MODULES or name in _SHORT_NAMES
        if is_module and _SHORT_NAMES.get(name, name) not in sys.modules:
            return False  # and need not be imported to be compared
        return _is_known(name) and names[name] is _known(name)

    return {name for name in names if not is_lent(name)}
