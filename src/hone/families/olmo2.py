"""OLMo 2: norms behind attention and MLP, and of all query heads, and all key heads, at once."""

from hone.families.spec import ModelSpec

SPEC = ModelSpec(model_type="olmo2", head_norms=True, joint_head_norms=True)
