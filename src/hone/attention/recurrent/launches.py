"""Launch parameters of the kernels of `fla-core` on Hopper GPUs.

The package tries some 150 variants of its kernels at their first calls, one after another, which
took more than five minutes before the first step of a run, and again for other numbers of tokens.
It can read them from files instead: the folder `fla_launches` beside this module holds what
`benchmarks/gpu/fla_launches.py` has found, a file for each kernel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from hone.extras import is_installed

__all__ = ["FOLDER", "use_found"]

FOLDER = Path(__file__).with_name("fla_launches")
_MODE, _FOLDER = "FLA_CACHE_MODE", "FLA_CONFIG_DIR"
"""Environment variables that the package reads when it is imported."""


def use_found(device: torch.device) -> None:
    """Let the package take what was found, where it was found: on Hopper GPUs. Has no effect where
    the package is imported already, or where one of its environment variables says something else.
    """
    if device.type != "cuda" or not is_installed("fla") or "fla" in sys.modules:
        return
    if _MODE in os.environ or _FOLDER in os.environ:
        return
    if torch.cuda.get_device_capability(device)[0] == 9:
        os.environ[_MODE] = "default"
        os.environ[_FOLDER] = str(FOLDER)
