"""Qwen3-MoE: Qwen3 with experts in place of the MLP of most layers."""

from hone.families.spec import (
    DENSE_TENSOR_PLAN,
    EXPERTS_TENSOR_PLAN,
    HEAD_NORMS_TENSOR_PLAN,
    DecodeLayout,
    ExpertLayout,
    Json,
    ModelSpec,
    sizes,
)

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _has_experts(config: Json, layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _public(numbers: tuple[int, int, int, int, int], expert_size: int) -> Json:
    dense = sizes("qwen3_moe", numbers, 151_936, head_dim=128, context=40_960, tied=False)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_size}
    return {**dense, **experts, "norm_topk_prob": True}


SPEC = ModelSpec(
    model_type="qwen3_moe",
    head_norms=True,
    head_dim=128,
    slides=lambda config, layer: True,
    decode=DecodeLayout("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3Moe"),
    experts=ExpertLayout(has_experts=_has_experts),
    tensor_plan={**DENSE_TENSOR_PLAN, **HEAD_NORMS_TENSOR_PLAN, **EXPERTS_TENSOR_PLAN},
    lora_targets=_ATTENTION,
    public={
        "qwen3-30b-a3b": _public((48, 2048, 32, 4, 6144), 768),
        "qwen3-235b-a22b": _public((94, 4096, 64, 4, 12288), 1536),
    },
)
