"""Finds the line of a Python script that gives a name its value at a place of use."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Binding", "Bindings", "Branch", "called"]

_Target = tuple[ast.expr, ast.expr | None]
_ONE_OF_SEVERAL = ("parse_known_args", "from_pretrained")
"""Calls that return several values, of which the first is the one that a setting needs."""


class Branch(NamedTuple):
    """Lines that run where a test has one outcome."""

    test: ast.expr | None
    """None for a loop, or for lines after an error."""
    outcome: bool
    first: int
    last: int


class Binding(NamedTuple):
    """A value that a name gets."""

    value: ast.expr | None
    """None if only a run of the script could tell."""
    end: tuple[int, int]
    """Line and column after which the name has the value."""
    branches: tuple[Branch, ...]


class _Scope(NamedTuple):
    """Names of the module, or of a function's body."""

    first: int
    last: int
    names: dict[str, list[Binding]]


class Bindings:
    """The names of a script, by the lines that set them."""

    def __init__(self, tree: ast.Module) -> None:
        self.defined: set[str] = set()
        """Names of functions and classes of the script."""
        self.imported: dict[str, str] = {}
        """Names by what they stand for, `module.name`."""
        self.attributes: list[tuple[ast.Attribute, Binding]] = []
        """Bindings of lines such as `config.max_steps = 10`."""
        last = max((node.end_lineno or 0 for node in tree.body), default=0)
        module = _Scope(0, last, {})
        self._scopes = [module]
        self._collect(tree.body, module, ())

    def of(self, name: str, node: ast.expr) -> Iterator[Binding]:
        """Bindings that may have set a name that `node` uses, last line first; from outer scopes
        all of them."""
        at = (node.lineno, node.col_offset)
        inside = [scope for scope in self._scopes if scope.first <= node.lineno <= scope.last]
        for scope in inside[::-1]:
            for binding in reversed(scope.names.get(name, [])):
                if scope is not inside[-1] or binding.end <= at:
                    yield binding

    def _collect(
        self, body: Sequence[ast.stmt], scope: _Scope, branches: tuple[Branch, ...]
    ) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._function(node)
            elif isinstance(node, ast.ClassDef):
                self.defined.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            for target, value in _targets(node):
                self._bind(target, Binding(value, _end(node), branches), scope)
            for part, test, outcome in _parts(node):
                within = branches
                if part and (test is not None or not outcome):
                    last = part[-1].end_lineno or part[-1].lineno
                    within = (*branches, Branch(test, outcome, part[0].lineno, last))
                self._collect(part, scope, within)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Bind a function and its arguments, which have no known value."""
        self.defined.add(node.name)
        inner = _Scope(node.lineno, node.end_lineno or node.lineno, {})
        self._scopes.append(inner)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            inner.names[argument.arg] = [Binding(None, (node.lineno, 0), ())]
        self._collect(node.body, inner, ())

    def _bind(self, target: ast.expr, binding: Binding, scope: _Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope.names.setdefault(name, []).append(binding)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for number, part in enumerate(targets):
                    value = _element(binding.value, number)
                    self._bind(part, binding._replace(value=value), scope)
            case ast.Attribute():
                self.attributes.append((target, binding))
            case _:
                pass


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _end(node: ast.stmt) -> tuple[int, int]:
    """Position after a statement, or where its body begins."""
    if isinstance(node, ast.For | ast.With | ast.AsyncFor | ast.AsyncWith):
        return node.lineno, node.col_offset
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _targets(node: ast.stmt) -> Iterator[_Target]:
    """Targets of a statement and their values. None if only a run could tell."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
            before = ast.copy_location(ast.Name(name, ast.Load()), target)
            yield target, ast.copy_location(ast.BinOp(before, op, value), value)
        case ast.For(target=target) | ast.AsyncFor(target=target):
            yield target, None
        case ast.With(items=items) | ast.AsyncWith(items=items):
            yield from ((item.optional_vars, None) for item in items if item.optional_vars)
        case _:
            pass


def _parts(node: ast.stmt) -> Iterator[tuple[Sequence[ast.stmt], ast.expr | None, bool]]:
    """The bodies of a statement, each with its test and the outcome for which it runs: (None, True)
    if it always runs, (None, False) if only a run could tell."""
    match node:
        case ast.If(test=test, body=body, orelse=orelse):
            yield body, test, True
            yield orelse, test, False
        case ast.For(body=body) | ast.AsyncFor(body=body) | ast.While(body=body):
            yield body, None, False
        case ast.With(body=body) | ast.AsyncWith(body=body):
            yield body, None, True
        case ast.Try():
            yield from ((body, None, True) for body in (node.body, node.orelse, node.finalbody))
            yield from ((handler.body, None, False) for handler in node.handlers)
        case ast.Match(cases=cases):
            yield from ((case.body, None, False) for case in cases)
        case _:
            pass


def _element(value: ast.expr | None, number: int) -> ast.expr | None:
    """The value of the n-th of several names."""
    match value:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if number < len(parts):
            return parts[number]
        case ast.Call() if called(value) in _ONE_OF_SEVERAL:
            return value if number == 0 else None
        case ast.Call() if called(value) == "load_dataset":
            part = ast.Subscript(value, ast.Constant(number), ast.Load())
            return ast.copy_location(part, value)
        case _:
            return None
