"""The decoder of Qwen2.5-VL: Qwen2 with positions of three axes."""

from hone.families.qwen2 import slides
from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, ModelSpec

SPEC = ModelSpec(
    model_type="qwen2_5_vl_text",
    qkv_bias=True,
    slides=slides,
    decode=DecodeLayout(
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "Qwen2_5_VL",
        backbone="TextModel",
        mlp="Qwen2MLP",
    ),
    tensor_plan=DENSE_TENSOR_PLAN,
)
