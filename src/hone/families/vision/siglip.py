"""Size and work of SigLIP, the tower of Gemma 3 and SmolVLM."""

from __future__ import annotations

from hone.families.spec import Json
from hone.families.vision.spec import TowerCost, work_values

__all__ = ["siglip_cost"]


def siglip_cost(
    vision: Json,
    *,
    projection: int,
    projection_flops: float,
    patches_per_token: int,
    tokens_per_image: int | None = None,
) -> TowerCost:
    """Cost of a tower of this `vision_config`, with a projection of so many parameters that takes
    so many FLOPs a patch."""
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    depth, patch = vision["num_hidden_layers"], vision["patch_size"]
    side = vision["image_size"] // patch
    embed = 3 * patch**2 * hidden
    products = 4 * hidden**2 + 2 * hidden * inner
    small = 4 * hidden + 4 * hidden + inner + hidden
    return TowerCost(
        num_params=embed
        + hidden
        + side**2 * hidden
        + depth * (products + small)
        + 2 * hidden
        + projection,
        flops_per_patch=2.0 * (embed + depth * products) + projection_flops,
        attention_flops_per_pair=4.0 * hidden * depth,
        patches_per_token=patches_per_token,
        tokens_per_image=tokens_per_image,
        values_per_patch=work_values(pixels=3 * patch**2, hidden=hidden, inner=inner),
    )
