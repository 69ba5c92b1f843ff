"""Imports are read from every kind of source, and each change reaches the tests behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection.graph import Graph, read_source
from tests.selection.plan import ROOT
from tests.tables import check_rows

REFERENCES = {
    "a plain import": ("import hone.types", "hone.types"),
    "a name of a module": ("from hone.config import plan", "hone.config.plan"),
    "a relative import": ("from . import sibling", "hone.rollout.sibling"),
    "a relative import from above": ("from ..config import plan", "hone.config.plan"),
    "an import in a function": ("def f():\n    import hone.types", "hone.types"),
    "a string": ('run_ranks("tests.trainer.some_ranks", 2)', "tests.trainer.some_ranks"),
    "a string with a function": ('spec = "hone.cli.main:main"', "hone.cli.main"),
    "a program in a shell": (
        'run("cd runs && python -m hone.tools.bench rl", shell=True)',
        "hone.tools.bench.__main__",
    ),
    "a program": ('run([python, "-m", "hone", "rl"])', "hone.__main__"),
    "what runs without type checkers": (
        "if TYPE_CHECKING:\n    import typing\nelse:\n    import hone.types",
        "hone.types",
    ),
}


def test_references_of_every_kind_are_read() -> None:
    def check(text: str, name: str) -> None:
        assert name in read_source(text, "hone.rollout.collector").imports

    check_rows(REFERENCES, check)


def test_what_only_type_checkers_or_people_read_is_no_reference() -> None:
    for text in (
        "if TYPE_CHECKING:\n    import hone.types",
        "if typing.TYPE_CHECKING:\n    import hone.types",
        'logger = getLogger("hone")',
        '"""hone.types is a module."""',
    ):
        assert not read_source(text, "hone.rollout.collector").imports, text


def test_a_module_that_is_chosen_at_run_time_reaches_its_whole_package() -> None:
    named = read_source('import_module(f"hone.families.{name}")', "hone.registry")
    own = read_source('import_module(f"{__name__}.{name}")', "hone.losses", is_package=True)
    assert (named.packages, own.packages) == ({"hone.families"}, {"hone.losses"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository in which `tests/test_low.py` is one import from `low`, and others further."""
    for name, text in {
        "src/hone/__init__.py": "",
        "src/hone/low.py": "",
        "src/hone/high.py": "from hone import low",
        "src/hone/parts/__init__.py": "",
        "src/hone/parts/one.py": "",
        "src/hone/chooser.py": 'import_module(f"hone.parts.{name}")',
        "src/hone/page/draw.py": 'FILE = "page.html"',
        "src/hone/page/page.html": "",
        "src/hone/page/unnamed.css": "",
        "tests/conftest.py": "",
        "tests/sub/conftest.py": "import hone.high",
        "tests/sub/test_below.py": "",
        "tests/sub/planted.py": "",
        "tests/sub/test_planted.py": 'FILE = HERE.with_name("planted.py")',
        "tests/planted.py": "",
        "tests/some_ranks.py": "import hone.high",
        "tests/test_low.py": "def test():\n    from hone.low import x",
        "tests/test_ranks.py": 'run_ranks("tests.some_ranks")',
        "tests/test_chooser.py": "import hone.chooser",
        "tests/test_page.py": "from hone.page.draw import FILE",
        "tests/test_examples.py": 'FOLDER = ROOT / "examples"',
        "tests/test_first.py": 'FILE = "first.yaml"',
        "tests/engine/test_vllm.py": "",
        "tests/test_alone.py": "",
        "examples/first.yaml": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_distances_are_imports_between_a_change_and_a_test(root: Path) -> None:
    graph = Graph.read(root)

    def check(changed: str, expected: dict[str, int]) -> None:
        found = graph.distances([changed])
        tests = {p: d for p, d in found.items() if Path(p).name.startswith("test_")}
        assert tests == {f"tests/{name}": distance for name, distance in expected.items()}

    vllm = [f"engine/test_vllm{end}.py" for end in ("", "_experts")]
    vllm.append("vision/test_loaded_elsewhere.py")
    ranks = {"test_ranks.py": 3, "sub/test_below.py": 3, "sub/test_planted.py": 3}
    check_rows(
        [
            ("src/hone/low.py", {"test_low.py": 1, **ranks}),
            ("src/hone/parts/one.py", {"test_chooser.py": 2}),
            ("src/hone/page/page.html", {"test_page.py": 2}),
            ("src/hone/page/unnamed.css", {"test_page.py": 2}),
            ("examples/first.yaml", {"test_examples.py": 1, "test_first.py": 1}),
            ("tests/sub/planted.py", {"sub/test_planted.py": 1}),
            ("tests/planted.py", {}),
            ("constraints-vllm.txt", dict.fromkeys(vllm, 1)),
            ("tests/test_alone.py", {"test_alone.py": 0}),
            ("tests/some_ranks.py", {"test_ranks.py": 1}),
            ("README.md", {}),
        ],
        check,
    )


def test_several_changes_reach_what_each_of_them_does(root: Path) -> None:
    found = Graph.read(root).distances(["src/hone/low.py", "src/hone/high.py"])
    assert (found["tests/test_ranks.py"], found["tests/test_low.py"]) == (2, 1)


def test_files_that_all_depend_on_reach_all(root: Path) -> None:
    for name in ("pyproject.toml", "tests/conftest.py"):
        found = Graph.read(root).distances([name])
        assert {p for p in Graph.read(root).sources if p.startswith("tests/")} <= set(found)


def test_the_graph_of_this_repository_has_no_hole() -> None:
    """Each test file of a package imports it, so a change there reaches it; each module of `hone`
    that is no program is reached by a test."""
    graph = Graph.read(ROOT)
    left = [path for path in graph.sources if Path(path).name.startswith("test_")]
    reached = set(left)
    while left:
        new = graph.imports[left.pop()] - reached
        reached |= new
        left.extend(new)
    assert [p for p in graph.sources if p.startswith("src/hone/") and p not in reached] == []
