"""OLMo 3: OLMo 2 with a window in three of four layers."""

from hone.families.spec import ModelSpec, listed_or

SPEC = ModelSpec(
    model_type="olmo3",
    head_norms=True,
    joint_head_norms=True,
    slides=lambda config, layer: listed_or(config, layer, (layer + 1) % 4 != 0),
)
