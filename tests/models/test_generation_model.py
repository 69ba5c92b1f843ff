"""The forward that generates equals transformers', over the trainer's own parameters."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hone.attention import ATTENTION_NAME, PagedContext
from hone.attention.context import FP8_DTYPE
from hone.checkpoint.export import export_hf
from hone.checkpoint.tree import in_memory, read_tree, split_tree, write_tree
from hone.distributed.mesh import Mesh
from hone.models import experts, fused_layers, generation, layer_ops
from hone.models.contents import follow_inputs
from hone.models.decoder import alias_module, head_logits, head_weight
from hone.models.fused_layers import FusedDecoder, RotaryTable, is_fusible
from hone.models.generation import generation_model
from hone.models.layer_ops import LayerOps, TorchKernels
from hone.models.manifest import build_manifest, export_weights
from hone.models.tiny import make_char_tokenizer
from hone.trainer.policy import Policy
from hone.trainer.settings import OptimizerConfig
from hone.trainer.update_rules import ParameterOptimizer
from tests.models.families import packed_logprobs
from tests.models.paged import PagedRun
from tests.tables import table

VOCAB = 50
LENGTHS = (11, 6, 14)
SCHEDULES = {
    "whole prompts": [{0: 11, 1: 6, 2: 14}],
    "chunks beside single tokens": [{0: 4, 2: 5}, {1: 6, 0: 1, 2: 3}, {2: 6, 0: 6}],
    "prompts, then decode": [{0: 8, 1: 4, 2: 12}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1, 1: 1}, {0: 1}],
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
GLM = {
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHAPES = {
    "llama": {},
    "llama, all biases": {"attention_bias": True, "mlp_bias": True},
    "llama, group of 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "llama, scaled rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama, far rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": {"sliding_window": 5},
    "mistral, no window": {"sliding_window": None, "num_key_value_heads": 4},
    "qwen2": {},
    "qwen2, mixed layers": {**MIXED, "sliding_window": 5, "max_window_layers": 0},
    "qwen3": {},
    "qwen3, heads of 64": {"head_dim": 64},
    "qwen3, heads of 128, tied": {"head_dim": 128, "tie_word_embeddings": True},
    "qwen3, biases, mixed layers": {"attention_bias": True, "sliding_window": 5, **MIXED},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_moe, an MLP beside": {"mlp_only_layers": [0]},
    "glm4_moe": {**GLM, "use_qk_norm": True, "n_group": 4, "topk_group": 2},
    "glm4_moe, one group, no norms": {**GLM, "norm_topk_prob": False, "num_hidden_layers": 3},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "qwen3_5_text": HYBRID,
    "qwen3_5_text, biases, tied": {**HYBRID, "attention_bias": True, "tie_word_embeddings": True},
    "qwen3_5_text, a head for each key": {**HYBRID, "linear_num_value_heads": 2},
    "qwen3_5_text, no attention": {**HYBRID, "layer_types": ["linear_attention"] * 4},
}
FUSED = [name for name in SHAPES if not name.startswith("gemma")]
ZERO_CENTRED = ("gemma2", "qwen3_5_text")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 2e-6}
"""Of log-probabilities, absolute and relative. The norms of transformers are never finer than
float32, nor are these."""


def make_model(name="qwen3", *, dtype=torch.float32, attention=ATTENTION_NAME, seed=0, **more):
    """A model whose parameters, biases and norms included, are all far from trivial."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    family = name.split(",")[0]
    if family == "qwen2":  # its rotary embedding takes head_dim from elsewhere
        fields["hidden_size"] = 64
    config = AutoConfig.for_model(family, **fields | SHAPES.get(name, {}) | more)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                is_zero_centred = family in ZERO_CENTRED and "linear_attn" not in key
                mean = float("norm" in key and not is_zero_centred)
                # Outputs of heads are normed: small ones would magnify every rounding.
                spread = 1.0 if "conv1d" in key else 0.25
                parameter.copy_(mean + spread * torch.randn_like(parameter))
            for key, buffer in model.named_buffers():
                if "correction" in key:
                    buffer.copy_(0.25 * torch.randn_like(buffer))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def make_samples(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=draw) for length in LENGTHS]


class Generation(PagedRun):
    """A run of the forward that generates."""

    def __init__(self, model, samples, *, compile=False, tp=None, **options):
        self.generation = generation_model(model, compile=compile, tp=tp)
        super().__init__(model, samples, forward=self.generation.hidden_states, **options)

    def logits(self):
        """Of every token fed, in the order of the samples: [T, V]."""
        return self.generation.logits(torch.cat([torch.cat(rows) for rows in self.hidden]))


def generate(model, schedule, **options):
    run = Generation(model, make_samples(), **options)
    for chunks in SCHEDULES[schedule]:
        run.step(chunks)
    return run.logits()


def compare(model, actual, dtype=torch.float32):
    """With each sample alone in the stock model, given the weights of `model`."""
    stock = AutoModelForCausalLM.from_config(
        model.config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    stock = stock.to(dtype)
    stock.load_state_dict(model.state_dict())
    with torch.inference_mode():
        expected = torch.cat(
            [stock(sample[None], use_cache=False).logits[0] for sample in make_samples()]
        )
    assert actual.dtype == torch.float32
    # The recurrence of transformers, and the states of a cache, are never finer than float32.
    is_hybrid = hasattr(model.config, "linear_num_value_heads")
    tolerance = TOLERANCE[torch.float32 if is_hybrid else dtype]
    torch.testing.assert_close(
        actual.double().log_softmax(-1),
        expected.double().log_softmax(-1),
        rtol=tolerance,
        atol=tolerance,
    )


@table("dtype", TOLERANCE)
@pytest.mark.parametrize("schedule", SCHEDULES)
@table("name", SHAPES)
def test_R4_generation_equals_transformers(name, schedule, dtype):
    model = make_model(name, dtype=dtype)
    assert is_fusible(model) == (name in FUSED)
    if "_moe" in name and dtype == torch.float64:
        return  # torch has no grouped products of that format
    compare(model, generate(model, schedule), dtype)


@table("name", FUSED)
def test_R4_generation_rounds_as_the_trainer_does(name):
    """In bfloat16 the fused layers are no further from float32 than those of transformers."""
    model = make_model(name, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    samples = make_samples()
    for packed in (exact, model):
        follow_inputs(packed)
    with torch.inference_mode():
        expected, trained = (torch.cat(packed_logprobs(m, samples)).float() for m in (exact, model))
    generated = generate(model, "whole prompts").log_softmax(-1)
    ours, theirs = ((x - expected).norm() for x in (generated, trained))
    assert 0 < ours < 1.1 * theirs


# ---------------------------------------------------------------- planted bugs


class Kernels(TorchKernels):
    """The right ones; each bug replaces one."""


class StaleResidual(Kernels):
    def add_rms_norm(self, x, residual, *norm):
        return super().add_rms_norm(x, residual.clone(), *norm)


class NormedResidual(Kernels):
    def add_rms_norm(self, x, residual, *norm):
        normed = super().add_rms_norm(x, residual, *norm)
        return residual.copy_(normed)


class AddsToNorm(Kernels):
    def add_rms_norm(self, x, residual, *norm):
        return self.rms_norm(x, *norm)


class WrongRotation(Kernels):
    def rotate_heads(self, qkv, positions, rotary, **rest):
        return super().rotate_heads(qkv, positions, rotary.abs(), **rest)


class KeysRotatedOneLate(Kernels):
    def rotate_heads(self, qkv, positions, rotary, *, kv_cache, slot_mapping, **rest):
        common = {"kv_cache": None, "slot_mapping": slot_mapping, **rest}
        q, _, v = super().rotate_heads(qkv.clone(), positions, rotary, **common)
        _, k, _ = super().rotate_heads(qkv, positions.roll(1, 0), rotary, **common)
        layer_ops.write_kv(k, v, kv_cache, slot_mapping)
        return q, k, v


class ForgetsToStore(Kernels):
    def rotate_heads(self, qkv, positions, rotary, *, kv_cache, **rest):
        return super().rotate_heads(qkv, positions, rotary, kv_cache=None, **rest)


class UpActivated(Kernels):
    def silu_mul(self, gate_up):
        return super().silu_mul(gate_up.roll(gate_up.shape[-1] // 2, -1))


class KeysAndValuesSwapped(Kernels):
    def rotate_heads(self, qkv, positions, rotary, **rest):
        q, k, v = qkv.split((4, 2, 2), 1)
        return super().rotate_heads(torch.cat((q, v, k), 1), positions, rotary, **rest)


OPERATION_BUGS = [
    StaleResidual,
    NormedResidual,
    AddsToNorm,
    WrongRotation,
    KeysRotatedOneLate,
    KeysAndValuesSwapped,
    ForgetsToStore,
    UpActivated,
]


def with_heads(layer, **changes):
    return replace(layer, heads=replace(layer.heads, **changes))


LAYER_BUGS = {
    "mlp norm ignored": lambda layer: replace(
        layer, mlp_norm=layer.mlp_norm._replace(weight=torch.ones(40))
    ),
    "next norm is this one's": lambda layer: replace(layer, next_norm=layer.mlp_norm),
    "q and k norm swapped": lambda layer: with_heads(
        layer, q_norm=layer.heads.k_norm, k_norm=layer.heads.q_norm
    ),
    "q and k norm left out": lambda layer: with_heads(layer, q_norm=None, k_norm=None),
    "bias left out": lambda layer: replace(layer, qkv=layer.qkv._replace(bias=None)),
    "window left out": lambda layer: with_heads(layer, window=None),
    "window of the wrong layers": lambda layer: with_heads(
        layer, window=5 - (layer.heads.window or 0)
    ),
    "scale left out": lambda layer: with_heads(layer, scale=1.0),
    "down left out": lambda layer: replace(
        layer,
        mlp=layer.mlp._replace(down=layer.mlp.down._replace(weight=0 * layer.mlp.down.weight)),
    ),
    "cache of the first layer": lambda layer: with_heads(layer, layer_index=0),
}
STEP_BUGS = {
    "positions of chunks restart": lambda ids, positions, context: (
        ids,
        positions % 8,
        context,
    ),
    "decoded token one late": lambda ids, positions, context: (
        ids,
        positions + context.is_decode,
        context,
    ),
}
PLANTED = "qwen3, biases, mixed layers"


def with_experts(layer, **changes):
    experts = layer.experts
    if experts is None:
        return layer
    return replace(layer, experts=replace(experts, sigmoid=experts.sigmoid._replace(**changes)))


EXPERT_BUGS = {
    "correction left out": lambda layer: with_experts(layer, correction=torch.zeros(12)),
    "scale left out": lambda layer: with_experts(layer, scale=1.0),
    "all groups kept": lambda layer: with_experts(layer, kept_groups=4),
    "shared experts left out": lambda layer: replace(
        layer, mlp=None if layer.experts else layer.mlp
    ),
    "not normalised": lambda layer: replace(
        layer, experts=layer.experts and replace(layer.experts, normalises=False)
    ),
}


@table("bug", EXPERT_BUGS)
def test_R4_check_catches_a_wrong_layer_of_experts(bug, monkeypatch):
    make_layer = fused_layers.FusedLayer.of
    monkeypatch.setattr(
        fused_layers.FusedLayer, "of", lambda *arguments: EXPERT_BUGS[bug](make_layer(*arguments))
    )
    model = make_model("glm4_moe")
    with pytest.raises(AssertionError, match="not close"):
        compare(model, generate(model, "prompts, then decode"))


def test_R4_check_catches_a_correction_of_gate_weights(monkeypatch):
    """The mistake: what corrects the choice is added to gate weights too."""
    model, right = make_model("glm4_moe"), experts._route_by_sigmoid

    def wrong(logits, own, sigmoid):
        ids, _ = right(logits, own, sigmoid)
        weights = (logits.sigmoid() + sigmoid.correction).gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * sigmoid.scale

    compare(model, generate(model, "prompts, then decode"))
    monkeypatch.setattr(experts, "_route_by_sigmoid", wrong)
    with pytest.raises(AssertionError, match="not close"):
        compare(model, generate(model, "prompts, then decode"))


def test_R4_check_catches_a_rotation_of_whole_heads(monkeypatch):
    class WholeHeads(Kernels):
        def rotate_heads(self, qkv, positions, rotary, **rest):
            cos, sin = rotary.chunk(2, -1)
            wide = torch.cat((cos, cos, sin, sin), -1)
            return super().rotate_heads(qkv, positions, wide, **rest)

    monkeypatch.setattr(generation, "choose_kernels", lambda _: WholeHeads())
    model = make_model("glm4_moe")
    with pytest.raises(AssertionError, match="not close"):
        compare(model, generate(model, "prompts, then decode"))


@table("bug", OPERATION_BUGS)
def test_R4_check_catches_a_wrong_operation(bug, monkeypatch):
    monkeypatch.setattr(generation, "choose_kernels", lambda _: Kernels())
    compare(model := make_model(PLANTED), generate(model, "prompts, then decode"))
    monkeypatch.setattr(generation, "choose_kernels", lambda _: bug())
    with pytest.raises(AssertionError, match="not close"):
        compare(model, generate(model, "prompts, then decode"))


@table("bug", LAYER_BUGS)
def test_R4_check_catches_a_wrong_layer(bug, monkeypatch):
    make_layer = fused_layers.FusedLayer.of
    monkeypatch.setattr(
        fused_layers.FusedLayer, "of", lambda *arguments: LAYER_BUGS[bug](make_layer(*arguments))
    )
    model = make_model(PLANTED)
    with pytest.raises(AssertionError, match="not close"):
        compare(model, generate(model, "prompts, then decode"))


@pytest.mark.parametrize("bug", STEP_BUGS)
def test_R4_check_catches_a_wrong_step(bug):
    model = make_model(PLANTED)
    with pytest.raises(AssertionError, match="not close"):
        compare(model, generate(model, "prompts, then decode", mutate=STEP_BUGS[bug]))


# ---------------------------------------------------------------- which models are fused


class OtherMLP(Qwen3MLP):
    pass


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_a_module_of(attribute, kind):
    def change(model):
        parent = model.model.layers[1].self_attn if "proj" in attribute else model.model.layers[1]
        getattr(parent, attribute).__class__ = kind

    return change


def with_an_adapter(model):
    model.model.layers[1].self_attn.q_proj.adapter = nn.Linear(40, 4)


def with_another_activation(model):
    model.config.hidden_act = "gelu"


def with_a_layer_in_half(model):
    model.model.layers[1].half()


@table(
    "change",
    [
        with_a_module_of("mlp", OtherMLP),
        with_a_module_of("o_proj", Doubled),
        with_a_module_of("post_attention_layernorm", nn.RMSNorm),
        with_an_adapter,
        with_another_activation,
        with_a_layer_in_half,
    ],
)
def test_only_what_is_known_is_fused(change):
    model = make_model()
    assert is_fusible(model)
    change(model)
    assert not is_fusible(model)


def test_changed_model_runs_its_own_layers():
    model = make_model()
    with_a_module_of("o_proj", Doubled)(model)
    actual = generate(model, "prompts, then decode", compile=True)
    model.model.layers[1].self_attn.o_proj.__class__ = nn.Linear
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight *= 2
    compare(model, actual)


# ---------------------------------------------------------------- the trainer's own parameters


def check_follows(model, write):
    run = Generation(model, make_samples()).step(SCHEDULES["whole prompts"][0])
    before = run.logits()
    write(model)
    run.done, run.hidden = [0] * 3, [[] for _ in LENGTHS]
    after = run.step(SCHEDULES["whole prompts"][0]).logits()
    assert not torch.allclose(before, after)
    compare(model, after)


def step_of_an_optimizer(model, fused=True):
    sum(rows.square().mean() for rows in packed_logprobs(model, make_samples())).backward()
    torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused).step()


def copy_of_other_weights(model):
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(make_model(seed=7).parameters()))


def change_of_one(name):
    def write(model):
        with torch.no_grad():
            model.get_parameter(name).add_(0.1)

    return write


NAMES = [name for name, _ in make_model(PLANTED).named_parameters()]


@pytest.mark.parametrize("write", [step_of_an_optimizer, copy_of_other_weights])
def test_R3_generation_follows_the_trainer(write):
    check_follows(make_model(), write)


@table("name", [name for name in NAMES if "layers.1" in name or "layers" not in name])
def test_R3_generation_follows_every_parameter(name):
    # A constant on all keys moves no softmax: without head norms, biases of keys are invisible.
    check_follows(make_model(PLANTED), change_of_one(name))


def test_R3_following_is_seen_to_fail_where_parameters_were_copied(monkeypatch):
    monkeypatch.setattr(layer_ops, "merge_rows", lambda ps: torch.cat([p.detach() for p in ps]))
    with pytest.raises(AssertionError, match="not close"):
        check_follows(make_model(), copy_of_other_weights)


@table("name", ["self_attn.k_proj.bias", "self_attn.q_proj.weight", "mlp.up_proj.weight"])
def test_R3_moved_parameters_are_an_error(name):
    run = Generation(model := make_model(PLANTED), make_samples())
    run.step({0: 3})
    moved = model.model.layers[1].get_parameter(name)
    moved.data = moved.data.clone()
    with pytest.raises(RuntimeError, match="have been moved"):
        run.step({0: 1})
    compare(model, generate(model, "whole prompts"))


def storages(model):
    return {name: p.untyped_storage().data_ptr() for name, p in model.named_parameters()}


def pointers(model):
    return {name: p.data_ptr() for name, p in model.named_parameters()}


@table("name", FUSED)
def test_merging_keeps_names_objects_values_and_ties(name):
    model, twin = make_model(name), make_model(name)
    parameters = dict(model.named_parameters())
    manifest = build_manifest(export_weights(model), 1)
    generation_model(model, compile=False)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert all(p.requires_grad and p.is_contiguous() for p in model.parameters())
    assert list(model.state_dict()) == list(twin.state_dict())
    assert build_manifest(export_weights(model), 1) == manifest
    tied = model.config.tie_word_embeddings
    assert (head_weight(model) is model.get_input_embeddings().weight) == tied


def test_merged_parameters_lie_side_by_side_layer_by_layer():
    model = make_model(PLANTED)
    generation_model(model, compile=False)
    stored = storages(model)
    for i in range(2):
        layer = f"model.layers.{i}"
        qkv = {stored[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv"}
        biases = {stored[f"{layer}.self_attn.{x}_proj.bias"] for x in "qkv"}
        gate_up = {stored[f"{layer}.mlp.{x}_proj.weight"] for x in ("gate", "up")}
        assert len(qkv) == len(biases) == len(gate_up) == len(qkv | biases | gate_up) - 2 == 1
    # Nothing else shares a storage: 3 of 4 groups a layer lose two or one.
    assert len(set(stored.values())) == len(stored) - 2 * (2 + 2 + 1)


def test_merging_again_moves_nothing():
    model = make_model(PLANTED)
    generation_model(model, compile=False)
    before = pointers(model)
    generation_model(model, compile=False)
    alias = alias_module(model)
    generation_model(alias, compile=False)
    assert pointers(model) == pointers(alias) == before


def test_merging_in_inference_mode_leaves_a_model_that_trains():
    model = make_model()
    with torch.inference_mode():
        generation_model(model, compile=False)
    check_follows(model, step_of_an_optimizer)


def test_a_model_made_in_inference_mode_is_served():
    with torch.inference_mode():
        model = make_model()
        compare(model, generate(model, "prompts, then decode"))
        packed_logprobs(model, make_samples())


def test_copies_of_a_merged_model_are_independent():
    model = make_model(PLANTED)
    generation_model(model, compile=False)
    twin = copy.deepcopy(model)
    assert not set(storages(model).values()) & set(storages(twin).values())
    change = partial(change_of_one("model.layers.0.self_attn.k_proj.weight"), twin)
    expected = generate(model, "whole prompts")
    change()
    assert torch.equal(generate(model, "whole prompts"), expected)
    compare(twin, generate(twin, "whole prompts"))


@table("optimizer", ["adamw", "muon"])
@table("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_same_with_merged_parameters(dtype, optimizer):
    results = []
    for merge_before_policy in (None, True, False):
        model = make_model(PLANTED, dtype=dtype)
        if merge_before_policy:
            generation_model(model, compile=False)
        policy = Policy(model)
        optimize = ParameterOptimizer(
            policy.masters, OptimizerConfig(name=optimizer, lr=0.01), policy.embedding_names
        )
        if merge_before_policy is False:
            generation_model(model, compile=False)
        for _ in range(2):
            rows = packed_logprobs(model, make_samples())
            sum(row.float().square().mean() for row in rows).backward()
            gradients, clip = policy.gradients, 1 / policy.gradient_norm()
            policy.apply(partial(optimize.step, gradients, 1.0, clip))
            policy.drop_gradient()
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    start = dict(make_model(PLANTED, dtype=dtype).named_parameters())
    assert all(not torch.equal(value, start[name]) for name, value in results[0].items())
    for result in results[1:]:
        assert all(torch.equal(result[name], value) for name, value in results[0].items())


def test_merged_parameters_are_saved_whole(tmp_path):
    model = make_model(PLANTED)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    generation_model(model, compile=False)
    tree = split_tree({"model": dict(export_weights(model))}, "trainer")
    write_tree(tmp_path, "trainer", tree)
    folder = export_hf(
        model,
        make_char_tokenizer("ab"),
        tmp_path / "out",
        torch.float32,
        export_weights(model),
        mesh=Mesh.alone("cpu"),
    )
    exported = load_file(folder / "model.safetensors")
    num_bytes = sum(value.nbytes for value in expected.values())
    assert num_bytes < (folder / "model.safetensors").stat().st_size < num_bytes + 8192
    read = in_memory(read_tree(tmp_path, "trainer"))["model"]
    assert exported.keys() == read.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(exported[name], value)
        assert torch.equal(read[name], value)


# ---------------------------------------------------------------- head and FP8


def test_logits_are_float32_and_capped():
    model = make_model("gemma2")
    hidden = torch.randn(7, 40)
    generation = generation_model(model, compile=False)
    assert generation.logits(hidden).abs().max() < 3
    assert torch.equal(generation.logits(hidden), head_logits(model, hidden))
    model = make_model(dtype=torch.bfloat16)
    assert generation_model(model, compile=False).logits(hidden.bfloat16()).dtype == torch.float32


def decode_once(decoder, caches, **context):
    """Tokens of three sequences at position 0, the second of them padding."""
    context = {"context_lens": torch.ones(3, dtype=torch.int32), "max_seqlen_q": 1, **context}
    context = PagedContext(
        kv_caches=caches,
        block_tables=torch.zeros(3, 1, dtype=torch.int32),
        slot_mapping=torch.tensor([5, -1, 2]),
        cu_seqlens_q=torch.arange(4, dtype=torch.int32),
        max_context_len=4,
        **context,
    )
    with torch.inference_mode():
        decoder(torch.tensor([1, 2, 3]), torch.zeros(3, dtype=torch.int64), context)


@table("kind", ["plain", "quantised", "calibrating"])
def test_caches_are_written_before_attention_that_need_not_set_their_scales(kind, monkeypatch):
    model, calls = make_model(), []

    def attend(q, k, v, layer_index, context, *, write, **_):
        calls.append((layer_index, write))
        assert k.shape == v.shape
        kept.append(torch.stack((k, v)))
        return q

    kept = []
    monkeypatch.setattr(layer_ops, "attend_paged", attend)
    dtype = torch.float32 if kind == "plain" else FP8_DTYPE
    caches = [torch.zeros(2, 4, 4, 2, 16).to(dtype) for _ in range(2)]
    scales = None if kind == "plain" else torch.tensor([0.5, 0.001, 2.0, 0.25] * 2).view(2, 2, 2)
    lens = {"calibrate": True, "query_lens": (1,) * 3, "key_lens": (1,) * 3}
    decode_once(
        FusedDecoder(model, LayerOps(TorchKernels())),
        caches,
        kv_scales=scales,
        **(lens if kind == "calibrating" else {}),
    )
    writes = kind == "calibrating"
    assert calls == [(0, writes), (1, writes)]
    stored = caches[1].float().flatten(1, 2)
    assert (stored != 0).flatten(2).any(-1).sum().item() == (0 if writes else 4)
    if kind == "plain":
        assert torch.equal(stored[:, [5, 2]], kept[1][:, [0, 2]])
    if kind == "quantised":
        scale = scales[1][:, None, :, None]
        expected = (kept[1] / scale).clamp(-448, 448).to(FP8_DTYPE).float()
        assert torch.equal(stored[:, [5, 2]], expected[:, [0, 2]])
        assert expected.abs().max() == 448  # the scale of 0.001 saturates


# ---------------------------------------------------------------- rotary embeddings


@table("name", ["llama", "llama, scaled rope", "llama, far rope"])
@table("dtype", [torch.float32, torch.bfloat16])
def test_R4_rotary_table_is_the_models_at_every_position(name, dtype):
    model = make_model(name, dtype=dtype)
    module = model.base_model.rotary_emb
    table = RotaryTable(module, dtype=dtype, device=model.device)
    positions = torch.tensor([0, 1, 17, 1023, 1024, 2000])
    with torch.inference_mode():
        rows = table.rows(2001)[positions]
        cos, sin = module(torch.empty(0, dtype=dtype), positions[None])
    assert rows.dtype == dtype
    assert torch.equal(torch.cat((rows[:, :8],) * 2, -1), cos[0])
    assert torch.equal(torch.cat((rows[:, 8:],) * 2, -1), sin[0])


def test_R4_rotary_table_follows_positions_of_three_axes():
    """Axes take turns in the quarter of a head that is rotated."""
    axes = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [3, 3, 2]}
    axes |= {"partial_rotary_factor": 0.25}
    model = make_model("qwen3_5_text", head_dim=64, rope_parameters=axes)
    module = model.base_model.rotary_emb
    table = RotaryTable(module, dtype=torch.float32, device=model.device)
    positions = torch.tensor([[3, 4, 4, 900], [3, 4, 5, 2], [3, 4, 6, 17]])
    rows, numbers = table.of_tokens(positions, 901)
    cos, sin = module(torch.empty(0), positions[:, None])
    assert rows.shape == (4, 16)
    assert torch.equal(rows[numbers], torch.cat((cos[0, :, :8], sin[0, :, :8]), -1))
    alone, _ = table.of_tokens(positions[:1].expand(3, -1), 901)
    assert not torch.equal(alone, rows)


def test_rotary_table_grows_and_keeps_what_graphs_hold():
    table = RotaryTable(make_model().base_model.rotary_emb, dtype=torch.float32, device="cpu")
    first = table.rows(3)
    assert len(first) == 1024
    assert table.rows(1024) is first
    second = table.rows(1025)
    assert len(second) == 2048
    assert torch.equal(second[:1024], first)
    assert any(kept is first for kept in table._tables)


def test_rotary_table_is_not_computed_inside_a_graph(monkeypatch):
    table = RotaryTable(make_model().base_model.rotary_emb, dtype=torch.float32, device="cpu")
    table._example = type("OnCuda", (), {"is_cuda": True})()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the forward once"):
        table.rows(5)
