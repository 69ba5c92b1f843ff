"""What is left of a pass that ran out of memory."""

from __future__ import annotations

import gc
import traceback

import torch

__all__ = ["free_failed_pass"]


def free_failed_pass(error: torch.OutOfMemoryError, device: torch.device) -> None:
    """Free the tensors that the frames of an error hold, whoever else keeps the error, and give
    the memory that torch caches back to the driver."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies beside the pass may still write to them
    linked: BaseException | None = error
    while linked is not None:
        traceback.clear_frames(linked.__traceback__)
        linked = linked.__cause__ or linked.__context__
    gc.collect()  # graphs of autograd have cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
