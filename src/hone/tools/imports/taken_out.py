"""Takes functions and classes of a script into a file of their own, with what they use of it.

A run imports the file that a recipe names, and a training script would train. Its source text is
copied as it stands, and nothing of it is run.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hone.config.aliases import FRAMEWORKS

__all__ = ["NotTaken", "Script", "TakenOut", "take_out"]

_PURE = {"bool", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "range", "round",
         "set", "sorted", "str", "sum", "tuple", "zip"}  # fmt: skip
"""Built-in functions that a constant may be made with."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


class NotTaken(Exception):
    """Raised if a function cannot surely be taken out; the message says why."""


class TakenOut(NamedTuple):
    """A file to be written beside the recipe."""

    path: Path
    names: Sequence[str]
    """Its functions and classes that the recipe names."""
    text: str


class Script:
    """The statements of a script, by the names that they set."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.body = ast.parse(text).body
        self._lines = text.split("\n")  # as the tree counts them, which a form feed does not end
        self._sets: dict[str, list[ast.stmt]] = {}
        for statement in self.body:
            for name in dict.fromkeys(_names_set(statement)):
                self._sets.setdefault(name, []).append(statement)

    def why_not_imported(self) -> str:
        """What a run that imports the script would do beside defining its functions. Empty if
        nothing."""
        for statement in self.body:
            if framework := _framework(statement):
                return f"line {statement.lineno} imports {framework}"
            if not self._only_defines(statement):
                return f"line {statement.lineno} runs with it"
        return ""

    def take_out(self, name: str, folder: Path) -> set[ast.stmt]:
        """The statements that a function or class needs, with its own, in a file in `folder`.
        Raises NotTaken."""
        kept: dict[str, ast.stmt] = {}
        names = [name]
        while names:
            used = names.pop()
            if used == "__file__":
                raise NotTaken("it uses __file__, which would be another")
            if used in kept or (used not in self._sets and used in dir(builtins)):
                continue
            kept[used] = self._found(used, folder)
            names += _names_used(self._source(kept[used]), self._future)
        self._refuse_changes(kept)
        return set(kept.values())

    def text_of(self, statements: set[ast.stmt]) -> str:
        """A file of these statements, in the order of the script."""
        parts = [f'"""Taken out of {self.path.name} by `hone import`."""\n']
        parts += [f"{self._future}\n"] if self._future else []
        is_definition = False
        for statement in self.body:
            if statement in statements:
                was, is_definition = is_definition, isinstance(statement, _DEFINITIONS)
                gap = 2 - parts[-1].endswith("\n") if was or is_definition else 0
                parts += [""] * gap
                parts.append(self._source(statement))
        return "\n".join([*parts, ""])

    @property
    def _future(self) -> str:
        """The imports from __future__, which hold for the whole file."""
        own = (one for one in self.body if isinstance(one, ast.ImportFrom))
        return "\n".join(self._source(one) for one in own if one.module == "__future__")

    def _source(self, statement: ast.stmt) -> str:
        """All lines of a statement, with its decorators and the comments right above."""
        first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ())))
        while first > 1 and self._lines[first - 2].startswith("# "):
            first -= 1
        return "\n".join(self._lines[first - 1 : statement.end_lineno])

    def _found(self, name: str, folder: Path) -> ast.stmt:
        """The statement that sets a name, if it can be copied."""
        statements = self._sets.get(name, [])
        if len(statements) != 1:
            how = "more than one line sets" if statements else "no line outside functions sets"
            raise NotTaken(f"{how} {name}")
        (statement,) = statements
        line = statement.lineno
        if framework := _framework(statement):
            raise NotTaken(f"{name} is of {framework} (line {line})")
        if not self._only_defines(statement) or isinstance(statement, ast.If):
            raise NotTaken(f"line {line} sets {name}, and only a run of the script could tell how")
        others = (one for one in self.body if one is not statement)
        if any(one.lineno <= (statement.end_lineno or line) and line <= (one.end_lineno or 0)
               for one in others):  # fmt: skip
            raise NotTaken(f"line {line} has several statements")
        if folder.resolve() != self.path.parent.resolve() and self._is_beside(statement):
            raise NotTaken(f"line {line} imports a file beside the script")
        return statement

    def _is_beside(self, statement: ast.stmt) -> bool:
        places = (self.path.parent / module for module in _modules(statement))
        return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)

    def _refuse_changes(self, kept: Mapping[str, ast.stmt]) -> None:
        """Raise NotTaken if a statement that stays behind changes what one of these names holds."""
        for statement in self.body:
            if statement in kept.values():
                continue
            for node in ast.walk(statement):
                for name in _names_changed(node):
                    if name in kept and not isinstance(kept[name], _IMPORTS):
                        line = getattr(node, "lineno", statement.lineno)
                        raise NotTaken(f"line {line} changes {name}")

    def _only_defines(self, statement: ast.stmt) -> bool:
        """Whether a statement does no more than define functions, classes or constants, or
        import."""
        match statement:
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return all(map(self._only_defines, statement.orelse))
            case ast.Try():
                handlers = [one for handler in statement.handlers for one in handler.body]
                parts = (statement.body, handlers, statement.orelse, statement.finalbody)
                return all(self._only_defines(one) for part in parts for one in part)
            case ast.ImportFrom(level=level, names=names):
                return level == 0 and all(alias.name != "*" for alias in names)
            case ast.Import() | ast.Pass() | ast.Expr(value=ast.Constant()):
                return True
            case ast.Assign(targets=targets, value=value):
                return all(map(_is_name, targets)) and self._is_constant(value)
            case ast.AnnAssign(target=target, value=value):
                return _is_name(target) and (value is None or self._is_constant(value))
            case _:
                return isinstance(statement, _DEFINITIONS)

    def _is_constant(self, value: ast.expr) -> bool:
        """Whether an expression calls nothing but what makes a plain value, such as
        `re.compile`."""
        return all(
            self._is_pure(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)
        )

    def _is_pure(self, function: ast.expr) -> bool:
        root = _root(function)
        if not isinstance(root, ast.Name):
            return isinstance(function, ast.Attribute)  # a method of a literal
        statements = self._sets.get(root.id)
        if not statements:
            return root.id in _PURE
        return all(
            all(module in sys.stdlib_module_names for module in _modules(statement))
            if isinstance(statement, _IMPORTS)
            else isinstance(function, ast.Attribute) and isinstance(statement, ast.Assign)
            for statement in statements
        )


def take_out(
    script: Script, names: Iterable[str], path: Path
) -> tuple[TakenOut | None, Mapping[str, str]]:
    """The file at `path` that has these functions and classes, and the reasons for those that
    cannot surely be taken out. None if none can."""
    statements: set[ast.stmt] = set()
    taken: list[str] = []
    reasons: dict[str, str] = {}
    for name in names:
        try:
            statements |= script.take_out(name, path.parent)
        except NotTaken as error:
            reasons[name] = str(error)
        else:
            taken.append(name)
    if not taken:
        return None, reasons
    return TakenOut(path, taken, script.text_of(statements)), reasons


def _framework(statement: ast.stmt) -> str:
    """The framework that a statement imports."""
    modules = {module for node in ast.walk(statement) for module in _modules(node)}
    inside = isinstance(statement, (*_DEFINITIONS, ast.If))
    return "" if inside else next((name for name in FRAMEWORKS if name in modules), "")


def _modules(node: ast.AST) -> list[str]:
    """First names of the modules that an import names."""
    match node:
        case ast.Import(names=names):
            return [alias.name.partition(".")[0] for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module.partition(".")[0]]
        case _:
            return []


def _names_set(statement: ast.stmt) -> Iterator[str]:
    """Names of the module that a statement sets, or could."""
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
        return
    for node in ast.walk(statement):
        match node:
            case ast.Import(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case _:
                pass


def _names_used(source: str, future: str) -> set[str]:
    """Names of the module that a statement uses, also within its functions."""
    tables = [symtable.symtable(f"{future}\n{source}", "", "exec")]
    names: set[str] = set()
    while tables:
        table = tables.pop()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_global() or (is_module and symbol.is_referenced()):
                names.add(symbol.get_name())
        tables += table.get_children()
    return names - {"annotations"} if future else names


def _names_changed(node: ast.AST) -> Iterator[str]:
    """Names whose value a node changes: `TAGS.append(1)`, `TAGS[0] = 1`, `global TAGS`."""
    match node:
        case ast.Global(names=names):
            yield from names
        case ast.Expr(value=ast.Call(func=ast.Attribute() as changed)):
            yield from _root_name(changed)
        case (
            ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del())
        ):
            yield from _root_name(node)
        case _:
            pass


def _root_name(node: ast.expr) -> Iterator[str]:
    root = _root(node)
    if isinstance(root, ast.Name):
        yield root.id


def _root(node: ast.expr) -> ast.expr:
    """The innermost value of `a.b[0]().c`: `a`."""
    while True:
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case _:
                return node


def _is_name(target: ast.expr) -> bool:
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(part, ast.Name) for part in parts)
