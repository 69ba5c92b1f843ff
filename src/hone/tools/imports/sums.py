"""Operators of scripts that are read but not run, and integer arithmetic as in a shell."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["OPERATORS", "worked_out"]

OPERATORS: Mapping[type[ast.operator | ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
"""Operators that Python and a shell write alike; `/` is Python's."""


def worked_out(text: str, value_of: Callable[[str], str | None]) -> int | None:
    """Value of integer arithmetic or a comparison (1 or 0), with variables from `value_of`. None
    for anything else."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if (held := value_of(name)) is not None:
                return int(held)
            case ast.BinOp(left=left, op=op, right=right):
                return applied(op, left, right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return applied(op, left, right)
            case _:
                raise ValueError

    def applied(op: ast.operator | ast.cmpop, left: ast.expr, right: ast.expr) -> int:
        kind = ast.FloorDiv if isinstance(op, ast.Div) else type(op)
        if isinstance(op, ast.FloorDiv) or kind not in OPERATORS:
            raise ValueError  # a shell divides whole numbers by `/`, and has no `//`
        return int(OPERATORS[kind](value(left), value(right)))

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
