"""Cleanup after a pass that ran out of memory."""

from __future__ import annotations

import gc
import traceback

import torch

__all__ = ["free_failed_pass"]


def free_failed_pass(error: torch.OutOfMemoryError, device: torch.device) -> None:
    """Free the tensors in the frames of an error, even if the error is kept elsewhere, and return
    torch's cached memory to the driver."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # asynchronous copies may still write to them
    linked: BaseException | None = error
    while linked is not None:
        traceback.clear_frames(linked.__traceback__)
        linked = linked.__cause__ or linked.__context__
    gc.collect()  # graphs of autograd have cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
