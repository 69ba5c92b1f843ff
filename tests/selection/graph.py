"""The import graph of the repository, read from the source, and what a change reaches in it.

Nothing is imported. An edge is an import anywhere in a file, in functions too, since much is
imported only where it is needed; imports for type checkers alone are no edge. Strings count as
well: a module's name (`run_ranks("tests.trainer.parallel_ranks")`), a program (`"-m", "hone"`, also
inside a line for a shell), a file's name (`with_name("misbehaving.py")`), and the beginning of a
name that is completed at run time (`f"hone.families.{name}"`), which is an edge to each module of
that package. A package's `__init__.py` is reached by those who import a name from
it, and not by all who import a module below it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

SOURCES = {"src": "", "tests": "tests.", "benchmarks": "benchmarks."}
"""Folders that hold Python modules, with the prefix of their names."""

TOUCHES_ALL = frozenset({"pyproject.toml", "constraints.txt", "tests/conftest.py"})
"""Files that every test depends on, without an import that says so."""

NEEDED_BY = {
    "constraints-envs.txt": ("tests/envs/shapes/test_frameworks.py",),
    "constraints-launch.txt": ("tests/launch/test_parsers.py",),
    "constraints-vllm.txt": (
        "tests/engine/test_vllm.py",
        "tests/engine/test_vllm_experts.py",
        "tests/vision/test_loaded_elsewhere.py",
    ),
}
"""Files that only the Makefile names, with the tests that it runs with them."""

_REFERRING = (ast.Import, ast.ImportFrom, ast.Constant, ast.JoinedStr, ast.List, ast.Tuple)
_MODULE = re.compile(r"(hone|tests|benchmarks)(\.\w+)*")
_PROGRAM = re.compile(rf"(?:^|\s)-m ({_MODULE.pattern})")
_OF_EVERY_FOLDER = frozenset({"__init__.py", "__main__.py", "conftest.py"})


@dataclass(frozen=True)
class Source:
    """What one Python file refers to."""

    imports: frozenset[str]
    """Names of modules, and of things in them; those that are neither are left out by the graph."""
    packages: frozenset[str]
    """Packages of which a module is chosen at run time."""
    texts: frozenset[str]
    """String constants, in which files that are no modules are named."""


def read_source(text: str, module: str, *, is_package: bool = False) -> Source:
    """Read the references of a file with the dotted name `module`."""
    package = module if is_package else module.rpartition(".")[0]
    imports: set[str] = set()
    packages: set[str] = set()
    texts: set[str] = set()
    for node in _executed(ast.parse(text)):
        match node:
            case ast.Import(names):
                imports |= {alias.name for alias in names}
            case ast.ImportFrom(name, names, level):
                base = _absolute(name, level, package)
                imports |= {f"{base}.{alias.name}" for alias in names}
            case ast.Constant(str(value)):
                texts.add(value)
                if _MODULE.fullmatch(name := value.partition(":")[0]) and "." in name:
                    imports.add(name)
                imports |= {f"{name}.__main__" for name, *_ in _PROGRAM.findall(value)}
            case ast.JoinedStr([ast.Constant(str(start)), *_]) if start.endswith("."):
                packages.add(start.removesuffix("."))
            case ast.JoinedStr([ast.FormattedValue(ast.Name("__name__")), *_]):
                packages.add(package)
            case ast.List(items) | ast.Tuple(items):
                imports |= {f"{name}.__main__" for name in _programs(items)}
            case _:
                pass
    return Source(frozenset(imports), frozenset(packages), frozenset(texts))


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that may refer to a module, but for those that only a type checker looks at."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, _REFERRING):
            yield node
        if isinstance(node, ast.If) and _is_for_type_checkers(node.test):
            left.extend(node.orelse)
            continue
        for value in node.__dict__.values():  # half the time of `ast.iter_child_nodes`
            if isinstance(value, ast.AST):
                if value._fields:  # not just a marker like `ast.Load`
                    left.append(value)
            elif isinstance(value, list):
                left.extend(item for item in value if isinstance(item, ast.AST))


def _is_for_type_checkers(test: ast.expr) -> bool:
    match test:
        case ast.Name("TYPE_CHECKING") | ast.Attribute(_, "TYPE_CHECKING"):
            return True
        case _:
            return False


def _absolute(name: str | None, level: int, package: str) -> str:
    if not level:
        return name or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


def _programs(items: list[ast.expr]) -> Iterator[str]:
    """Names that follow `-m` in a command line."""
    for option, name in pairwise(items):
        match option, name:
            case ast.Constant("-m"), ast.Constant(str(module)):
                yield module
            case _:
                pass


@dataclass(frozen=True)
class Graph:
    """The files of a repository by their paths relative to its root, and who imports whom."""

    files: frozenset[str]
    sources: Mapping[str, Source]
    """Of each Python module, by its path."""

    @classmethod
    def read(cls, root: Path) -> Graph:
        """Read all files below `SOURCES`."""
        files: set[str] = set()
        sources: dict[str, Source] = {}
        for folder in SOURCES:
            for path in sorted((root / folder).rglob("*")):
                name = path.relative_to(root).as_posix()
                if "__pycache__" in path.parts or not path.is_file():
                    continue
                files.add(name)
                if path.suffix == ".py":
                    text = path.read_text(encoding="utf-8")
                    is_package = path.name == "__init__.py"
                    sources[name] = read_source(text, module_of(name), is_package=is_package)
        return cls(frozenset(files), sources)

    @cached_property
    def _paths(self) -> dict[str, str]:
        return {module_of(path): path for path in self.sources}

    @cached_property
    def imports(self) -> dict[str, frozenset[str]]:
        """The files that each file imports."""
        return {path: frozenset(self._imported(path)) for path in self.sources}

    def _imported(self, path: str) -> Iterator[str]:
        if path in TOUCHES_ALL:
            return  # what a fixture of all tests imports is not what each of them tests
        source = self.sources[path]
        for name in source.imports:
            if found := self._paths.get(name) or self._paths.get(name.rpartition(".")[0]):
                yield found
        for text in source.texts:
            if text.endswith(".py"):
                yield from self._files_named(text, path)
        for package in source.packages:
            yield from (p for m, p in self._paths.items() if m.startswith(f"{package}."))
        folder = path
        while path.startswith("tests/") and "/" in folder:
            folder = folder.rpartition("/")[0]
            if (conftest := f"{folder}/conftest.py") in self.sources and conftest != path:
                yield conftest

    def _files_named(self, text: str, path: str) -> Iterable[str]:
        """The Python files that a string in the file `path` means: by their path from the root, or
        by a name, of the same folder first."""
        near = f"{path.rpartition('/')[0]}/{text}"
        if found := [name for name in (text, near) if name in self.sources]:
            return found
        return () if text in _OF_EVERY_FOLDER else self._by_name.get(text, ())

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for path in self.sources:
            found[path.rpartition("/")[2]].append(path)
        return found

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """The files that import each file."""
        found: dict[str, set[str]] = defaultdict(set)
        for path, imported in self.imports.items():
            for other in imported:
                found[other].add(path)
        return found

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """Fewest imports between each file that depends on a changed one and the change."""
        found: dict[str, int] = {}
        for path in changed:
            found |= self._starts(path)
        left = deque(sorted(found, key=found.__getitem__))
        while left:
            path = left.popleft()
            for importer in self.importers.get(path, ()):
                if importer not in found:
                    found[importer] = found[path] + 1
                    left.append(importer)
        return found

    def _starts(self, path: str) -> dict[str, int]:
        """The files at which distances begin: the changed file, or the modules that name it."""
        if path in TOUCHES_ALL:
            return dict.fromkeys(self.sources, 1) | {path: 0}
        if path in self.sources:
            return {path: 0}
        if (
            path.endswith(".py") and path.partition("/")[0] in SOURCES
        ):  # deleted: whoever still imports it has changed or fails
            return {}
        return {path: 0} | dict.fromkeys(self._naming(path), 1)

    def _naming(self, path: str) -> set[str]:
        """Modules with the name of the file, or of a folder it lies in, in a string; of the package
        itself, else all in its folder."""
        folders = [folder.as_posix() for folder in Path(path).parents][:-1]
        words = {*folders, *(Path(folder).name for folder in folders)} - {"src", "tests", "hone"}
        words |= {path, Path(path).name}
        named = {p for p, source in self.sources.items() if words & source.texts}
        named.update(NEEDED_BY.get(path, ()))
        folder = path.rpartition("/")[0]
        if not named and path.startswith(tuple(SOURCES)):
            named = {p for p in self.sources if p.rpartition("/")[0] == folder}
        return named


def module_of(path: str) -> str:
    """The dotted name of a file below one of `SOURCES`: `src/hone/types.py` is `hone.types`."""
    folder, _, rest = path.partition("/")
    name = SOURCES[folder] + rest.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")
