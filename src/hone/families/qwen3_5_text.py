"""The decoder of Qwen3.5: three of four layers have gated linear attention, the fourth has gated
attention with head norms and rotates a quarter of each head. Qwen3.6 27B and Qwen3.8 27B are models
of the family too, with the sizes of Qwen3.5 27B.
"""

from __future__ import annotations

from typing import Any

from hone.families.spec import (
    DENSE_TENSOR_PLAN,
    HEAD_NORMS_TENSOR_PLAN,
    PROJECTIONS,
    RECURRENT_PROJECTIONS,
    RECURRENT_TENSOR_PLAN,
    DecodeLayout,
    Json,
    ModelSpec,
    sizes,
)

__all__ = ["SPEC", "decoder_sizes"]

_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def decoder_sizes(
    model_type: str,
    numbers: tuple[int, int, int, int, int],
    *,
    value_heads: int,
    tied: bool,
    **fields: Any,
) -> Json:
    """The decoder's `config.json` of a public model with this `model_type`. `numbers` are those of
    `sizes`; `value_heads` are those of the recurrent layers."""
    return {
        **sizes(model_type, numbers, 248_320, context=262_144, tied=tied, head_dim=256),
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": _ROPE,
        **fields,
    }


_27B = decoder_sizes("qwen3_5_text", (64, 5120, 24, 4, 17_408), value_heads=48, tied=False)

SPEC = ModelSpec(
    model_type="qwen3_5_text",
    head_norms=True,
    head_dim=256,
    is_hybrid=True,
    gated_attention=True,
    decode=DecodeLayout(
        "transformers.models.qwen3_5.modeling_qwen3_5",
        "Qwen3_5",
        backbone="TextModel",
        rotary="TextRotaryEmbedding",
        has_zero_centred_norms=True,
    ),
    tensor_plan={**DENSE_TENSOR_PLAN, **HEAD_NORMS_TENSOR_PLAN, **RECURRENT_TENSOR_PLAN},
    lora_targets=(*PROJECTIONS, *RECURRENT_PROJECTIONS),
    public={
        **{
            f"qwen3.5-{name}": decoder_sizes("qwen3_5_text", numbers, value_heads=heads, tied=tied)
            for name, tied, numbers, heads in (
                ("0.8b", True, (24, 1024, 8, 2, 3584), 16),
                ("2b", True, (24, 2048, 8, 2, 6144), 16),
                ("4b", True, (32, 2560, 16, 4, 9216), 32),
                ("9b", False, (32, 4096, 16, 4, 12_288), 32),
            )
        },
        **dict.fromkeys(("qwen3.5-27b", "qwen3.6-27b", "qwen3.8-27b"), _27B),
    },
)
