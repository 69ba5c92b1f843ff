"""Sizes of models with recurrent layers: against transformers, the tensors that hone computes, and
counting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from hone.attention.recurrent.convolution import convolve
from hone.attention.recurrent.delta_rule import Tokens, chunked
from hone.families import qwen3_5_moe_text
from hone.families.model_facts import ModelFacts
from hone.families.qwen3_5_text import SPEC
from hone.families.shape import ModelShape, public_shape
from hone.families.stages import RECURRENCE, layer_costs, stage_layers
from hone.segments import CHUNK
from hone.trainer.batcher import Batcher
from hone.trainer.settings import TrainerConfig
from tests.tables import table
from tests.trainer.examples import tiny_model

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 97,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "every fourth": {},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "listed": {"layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"]},
    "without recurrence": {"layer_types": ["full_attention"] * 5},
}


def assert_as_transformers(config: Any, shape: ModelShape) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    expected = sorted(tuple(p.shape) for p in model.parameters())
    assert sorted(size for t in shape.tensors() for size in [t.size] * t.count) == expected
    assert shape.recurrent is not None
    assert [*shape.recurrent.indices] == [
        i for i, x in enumerate(model.model.layers) if hasattr(x, "linear_attn")
    ]


@table("case", VARIANTS)
def test_a_tiny_model_has_transformers_parameters(case: str) -> None:
    config = AutoConfig.for_model("qwen3_5_text", **{**TINY, **VARIANTS[case]})
    assert_as_transformers(config, ModelShape.from_config(config.to_dict()))


@table("name", SPEC.public)
def test_public_decoders_have_transformers_parameters(name: str) -> None:
    """Whatever whole model has the name."""
    config = SPEC.public[name]
    shape = ModelShape.from_config(config)
    assert_as_transformers(AutoConfig.for_model(**config), shape)
    found = public_shape(name)
    assert found is not None
    assert found.num_params == shape.num_params


def test_public_sizes_are_those_that_were_published() -> None:
    """The checkpoint of 9B has 9,653,104,368 parameters: 456,010,480 of its tower, and a layer of
    multi-token prediction with a product of its own. The decoder of 27B has 26,895,998,464."""
    found = {
        name: ModelShape.from_config(config).num_params for name, config in SPEC.public.items()
    }
    prediction = 2 * 4096**2 + 4096 * (8192 + 2 * 1024 + 4096 + 3 * 12_288) + 5 * 4096 + 512
    assert found["qwen3.5-9b"] + 456_010_480 + prediction == 9_653_104_368
    assert found["qwen3.5-27b"] == found["qwen3.8-27b"] == 26_895_998_464


PUBLISHED = {
    "qwen3.5-35b-a3b": (35_951_822_704, 446_571_248),
    "qwen3.5-122b-a10b": (125_086_497_008, 451_290_864),
    "qwen3.5-397b-a17b": (403_397_928_944, 456_010_480),
}
"""Parameters of the checkpoint, and those of its tower."""


@table("name", PUBLISHED)
def test_public_mixtures_have_what_was_published(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**qwen3_5_moe_text.SPEC.public[name])
        )
    hidden = model.config.hidden_size
    layer = sum(p.numel() for p in model.model.layers[3].parameters())
    prediction = layer + 2 * hidden**2 + 3 * hidden
    total, tower = PUBLISHED[name]
    assert sum(p.numel() for p in model.parameters()) + tower + prediction == total


NAMES = (
    "Qwen/Qwen3.5-0.8B",
    "Qwen/Qwen3.5-2B-Base",
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B-Base",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.8-27B",
)


@table("name", NAMES)
def test_hub_names_are_served(name: str) -> None:
    facts = ModelFacts.known(name)
    assert facts is not None
    assert (facts.family, facts.unserved) == ("qwen3_5_text", ())


def test_only_attention_keeps_keys_and_values() -> None:
    """By hand: 6 of the 24 layers of 0.8B have 2 heads of 256; 18 have 16 states of 128 x 128 in
    float32 and 3 tokens before the convolution of 6,144 channels."""
    shape = public_shape("qwen3.5-0.8b")
    assert shape is not None
    assert shape.kv_bytes_per_token() == 2 * 6 * 2 * 256 * 2
    assert shape.attention_flops_per_key == 4 * 6 * 8 * 256
    assert shape.state_bytes() == 18 * (4 * 16 * 128 * 128 + 2 * 3 * 6144)
    assert shape.state_bytes(4) == 18 * (4 * 16 * 128 * 128 + 4 * 3 * 6144)
    facts = ModelFacts.from_config({**SPEC.public["qwen3.5-0.8b"]})
    assert facts.kv_bytes_per_token("bfloat16") == 12_288


def test_states_are_the_tensors_that_layers_leave() -> None:
    config = {**TINY, "model_type": "qwen3_5_text"}
    shape = ModelShape.from_config({**config, "linear_conv_kernel_dim": 4})
    own = shape.recurrent
    assert own is not None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, own.num_channels, generator=draw).bfloat16()
    mixed, tail = convolve(x, torch.randn(own.num_channels, 4).bfloat16(), [7], None)
    keys = own.num_key_heads * own.key_dim
    q, k, v = mixed.split((keys, keys, own.num_value_heads * own.value_dim), -1)
    tokens = Tokens(
        q.unflatten(-1, (-1, own.key_dim)),
        k.unflatten(-1, (-1, own.key_dim)),
        v.unflatten(-1, (-1, own.value_dim)),
        -torch.rand(7, own.num_value_heads, generator=draw),
        torch.rand(7, own.num_value_heads, generator=draw),
    )
    _, state = chunked(tokens, [7], None)
    assert shape.state_bytes(2) == len(own.indices) * (state.nbytes + tail.nbytes)


def test_flops_of_the_recurrence_are_those_of_its_chunks() -> None:
    """torch counts the products of `chunked` whole and its triangular system not at all: half of
    the pairs of a chunk count, and the system's C^2 (K + V)."""
    heads, key_dim, value_dim, num_chunks = 4, 8, 12, 3
    num_tokens = num_chunks * CHUNK
    draw = torch.Generator().manual_seed(0)
    tokens = Tokens(
        torch.randn(num_tokens, 2, key_dim, generator=draw),
        torch.randn(num_tokens, 2, key_dim, generator=draw),
        torch.randn(num_tokens, heads, value_dim, generator=draw),
        -torch.rand(num_tokens, heads, generator=draw),
        torch.rand(num_tokens, heads, generator=draw),
    )
    with FlopCounterMode(display=False) as counter:
        chunked(tokens, [num_tokens], None)
    pairs = CHUNK**2 * heads * num_chunks
    expected = counter.get_total_flops() - pairs * (2 * key_dim + value_dim)
    expected += pairs * (key_dim + value_dim)
    config = {**TINY, "model_type": "qwen3_5_text", "linear_conv_kernel_dim": 4}
    shape = ModelShape.from_config(config)
    num_layers = len(shape.recurrent_indices)
    assert shape.recurrence_flops_per_token * num_tokens == num_layers * expected


def test_flops_grow_with_the_square_in_attention_alone() -> None:
    shape = public_shape("qwen3.5-0.8b")
    assert shape is not None
    n = 4096
    linear = 2 * (shape.body_params + shape.head_params) + shape.recurrence_flops_per_token
    assert shape.forward_flops([n]) == pytest.approx(linear * n + 4 * 6 * 8 * 256 * n * n / 2)
    recurrent = shape.part(shape.recurrent_indices)
    assert recurrent.forward_flops([2 * n]) == 2 * recurrent.forward_flops([n])
    assert recurrent.kv_bytes_per_token() == 0


def test_parts_have_what_the_whole_has() -> None:
    shape = ModelShape.from_config({**SPEC.public["qwen3.5-2b"], "num_hidden_layers": 10})
    parts = [shape.part(range(3)), shape.part(range(3, 7)), shape.part((7, 8, 9))]
    assert [x.num_layers for x in parts] == [3, 4, 3]
    assert [x.recurrent_indices for x in parts] == [(0, 1, 2), (1, 2, 3), (1, 2)]
    for name in ("attention_flops_per_key", "recurrence_flops_per_token", "num_attention_layers"):
        assert sum(getattr(x, name) for x in parts) == getattr(shape, name)
    assert sum(x.state_bytes() for x in parts) == shape.state_bytes()
    ends = shape.hidden_size  # of the final norm
    assert sum(x.body_params - ends for x in parts) == shape.body_params - ends


def test_stages_hold_layers_of_both_kinds_by_their_cost() -> None:
    """By hand: of 2B a recurrent layer has 35.8 million weights in its mixer and a recurrence of
    2.2 million FLOPs, an attention layer 16.8 million weights."""
    shape = ModelShape.from_config(SPEC.public["qwen3.5-2b"])
    recurrent, attention = layer_costs(shape)[2:4]
    assert layer_costs(shape) == (recurrent, recurrent, recurrent, attention) * 6
    mlp = 3 * 2048 * 6144
    own = 2048 * (6144 + 2048 + 16 + 16 + 2048) + 4 * 6144
    expected = 2 * (own + mlp) + RECURRENCE * shape.recurrence_flops_per_token / 18
    assert recurrent == pytest.approx(expected, rel=1e-3)
    width = 8 * 256
    expected = 2 * (2048 * (2 * width + 2 * 512 + width) + mlp) + 2.5 * 4 * width * 1024
    assert attention == pytest.approx(expected, rel=1e-3)
    (first,), (second,) = stage_layers(shape, 2, has_head=False)
    assert len(first) == len(second) == 12


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_passes_are_balanced_by_what_rows_cost(family: str) -> None:
    """With tied weights each parameter is used once a token, so that costs are FLOPs."""
    fields = {name: value for name, value in TINY.items() if name.startswith("linear")}
    model = tiny_model(family, num_hidden_layers=5, **(fields if family == "qwen3_5_text" else {}))
    shape = ModelShape.from_config(model.config.to_dict())
    cost = Batcher.of(TrainerConfig(), model).cost
    for n in (1, 100, 4000):
        assert cost(n) == pytest.approx(shape.forward_flops([n]), rel=1e-12)
