"""EXAONE 4: head norms, norms after attention and MLP, and a window in three of four layers. The
other layers do not rotate queries and keys."""

from hone.families.spec import DENSE_TENSOR_PLAN, HEAD_NORMS_TENSOR_PLAN, ModelSpec, listed_or

SPEC = ModelSpec(
    model_type="exaone4",
    head_norms=True,
    slides=lambda config, layer: listed_or(config, layer, (layer + 1) % 4 != 0),
    tensor_plan={
        **{name: split for name, split in DENSE_TENSOR_PLAN.items() if name != "input_layernorm"},
        **HEAD_NORMS_TENSOR_PLAN,
        "post_feedforward_layernorm": "shared",
    },
)
