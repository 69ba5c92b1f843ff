"""Kernels are compiled for the first micro-batch, and for no later one."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.interpreted import run_interpreted

FOLDER = Path(sys.prefix) / "fla"
"""Where `make test` has put the package: transformers would use it wherever it can be imported."""

pytestmark = pytest.mark.skipif(
    not find_spec("triton") or not FOLDER.is_dir(), reason="needs triton and fla-core"
)


def test_a_step_waits_for_no_kernel_that_an_earlier_one_did_not_have():
    """Whatever is first: whole groups or what is left of them, rows that end early, rows alone. The
    first pass with a shared prompt compiles the two kernels that copy its keys."""
    results = run_interpreted("tests.recurrent.compiled_kernels", FOLDER)
    assert len({*results["first"].values()}) == 1
    assert min(results["first"].values()) >= 16
    wrong = {name: [*again] for name, again in results["again"].items() if again}
    for name in ("rows that share nothing", "one row", "a prompt of one token"):
        assert sorted(wrong.pop(name)) == results["copies"]
    assert not wrong
