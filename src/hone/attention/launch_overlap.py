"""Starting a Triton kernel before the one ahead of it has ended (programmatic dependent launch).

On Hopper GPUs and later a kernel that is launched with `launch_pdl` starts as soon as every program
of the one ahead has called `gdc_launch_dependents` or ended. Until it calls `gdc_wait` it may read
only what no kernel of such a chain writes, and write nothing; after it, all results are visible
(CUDA Programming Guide). What it asks for meanwhile keeps the memory busy.

This module imports triton; the modules of kernels import it.
"""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

__all__ = ["overlaps", "prefetch"]


@cache
def overlaps(device: int) -> bool:
    """Whether kernels on a device can be started before the one ahead ends: from Hopper on."""
    return device >= 0 and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(ptr: tl.tensor) -> None:
    """Ask for the cache lines of 128 bytes at addresses of any shape to be brought into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
