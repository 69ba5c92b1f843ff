"""Check of a family without a spec: whether transformers' forward supports packed rows and a paged
cache.

These ask more of a model than transformers promises: that it takes positions as given, passes all
that attention depends on to the attention interface, and computes logits as a product with one
matrix. A small twin of the model, with the same `config.json` except for sizes, shows whether that
holds, before any weight is read.
"""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hone.attention import ATTENTION_NAME, AttentionContext, PackedContext, PagedContext
from hone.errors import UserError
from hone.families.registry import SPECS
from hone.models.decoder import decoder_layers, head_logits, hidden_states
from hone.models.support import head_dim_of

__all__ = ["TOLERANCE", "require_parity"]

TOLERANCE = 1e-3
"""Largest allowed difference of log-probabilities in float32. Those of a twin with a fault differ
by several units."""

_LENGTHS = (9, 14)
_PREFILL = 11
_WINDOW = 5
_VOCAB = 128


def require_parity(config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Raise UserError unless a small model of this `config` gives, packed and with a cache, the
    same log-probabilities as transformers for each single sequence."""
    try:
        found = _differences(config, trust_remote_code=trust_remote_code)
    # Foreign code, about which nothing is known: all errors that a forward may raise.
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise _refusal(config, f"a small model of it does not run: {error}") from error
    for what, difference in found.items():
        if not difference <= TOLERANCE:
            raise _refusal(
                config,
                f"the log-probabilities of a small model of it are {difference:.2g} off {what}, "
                f"of which {TOLERANCE:g} is allowed",
            )


def _refusal(config: PreTrainedConfig, why: str) -> UserError:
    return UserError(
        f"a model of the family {config.model_type}, which is none of hone's own, runs where "
        f"packed rows give what transformers gives; {why}. Use a model of {', '.join(SPECS)}."
    )


@torch.no_grad()
def _differences(config: PreTrainedConfig, *, trust_remote_code: bool) -> dict[str, float]:
    """Largest differences of log-probabilities from transformers' own forward, by where."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours, theirs = (
            AutoModelForCausalLM.from_config(
                _twin(config),
                dtype=torch.float32,
                attn_implementation=name,
                trust_remote_code=trust_remote_code,
            ).eval()
            for name in (ATTENTION_NAME, "eager")
        )
        for parameter in ours.parameters():  # initial biases are zero and norms one
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        theirs.load_state_dict(ours.state_dict())
        samples = [torch.randint(_VOCAB, (length,)) for length in _LENGTHS]
    assert len(decoder_layers(ours)) == ours.config.num_hidden_layers
    expected = [theirs(input_ids=ids[None], use_cache=False).logits[0] for ids in samples]
    packed = _logits(
        ours,
        torch.cat(samples),
        torch.cat([torch.arange(length) for length in _LENGTHS]),
        PackedContext.from_lengths(_LENGTHS),
    )
    return {
        "in packed rows": _largest(packed, torch.cat(expected)),
        "with a cache": _largest(_sampled(ours, samples[-1]), expected[-1]),
    }


def _twin(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config with few layers (one of each kind), few heads, and windows shorter than a
    sample."""
    twin = copy.deepcopy(config)
    num_layers, heads = config.num_hidden_layers, config.num_attention_heads
    kinds: list[str] = getattr(config, "layer_types", None) or []
    kept = min(max(2, *(kinds.index(kind) + 1 for kind in {*kinds}), 0), num_layers)
    for name, value in config.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == num_layers:
            setattr(twin, name, value[:kept])
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    few = min(kv_heads, 2)
    fields: dict[str, Any] = {
        "num_hidden_layers": kept,
        "num_attention_heads": few * min(heads // kv_heads, 4),
        "hidden_size": few * min(heads // kv_heads, 4) * (config.hidden_size // heads),
        "intermediate_size": 64,
        "vocab_size": _VOCAB,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if hasattr(config, "num_key_value_heads"):
        fields["num_key_value_heads"] = few
    if getattr(config, "sliding_window", None):
        fields["sliding_window"] = _WINDOW
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin


def _sampled(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [T, V] as an engine computes them: some tokens at once, the others one by one."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    caches = [
        torch.zeros(2, 1, len(ids), heads, head_dim_of(config)) for _ in decoder_layers(model)
    ]
    found: list[Tensor] = []
    chunks = (_PREFILL, *[1] * (len(ids) - _PREFILL))
    for size, end in zip(chunks, accumulate(chunks), strict=True):
        positions = torch.arange(end - size, end)
        context = PagedContext(
            kv_caches=caches,
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=positions,
            cu_seqlens_q=torch.tensor([0, size], dtype=torch.int32),
            context_lens=torch.tensor([end], dtype=torch.int32),
            max_seqlen_q=size,
            max_context_len=end,
            query_lens=() if size == 1 else (size,),
            key_lens=() if size == 1 else (end,),
        )
        found.append(_logits(model, ids[positions], positions, context))
    return torch.cat(found)


def _logits(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, context: AttentionContext
) -> Tensor:
    return head_logits(model, hidden_states(model, ids, positions, context))


def _largest(logits: Tensor, expected: Tensor) -> float:
    return float((logits.log_softmax(-1) - expected.log_softmax(-1)).abs().max())
