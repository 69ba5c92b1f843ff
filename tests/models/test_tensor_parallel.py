"""Tensor parallelism: what ranks hold, and that together they compute what one alone does.

What needs a group runs in two processes, `tensor_parallel_ranks`, whose outcomes are judged here.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from hone import rules
from hone.config.plan import Devices, resolve
from hone.config.tree import GenerateConfig
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.families.model_facts import ModelFacts
from hone.models.load import load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tensor_parallel import TensorParallel, shard_model, shard_of
from hone.models.tiny import make_tiny_model
from tests.models.test_generation_model import FUSED, make_model
from tests.ranks import run_ranks

CPU = torch.device("cpu")
TOLERANCE = 1e-5


def torchrun(rank, world_size):
    """The environment of a process that torchrun has started on one host."""
    own, total = {"RANK": rank, "LOCAL_RANK": rank}, ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {name: str(value) for name, value in (own | dict.fromkeys(total, world_size)).items()}


def group(size):
    return [TensorParallel(rank=rank, size=size, device=CPU) for rank in range(size)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    # Triton must be imported for its interpreter.
    return run_ranks("tests.models.tensor_parallel_ranks", 2, folder, is_warm=False)


# ---------------------------------------------------------------- parts of weights


BLOCKS = ("in_proj_qkv.weight", "conv1d.weight")
"""Weights of recurrent layers with rows of queries, of keys and of values, divided one by one."""
RECURRENT = {*(f"in_proj_{x}" for x in ("qkv", "z", "b", "a")), "conv1d", "out_proj", "linear_attn"}


def whole(name, parts, full, config):
    """The weight that the parts make up; each whole part must be the full weight itself."""
    if parts[0].shape == full.shape:
        assert all(part is full for part in parts), name
        return full
    if name.endswith(BLOCKS):
        keys = config.linear_num_key_heads * config.linear_key_head_dim // len(parts)
        blocks = [part.split((keys, keys, len(part) - 2 * keys)) for part in parts]
        return torch.cat([torch.cat(same) for same in zip(*blocks, strict=True)])
    dim = next(d for d in range(full.dim()) if parts[0].shape[d] != full.shape[d])
    return torch.cat(parts, dim)


@pytest.mark.parametrize("name", [name for name in FUSED if "_moe" not in name])
def test_R3_shards_cover_every_weight_exactly(name):
    model = make_model(name)
    shards = [dict(export_weights(shard_model(model, tp))) for tp in group(2)]
    full = dict(export_weights(model))
    assert list(shards[0]) == list(shards[1]) == list(full)
    divided = set()
    for key, tensor in full.items():
        views = [shard_of(key, tensor, model.config, tp) for tp in group(2)]
        assert torch.equal(whole(key, views, tensor, model.config), tensor), key
        for shard, view in zip(shards, views, strict=True):
            assert torch.equal(shard[key], view)
            lies_together = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            assert lies_together == (not key.endswith(BLOCKS)), key
            assert shard[key].is_contiguous()
        divided |= {key.split(".")[-2]} if views[0].shape != tensor.shape else set()
    projections = {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}
    modules = {key.split(".")[-2] for key in full}
    assert divided == modules & (projections | RECURRENT | {"lm_head"})


@pytest.mark.parametrize("name", ["qwen3", "qwen3, heads of 128, tied"])
def test_a_shard_is_a_model_of_its_own(name):
    model = make_model(name)
    before = {key: (id(p), p.detach().clone()) for key, p in model.named_parameters()}
    shard = shard_model(model, group(2)[1])
    config = shard.config
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    assert (config.intermediate_size, config.vocab_size) == (28, 50)
    with torch.no_grad():
        for parameter in shard.parameters():
            parameter.zero_()
    assert model.config.num_attention_heads == 4
    assert list(before) == [key for key, _ in model.named_parameters()]
    for key, parameter in model.named_parameters():
        assert (id(parameter), torch.equal(parameter, before[key][1])) == (before[key][0], True)


def test_tied_head_and_embedding_share_memory_in_a_shard():
    shard = shard_model(make_model("qwen3, heads of 128, tied"), group(2)[1])
    with torch.no_grad():
        shard.get_input_embeddings().weight.copy_(torch.arange(50.0)[:, None].expand(50, 40))
    head = shard.get_output_embeddings().weight
    assert torch.equal(head, torch.arange(25.0, 50.0)[:, None].expand(25, 40))


def test_a_vocabulary_that_does_not_divide_stays_whole():
    model = make_model("llama, group of 4")
    model.resize_token_embeddings(51)
    shard = shard_model(model, group(2)[0])
    assert shard.get_output_embeddings().weight.shape == (51, 40)
    assert torch.equal(shard.lm_head.weight, model.lm_head.weight)


def test_a_group_of_one_keeps_the_model():
    model, (tp,) = make_model(), group(1)
    assert shard_model(model, tp) is model
    for key, tensor in export_weights(model):
        assert shard_of(key, tensor, model.config, tp) is tensor


# ---------------------------------------------------------------- loading parts


LOADED = {
    "tied": {},
    "a head of its own": {"tie_word_embeddings": False},
    "biases": {"family": "qwen2"},
    "a vocabulary that does not divide": {"vocab_size": 101},
}


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_R3_ranks_load_the_parts_of_one_model(init, name, tmp_path):
    folder = make_tiny_model(tmp_path, num_layers=2, weights=init == "pretrained", **LOADED[name])
    load = partial(load_model, ModelConfig(path=str(folder), init=init), device=CPU, seed=3)
    full = load()
    weights = dict(export_weights(full))
    for tp in group(2):
        shard = load(tp=tp)
        parts = dict(export_weights(shard))
        assert list(parts) == list(weights)
        for key, tensor in weights.items():
            expected = shard_of(key, tensor, full.config, tp)
            assert torch.equal(parts[key], expected), key
        assert shard.config.num_attention_heads == full.config.num_attention_heads // 2
        assert (shard.lm_head.out_features, shard.training) == (len(shard.lm_head.weight), False)
        for (key, buffer), other in zip(full.named_buffers(), shard.buffers(), strict=True):
            assert torch.equal(buffer, other), key


def test_a_rank_draws_one_weight_at_a_time(tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path, num_layers=6, weights=False, tie_word_embeddings=False)
    held, draw = [], PreTrainedModel._init_weights

    def init_weights(model, module):
        held.append(sum(x.nbytes for x in model.parameters() if not x.is_meta))
        draw(model, module)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", init_weights)
    cfg = ModelConfig(path=str(folder), init="random")
    shard = load_model(cfg, device=CPU, seed=0, tp=group(2)[1])
    sizes = [x.nbytes for x in shard.parameters()]
    assert max(held) <= sum(sizes) + max(sizes)
    assert len(held) > 6 * 7


def test_a_rank_reads_weights_on_the_host(tmp_path, monkeypatch):
    folder, accelerator = make_tiny_model(tmp_path, num_layers=1), torch.device("meta")
    places = []

    def shard(model, tp):
        places.extend(x.device for x in model.parameters())
        return shard_model(model, tp)

    monkeypatch.setattr("hone.models.tensor_parallel.shard_model", shard)
    tp = TensorParallel(rank=1, size=2, device=accelerator)
    model = load_model(ModelConfig(path=str(folder)), device=accelerator, seed=0, tp=tp)
    assert set(places) == {CPU}
    assert {x.device for x in (*model.parameters(), *model.buffers())} == {accelerator}


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen3", 3, "num_attention_heads = 4, num_key_value_heads = 2"),
        ("gemma2", 2, "a gemma2 model"),
    ],
)
def test_R22_what_does_not_divide_is_refused_before_weights_are_loaded(
    family, size, message, tmp_path, monkeypatch
):
    folder = make_tiny_model(tmp_path, num_layers=1, family=family, weights=False)
    monkeypatch.setattr("hone.models.load.AutoModelForCausalLM", None)
    for init in ("pretrained", "random"):
        cfg = ModelConfig(path=str(folder), init=init)
        with pytest.raises(ValueError, match=message):
            load_model(cfg, device=CPU, seed=0, tp=group(size)[0])


# ---------------------------------------------------------------- a group of two


def test_R4_ranks_compute_what_one_does(ranks):
    for name, outcome in of_all(ranks, "forward"):
        assert outcome["equal on all ranks"], name
        assert 0 < outcome["hidden"] < TOLERANCE, name
        assert 0 < outcome["logits"] < TOLERANCE, name


def of_all(ranks, part):
    """Each case of a part of the work and what came of it, on every rank."""
    assert all(found[part] for found in ranks)
    return [pair for found in ranks for pair in found[part].items()]


def test_R4_check_catches_planted_bugs(ranks):
    for found in ranks:
        planted = found["planted"]
        assert planted.pop("nothing") < TOLERANCE
        assert len(planted) == 6
        assert min(planted.values()) > 0.01, planted


def test_R7_engines_of_all_ranks_return_the_same(ranks):
    for name, outcome in of_all(ranks, "engine"):
        assert outcome["same tokens"], name
        assert outcome["equal on all ranks"], name
        assert outcome["gap"] < TOLERANCE, name
        assert (outcome["preemptions"] > 0) == (name == "preemption")


def test_R4_ranks_sample_after_images_as_one_does(ranks):
    for name, outcome in of_all(ranks, "images"):
        assert outcome["same tokens"], name
        assert outcome["equal on all ranks"], name
        assert 0 < outcome["gap"] < TOLERANCE, name


def test_caches_are_as_large_as_the_smallest(ranks):
    assert [found["cache"] for found in ranks] == [[49, 49]] * 2
    assert [found["smallest"] for found in ranks] == [7, 7]


def test_R14_no_rank_wakes_where_one_cannot(ranks):
    messages = [found["failed wake"].pop("message") for found in ranks]
    assert messages[0].startswith("another rank lacks the memory")
    assert messages[1] == "too little memory"
    expected = {"state": "asleep", "asleep": True, "same tokens": True}
    assert [found["failed wake"] for found in ranks] == [expected] * 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3, heads of 128, tied"])
def test_R3_every_rank_gets_and_proves_its_parts(ranks, name):
    faults = "a bit flipped", "a bit flipped on the last rank", "the other rank's parts"
    for rank, found in enumerate(ranks):
        outcome = found["sync"][name]
        for fault in (*faults, "nothing sent"):
            assert outcome[fault].startswith("RuntimeError: weight sync to version 1 is incomplete")
            elsewhere = rank == 0 and fault == faults[1]
            assert ("on another rank" in outcome[fault]) == elsewhere
        assert outcome["not finite"].startswith("NonFiniteWeightsError: 1 of 2240 values of model")
        assert outcome["bytes"] == outcome["expected bytes"]
        assert outcome["same tokens"]
        assert outcome["gap"] < TOLERANCE


def test_kernels_add_and_gather_what_ranks_post(ranks):
    for found in ranks:
        kernels = found["kernels"]
        for dtype in ("torch.float32", "torch.float16"):
            assert kernels[dtype]["residual is equal"]
            assert kernels[dtype]["difference"] < (1e-3 if "16" in dtype else 1e-6)
        assert kernels["gather"]["equal"]
        assert kernels["late"] == {"difference": 0.0, "residual is equal": True}


def test_check_catches_kernels_that_do_not_meet(ranks):
    for bug in ("no wait", "late, one place"):
        assert max(found["kernels"][bug]["difference"] for found in ranks) > 0.01


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("qwen3", 4, "not divided among 4 ranks: num_key_value_heads = 2"),
        ("gemma2", 2, "a gemma2 model is not divided"),
    ],
)
def test_R22_models_that_cannot_be_divided(name, size, message):
    with pytest.raises(ValueError, match=message):
        shard_model(make_model(name), group(size)[0])


def test_R22_engine_and_group_must_fit():
    tp = group(2)[0]
    model = shard_model(make_model(), tp)
    cfg = EngineConfig(tensor_parallel_size=1)
    message = "tensor_parallel_size=1, but the engine was given a group of 2"
    with pytest.raises(ValueError, match=message):
        EmbeddedEngine(model, cfg, eos_token_ids=(), tensor_parallel=tp)


def findings(facts, **engine):
    cfg = GenerateConfig.model_validate(
        {"model": {"path": "."}, "data": {"train": []}, "engine": engine}
    )
    told = rules.findings(resolve(cfg, facts, Devices()))
    return [x.message for x in told if x.keys[0] == "engine.tensor_parallel_size"]


def make_facts(family="qwen3"):
    return ModelFacts(
        context_length=64,
        vocab_size=50,
        kv_values_per_token=128,
        family=family,
        divided={"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 56},
    )


def test_R22_configuration_is_checked_with_its_numbers():
    facts = make_facts()
    assert findings(facts) == findings(facts, tensor_parallel_size=4) == []
    assert findings(None, tensor_parallel_size=4) == []
    (message,) = findings(facts, tensor_parallel_size=8)
    assert "is 8, which does not divide num_key_value_heads = 4 of" in message
    (message,) = findings(make_facts("gemma2"), tensor_parallel_size=2)
    assert "family gemma2" in message
