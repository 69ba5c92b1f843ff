"""No file imports another in a circle, so that each can be read after those that it imports.

Imports for type checkers count too: a file that needs another's types depends on it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import grimp

import hone

EXAMPLE = Path(__file__).parents[1] / "examples" / "loop.py"
MOST_LINES = 28_730
"""What `examples/loop.py` may load of hone."""
NOT_ASKED_FOR = {
    "adapters": "hone.models.adapters",
    "recurrent layers": "hone.attention.recurrent",
    "attention on a GPU": "hone.attention.flash",
    "attempts after an out-of-memory error": "hone.trainer.out_of_memory",
    "built-in rewards": "hone.rewards.builtin",
    "environments": "hone.data.turns",
    "arenas of device memory": "hone.engine.arena",
    "decode graphs": "hone.engine.decode_graphs",
    "exact mode": "hone.models.exact",
    "float8 training": "hone.trainer.precision",
    "frozen models": "hone.trainer.frozen",
    "experts": "hone.models.experts",
    "experts over processes": "hone.trainer.experts",
    "moments in bfloat16": "hone.trainer.narrow_moments",
    "offload": "hone.trainer.offload",
    "recomputation": "hone.trainer.recompute",
    "several processes": "hone.distributed.store",
    "several processes in training": "hone.trainer.distributed_model",
    "processes that meet": "hone.distributed.joined",
    "routes of experts": "hone.models.routes",
    "shards": "hone.trainer.sharded",
    "sleep with weights": "hone.engine.sleeping_weights",
    "sizes of models": "hone.families.shape",
    "split matrices": "hone.trainer.tensor",
    "split rows": "hone.attention.context_parallel",
    "split rows in training": "hone.trainer.context",
    "split matrices of an engine": "hone.models.tensor_parallel",
    "stages": "hone.trainer.pipeline",
    "stop strings": "hone.engine.detokenizer",
    "summaries of evaluations": "hone.rollout.eval_metrics",
    "unknown families": "hone.models.parity",
    "watch": "hone.distributed.watch",
    "worker processes": "hone.rewards.pool",
}
"""Features that the example does not use, by a module of each."""


def _circle(imports: Mapping[str, Collection[str]]) -> str:
    """Files that import each other, if there are any."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def _with_packages(imports: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Who imports a file from outside of its package waits for the package's `__init__` as well."""
    return {
        module: {
            waited_for
            for name in imported
            for waited_for in (name, *_packages_of(name))
            if not f"{module}.".startswith(f"{waited_for}.")
        }
        for module, imported in imports.items()
    }


def _packages_of(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:number]) for number in range(1, len(parts)))


def test_files_import_each_other_in_no_circle() -> None:
    graph = grimp.build_graph("hone")
    files = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(files) > 100
    assert not _circle(files)


def test_any_file_can_be_imported_first() -> None:
    """In a fresh process, where no other import has run the packages' `__init__` before."""
    graph = grimp.build_graph("hone")
    files = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert not _circle(_with_packages(files))


def test_planted_a_package_that_gathers_what_needs_it() -> None:
    """`hone.rules` fails as the first import of a process, `hone.rules.language` does not."""
    imports = {
        "hone.rules": {"hone.rules.language", "hone.engine.rules"},
        "hone.rules.language": set[str](),
        "hone.engine.rules": {"hone.rules.language"},
    }
    assert not _circle(imports)
    assert "hone.engine.rules" in _circle(_with_packages(imports))


def test_the_trainer_is_loaded_without_the_planner() -> None:
    """A loop of hone's parts would else load a third of the package for it."""
    graph = grimp.build_graph("hone", exclude_type_checking_imports=True)
    loaded = graph.find_upstream_modules("hone.trainer.trainer")
    heavy = ("hone.planner", "hone.rules", "hone.config.rules", "hone.config.tree")
    assert not [module for module in loaded if module.startswith(heavy)]


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """The modules of hone that these statements import when they run; not those that functions
    import when they are called, nor those for type checkers alone."""
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{name.name}" for name in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If(body=inner, orelse=others):
                yield from _imported([*inner, *others])
            case ast.Try(body=inner, handlers=handlers):
                yield from _imported([*inner, *(x for each in handlers for x in each.body)])
            case ast.ClassDef(body=inner) | ast.With(body=inner) | ast.For(body=inner):
                yield from _imported(inner)
            case _:
                pass


def loaded_by_example() -> dict[str, int]:
    """The modules that the names of hone in the example load, each with its lines."""
    files = {"hone": Path(hone.__file__)}
    root = files["hone"].parent
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    used = {
        node.attr
        for node in ast.walk(ast.parse(EXAMPLE.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "hone"
    }
    waiting = [hone._PARTS[name].partition(":")[0] for name in used]
    loaded: dict[str, int] = {}
    while waiting:
        module = waiting.pop()
        if module in loaded or module not in files:
            continue
        text = files[module].read_text()
        loaded[module] = len(text.splitlines())
        waiting += [module.rpartition(".")[0], *_imported(ast.parse(text).body)]
    return loaded


def test_a_loop_of_the_parts_loads_what_it_asks_for() -> None:
    loaded = loaded_by_example()
    assert "hone.trainer.trainer" in loaded
    assert all(find_spec(module) for module in NOT_ASKED_FOR.values())
    assert not {name for name, module in NOT_ASKED_FOR.items() if module in loaded}
    assert sum(loaded.values()) <= MOST_LINES
