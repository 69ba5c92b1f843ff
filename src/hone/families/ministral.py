"""Ministral: Mistral with a window in the layers that the config lists."""

from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, ModelSpec, listed_or

SPEC = ModelSpec(
    model_type="ministral",
    slides=lambda config, layer: listed_or(config, layer, default=True),
    decode=DecodeLayout("transformers.models.ministral.modeling_ministral", "Ministral"),
    tensor_plan=DENSE_TENSOR_PLAN,
)
