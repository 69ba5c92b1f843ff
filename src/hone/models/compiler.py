"""How torch compiles what is trained: once for all micro-batches, of which no two are alike.

Graphs take any number of tokens from two on. By itself torch would compile them again in the middle
of a run in two cases:

* On a GPU it lets one kernel compute both gradients of a norm where they are large, and guards the
  size: at 4,096 tokens or more, at 10,240 for two heads of 256. Here it does so for any size.
* A first micro-batch with as many tokens as the model is wide would be taken for a square.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic_shapes

__all__ = ["compile_module", "compiled"]

T = TypeVar("T")
_OPTIONS: dict[str, Any] = {"triton.mix_order_reduction_non_strict_mode": True}


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which is compiled when it is first called."""
    _tell_sizes_apart()
    return torch.compile(function, dynamic=True, options=_OPTIONS)


def compile_module(module: nn.Module) -> None:
    """Let the module and its hooks be compiled when it is first called."""
    _tell_sizes_apart()
    module.compile(dynamic=True, options=_OPTIONS)


def _tell_sizes_apart() -> None:
    """Sizes that are equal once need not be so again. A setting of the process."""
    symbolic_shapes.use_duck_shape = False
