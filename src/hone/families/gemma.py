"""Gemma: a scaled embedding, norms of weight 1 + w, and the activation gelu."""

from hone.families.spec import ModelSpec

SPEC = ModelSpec(model_type="gemma", tied=True, head_dim=256)
