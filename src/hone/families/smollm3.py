"""SmolLM3: Llama in which every fourth layer does not rotate queries and keys."""

from hone.families.spec import DENSE_TENSOR_PLAN, ModelSpec, listed_or

SPEC = ModelSpec(
    model_type="smollm3",
    tied=True,
    slides=lambda config, layer: listed_or(config, layer, not config["no_rope_layers"][layer]),
    tensor_plan=DENSE_TENSOR_PLAN,
)
