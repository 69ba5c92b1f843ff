"""A stand-in for transformers, for processes that need it only to name hone's attention there.

Importing the package itself takes half of the time in which a process of kernels starts. Import
before hone.
"""

from __future__ import annotations

import sys
from types import ModuleType


class AttentionInterface:
    """Where `hone.attention` writes down its name."""

    @staticmethod
    def register(name: str, function: object) -> None:
        pass


_module = ModuleType("transformers")
_module.AttentionInterface = AttentionInterface  # pyright: ignore[reportAttributeAccessIssue]
sys.modules["transformers"] = _module
