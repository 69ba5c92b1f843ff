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
