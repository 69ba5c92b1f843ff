"""The decoder of Qwen3-VL: Qwen3 with positions of three axes."""

from hone.families.spec import DENSE_TENSOR_PLAN, HEAD_NORMS_TENSOR_PLAN, DecodeLayout, ModelSpec

SPEC = ModelSpec(
    model_type="qwen3_vl_text",
    head_norms=True,
    head_dim=128,
    decode=DecodeLayout("transformers.models.qwen3_vl.modeling_qwen3_vl", "Qwen3VLText"),
    tensor_plan={**DENSE_TENSOR_PLAN, **HEAD_NORMS_TENSOR_PLAN},
)
