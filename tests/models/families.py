"""One tiny model of every family, with the features that set the family apart switched on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from hone.attention import PackedContext
from hone.models.contents import follow_inputs
from hone.models.decoder import head_logits, hidden_states
from hone.models.load import load_model
from hone.models.settings import ModelConfig
from hone.models.tiny import make_tiny_model
from hone.models.tiny_vision import make_tiny_vision_model

VOCAB = 64
MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
"""Of heads of 8 values."""

FAMILY_FIELDS = {
    "llama": {"attention_bias": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": {},
    "ministral": MIXED_LAYERS,
    "exaone4": MIXED_LAYERS,
    "olmo2": {},
    "olmo3": MIXED_LAYERS,
    "gemma": {},
    "gemma2": {
        **MIXED_LAYERS,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {**MIXED_LAYERS, "query_pre_attn_scalar": 16},
    "qwen3_moe": {
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "glm4_moe": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "qwen3_5_moe_text": {
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 40,
    },
    "qwen2_5_vl_text": {"rope_parameters": AXES},
    "qwen3_vl_text": {"rope_parameters": AXES},
}

WHOLE = {"qwen2_5_vl_text": "qwen2_5_vl", "qwen3_vl_text": "qwen3_vl"}
"""Decoders that are only a part of a vision-language model, and the family of the whole."""


@lru_cache
def family_folder(family: str) -> Path:
    """Weights large enough that attention is far from uniform and logits far from equal."""
    folder = Path(mkdtemp(prefix=f"hone-{family}-"))
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "initializer_range": 0.15,
        "seed": 3,
    }
    if family in WHOLE:
        return make_tiny_vision_model(
            folder, family=WHOLE[family], tie_word_embeddings=False, **sizes
        )
    return make_tiny_model(
        folder,
        family=family,
        vocab_size=VOCAB,
        tie_word_embeddings=family in ("qwen3", "gemma", "gemma2", "gemma3_text"),
        **sizes,
        **FAMILY_FIELDS[family],
    )


def family_model(family: str, dtype: torch.dtype = torch.float32):
    model = load_model(ModelConfig(path=str(family_folder(family))), device="cpu", seed=0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:  # which torch's grouped product does not compute
        model.set_experts_implementation("eager")
    follow_inputs(model)
    return model


def random_samples(lengths, seed=0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=draw) for length in lengths]


def restarting_positions(lengths) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def packed_logprobs(model, samples, *, lengths=None, positions=None) -> list[Tensor]:
    """Log-probabilities [T_i, V] of each sample, all computed in one packed forward."""
    sizes = [len(sample) for sample in samples]
    positions = restarting_positions(sizes) if positions is None else positions
    context = PackedContext.from_lengths(lengths or sizes)
    hidden = hidden_states(model, torch.cat(samples), positions, context)
    return list(head_logits(model, hidden).log_softmax(-1).split(sizes))
