"""Mistral: Llama with one sliding window for all layers."""

from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, ModelSpec

SPEC = ModelSpec(
    model_type="mistral",
    slides=lambda config, layer: True,
    decode=DecodeLayout("transformers.models.mistral.modeling_mistral", "Mistral"),
    tensor_plan=DENSE_TENSOR_PLAN,
)
