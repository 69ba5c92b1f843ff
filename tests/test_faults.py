"""Every fault of `faults.yaml` has a test, or a benchmark where only a GPU or a disk shows it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import yaml

from tests.tables import check_rows

ROOT = Path(__file__).parents[1]
FAULTS: dict[str, list[dict[str, str]]] = yaml.safe_load(
    Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8")
)


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def check_fault(fault: dict[str, str]) -> None:
    assert list(fault) == ["fault", "test", "red", "kind"]
    assert all(fault.values())
    path, _, name = fault["test"].partition("::")
    folder = "tests" if name else "benchmarks"
    assert path.startswith(f"{folder}/")
    assert (ROOT / path).is_file(), path
    assert not name or name in functions(ROOT / path), fault["test"]


def test_every_fault_has_a_test_that_exists() -> None:
    rows = [fault for faults in FAULTS.values() for fault in faults]
    check_rows({fault["fault"]: (fault,) for fault in rows}, check_fault, minimum=160)
    assert len({fault["fault"] for fault in rows}) == len(rows), "a fault stands there once"
