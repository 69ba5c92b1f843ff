"""What specs say of families against transformers' classes and configurations."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hone.families.registry import (
    DENSE_FUSED_FAMILIES,
    FUSED_FAMILIES,
    SPECS,
    public_configs,
    spec_of,
    unserved,
)
from hone.families.shape import ModelShape, public_shape
from hone.families.spec import RECURRENT_TENSOR_PLAN
from hone.models.fused_layers import is_fusible
from hone.models.vision_decoders import own_class
from tests.models.families import FAMILY_FIELDS, family_model
from tests.tables import table

TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 80,
    "vocab_size": 97,
    "pad_token_id": None,
}
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
OWN_FIELDS = {name: {"full_attention_interval": 3} for name in HYBRIDS}
"""Fields with which a model of three layers has layers of each kind."""
STYLES = {"rows": "colwise", "columns": "rowwise", "shared": "replicated_with_grad_allreduce"}
"""What transformers' plans call the ways to split."""


def make_model(model_type, **fields):
    config = AutoConfig.for_model(model_type, **TINY | OWN_FIELDS.get(model_type, {}) | fields)
    kind = own_class(AutoModelForCausalLM, config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config) if kind is None else kind(config)


@table("name", SPECS)
def test_every_family_is_found_by_its_model_type_and_tested(name):
    assert spec_of(name).model_type == name
    assert name in FAMILY_FIELDS


@table("name", SPECS)
def test_families_are_divided_as_transformers_divides_them(name):
    plan = SPECS[name].tensor_plan
    if plan is None:
        assert name not in DENSE_FUSED_FAMILIES
        return
    # transformers has no plan for Qwen3-VL's, whose layers are Qwen3's.
    known = AutoConfig.for_model(name.replace("qwen3_vl_text", "qwen3")).base_model_tp_plan
    theirs = {k.removeprefix("layers.*."): v for k, v in known.items() if k.startswith("layers.*")}
    own = {"glm4_moe": {"use_qk_norm": True}, "qwen3_moe": {"mlp_only_layers": [0]}}
    layers = make_model(name, **own.get(name, {})).base_model.layers
    assert plan.keys() == {
        n for layer in layers for n, m in layer.named_modules() if [*m.parameters(recurse=False)]
    }
    # It divides the inside of each expert, and no heads of gated linear attention.
    otherwise = ("mlp.experts", "linear_attn")
    theirs = {k: v for k, v in theirs.items() if not k.startswith(otherwise)}
    plan = {k: v for k, v in plan.items() if k not in RECURRENT_TENSOR_PLAN}
    assert {k: STYLES[plan[k]] for k in theirs} == theirs
    rest = {k: "experts" if k == "mlp.experts" else "shared" for k in plan.keys() - theirs}
    assert {k: plan[k] for k in rest} == rest


@table("name", SPECS)
def test_tensors_of_a_shape_are_the_parameters_of_the_model(name):
    model = make_model(name)
    expected = sorted(tuple(parameter.shape) for parameter in model.parameters())
    shape = ModelShape.from_config(model.config.to_dict())
    found = sorted(size for t in shape.tensors() for size in [t.size] * t.count)
    assert found == expected


@table("name", SPECS)
def test_lora_targets_are_all_projections_of_a_layer(name):
    layers = make_model(name).base_model.layers
    # A gate of one output takes no adapter.
    linears = {
        n.rpartition(".")[2]
        for n, m in layers.named_modules()
        if type(m) is torch.nn.Linear and m.out_features > 1
    }
    assert set(SPECS[name].lora_targets) == linears


WINDOWS = {
    "mistral": ({"sliding_window": 5}, (5, 5, 5)),
    "mistral, listed": ({"sliding_window": 5, "layer_types": ["full_attention"] * 3}, (5, 5, 5)),
    "mistral, none": ({"sliding_window": None}, (None, None, None)),
    "qwen2": (
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
        (None, 5, 5),
    ),
    "qwen2, off": ({"sliding_window": 5, "max_window_layers": 1}, (None, None, None)),
    "qwen3": (
        {
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        (5, None, 5),
    ),
}


@table("name", SPECS)
def test_windows_are_those_of_transformers_layers(name):
    """Where `config.json` lists the layers that have one, and where it does not."""
    fields = {"num_hidden_layers": 9, "sliding_window": 5, "use_sliding_window": True}
    model = make_model(name, **fields)
    owners = [
        model.config if name == "mistral" else getattr(layer, "self_attn", None)
        for layer in model.base_model.layers
    ]
    expected = tuple(
        getattr(owner, "sliding_window", None) if getattr(owner, "is_sliding", True) else None
        for owner in owners
    )
    listed = model.config.to_dict()
    for config in (listed, listed | {"layer_types": None}):
        assert SPECS[name].layer_windows(config) == expected


@table("name", FUSED_FAMILIES)
def test_the_fused_decode_knows_transformers_classes(name):
    assert is_fusible(family_model(name))


@table("case", WINDOWS)
def test_windows_of_configurations_that_say_more(case):
    fields, expected = WINDOWS[case]
    name = case.partition(",")[0]
    model = make_model(name, **fields)
    assert SPECS[name].layer_windows(model.config.to_dict()) == expected
    for layer, window in zip(model.base_model.layers, expected, strict=True):
        owner = model.config if name == "mistral" else layer.self_attn
        assert getattr(owner, "sliding_window", None) == window


def test_public_models_have_shapes():
    assert {"qwen3-0.6b", "qwen2.5-7b", "llama-3.1-70b", "mistral-7b-v0.3"} <= {*public_configs()}
    assert public_shape("qwen3-8b").num_params == 8_190_735_360
    assert public_shape("qwen3-8b-base") == public_shape("qwen3-8b")
    assert public_shape("meta-llama-3.1-8b-instruct") == public_shape("llama-3.1-8b")
    assert public_shape("qwen9") is None


def test_a_family_without_a_spec_has_the_sizes_of_a_dense_decoder():
    config = {**TINY, "max_position_embeddings": 64, "sliding_window": 5}
    like_llama = ModelShape.from_config(config | {"model_type": "llama"})
    shape = ModelShape.from_config(config | {"model_type": "nonesuch"})
    assert shape.num_params == like_llama.num_params
    assert (shape.num_sliding_layers, shape.sliding_window) == (3, 5)
    assert unserved(config | {"model_type": "nonesuch"}) == []
    with pytest.raises(ValueError, match="nonesuch model lacks 'num_attention_heads'"):
        ModelShape.from_config({"model_type": "nonesuch", "hidden_size": 4})


UNSERVED = {
    "experts": ({"n_routed_experts": 8}, "n_routed_experts=8"),
    "images": ({"vision_config": {"depth": 2}}, "vision_config"),
    "latent attention": ({"kv_lora_rank": 8}, "kv_lora_rank=8"),
    "no size of its MLP": ({"intermediate_size": None}, "no intermediate_size"),
    "recurrent layers": (
        {"layer_types": ["linear_attention"]},
        "layer_types=['linear_attention']",
    ),
}


@table("case", UNSERVED)
def test_what_a_family_without_a_spec_may_not_ask_for(case):
    fields, told = UNSERVED[case]
    config = {**TINY, "model_type": "nonesuch", "max_position_embeddings": 64}
    assert unserved(config | fields) == [told]
