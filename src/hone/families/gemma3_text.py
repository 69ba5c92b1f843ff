"""Gemma 3, its text model: Gemma 2 with head norms, and a window in five of six layers."""

from hone.families.spec import UNSERVED_FIELDS, Json, ModelSpec, listed_or


def _slides(config: Json, layer: int) -> bool:
    return listed_or(config, layer, (layer + 1) % config.get("sliding_window_pattern", 6) != 0)


SPEC = ModelSpec(
    model_type="gemma3_text",
    norms_per_layer=4,
    head_norms=True,
    tied=True,
    head_dim=256,
    slides=_slides,
    unserved_fields=UNSERVED_FIELDS,
)
