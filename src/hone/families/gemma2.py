"""Gemma 2: Gemma with two more norms a layer, soft caps, and a window in every other layer."""

from hone.families.spec import UNSERVED_FIELDS, ModelSpec, listed_or

SPEC = ModelSpec(
    model_type="gemma2",
    norms_per_layer=4,
    tied=True,
    head_dim=256,
    slides=lambda config, layer: listed_or(config, layer, layer % 2 == 0),
    unserved_fields=UNSERVED_FIELDS,
)
