"""Random generators go on where they were, through a checkpoint."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tables import table

from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.checkpoint.store import CheckpointStore
from hone.checkpoint.tree import in_memory


def draw() -> list[Any]:
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    drawn += torch.randn(3).tolist()
    if torch.cuda.is_available():
        drawn += torch.randn(3, device="cuda").tolist()
    return drawn


def check_resumes(folder: Path, lose: str | None = None) -> None:
    draw()  # odd numbers of normals leave a cached one in Python's and NumPy's generators
    store = CheckpointStore(folder)
    store.save(1, {"random": capture_random_state()})
    wanted = draw()
    before: Any = capture_random_state()
    loaded = in_memory(store.load().parts["random"])
    if lose:
        loaded = {**loaded, lose: before[lose]}
    restore_random_state(loaded)
    assert draw() == wanted


def test_R17_random_state_resumes(tmp_path: Path) -> None:
    check_resumes(tmp_path)


@table("lose", ["python", "numpy", "torch"])
def test_R17_a_generator_left_out_turns_red(lose: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_resumes(tmp_path, lose)


def test_other_number_of_devices_is_refused() -> None:
    state = capture_random_state()
    state["cuda"] = [*state["cuda"], torch.zeros(16, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="CUDA devices"):
        restore_random_state(state)
