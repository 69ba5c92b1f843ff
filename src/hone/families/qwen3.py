"""Qwen3: Llama with norms of query and key heads."""

from hone.families.qwen2 import slides
from hone.families.spec import (
    DENSE_TENSOR_PLAN,
    HEAD_NORMS_TENSOR_PLAN,
    DecodeLayout,
    Json,
    ModelSpec,
)


def _public(
    num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int, *, tied: bool = True
) -> Json:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate_size,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
    }


SPEC = ModelSpec(
    model_type="qwen3",
    head_norms=True,
    head_dim=128,
    slides=slides,
    decode=DecodeLayout("transformers.models.qwen3.modeling_qwen3", "Qwen3"),
    tensor_plan={**DENSE_TENSOR_PLAN, **HEAD_NORMS_TENSOR_PLAN},
    public={
        "qwen3-0.6b": _public(28, 1024, 16, 3072),
        "qwen3-1.7b": _public(28, 2048, 16, 6144),
        "qwen3-4b": _public(36, 2560, 32, 9728),
        "qwen3-8b": _public(36, 4096, 32, 12288, tied=False),
    },
)
