"""Starting a Triton kernel before the one ahead of it has ended (programmatic dependent launch).

On Hopper GPUs and later a kernel that is launched with `launch_pdl` starts as soon as every program
of the one ahead has called `gdc_launch_dependents` or ended. Until it calls `gdc_wait` it may read
only what no kernel of such a chain writes, and write nothing; after it, all results are visible
(CUDA Programming Guide).
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["overlaps"]


@cache
def overlaps(device: int) -> bool:
    """Whether kernels on a device can start before the previous one ends: from Hopper on."""
    return device >= 0 and torch.cuda.get_device_capability(device) >= (9, 0)
