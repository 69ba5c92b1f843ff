"""Reads settings of a Python script for TRL from its syntax tree. The script is never run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.errors import UserError
from hone.tools.imports.bindings import Binding, Bindings, Branch, called
from hone.tools.imports.source import Given, Unread
from hone.tools.imports.sums import OPERATORS

__all__ = ["read_python"]

_CALL = re.compile(r"(GRPO|RLOO|DPO|KTO|SFT|Reward)(Config|Trainer)")
_LOADS_MODEL = ("from_pretrained", "create_model_from_path")
_MODEL_NAMES = ("pretrained_model_name_or_path", "model_name", "model_id")
_SAME_ROWS = {"shuffle", "remove_columns", "select_columns", "with_format", "set_format"}
"""Methods of a data set that do not change the training data: hone shuffles by itself, and takes
the columns that it needs."""
_OPERATORS: Mapping[type[ast.operator | ast.cmpop], Callable[[Any, Any], Any]] = {
    **OPERATORS,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda left, right: left in right,
}
_SCALARS = (bool, int, float, str)


def read_python(
    text: str, path: Path, environment: Mapping[str, str]
) -> tuple[str, list[Given], list[str]]:
    """The trainer (`grpo`), its settings, and notes on what could not be followed. Raises UserError
    for a script that is not valid Python or has no trainer of TRL."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(
            f"'{path}' is not valid Python: line {error.lineno}: {error.msg}"
        ) from error
    names = _Names(tree, path, environment)
    calls = [
        (match[1].lower(), match[2], node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (match := _CALL.fullmatch(called(node)))
    ]
    trainers = [(program, call) for program, kind, call in calls if kind == "Trainer"]
    if not calls:
        raise UserError(
            f"'{path}' makes no trainer of TRL that is served (GRPO, RLOO, DPO, KTO, SFT, Reward; "
            "GRPOConfig(...) or GRPOTrainer(...))."
        )
    program = (trainers or calls)[0][0]
    for name, kind, call in calls:
        if name != program or (kind == "Trainer" and call is not trainers[0][1]):
            names.note(call, f"a second trainer, {called(call)}, is left out")
    given: list[Given] = []
    configs = [call for name, kind, call in calls if name == program and kind == "Config"]
    if trainers:
        trainer = trainers[0][1]
        argument = next((word.value for word in trainer.keywords if word.arg == "args"), None)
        if argument is not None:
            configs = _configs(names, argument, configs)
        given += _settings(names, trainer, "model")
    for config in configs:
        given += _settings(names, config, "output_dir")
    return program, [*given, *names.given], names.notes


def _configs(names: _Names, argument: ast.expr, known: Sequence[ast.Call]) -> list[ast.Call]:
    """The call that makes the `args` of a trainer, and settings that are assigned to it later."""
    made = names.resolved(argument)
    if isinstance(argument, ast.Name):
        names.set_on(argument)
    if isinstance(made, ast.Call) and made in known:
        return [made]
    written = ast.unparse(argument)
    names.note(argument, f"what args={_short(written)} holds is not in the script, and not read: "
               "give the command that sets it, with `hone import trl -- COMMAND`")  # fmt: skip
    return []


def _settings(names: _Names, call: ast.Call, first: str) -> Iterator[Given]:
    """The arguments of a trainer or of its config."""
    for word in call.keywords:
        where = f"line {word.value.lineno}"
        if word.arg is None:
            brought = names.value(word.value)
            if isinstance(brought, dict):
                yield from (Given(name, value, where) for name, value in brought.items())
            else:
                names.note(word.value, "what `**` brings is not read")
        elif word.arg != "args":
            yield from names.given_of(word.arg, word.value)
    for value in call.args[1:]:
        names.note(value, f"{_short(ast.unparse(value))}, which has no name, is not read")
    if call.args:  # GRPOTrainer(model, ...) and GRPOConfig(output_dir, ...)
        yield from names.given_of(first, call.args[0])


class _Rows(dict[str, Any]):
    """A data source of hone's."""

    is_cut = False
    """Whether the script splits it into training and other rows."""


class _Names:
    """Values of a script's names, as far as they are written out."""

    def __init__(self, tree: ast.Module, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        self.environment = environment
        self.bindings = Bindings(tree)
        self.defaults: dict[str, ast.expr] = {}  # of a parser of the command line
        self.given: list[Given] = []
        self.notes: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node) == "add_argument":
                self._add_argument(node)

    def note(self, node: ast.expr, text: str) -> None:
        """Add a note on a line that could not be followed, once."""
        note = f"line {node.lineno}: {text}"
        if note not in self.notes:
            self.notes.append(note)

    def _add_argument(self, call: ast.Call) -> None:
        """Record a flag of the script itself with its default."""
        flags = [part.value for part in call.args if isinstance(part, ast.Constant)]
        words = {word.arg: word.value for word in call.keywords}
        action = self._text(words.get("action"))
        default = words.get("default") or (
            ast.Constant(action == "store_false") if action.startswith("store_") else None
        )
        long = [str(flag).lstrip("-").replace("-", "_") for flag in flags]
        name = self._text(words.get("dest")) or (long[-1] if long else "")
        if default is not None and name:
            self.defaults[name] = ast.copy_location(default, call)

    @staticmethod
    def _text(node: ast.expr | None) -> str:
        return str(node.value) if isinstance(node, ast.Constant) else ""

    def _bound(self, name: str, node: ast.expr) -> Binding | None:
        """The binding of a name where `node` uses it: that of the last line that sets it and
        runs."""
        for binding in self.bindings.of(name, node):
            written = "" if binding.value is None else f" as in line {binding.end[0]}"
            if self._runs(binding, node, f"{name} is set{written}"):
                return binding
        return None

    def _runs(self, binding: Binding, node: ast.expr, what: str) -> bool:
        """Whether a line runs before `node`. If only a run could tell, it is assumed to, with a
        note."""
        truths = [self._holds(branch, node) for branch in binding.branches]
        if False in truths:
            return False
        if None in truths:
            self.note(node, f"whether {what} is known only when the script runs; it is taken")
        return True

    def _holds(self, branch: Branch, node: ast.expr) -> bool | None:
        if branch.first <= node.lineno <= branch.last:
            return True
        truth = None if branch.test is None else self._truth(branch.test)
        return None if truth is None else truth == branch.outcome

    def _truth(self, test: ast.expr) -> bool | None:
        match test:
            case ast.Compare(left=ast.Name(id="__name__")):
                return True
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                truth = self._truth(inner)
                return None if truth is None else not truth
            case ast.BoolOp(op=op, values=values):
                truths = [self._truth(value) for value in values]
                decides = isinstance(op, ast.Or)
                return decides if decides in truths else None if None in truths else not decides
            case _:
                value = self.value(test)
                return None if isinstance(value, Unread) else bool(value)

    # Values

    def resolved(self, node: ast.expr) -> ast.expr | None:
        """The expression that a name stands for, or the node itself if it is no name."""
        while isinstance(node, ast.Name):
            binding = self._bound(node.id, node)
            if binding is None or binding.value is None:
                return None
            node = binding.value
        return node

    def set_on(self, argument: ast.Name) -> None:
        """Add settings of lines such as `config.max_steps = 10`."""
        for target, binding in self.bindings.attributes:
            if not isinstance(target.value, ast.Name) or target.value.id != argument.id:
                continue
            is_before = binding.end <= (argument.lineno, argument.col_offset)
            if is_before and self._runs(binding, argument, f"{ast.unparse(target)} is set"):
                assert binding.value is not None
                self.given += self.given_of(target.attr, binding.value)

    def given_of(self, name: str, node: ast.expr) -> Iterator[Given]:
        """A setting; for a loaded model also the arguments that it is loaded with."""
        where = f"line {node.lineno}"
        yield Given(name, self.value(node), where)
        made = self.resolved(node)
        if name == "model" and isinstance(made, ast.Call) and called(made) in _LOADS_MODEL:
            for word in made.keywords:
                if word.arg and word.arg not in _MODEL_NAMES:
                    value = self.value(word.value)
                    yield Given(f"model_init_kwargs.{word.arg}", value, f"line {word.value.lineno}")

    def value(self, node: ast.expr) -> Any:
        """Value of an expression: a literal, a list, a function's name, a data set, a loaded model;
        else Unread."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Dict():
                return dict(self._pairs(node))
            case ast.Name():
                return self._of_name(node)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return self._part(node, inner, key)
            case ast.Attribute(value=ast.Name() as inner, attr=name) if self._is_parsed(inner):
                return self._default(node, name)
            case ast.Call():
                return self._of_call(node)
            case _:
                return self._worked_out(node)

    def _worked_out(self, node: ast.expr) -> Any:
        """Value of a sum, a comparison or an f-string. Unread if a part is unknown."""
        match node:
            case ast.JoinedStr(values=parts):
                texts = [self._formatted(part) for part in parts]
                return "".join(map(str, texts)) if None not in texts else _unread(node)
            case ast.UnaryOp(op=ast.Not()):
                truth = self._truth(node)
                return _unread(node) if truth is None else truth
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                value = self.value(inner)
                return -value if isinstance(value, int | float) else _unread(node)
            case ast.BinOp(left=left, op=op, right=right):
                return self._applied(op, left, right, node)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._applied(op, left, right, node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                truth = self._truth(test)
                return _unread(node) if truth is None else self.value(body if truth else orelse)
            case _:
                return _unread(node)

    def _of_name(self, node: ast.Name) -> Any:
        binding = self._bound(node.id, node)
        if binding is not None:
            return _unread(node) if binding.value is None else self.value(binding.value)
        if node.id in self.bindings.defined:
            return f"{self.path}:{node.id}"
        if node.id in self.bindings.imported:
            module, _, function = self.bindings.imported[node.id].rpartition(".")
            return f"{module}:{function}"
        return _unread(node)

    def _formatted(self, part: ast.expr) -> Any:
        """A part of an f-string. None if it is unknown or has a format."""
        inner = part.value if isinstance(part, ast.FormattedValue) else part
        if isinstance(part, ast.FormattedValue) and (part.format_spec or part.conversion != -1):
            return None
        value = self.value(inner)
        return value if isinstance(value, _SCALARS) else None

    def _applied(
        self, op: ast.operator | ast.cmpop, left: ast.expr, right: ast.expr, node: ast.expr
    ) -> Any:
        values = self.value(left), self.value(right)
        if type(op) not in _OPERATORS or any(isinstance(value, Unread) for value in values):
            return _unread(node)
        try:
            return _OPERATORS[type(op)](*values)
        except (TypeError, ValueError, ArithmeticError):
            return _unread(node)

    def _is_parsed(self, node: ast.Name) -> bool:
        """Whether a name holds the parsed command line."""
        made = self.resolved(node)
        return isinstance(made, ast.Call) and called(made) in ("parse_args", "parse_known_args")

    def _default(self, node: ast.expr, name: str) -> Any:
        if name not in self.defaults:
            return _unread(node)
        self.note(self.defaults[name], f"the flag {name} counts as its default")
        return self.value(self.defaults[name])

    def _part(self, node: ast.expr, inner: ast.expr, key: Any) -> Any:
        """Value of an index expression: a split of a data set, an environment variable, an entry of
        a list or mapping."""
        if ast.unparse(inner) == "os.environ" and key in self.environment:
            return self.environment[key]
        found = self.value(inner)
        if isinstance(found, _Rows):
            if found.is_cut:
                return _Rows(found) if key == "train" else _unread(node)
            return _Rows(found | {"split": key}) if isinstance(key, str) else _unread(node)
        if isinstance(found, list | dict):
            try:
                return found[key]
            except (IndexError, KeyError, TypeError):
                return _unread(node)
        return _unread(node)

    def _of_call(self, node: ast.Call) -> Any:
        name = called(node)
        words = {word.arg: word.value for word in node.keywords}
        if name == "load_dataset":
            return self._data(node)
        if name in ("LoraConfig", "dict"):
            return {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        if name in _LOADS_MODEL:
            named = (*node.args[:1], *(words[key] for key in _MODEL_NAMES if key in words))
            return self.value(named[0]) if named else _unread(node)
        if ast.unparse(node.func) in ("os.environ.get", "os.getenv") and node.args:
            key = self.value(node.args[0])
            if key in self.environment:
                return self.environment[key]
            return self.value(node.args[1]) if len(node.args) > 1 else None
        if name in ("int", "float", "str", "bool") and len(node.args) == 1:
            return self._converted(node, name)
        if isinstance(node.func, ast.Attribute):
            return self._of_method(node, self.value(node.func.value), name)
        return _unread(node)

    def _converted(self, node: ast.Call, name: str) -> Any:
        value = self.value(node.args[0])
        if not isinstance(value, _SCALARS):
            return _unread(node)
        try:
            return {"int": int, "float": float, "str": str, "bool": bool}[name](value)
        except ValueError:
            return _unread(node)

    def _of_method(self, node: ast.Call, found: Any, name: str) -> Any:
        """Value of a data set's method: the same data set if it does not matter to hone; otherwise
        a note is added."""
        if not isinstance(found, _Rows):
            return _unread(node)
        made = _Rows(found)
        made.is_cut = found.is_cut or name == "train_test_split"
        written = f"{name}({', '.join(map(ast.unparse, [*node.args, *_values(node)]))})"
        lost = f"{_short(written)} of {found['path']} is not carried over: "
        if name == "train_test_split":
            self.note(node, f"{lost}data.eval_fraction keeps rows out of training")
        elif name not in _SAME_ROWS:
            self.note(node, f"{lost}rows are read as they are stored; write changed ones to a file")
        return made

    def _pairs(self, node: ast.Dict) -> Iterator[tuple[str, Any]]:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield str(key.value), self.value(value)
            else:
                self.note(value, f"{_short(ast.unparse(value))}, of a mapping, is not read")

    def _data(self, call: ast.Call) -> Any:
        """`load_dataset` as a data source of hone's, or several if it loads several splits."""
        first = [self.value(argument) for argument in call.args]
        words = {word.arg: self.value(word.value) for word in call.keywords}
        path = first[0] if first else words.get("path")
        if path in ("json", "parquet", "csv") and isinstance(words.get("data_files"), str):
            return _Rows(path=words["data_files"])
        subset = first[1] if len(first) > 1 else words.get("name")
        split = words.get("split")
        sources = [
            _Rows({
                key: value
                for key, value in (("path", path), ("subset", subset), ("split", one))
                if isinstance(value, str)
            })
            for one in (split if isinstance(split, list) else [split])
        ]  # fmt: skip
        if not isinstance(path, str):
            return _unread(call)
        return sources if isinstance(split, list) else sources[0]


def _values(call: ast.Call) -> Iterator[ast.expr]:
    return (word.value for word in call.keywords)


def _short(text: str) -> str:
    """Shorten an expression for a note."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _unread(node: ast.expr) -> Unread:
    return Unread(ast.unparse(node), is_expression=True)
