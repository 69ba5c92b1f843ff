"""Adapters on experts against a loop over tokens and experts with merged weights, in float64, and
against the merged model that engines and exports get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.checkpoint.export import export_adapter
from hone.distributed.mesh import Mesh
from hone.families.registry import SPECS
from hone.families.spec import EXPERT_MATRICES
from hone.models.adapted import adapters_off, merged_weights
from hone.models.adapters import LoraAdapters, adapt
from hone.models.expert_adapters import ExpertLora, GroupedExperts
from hone.models.manifest import export_weights
from hone.models.nf4 import dequantise, quantise
from hone.models.products import nf4_product
from hone.models.settings import LoraConfig
from tests.models.families import family_model
from tests.models.test_adapters import check_compiled, logits
from tests.tables import table

NUMBER, WIDTH, INNER = 6, 32, 24
FAMILIES = [name for name, spec in SPECS.items() if spec.experts is not None]
GATE_UP, DOWN = EXPERT_MATRICES
BOTH = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", GATE_UP, DOWN))
BOTH_4BIT = BOTH.model_copy(update={"load_in_4bit": True})


class Loop(nn.Module):
    """Experts with merged weights in float64, one token and one expert after the other."""

    def __init__(self, experts: Any, scaling: float) -> None:
        super().__init__()
        self.leaves: dict[str, Tensor] = {
            name: p.detach().double().requires_grad_(p.requires_grad)
            for name, p in experts.named_parameters()
        }
        for name, layer in experts.named_children():
            if isinstance(layer, ExpertLora):
                self.leaves[f"{name}.weight"] = layer.base_weight(torch.float32).double()
        self.scaling = scaling

    def matrix(self, name: str, expert: int) -> Tensor:
        if name in self.leaves:
            return self.leaves[name][expert]
        weight, a, b = (
            self.leaves[f"{name}.{leaf}"][expert] for leaf in ("weight", "lora_A", "lora_B")
        )
        return weight + self.scaling * b @ a

    def forward(self, hidden: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        outputs = [torch.zeros(WIDTH, dtype=torch.float64) for _ in hidden]
        for token, own in enumerate(ids.tolist()):
            for choice, expert in enumerate(own):
                gate, up = (self.matrix("gate_up_proj", expert) @ hidden[token]).chunk(2)
                inner = nn.functional.silu(gate) * up
                output = self.matrix("down_proj", expert) @ inner
                outputs[token] = outputs[token] + gates[token, choice] * output
        return torch.stack(outputs) if outputs else hidden


def experts_with(cfg: LoraConfig) -> Any:
    """Experts with adapters that say something, with a pair of its own for each."""
    torch.manual_seed(0)
    holder: Any = nn.Module()
    holder.act_fn = nn.SiLU()
    holder.gate_up_proj = nn.Parameter(torch.randn(NUMBER, 2 * INNER, WIDTH) / 6)
    holder.down_proj = nn.Parameter(torch.randn(NUMBER, WIDTH, INNER) / 5)
    holder.requires_grad_(False)
    for name in cfg.target_modules:
        layer = GroupedExperts.adapt(holder, name.rpartition(".")[2], cfg)
        layer.lora_A.data.normal_().div_(6)
        layer.lora_B.data.normal_()
    return holder


def choices(num_tokens: int) -> Tensor:
    """Ids of two experts of each token, in no order, none of which is the fourth."""
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randperm(NUMBER - 1, generator=draw)[:2] for _ in range(num_tokens)]
    return torch.stack(ids) + (torch.stack(ids) >= 3) if ids else torch.zeros(0, 2).long()


@table("num_tokens", [9, 1, 0])
@table("rank", [1, 3, 8, 16])
@table("names", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,)])
@table("is_4bit", [False, True])
def test_R8_a_layer_and_its_gradients_are_the_loop(is_4bit, names, rank, num_tokens):
    cfg = LoraConfig(rank=rank, alpha=6.0, target_modules=names, load_in_4bit=is_4bit)
    experts = experts_with(cfg)
    loop = Loop(experts, cfg.alpha / cfg.rank)
    ids, gates = choices(num_tokens), torch.rand(num_tokens, 2).requires_grad_()
    hidden = torch.randn(num_tokens, WIDTH).requires_grad_()
    upstream = torch.randn(num_tokens, WIDTH)
    wanted_in, wanted_gates = (x.detach().double().requires_grad_() for x in (hidden, gates))
    found, wanted = experts(hidden, ids, gates), loop(wanted_in, ids, wanted_gates)
    (found * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    close = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(found, wanted, **close)
    if num_tokens:
        torch.testing.assert_close(hidden.grad, wanted_in.grad, **close)
        torch.testing.assert_close(gates.grad, wanted_gates.grad, **close)
    for name, parameter in experts.named_parameters():
        leaf = loop.leaves[name]
        assert parameter.requires_grad == name.endswith(("lora_A", "lora_B"))
        if parameter.requires_grad:
            expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(parameter.grad, expected, **close)


def stir(model: PreTrainedModel) -> None:
    """Give all adapters something to say."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))


def test_four_bits_of_experts_are_those_of_each():
    """More of them than are computed with at once, in a memory of parts."""
    weight = torch.randn(37, 4, 48)
    codes, scales = quantise(weight)
    found = dequantise(codes, scales, (37, 4, 48), torch.bfloat16)
    for expert, own in enumerate(map(quantise, weight)):
        assert torch.equal(codes.view(37, -1)[expert], own[0])
        assert torch.equal(scales.view(37, -1)[expert], own[1])
        assert torch.equal(found[expert], dequantise(*own, (4, 48), torch.bfloat16))
    with pytest.raises(ValueError, match="whole number of blocks"):
        quantise(torch.ones(64, 3, 5))


def test_products_in_four_bits_take_a_gradient_that_is_expanded():
    weight = torch.randn(3, 16, 64)
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    codes, scales = quantise(weight)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    nf4_product(x, codes, scales, weight.shape, ends).sum().backward()
    own = dequantise(codes, scales, (3, 16, 64), torch.bfloat16).sum(1)
    torch.testing.assert_close(x.grad, own[[0, 0, 2, 2, 2, 2, 2, 2]], rtol=2e-2, atol=2e-2)


def adapted(family: str, cfg: LoraConfig = BOTH) -> PreTrainedModel:
    model = family_model(family)
    adapt(model, cfg, seed=3)
    stir(model)
    return model


@table("family", FAMILIES)
@table("cfg", [BOTH, BOTH_4BIT])
def test_merged_weights_compute_what_the_adapted_model_computes(cfg, family):
    model, plain = adapted(family, cfg), family_model(family)
    base = {name: weight.clone() for name, weight in export_weights(plain)}
    merged = dict(merged_weights(model, export_weights(model)))
    assert merged.keys() == base.keys()
    before = logits(plain)
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, logits(plain), atol=1e-2)
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert {name.partition("layers.1.")[2] for name in changed} >= {
        f"mlp.{name}" for name in EXPERT_MATRICES
    }


@table("dtype", [torch.float32, torch.bfloat16])
@table("is_4bit", [False, True])
def test_merged_experts_are_rounded_once(is_4bit, dtype):
    """More of them than are merged at once."""
    torch.manual_seed(0)
    number, rank, scaling = 37, 3, 2.0
    stored = {
        "weight": torch.randn(number, 16, 8).to(dtype),
        "lora_A": torch.randn(number, rank, 8).to(dtype),
        "lora_B": torch.randn(number, 16, rank).to(dtype),
    }
    expected = stored["weight"].double()
    if is_4bit:
        stored["codes"], stored["scales"] = codes, scales = quantise(stored.pop("weight"))
        expected = dequantise(codes, scales, (number, 16, 8), torch.float32).double()
    adapters = LoraAdapters(frozenset({"experts.down_proj"}), scaling, is_4bit)
    assert stored.keys() == adapters.stored
    found = adapters.merge(stored)
    for expert in range(number):
        expected[expert] += scaling * (
            stored["lora_B"][expert].double() @ stored["lora_A"][expert].double()
        )
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype))


def test_compiled_layers_have_the_gradients_of_the_model():
    check_compiled(adapted("qwen3_moe", BOTH_4BIT))


def test_without_adapters_it_is_the_base_and_it_begins_as_it():
    model = family_model("qwen3_moe")
    before = logits(model).detach()
    adapt(model, BOTH, seed=3)
    assert torch.equal(logits(model).detach(), before)
    stir(model)
    assert not torch.allclose(logits(model).detach(), before)
    with adapters_off(model):
        assert torch.equal(logits(model).detach(), before)


def test_only_adapters_learn():
    model = adapted("qwen3_moe")
    logits(model).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n, _ in model.named_parameters() if n.endswith(("lora_A", "lora_B"))}
    assert {name.partition("layers.1.")[2].rpartition(".")[0] for name in trained} >= {
        f"mlp.{name}" for name in EXPERT_MATRICES
    }


def test_experts_have_adapters_only_where_they_are_named():
    model = family_model("glm4_moe")
    adapt(model, LoraConfig(rank=3), seed=0)
    assert not any(isinstance(module, ExpertLora) for module in model.modules())
    model = family_model("glm4_moe")
    adapt(model, LoraConfig(rank=3, target_modules=(DOWN,)), seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    layer = f"model.layers.1.mlp.{DOWN}"
    assert trained == {f"{layer}.lora_A", f"{layer}.lora_B"}


def test_A_of_each_expert_is_drawn_as_peft_draws_it():
    model = family_model("qwen3_moe")
    adapt(model, BOTH.model_copy(update={"target_modules": (DOWN,)}), seed=3)
    drawn = nn.Linear(INNER, NUMBER * 3, bias=False)
    nn.init.kaiming_uniform_(drawn.weight, a=5**0.5, generator=torch.Generator().manual_seed(3))
    (layer,) = (module for module in model.modules() if isinstance(module, ExpertLora))
    assert torch.equal(layer.lora_A, drawn.weight.view(NUMBER, 3, INNER))
    assert not layer.lora_B.any()


def peft_delta(saved: dict[str, Tensor], prefix: str, number: int, scaling: float) -> Tensor:
    """What PEFT's `ParamWrapper.get_delta_weight` adds to a parameter [experts, out, in]."""
    a, b = (saved[f"{prefix}.{leaf}.weight"].double() for leaf in ("lora_A", "lora_B"))
    a, b = a.reshape(number, -1, a.shape[-1]), b.reshape(b.shape[0], -1, number)
    return torch.einsum("o r e, e r i -> e o i", b, a) * scaling


def saved_adapter(model: PreTrainedModel, cfg: LoraConfig, folder: Path) -> dict[str, Tensor]:
    weights, mesh = export_weights(model), Mesh.alone(torch.device("cpu"))
    export_adapter(model, cfg, folder, weights, mesh=mesh, step=1)
    return load_file(folder / "adapter_model.safetensors")


@table("names", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,)])
@table("family", FAMILIES)
def test_saved_adapters_of_experts_are_in_peft_s_layout(family, names, tmp_path):
    cfg = BOTH.model_copy(update={"target_modules": ("q_proj", *names)})
    model, folder = adapted(family, cfg), tmp_path / f"{family} {len(names)} {names[0]}"
    saved = saved_adapter(model, cfg, folder)
    document = json.loads((folder / "adapter_config.json").read_text())
    assert document["target_parameters"] == sorted(f"mlp.{name}" for name in names)
    assert document["target_modules"] == ["q_proj"]
    base = dict(export_weights(family_model(family)))
    merged = dict(merged_weights(model, export_weights(model)))
    module = "model.layers.1.mlp.experts"
    places = {DOWN: module, GATE_UP: f"{module}.base_layer" if DOWN in names else module}
    for name in names:
        own = f"model.layers.1.mlp.{name}"
        delta = peft_delta(saved, f"base_model.model.{places[name]}", NUMBER, cfg.alpha / cfg.rank)
        torch.testing.assert_close(merged[own].double(), base[own].double() + delta)


@table("names", [(GATE_UP, DOWN), (GATE_UP,), (DOWN,)])
@table("family", FAMILIES)
def test_peft_loads_and_merges_saved_adapters_of_experts(family, names, tmp_path):
    peft = pytest.importorskip("peft")
    cfg = BOTH.model_copy(update={"target_modules": ("q_proj", *names)})
    model, folder = adapted(family, cfg), tmp_path / f"{family} {len(names)} {names[0]}"
    saved_adapter(model, cfg, folder)
    loaded = peft.PeftModel.from_pretrained(family_model(family), folder)
    torch.testing.assert_close(logits(loaded.base_model.model), logits(model), rtol=1e-4, atol=1e-4)
    merged = dict(merged_weights(model, export_weights(model)))
    for name, weight in export_weights(loaded.merge_and_unload()):
        torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-6)
