"""Adapters against the definition, and against the merged model that engines and exports get."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hone.attention import PackedContext
from hone.checkpoint.export import export_adapter
from hone.distributed.mesh import Mesh
from hone.families.model_facts import NF4_BLOCK
from hone.families.registry import SPECS
from hone.models.adapted import adapters_of, adapters_off, attach_adapters, merged_weights
from hone.models.adapters import LoraAdapters, LoraLinear, adapt
from hone.models.decoder import decoder_layers, head_logits, hidden_states
from hone.models.load import load_model
from hone.models.manifest import export_weights
from hone.models.nf4 import NF4, dequantise, quantise
from hone.models.settings import LoraConfig, ModelConfig
from hone.models.tiny import make_tiny_model
from hone.models.vision_decoders import own_class
from tests.interpreted import run_interpreted
from tests.tables import table

BACKEND = "aot_eager_decomp_partition"
"""Divides forward from backward as the default does, and makes no kernels."""

LORA = LoraConfig(rank=3, alpha=6.0)
LORA_4BIT = LoraConfig(rank=3, alpha=6.0, load_in_4bit=True)


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model", family="qwen2", seed=1)


def load(folder):
    return load_model(ModelConfig(path=str(folder)), device="cpu", seed=0)


def stir(model, seed=5):
    """Give the adapters something to say."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.lora_B.copy_(0.1 * torch.randn(module.lora_B.shape, generator=draw))


def logits(model):
    ids = torch.tensor([5, 9, 33, 41, 7, 2, 60, 11])
    context = PackedContext.from_lengths([5, 3])
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    return head_logits(model, hidden_states(model, ids, positions, context))


@table("bias", [False, True])
@table("cfg", [LORA, LORA_4BIT])
def test_layer_and_its_gradients_are_the_definition(cfg, bias):
    torch.manual_seed(0)
    base = nn.Linear(32, 16, bias=bias).double()
    layer = LoraLinear(base, cfg)
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    a, b = (p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    weight = base.weight.detach()
    if cfg.load_in_4bit:
        weight = dequantise(*quantise(weight), (16, 32), torch.float64)
    twin = x @ (weight + cfg.alpha / cfg.rank * b @ a).T + (base.bias if bias else 0)
    actual = layer(x)
    torch.testing.assert_close(actual, twin, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(twin)
    expected = torch.autograd.grad(twin, [x, a, b], upstream)
    found = torch.autograd.grad(actual, [x, layer.lora_A, layer.lora_B], upstream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def nearest_levels(weight):
    """Slow twin of `quantise`: every value to the nearest level of its block."""
    result = []
    for block in weight.double().reshape(-1, NF4_BLOCK):
        scale = block.abs().max()
        for value in block:
            share = value / scale if scale else torch.zeros(())
            level = min(NF4, key=lambda level: abs(level - float(share)))
            result.append(level * float(scale))
    return torch.tensor(result, dtype=torch.float64).reshape(weight.shape)


def test_four_bits_are_the_nearest_levels():
    weight = torch.randn(8, 2 * NF4_BLOCK)
    weight[3] = 0
    stored = quantise(weight)
    restored = dequantise(*stored, tuple(weight.shape), torch.float64)
    torch.testing.assert_close(restored, nearest_levels(weight), rtol=1e-6, atol=1e-7)
    assert sum(t.nbytes for t in stored) == weight.numel() // 2 + weight.numel() // NF4_BLOCK * 4
    again = dequantise(*quantise(restored), tuple(weight.shape), torch.float64)
    torch.testing.assert_close(again, restored, rtol=1e-6, atol=1e-7)  # rounding is for good


def test_kernel_unpacks_four_bits_as_torch_does():
    equal = run_interpreted("tests.models.interpreted_nf4")
    assert len(equal) == 12
    assert all(equal.values()), equal


def kept_bytes(layer, x):
    """Bytes that a compiled layer keeps from forward to backward besides x and its parameters."""
    known = {x.data_ptr()} | {tensor.data_ptr() for tensor in layer.state_dict().values()}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.compile(layer, backend=BACKEND, dynamic=True, fullgraph=True)(x)
    return sum(t.nbytes for t in kept if t.data_ptr() not in known)


def test_compiled_layers_keep_no_unpacked_weight():
    torch.manual_seed(0)
    x = torch.randn(8, 64, requires_grad=True)
    layer = LoraLinear(nn.Linear(64, 128, bias=False), LORA_4BIT)
    inner = 8 * LORA.rank * x.itemsize
    assert kept_bytes(layer, x) <= 2 * inner
    torch.testing.assert_close(torch.compile(layer, backend=BACKEND)(x), layer(x))


def gradients(model):
    model.zero_grad()
    logits(model).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_compiled(model):
    """Compiled layers have the gradients of the model."""
    stir(model)
    expected = gradients(model)
    torch.compiler.reset()
    for layer in decoder_layers(model):
        layer.compile(backend=BACKEND, dynamic=True)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-4)


def test_compiled_layers_have_the_gradients_of_the_model(folder):
    model = load(folder)
    adapt(model, LORA_4BIT, seed=3)
    check_compiled(model)


@pytest.mark.parametrize("cfg", [LORA, LORA_4BIT], ids=["whole", "4-bit"])
def test_merged_weights_compute_what_the_adapted_model_computes(folder, cfg):
    adapted, plain = load(folder), load(folder)
    adapt(adapted, cfg, seed=3)
    stir(adapted)
    merged = dict(merged_weights(adapted, export_weights(adapted)))
    assert merged.keys() == dict(export_weights(plain)).keys()
    changed = logits(plain)
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(plain), logits(adapted), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed, logits(plain), atol=1e-3)
    # A merge that forgets the scale would not be seen where alpha is the rank.
    found = adapters_of(adapted)
    assert found is not None
    attach_adapters(adapted, replace(found, scaling=1.0))
    wrong = dict(merged_weights(adapted, export_weights(adapted)))
    plain.load_state_dict(wrong)
    assert not torch.allclose(changed, logits(plain), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cfg", [LORA, LORA_4BIT], ids=["whole", "4-bit"])
def test_a_merged_weight_is_rounded_once(cfg, dtype):
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(192, 320, bias=False).to(dtype), cfg)
    stored = dict(export_weights(layer))
    for name in ("lora_A", "lora_B"):
        stored[name] = torch.randn(stored[name].shape).to(dtype)
    found = LoraAdapters(frozenset({"layer"}), 2.0, cfg.load_in_4bit)
    assert stored.keys() == found.stored
    merged = found.merge(stored)
    base = layer.base_weight(torch.float32).double()
    expected = base + 2.0 * stored["lora_B"].double() @ stored["lora_A"].double()
    assert merged.dtype == dtype
    torch.testing.assert_close(merged, expected.to(dtype))


def test_a_projection_that_comes_in_part_is_named(folder):
    model = load(folder)
    adapt(model, LORA.model_copy(update={"target_modules": ("q_proj",)}), seed=0)
    lost = "model.layers.0.self_attn.q_proj.lora_A"
    half = ((name, tensor) for name, tensor in export_weights(model) if name != lost)
    with pytest.raises(RuntimeError, match=rf"are missing: {lost}$"):
        list(merged_weights(model, half))


def test_only_adapters_learn_and_they_begin_as_nothing(folder):
    model = load(folder)
    before = logits(model).detach()
    adapt(model, LORA, seed=3)
    assert adapters_of(model) is not None
    assert torch.equal(logits(model).detach(), before)
    logits(model).sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if n.endswith((".lora_A", ".lora_B"))}
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trained


def test_without_adapters_it_is_the_base(folder):
    model = load(folder)
    before = logits(model).detach()
    adapt(model, LORA, seed=3)
    stir(model)
    with adapters_off(model):
        assert torch.equal(logits(model).detach(), before)
    assert not torch.allclose(logits(model).detach(), before)


def test_the_seed_draws_them_and_nothing_else(folder):
    drawn = []
    for seed in (3, 3, 4):
        state = torch.random.get_rng_state()
        model = load(folder)
        adapt(model, LORA, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), state)
        drawn.append(torch.cat([p.flatten() for n, p in model.named_parameters() if "lora" in n]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_chosen_targets_alone_are_adapted(folder):
    model = load(folder)
    adapt(model, LORA.model_copy(update={"target_modules": ("q_proj", "down_proj")}), seed=0)
    adapted = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, LoraLinear)}
    assert adapted == {"q_proj", "down_proj"}


@table("family", SPECS)
def test_R22_what_is_checked_before_a_run_is_what_every_family_has(family):
    config = AutoConfig.for_model(family, num_hidden_layers=4, hidden_size=64, head_dim=16)
    kind = own_class(AutoModelForCausalLM, config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    adapt(model, LORA, seed=0)
    paths = [path for path, module in model.named_modules() if isinstance(module, LoraLinear)]
    assert {path.rpartition(".")[2] for path in paths} == {*SPECS[family].lora_targets}


def test_saved_adapters_are_peft_s(folder, tmp_path):
    model = load(folder)
    adapt(model, LORA, seed=3)
    stir(model)
    mesh, weights = Mesh.alone("cpu"), export_weights(model)
    export_adapter(model, LORA, tmp_path / "adapter", weights, mesh=mesh, step=1)
    document = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert document["r"] == 3
    assert document["target_modules"][:2] == ["down_proj", "gate_proj"]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(saved[key], model.get_submodule("model.layers.0.self_attn.q_proj").lora_A)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded.base_model.model), logits(model))


def test_a_layer_that_is_not_of_whole_blocks_is_refused():
    with pytest.raises(ValueError, match="whole number of blocks"):
        quantise(torch.ones(3, 5))
