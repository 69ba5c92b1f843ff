"""Seed-OSS: Llama with biases of queries, keys and values.

Its configurations name rates of dropout; training here drops nothing out, of any family.
"""

from hone.families.spec import DENSE_TENSOR_PLAN, UNSERVED_FIELDS, DecodeLayout, ModelSpec

SPEC = ModelSpec(
    model_type="seed_oss",
    qkv_bias=True,
    head_dim=128,
    decode=DecodeLayout("transformers.models.seed_oss.modeling_seed_oss", "SeedOss"),
    tensor_plan=DENSE_TENSOR_PLAN,
    unserved_fields=(*(set(UNSERVED_FIELDS) - {"attention_dropout"}), "attention_out_bias"),
)
