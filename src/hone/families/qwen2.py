"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, Json, ModelSpec, listed_or, sizes

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
    public={
        f"qwen2.5-{name}": sizes("qwen2", numbers, vocab, context=32_768, tied=tied)
        for name, tied, numbers, vocab in (
            ("0.5b", True, (24, 896, 14, 2, 4864), 151_936),
            ("1.5b", True, (28, 1536, 12, 2, 8960), 151_936),
            ("3b", True, (36, 2048, 16, 2, 11008), 151_936),
            ("7b", False, (28, 3584, 28, 4, 18944), 152_064),
            ("14b", False, (48, 5120, 40, 8, 13824), 152_064),
            ("32b", False, (64, 5120, 40, 8, 27648), 152_064),
            ("72b", False, (80, 8192, 64, 8, 29568), 152_064),
        )
    },
)
