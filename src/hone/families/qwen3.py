"""Qwen3: Llama with norms of query and key heads."""

from hone.families.qwen2 import slides
from hone.families.spec import (
    DENSE_TENSOR_PLAN,
    HEAD_NORMS_TENSOR_PLAN,
    DecodeLayout,
    ModelSpec,
    sizes,
)

SPEC = ModelSpec(
    model_type="qwen3",
    head_norms=True,
    head_dim=128,
    slides=slides,
    decode=DecodeLayout("transformers.models.qwen3.modeling_qwen3", "Qwen3"),
    tensor_plan={**DENSE_TENSOR_PLAN, **HEAD_NORMS_TENSOR_PLAN},
    public={
        f"qwen3-{name}": sizes("qwen3", numbers, 151_936, head_dim=128, context=40_960, tied=tied)
        for name, tied, numbers in (
            ("0.6b", True, (28, 1024, 16, 8, 3072)),
            ("1.7b", True, (28, 2048, 16, 8, 6144)),
            ("4b", True, (36, 2560, 32, 8, 9728)),
            ("8b", False, (36, 4096, 32, 8, 12288)),
            ("14b", False, (40, 5120, 40, 8, 17408)),
            ("32b", False, (64, 5120, 64, 8, 25600)),
        )
    },
)
