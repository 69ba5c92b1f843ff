"""Layers of experts against a loop over tokens in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from hone.checkpoint.export import export_hf
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.families.shape import public_shape
from hone.models.experts import Experts, SigmoidScores, route, router_logits
from hone.models.fused_layers import is_fusible
from hone.models.load import load_deferred, load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from tests.models.families import family_folder, family_model, random_samples
from tests.tables import table

TOLERANCE = 1e-5
NAMES = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")


def block() -> Qwen3MoeSparseMoeBlock:
    """With grouped products, as training and sampling have it."""
    model = family_model("qwen3_moe")
    assert model.config._experts_implementation == "grouped_mm"
    return model.base_model.layers[1].mlp


def one_by_one(x: Tensor, gate: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    """[T, H] to [T, H]: each token through its experts, weighted by their shares of the scores."""
    found = []
    for token in x:
        scores = (gate @ token).softmax(0)
        chosen = scores.argsort(descending=True)[:top_k]
        shares = scores[chosen] / scores[chosen].sum()
        outs = []
        for e in chosen:
            left, right = (gate_up[e] @ token).chunk(2)
            outs.append(down[e] @ (silu(left) * right))
        found.append(torch.stack(outs).mul(shares[:, None]).sum(0))
    return torch.stack(found)


def errors(layer: Qwen3MoeSparseMoeBlock, x: Tensor) -> dict[str, float]:
    """Of outputs and gradients, largest, relative to the largest value of each."""
    weights = dict(layer.named_parameters())
    doubles = [weights[name].detach().double().requires_grad_() for name in NAMES]
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    outputs = [
        layer(inputs[0][None])[0],
        one_by_one(inputs[1], *doubles, top_k=layer.gate.top_k),
    ]
    factors = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad(
        (outputs[0] * factors).sum(), [inputs[0], *(weights[n] for n in NAMES)]
    )
    theirs = torch.autograd.grad((outputs[1] * factors).sum(), [inputs[1], *doubles])
    pairs = zip([outputs[0], *ours], [outputs[1], *theirs], strict=True)
    return {
        name: float((a - b).abs().max() / b.abs().max())
        for name, (a, b) in zip(("output", "input", *NAMES), pairs, strict=True)
    }


@pytest.fixture
def x() -> Tensor:
    return torch.randn(17, 32, generator=torch.Generator().manual_seed(1))


def test_each_token_passes_its_experts(x: Tensor) -> None:
    assert max(errors(block(), x).values()) < TOLERANCE


def test_a_gated_shared_expert_is_added(x: Tensor) -> None:
    """Of Qwen3.5: each token passes it too, times the sigmoid of its gate."""
    layer: Any = family_model("qwen3_5_moe_text").base_model.layers[0].mlp
    names = [name for name, _ in layer.named_parameters()]
    own = dict(layer.named_parameters())
    doubles = {name: own[name].detach().double().requires_grad_() for name in names}
    left, right, down = (
        doubles[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    wide = inputs[1]
    expected = one_by_one(wide, *(doubles[n] for n in NAMES), top_k=layer.gate.top_k)
    shared = (silu(wide @ left.T) * (wide @ right.T)) @ down.T
    expected = expected + (wide @ doubles["shared_expert_gate.weight"].T).sigmoid() * shared
    output = layer(inputs[0][None])[0]
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    ours = torch.autograd.grad((output * factors).sum(), [inputs[0], *own.values()])
    theirs = torch.autograd.grad((expected * factors).sum(), [inputs[1], *doubles.values()])
    for name, a, b in zip(
        ("output", "input", *names), (output, *ours), (expected, *theirs), strict=True
    ):
        assert float((a - b).detach().abs().max() / b.detach().abs().max()) < TOLERANCE, name


def test_all_tokens_to_the_same_experts(x: Tensor) -> None:
    """Four of six are without tokens, and without gradients."""
    layer, x = block(), x.abs()
    with torch.no_grad():
        layer.gate.weight[:2] += 1.0
    assert max(errors(layer, x).values()) < TOLERANCE
    layer(x[None]).sum().backward()
    assert layer.experts.down_proj.grad is not None
    assert [bool(own.any()) for own in layer.experts.down_proj.grad] == [True] * 2 + [False] * 4


def test_scores_without_a_gradient_are_seen(x: Tensor) -> None:
    """The mistake: shares are read from what choosing left, apart from the scores."""
    forward = Qwen3MoeTopKRouter.forward

    def cut(self: Qwen3MoeTopKRouter, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, shares, chosen = forward(self, hidden)
        return logits, shares.detach() + 0 * logits.sum(), chosen

    with patch.object(Qwen3MoeTopKRouter, "forward", cut):
        assert errors(block(), x)["gate.weight"] > 0.1


PUBLIC = (
    ("qwen3-30b-a3b", 30.5, 3.35),
    ("qwen3-235b-a22b", 235.1, 22.2),
    # Without the layer that predicts further tokens, which is not loaded.
    ("glm-4.5-air", 106.85, 13.42),
    ("glm-4.5", 352.8, 33.63),
    ("qwen3.5-35b-a3b", 34.66, 3.455),
    ("qwen3.5-397b-a17b", 396.35, 17.35),
)


def test_public_models_have_the_parameters_of_their_names() -> None:
    for name, total, active in PUBLIC:
        shape = public_shape(name)
        assert shape is not None
        assert shape.num_params / 1e9 == pytest.approx(total, rel=0.002)
        per_token = shape.active_body_params + 2 * shape.head_params
        assert per_token / 1e9 == pytest.approx(active, rel=0.002)
        products = shape.forward_flops([1]) - shape.mixing_flops([1])
        assert products == pytest.approx(2 * (shape.active_body_params + shape.head_params))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(
        tmp_path / "model",
        family="qwen3_moe",
        hidden_size=16,
        num_layers=1,
        moe_intermediate_size=8,
        num_experts=3,
        num_experts_per_tok=2,
    )


EXPERT = "model.layers.0.mlp.experts.1.up_proj.weight"


def test_a_folder_without_a_tensor_of_an_expert_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[EXPERT]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for load, told in ((load_model, "of some expert"), (load_deferred, EXPERT)):
        with pytest.raises(UserError, match=told):
            load(ModelConfig(path=str(folder)), device="cpu", seed=0)


def test_files_hold_each_expert_by_itself(folder: Path) -> None:
    """As public models have them."""
    tensors = load_file(folder / "model.safetensors")
    model = load_model(ModelConfig(path=str(folder)), device="cpu", seed=0)
    gate_up = model.base_model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(gate_up[1, 8:], tensors[EXPERT])
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_moe"


def test_what_corrects_choices_keeps_its_format(tmp_path: Path) -> None:
    """Rounded to bfloat16 beside the weights, it would choose other experts."""
    folder = family_folder("glm4_moe")
    cfg = ModelConfig(path=str(folder), dtype="bfloat16")
    model = load_model(cfg, device="cpu", seed=0)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert model.config._experts_implementation == "grouped_mm"
    bias = model.get_buffer(name)
    assert (bias.dtype, model.dtype) == (torch.float32, torch.bfloat16)
    bias.copy_(torch.linspace(0.1, 0.7, len(bias)))
    weights = export_weights(model)
    tokenizer = make_char_tokenizer("ab")
    mesh = Mesh.alone(torch.device("cpu"))
    out = export_hf(model, tokenizer, tmp_path / "out", torch.bfloat16, weights, mesh=mesh)
    found = load_file(out / "model.safetensors")
    assert torch.equal(found[name], bias)
    assert found["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.bfloat16
    again = load_model(ModelConfig(path=str(out), dtype="bfloat16"), device="cpu", seed=0)
    assert torch.equal(again.get_buffer(name), bias)


@table("groups", [(1, 1), (4, 2)])
@table("normalises", [True, False])
def test_sigmoid_choices_and_weights_are_those_of_transformers(
    groups: tuple[int, int], normalises: bool
) -> None:
    config = AutoConfig.for_model(
        "glm4_moe",
        hidden_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=normalises,
        routed_scaling_factor=2.5,
    )
    router = Glm4MoeTopkRouter(config)
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.normal_(std=0.3)
    x = torch.randn(40, 32)
    own = Experts(
        router=router.weight,
        gate_up=torch.empty(0),
        down=torch.empty(0),
        per_token=3,
        normalises=normalises,
        sigmoid=SigmoidScores(router.e_score_correction_bias, *groups, scale=2.5),
    )
    with torch.no_grad():
        _, expected, chosen = router(x)
        ids, weights = route(router_logits(x, own), own)
    order, other = ids.argsort(-1), chosen.argsort(-1)
    assert torch.equal(ids.gather(-1, order), chosen.gather(-1, other))
    torch.testing.assert_close(weights.gather(-1, order), expected.gather(-1, other))
    by_scores = route(router_logits(x, own), replace(own, sigmoid=None))[0]
    assert not torch.equal(by_scores.sort(-1).values, ids.sort(-1).values), "the bias decides"


def test_glm4_moe_is_sampled_with_fused_layers() -> None:
    assert is_fusible(family_model("glm4_moe"))


def test_packed_rows_with_experts_are_not_all_alike() -> None:
    """Else a mistake in who goes where would not be seen."""
    layer = block()
    (ids,) = random_samples([40])
    states = family_model("qwen3_moe").base_model.embed_tokens(ids)
    _, _, chosen = layer.gate(states)
    assert len({tuple(sorted(own)) for own in chosen.tolist()}) > 4
