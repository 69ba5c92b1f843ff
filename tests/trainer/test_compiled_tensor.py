"""Layers of tensor parallel processes under the compiler, which costs more than all else there."""

from __future__ import annotations

from tests.ranks import parts_of, run_ranks
from tests.trainer.test_tensor import GRADIENTS, RANKS


def test_R8_compiled_layers_take_any_number_of_tokens() -> None:
    for rank in parts_of(run_ranks(RANKS, 2, "compiled")):
        assert max(found["gradients"] for found in rank["compiled"].values()) < GRADIENTS
