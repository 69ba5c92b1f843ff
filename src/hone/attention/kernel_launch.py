"""Launches Triton kernels repeatedly with little host work.

Triton inspects every argument of every launch, which takes longer than a small kernel runs: an
eager forward of a small model would take as long as its launches. This module imports triton; the
modules of kernels import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hone.attention.launch_overlap import overlaps

__all__ = ["SHARED_BYTES", "fitting_stages", "launch", "next_power_of_2", "shared_bytes"]

SHARED_BYTES = 227 * 1024
"""Shared memory available to a program on Hopper, in bytes; other GPUs have less."""

ALIGNMENT = 16
"""Bytes of the widest access; kernels are built for addresses that are multiples of it, or not."""

_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    numbers: tuple[float, ...],
    constants: tuple[int, ...],
    *,
    num_warps: int,
    num_stages: int = 3,
    max_registers: int | None = None,
) -> None:
    """`kernel[grid](*tensors, *numbers, *constants, OVERLAP)` on the device of the first tensor.

    The kernel must exclude `numbers` from specialisation (`do_not_specialize`), and they fit into
    32 bits; `constants` and OVERLAP are its constexpr parameters. What was compiled for arguments
    of the same kind is then launched directly. OVERLAP says that the kernel may be started before
    the one ahead of it has ended: it has to call `gdc_wait` before it reads what others write and
    before it writes anything (`hone.attention.launch_overlap`). `max_registers` are a thread's.

    Products and sums are never contracted into one rounding (`enable_fp_fusion`), as torch does
    not do so either.
    """
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
    first = tensors[0]
    assert first is not None
    device = first.get_device()
    is_aligned = True
    for address in addresses:
        if address is not None and address % ALIGNMENT:
            is_aligned = False
    key = (
        id(kernel),
        device,
        is_aligned,
        constants,
        num_warps,
        num_stages,
        max_registers,
        *dtypes,
    )
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*addresses, *numbers, *constants, overlaps(device))
        return
    options: dict[str, int] = {"launch_pdl": True} if overlaps(device) else {}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    compiled = kernel[grid](
        *tensors,
        *numbers,
        *constants,
        overlaps(device),
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
        **options,
    )
    # The interpreter compiles nothing. Where some addresses are aligned, another mix may follow.
    if compiled is not None and is_aligned:
        _compiled[key] = compiled


@cache
def shared_bytes(device: int) -> int:
    """Shared memory available to a program on a GPU, in bytes; unlimited in the interpreter."""
    if device < 0:
        return SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fitting_stages(num_stages: int, stage_bytes: int, limit: int) -> int:
    """`num_stages` stages of a pipelined loop, or as many as fit, at least one."""
    return max(min(num_stages, limit // stage_bytes), 1)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`. triton's own function costs the host a
    microsecond more."""
    return 1 << (number - 1).bit_length()
