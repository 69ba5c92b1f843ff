"""The decoder of Qwen3.5 with experts: layers as in `qwen3_5_text`, each with a mixture of experts
in place of the MLP, and a shared expert behind a gate. Qwen3.6 35B-A3B is a model of the family
too. It has no fused layers and no tensor plan: generation runs transformers' modules, and tensor
parallelism cannot divide its layers.
"""

from __future__ import annotations

from hone.families.qwen3_5_text import decoder_sizes
from hone.families.spec import (
    PROJECTIONS,
    RECURRENT_PROJECTIONS,
    ExpertLayout,
    Json,
    ModelSpec,
)


def _public(
    numbers: tuple[int, int, int, int], *, value_heads: int, experts: tuple[int, int, int]
) -> Json:
    """`numbers` lack the size of an MLP, which no layer has; `experts` are their number, those of a
    token, and the size of each and of the shared one."""
    number, per_token, size = experts
    config = decoder_sizes(
        "qwen3_5_moe_text",
        (*numbers, 0),
        value_heads=value_heads,
        tied=False,
        num_experts=number,
        num_experts_per_tok=per_token,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=size,
    )
    return {name: value for name, value in config.items() if name != "intermediate_size"}


_35B = _public((40, 2048, 16, 2), value_heads=32, experts=(256, 8, 512))

SPEC = ModelSpec(
    model_type="qwen3_5_moe_text",
    head_norms=True,
    head_dim=256,
    is_hybrid=True,
    gated_attention=True,
    experts=ExpertLayout(
        has_experts=lambda config, layer: True, gated_shared="shared_expert_intermediate_size"
    ),
    lora_targets=(*PROJECTIONS, *RECURRENT_PROJECTIONS),
    gives_values=False,
    public={
        "qwen3.5-35b-a3b": _35B,
        "qwen3.6-35b-a3b": _35B,
        "qwen3.5-122b-a10b": _public((48, 3072, 32, 2), value_heads=64, experts=(256, 8, 1024)),
        "qwen3.5-397b-a17b": _public((60, 4096, 32, 2), value_heads=64, experts=(512, 10, 1024)),
    },
)
