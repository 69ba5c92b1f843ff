"""Lets torchvision be imported where its library does not load.

The index with builds for CPUs is not reachable everywhere. The library of another build needs that
of CUDA, and without it the operators are missing whose gradients and shapes torchvision declares
when it is imported. Resizing, for which processors of images import it, needs none of them.

`make test-vllm` puts this file into its environment as `sitecustomize.py`, which each process reads
at its start, unless torchvision can be imported without it.
"""

from __future__ import annotations

import sys
from typing import Any


class _Declares:
    """Finds no module. Declares the operators when torchvision is looked for."""

    library: Any = None
    """Kept, since the operators go with it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            self.library.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )


_finder = _Declares()
sys.meta_path.insert(0, _finder)
