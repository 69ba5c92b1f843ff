"""GLM-4 MoE (GLM-4.5, GLM-4.5-Air): sigmoid routing, shared experts, MLPs in the first layers."""

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


def _public(numbers: tuple[int, int, int, int, int], **fields: Json | float) -> Json:
    dense = sizes("glm4_moe", numbers, 151_552, head_dim=128, context=131_072, tied=False)
    experts = {"num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True}
    return {**dense, **experts, "attention_bias": True, "partial_rotary_factor": 0.5, **fields}


SPEC = ModelSpec(
    model_type="glm4_moe",
    o_bias=False,
    head_norms=True,
    head_norms_switch="use_qk_norm",
    decode=DecodeLayout(
        "transformers.models.glm4_moe.modeling_glm4_moe",
        "Glm4Moe",
        mixture="MoE",
        router="TopkRouter",
    ),
    experts=ExpertLayout(
        has_experts=lambda config, layer: layer >= config.get("first_k_dense_replace", 1),
        numbers=("n_routed_experts", "num_local_experts"),
        shared="n_shared_experts",
        scores="sigmoid",
    ),
    tensor_plan={
        **DENSE_TENSOR_PLAN,
        **HEAD_NORMS_TENSOR_PLAN,
        **EXPERTS_TENSOR_PLAN,
        "mlp.shared_experts.gate_proj": "rows",
        "mlp.shared_experts.up_proj": "rows",
        "mlp.shared_experts.down_proj": "columns",
    },
    gives_values=False,
    public={
        "glm-4.5-air": _public(
            (46, 4096, 96, 8, 10_944),
            n_routed_experts=128,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            use_qk_norm=False,
            routed_scaling_factor=1.0,
        ),
        "glm-4.5": _public(
            (92, 5120, 96, 8, 12_288),
            n_routed_experts=160,
            moe_intermediate_size=1536,
            first_k_dense_replace=3,
            use_qk_norm=True,
            routed_scaling_factor=2.5,
        ),
    },
)
