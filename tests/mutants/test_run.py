"""The catalogue of planted mistakes fits the code, and its runner tells killed from surviving."""

import threading
from dataclasses import replace

import psutil
import pytest

from tests.mutants import run
from tests.mutants.run import CATALOGUE, ROOT, Mutant, Runner, load, problems

MUTANT = Mutant(
    id="area-is-sum",
    what="the area adds its sides",
    file="src/shapes.py",
    find="a * b",
    replace="a + b",
    killed_by=["tests/test_shapes.py::test_area"],
    area="shapes",
)
SOURCE = "def area(a, b):\n    return a * b\n\n\ndef edge(a, b):\n    return 2 * (a + b)\n"
TESTS = """
import subprocess
from shapes import area, edge

def test_area():
    assert area(3, 4) == 12

def test_square():
    assert area(2, 2) == 4

def test_edge():
    assert edge(3, 4) in (14, 7)

def test_that_fails():
    assert area(3, 4) == 11

def test_that_hangs():
    if area(3, 4) == 7:
        subprocess.run(["sleep", "600"])

class TestShapes:
    def test_edge(self):
        assert edge(3, 4) == 14
"""


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name, text in {
        "src/shapes.py": SOURCE,
        "examples/shapes.py": SOURCE,
        "tests/test_shapes.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_entry_of_the_catalogue_fits_the_code():
    assert problems(load(CATALOGUE), ROOT) == []


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"file": "src/none.py"}, "there is no file src/none.py"),
        ({"file": "examples/shapes.py"}, "examples/shapes.py would be changed itself"),
        ({"find": "a - b"}, "`find` occurs 0 times"),
        ({"find": "return"}, "`find` occurs 2 times"),
        ({"replace": "a * b"}, "are the same"),
        ({"replace": "a *"}, "no longer parses"),
        ({"killed_by": ["tests/test_none.py"]}, "no test file tests/test_none.py"),
        ({"killed_by": ["tests/test_shapes.py::test_none"]}, "has no test test_none"),
        ({"killed_by": ["tests/test_shapes.py::TestShapes::test_area"]}, "TestShapes::test_area"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(tree, entry, complaint):
    (found,) = problems([replace(MUTANT, **entry)], tree)
    assert found.startswith("shapes.yaml, area-is-sum: ")
    assert complaint in found


def test_entries_that_fit_and_ids_that_occur_twice(tree):
    tests = ["", "::test_area", "::test_area[3-4]", "::TestShapes::test_edge"]
    mutant = replace(MUTANT, killed_by=["tests/test_shapes.py" + test for test in tests])
    assert problems([mutant], tree) == []
    assert problems([mutant, mutant], tree) == ["area-is-sum: 2 entries have this id"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- id: x", "needs exactly id, what, file, find, replace, killed_by"),
        ("- plain", "needs exactly"),
        ("- {id: x, what: a, file: b, find: c, replace: d, killed_by: [], more: e}", "needs exac"),
        ("- {id: x, what: a, file: b, find: c, replace: d, killed_by: []}", "not empty"),
        ("- {id: x, what: a, file: b, find: c, replace: d, killed_by: test}", "a list of tests"),
        ("- {id: x, what: a, file: b, find: c, replace: 1, killed_by: [d]}", "the rest is text"),
        ("- {id: A_b, what: a, file: b, find: c, replace: d, killed_by: [e]}", "not kebab case"),
    ],
)
def test_an_entry_of_another_form_is_refused(tmp_path, text, complaint):
    (tmp_path / "shapes.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^shapes.yaml, entry 1: .*{complaint}"):
        load(tmp_path)


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "shapes.yaml").write_text("- find: lambda a: b")
    with pytest.raises(ValueError, match=r"^shapes.yaml: mapping values are not allowed"):
        load(tmp_path)


def test_of_two_mistakes_one_is_killed_and_one_survives(tree, monkeypatch, capsys):
    monkeypatch.setattr(run, "ROOT", tree)
    monkeypatch.setattr(run, "CATALOGUE", tree / "tests")
    shared = "what: the area adds its sides, file: src/shapes.py, find: a * b, replace: a + b"
    (tree / "tests/shapes.yaml").write_text(
        f"- {{id: held, {shared}, killed_by: [tests/test_shapes.py]}}\n"
        f"- {{id: not-held, {shared}, killed_by: ['tests/test_shapes.py::test_square']}}\n"
    )
    assert run.main(["--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert "killed by tests/test_shapes.py::test_area\n" in printed
    assert "not-held  SURVIVED " in printed
    assert printed.endswith("2 mutants: 1 SURVIVED, 1 killed\n")
    assert (tree / "src/shapes.py").read_text() == SOURCE
    assert run.main(["--only", "not-held", "--area", "tests/mutants/shapes.yaml"]) == 1
    assert run.main(["--only", "held", "--slice", "2/2"]) == 1
    assert "1 mutants: " in capsys.readouterr().out
    assert run.main(["--only", "held", "--area", "other"]) == 2
    assert capsys.readouterr().out.endswith("error: no mutant fits\n")


def test_a_test_that_fails_anyway_kills_nothing(tree):
    mutant = replace(MUTANT, killed_by=["tests/test_shapes.py::test_that_fails"])
    verdict = Runner(tree).verdict(mutant)
    assert verdict.outcome == "BROKEN"
    assert verdict.detail.endswith("test_that_fails fails without the mistake too")


def test_a_run_that_hangs_or_is_interrupted_leaves_nothing_behind(tree):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    mutant = replace(MUTANT, killed_by=["tests/test_shapes.py::test_that_hangs"])
    assert Runner(tree, deadline_s=2).verdict(mutant).outcome == "TIMED OUT"
    runner = Runner(tree)
    threading.Timer(2, runner.stop).start()
    said = []
    assert run.run([mutant], runner, 1, said.append) == 130
    assert said[-1] == "1 mutants: none\n"
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before
