"""Mistral: Llama with one sliding window for all layers."""

from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, ModelSpec, sizes

SPEC = ModelSpec(
    model_type="mistral",
    slides=lambda config, layer: True,
    decode=DecodeLayout("transformers.models.mistral.modeling_mistral", "Mistral"),
    tensor_plan=DENSE_TENSOR_PLAN,
    public={
        "mistral-7b-v0.3": {
            **sizes("mistral", (32, 4096, 32, 8, 14336), 32_768, context=32_768, tied=False),
            "sliding_window": None,
        }
    },
)
