"""The settings in a Python script for TRL, read from its syntax tree: it is never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone.config.errors import UserError
from hone.importing.source import Given, Unread

__all__ = ["read_python"]

_CALL = re.compile(r"(GRPO|RLOO|DPO|KTO|SFT|Reward)(Config|Trainer)")
_NOT_SETTINGS = {"args"}


def read_python(text: str, path: Path) -> tuple[str, list[Given], list[str]]:
    """The trainer (`grpo`), its settings, and what could not be followed.

    Raises UserError for a script that is no Python, and one without a trainer of TRL.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(
            f"'{path}' is not valid Python: line {error.lineno}: {error.msg}"
        ) from error
    names = _Names(tree, path)
    found = [
        (match[1].lower(), node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (match := _CALL.fullmatch(_called(node)))
    ]
    if not found:
        raise UserError(
            f"'{path}' makes no trainer of TRL that is served (GRPO, RLOO, DPO, KTO, SFT, Reward; "
            "GRPOConfig(...) or GRPOTrainer(...))."
        )
    program = found[0][0]
    given: list[Given] = []
    notes: list[str] = []
    for name, call in found:
        if name != program:
            notes.append(f"line {call.lineno}: a second trainer, {_called(call)}, is left out")
            continue
        for word in call.keywords:
            if word.arg is None:
                notes.append(f"line {word.value.lineno}: what `**` brings is not read")
            elif word.arg not in _NOT_SETTINGS:
                value = names.value(word.value)
                given.append(Given(word.arg, value, f"line {word.value.lineno}"))
        notes += [f"line {value.lineno}: {ast.unparse(value)}, which has no name, is not read"
                  for value in call.args[1:]]  # fmt: skip
        if call.args:  # GRPOTrainer(model, ...) and GRPOConfig(output_dir, ...)
            first = "output_dir" if _called(call).endswith("Config") else "model"
            given.append(Given(first, names.value(call.args[0]), f"line {call.lineno}"))
    return program, given, notes


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _Names:
    """What names of a script stand for, as far as it is written out."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.path = path
        self.values: dict[str, ast.expr] = {}
        self.functions: set[str] = set()
        self.imported: dict[str, str] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.values.setdefault(name, value)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    self.functions.add(name)
                case ast.ImportFrom(module=str(module), names=aliases):
                    for alias in aliases:
                        self.imported[alias.asname or alias.name] = f"{module}.{alias.name}"
                case _:
                    pass

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """A literal, a list, a function's name, a data set that is loaded; else Unread."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item, depth) for item in items]
            case ast.Dict():
                return dict(self._pairs(node, depth))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Name(id=name) if name in self.functions:
                return f"{self.path}:{name}"
            case ast.Name(id=name) if name in self.values and depth < 10:
                return self.value(self.values[name], depth + 1)
            case ast.Name(id=name) if name in self.imported:
                module, _, function = self.imported[name].rpartition(".")
                return f"{module}:{function}"
            case ast.Call() if _called(node) == "load_dataset":
                return self._data(node)
            case ast.Call() if _called(node) in ("LoraConfig", "dict"):
                return {word.arg: self.value(word.value) for word in node.keywords if word.arg}
            case ast.Call(func=ast.Attribute(value=inner)) if depth < 10:
                found = self.value(inner, depth + 1)  # dataset.map(...), .rename_column(...)
                return found if isinstance(found, dict) and "path" in found else _unread(node)
            case _:
                return _unread(node)

    def _pairs(self, node: ast.Dict, depth: int) -> Iterator[tuple[str, Any]]:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value), self.value(value, depth)

    def _data(self, call: ast.Call) -> Any:
        """`load_dataset` as a source of ours."""
        first = [self.value(argument) for argument in call.args]
        words = {word.arg: self.value(word.value) for word in call.keywords}
        path = first[0] if first else words.get("path")
        if path in ("json", "parquet", "csv") and isinstance(words.get("data_files"), str):
            return {"path": words["data_files"]}
        source = {"path": path, "subset": first[1] if len(first) > 1 else words.get("name"),
                  "split": words.get("split")}  # fmt: skip
        source = {key: value for key, value in source.items() if isinstance(value, str)}
        return source if "path" in source else _unread(call)


def _unread(node: ast.expr) -> Unread:
    return Unread(ast.unparse(node))
