"""Attention of towers that encode pictures of any sizes together, registered with transformers.

Without it transformers' Qwen towers call attention once for each picture, or each of its windows,
in every layer, and a GPU waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

__all__ = ["TOWER_ATTENTION"]

TOWER_ATTENTION = "hone_flash_tower"
"""Value of `attn_implementation`. Towers give borders to a function with `flash` in its name."""


def _attend(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in both directions between the borders. Returns [1, T, H, D] and no weights."""
    q, k, v = (x[0].transpose(0, 1) for x in (query_1HTD, key_1HTD, value_1HTD))
    if query_1HTD.is_cuda and query_1HTD.dtype in (torch.bfloat16, torch.float16):
        borders = cu_seq_lens_q.int()
        output = varlen_attn(q, k, v, borders, borders, max_length_q, max_length_q, scale=scaling)
        assert isinstance(output, Tensor)  # a pair only if the log-sum-exp is requested
        return output[None], None
    sizes = cu_seq_lens_q.diff().tolist()
    parts = zip(*(x.split(sizes, 2) for x in (query_1HTD, key_1HTD, value_1HTD)), strict=True)
    outputs = [F.scaled_dot_product_attention(*part, scale=scaling) for part in parts]
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register(TOWER_ATTENTION, _attend)
