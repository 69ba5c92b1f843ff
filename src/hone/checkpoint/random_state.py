"""State of a process's global random generators, for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_random_state", "restore_random_state"]


def capture_random_state() -> dict[str, Any]:
    """State of the generators of Python, NumPy, torch and every CUDA device, as a tree."""
    version, words, gauss_next = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    generator = numpy["state"]
    return {
        "python": {"version": version, "words": list(words), "gauss_next": gauss_next},
        "numpy": numpy | {"state": generator | {"key": generator["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore every generator to the state of `capture_random_state`.

    Raises ValueError when the number of CUDA devices differs.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) != num_devices:
        raise ValueError(
            f"The random state was saved with {len(state['cuda'])} CUDA devices, {num_devices} are "
            "visible here. Resume on the same number (CUDA_VISIBLE_DEVICES)."
        )
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss_next"]))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if num_devices:
        torch.cuda.set_rng_state_all(state["cuda"])
