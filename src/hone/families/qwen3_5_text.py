"""The decoder of Qwen3.5: three of four layers have gated linear attention, the fourth has gated
attention with head norms and rotates a quarter of each head."""

from hone.families.spec import PROJECTIONS, RECURRENT_PROJECTIONS, DecodeLayout, ModelSpec

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
    lora_targets=(*PROJECTIONS, *RECURRENT_PROJECTIONS),
)
