"""Weights as 8-bit codes with a scale for each row, against float64."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hone.families.shape import ModelShape
from hone.models import int8_rows
from hone.models.int8_rows import is_packed, pack_layers, pack_rows, unpack_rows
from hone.models.manifest import export_weights
from tests.tables import table

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4).map(lambda n: 16 * n))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(SIZES, DTYPES, st.integers(0, 10_000), st.floats(-12, 12), st.integers(0, 2))
def test_every_value_is_within_half_a_step_of_its_row(size, dtype, seed, power, outer):
    draw = torch.Generator().manual_seed(seed)
    shape = (*(2, 3)[:outer], *size)
    weight = (torch.randn(shape, generator=draw) * 10**power).to(dtype)
    weight[..., 0, :] = 0
    packed = pack_rows(weight)
    assert is_packed(packed)
    assert packed.shape == (*shape[:-1], size[-1] + 16)
    found = unpack_rows(packed, torch.float64)
    steps = weight.double().abs().amax(-1, keepdim=True) / 127
    # The scale is rounded too, to 24 bits, and the quotient where weights have fewer.
    slack = 1e-6 if dtype == torch.float32 else 2**-8
    assert ((found - weight.double()).abs() <= steps * (0.5 + 127 * slack)).all()
    assert not found[..., 0, :].any()
    assert torch.equal(pack_rows(unpack_rows(packed, torch.float32)), packed), "packs as it was"


def test_codes_are_the_nearest():
    weight = torch.randn(40, 64)
    codes = pack_rows(weight)[:, :64].double()
    scales = weight.abs().amax(1, keepdim=True).double() / 127
    exact = weight.double() / scales
    assert ((codes - exact).abs() <= 0.5 + 1e-4).all()
    assert codes.abs().amax(1).eq(127).all(), "the largest value of a row has the largest code"


def test_weights_are_rounded_some_at_a_time(monkeypatch):
    weight = torch.randn(7, 5, 48)[..., 16:]  # as a rank's part
    whole = pack_rows(weight)
    norm, sizes = torch.linalg.vector_norm, []

    def counted(part, *arguments, **options):
        sizes.append(len(part))
        return norm(part, *arguments, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    monkeypatch.setattr(int8_rows, "_AT_ONCE", 2 * 5 * 32 + 31)
    assert torch.equal(pack_rows(weight), whole)
    assert sizes == [2, 2, 2, 1]


def test_a_step_off_is_seen():
    """What the first test would not see, it does not test."""
    weight = torch.randn(4, 32)
    packed = pack_rows(weight)
    packed[0, 3] += 1
    found = unpack_rows(packed, torch.float64)
    steps = weight.double().abs().amax(-1, keepdim=True) / 127
    assert ((found - weight.double()).abs() > steps * 0.5001).any()


@table("family", ["qwen3", "qwen3_moe", "glm4_moe"])
def test_matrices_of_layers_are_packed_and_nothing_else(family):
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    if family == "qwen3_moe":
        fields |= {"num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
    elif family == "glm4_moe":
        fields |= {"n_routed_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
        fields |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
    config = AutoConfig.for_model(family, **fields, tie_word_embeddings=False)
    with torch.device("meta"):
        room = AutoModelForCausalLM.from_config(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain = {name: tensor.clone() for name, tensor in export_weights(model)}
    pack_layers(model)
    pack_layers(room)
    packed = {name for name, tensor in export_weights(model) if is_packed(tensor)}
    assert packed == {
        name
        for name, tensor in plain.items()
        if ".layers." in name and tensor.ndim > 1 and not name.endswith("mlp.gate.weight")
    }
    for name, tensor in export_weights(model):
        assert torch.equal(tensor, pack_rows(plain[name]) if name in packed else plain[name])
    shapes = {name: (tensor.shape, is_packed(tensor)) for name, tensor in export_weights(model)}
    assert shapes == {name: (t.shape, is_packed(t)) for name, t in export_weights(room)}
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert held == ModelShape.from_config(config.to_dict()).rank_bytes(1, 2, packs_rows=True)


def test_convolutions_of_a_hybrid_are_not_packed():
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    fields |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "vocab_size": 50}
    fields |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **fields))
    pack_layers(model)
    is_matrix = {
        name: ".layers." in name and parameter.ndim == 2
        for name, parameter in model.named_parameters()
    }
    assert is_matrix == {name: is_packed(p) for name, p in model.named_parameters()}
    assert any("conv1d" in name for name in is_matrix)
