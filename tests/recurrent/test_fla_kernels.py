"""The kernels of `fla-core` as a pass calls them, in Triton's interpreter."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hone.attention.recurrent.launches import FOLDER as LAUNCHES
from tests.interpreted import run_interpreted

FOLDER = Path(sys.prefix) / "fla"
"""Where `make test` has put the package: transformers would use it wherever it can be imported."""

pytestmark = pytest.mark.skipif(
    not find_spec("triton") or not FOLDER.is_dir(), reason="needs triton and fla-core"
)


def test_passes_of_any_levels_are_those_of_plain_torch():
    """Outputs, states and gradients, with and without stored states, and wanted ones."""
    results = run_interpreted("tests.recurrent.interpreted_fla", FOLDER)
    assert results["cases"] == 3 * 4 * 2
    assert not results["wrong"]
    # Without a file a kernel searches its launch parameters in the first step, for minutes.
    assert results["searched"] == sorted(file.stem for file in LAUNCHES.glob("*.json"))
