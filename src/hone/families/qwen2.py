"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, Json, ModelSpec, listed_or

__all__ = ["SPEC", "slides"]


def slides(config: Json, layer: int) -> bool:
    """Layers from `max_window_layers` on are windowed."""
    first = config.get("max_window_layers", config["num_hidden_layers"])
    return listed_or(config, layer, layer >= first)


SPEC = ModelSpec(
    model_type="qwen2",
    qkv_bias=True,
    slides=slides,
    decode=DecodeLayout("transformers.models.qwen2.modeling_qwen2", "Qwen2"),
    tensor_plan=DENSE_TENSOR_PLAN,
)
