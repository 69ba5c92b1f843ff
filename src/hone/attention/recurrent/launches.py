"""Launch parameters of the kernels of `fla-core` on Hopper GPUs.

The package tries 140 variants of twelve kernels at their first calls, one after another, which
takes minutes before the first step of a run. It can read launch parameters from files instead: the
folder `fla_launches` beside this module holds what `benchmarks/gpu/fla_launches.py` has found on an
H200, for heads of 128, a file for each kernel.

There is none for the kernel that `chunk_gradients` replaces.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hone.extras import is_installed

__all__ = ["FOLDER", "use_found_launches"]

FOLDER = Path(__file__).with_name("fla_launches")
_MODE, _FOLDER = "FLA_CACHE_MODE", "FLA_CONFIG_DIR"
"""Environment variables that the package reads when it is imported."""


def use_found_launches(device: torch.device) -> None:
    """Let the package read its launch parameters from `FOLDER` if `device` is a Hopper GPU. Sets
    environment variables of this process. Has no effect where the package is imported already, or
    where one of these variables is set.
    """
    if device.type != "cuda" or not is_installed("fla") or "fla" in sys.modules:
        return
    if _MODE in os.environ or _FOLDER in os.environ:
        return
    if torch.cuda.get_device_capability(device)[0] == 9:
        os.environ[_MODE] = "default"
        os.environ[_FOLDER] = str(FOLDER)
