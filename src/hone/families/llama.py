"""Llama: the layout that the other dense families vary."""

from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, ModelSpec

SPEC = ModelSpec(
    model_type="llama",
    decode=DecodeLayout("transformers.models.llama.modeling_llama", "Llama"),
    tensor_plan=DENSE_TENSOR_PLAN,
)
