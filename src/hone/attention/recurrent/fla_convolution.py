# pyright: reportMissingImports=false
"""The causal convolution by the kernels of `fla-core` 0.6, with gradients.

Letters: T tokens, S segments, C channels, W weights of a channel.
"""

from __future__ import annotations

import torch.nn.functional as F
from fla.modules.causal_conv1d import causal_conv1d
from torch import Tensor

from hone.segments import SegmentLevel

__all__ = ["convolve"]


def convolve(
    x: Tensor, weight: Tensor, level: SegmentLevel, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [T, C] and last inputs [S, W - 1, C], as `convolution.convolve`.

    The package keeps W inputs of each segment, channels first; of the first one nothing depends.
    """
    before = None
    if initial is not None:
        before = F.pad(initial.to(x.dtype).transpose(1, 2), (1, 0)).contiguous()
    output, last = causal_conv1d(
        x[None],
        weight.to(x.dtype),
        initial_state=before,
        output_final_state=True,
        activation="silu",
        cu_seqlens=level.cu_seqlens,
        chunk_indices=level.chunks,  # which it would otherwise compute and send, waiting for it
    )
    assert last is not None
    return output[0], last[:, :, 1:].transpose(1, 2)
