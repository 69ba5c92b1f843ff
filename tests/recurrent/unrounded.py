"""The layers of Qwen3.5 in transformers, in float64 throughout."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

__all__ = ["unrounded"]


class _Wide:
    """torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def unrounded() -> Generator[None]:
    """Context manager in which these layers, which round to float32 also in models of float64,
    compute in float64 throughout."""
    with (
        patch.object(modeling_qwen3_5, "torch", _Wide()),
        patch.object(modeling_qwen3_5_moe, "torch", _Wide()),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield
