"""Layers are compiled in the first micro-batch, and not again in later ones."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.interpreted import run_interpreted


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("triton"), reason="needs triton")
def test_no_number_of_tokens_compiles_layers_again():
    """As torch compiles them for a GPU."""
    results = run_interpreted("tests.trainer.compiled_layers")
    assert results["first"]
    assert {*results["later"]} == {results["first"]}
