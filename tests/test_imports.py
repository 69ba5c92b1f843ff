"""No file imports another in a circle, so that each can be read after those that it imports.

Imports for type checkers count too: a file that needs another's types depends on it.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_files_import_each_other_in_no_circle() -> None:
    graph = grimp.build_graph("hone")
    files = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(files) > 100
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " -> ".join(reversed(error.args[1])))


def test_the_trainer_is_loaded_without_the_planner() -> None:
    """A loop of hone's parts would else load a third of the package for it."""
    graph = grimp.build_graph("hone", exclude_type_checking_imports=True)
    loaded = graph.find_upstream_modules("hone.trainer.trainer")
    heavy = ("hone.planner", "hone.config.rules", "hone.config.tree")
    assert not [module for module in loaded if module.startswith(heavy)]
