"""Exact mode on a CPU: ordinary torch operations where its kernels would run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hone.attention import reference
from hone.models import exact, exact_decoder


def use_torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Put them in place; the shapes of the weights that are multiplied with, as it happens."""
    from hone.attention import exact as attention
    from hone.models import token_logprobs as scoring

    calls: list[tuple[int, ...]] = []

    def matmul(x, weight, bias, dtype):
        calls.append(tuple(weight.shape))
        return F.linear(x, weight, bias).to(dtype or x.dtype)

    def packed_attention(q, k, v, context, *, scale, window):
        return reference.packed_attention(
            q, k, v, context.lengths, scale=scale, window=window, softcap=None
        )

    def paged_attention(q, kv_cache, context, *, scale, window):
        return reference.paged_attention(
            q, kv_cache, context, None, scale=scale, window=window, softcap=None
        )

    def token_logprobs(logits, token_ids, temperatures):
        logprobs = torch.log_softmax(logits / temperatures[:, None], -1)
        return logprobs.gather(-1, token_ids[:, None]).squeeze(-1)

    monkeypatch.setattr(exact, "_matmul", matmul)
    monkeypatch.setattr(attention, "packed_attention", packed_attention)
    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    monkeypatch.setattr(scoring, "token_logprobs", token_logprobs)
    monkeypatch.setattr(exact_decoder, "exact_supported", lambda config, device: None)
    return calls
