"""Weights that an engine gives up while it sleeps, and what it then demands."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import psutil
import pytest
import torch

from hone.engine import sleeping_weights as module
from hone.engine.arena import Arena, HostArena
from hone.engine.base import EngineState
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.engine.sleeping_weights import SleepingWeights
from hone.errors import UserError
from hone.models.manifest import build_manifest, export_weights
from hone.weights.sync import WeightSync
from tests.engine.fake_driver import FakeDriver
from tests.engine.test_generation import assert_equal, make_requests, run


@pytest.fixture
def own(make_models):
    models = make_models("qwen3")
    return replace(models, hone=copy.deepcopy(models.hone))


class Trainer:
    """Has the weights of a model."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)

    def named_weights(self):
        return export_weights(self.model)


def sleeper(model):
    cfg = EngineConfig(max_num_seqs=8, enable_sleep=True)
    return EmbeddedEngine(
        model, cfg, eos_token_ids=(), max_model_len=64, block_size=4, owns_weights=True
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_R3_weights_that_slept_sample_only_once_they_are_delivered_again(make_models, family):
    models = make_models(family)
    expected = run(models.engine(), make_requests())
    engine = sleeper(copy.deepcopy(models.hone))
    places = [parameter.data_ptr() for parameter in engine.model.parameters()]
    sync = WeightSync(Trainer(models.hone), engine)
    assert_equal(run(engine, make_requests()), expected)
    for version in (1, 2):
        engine.sleep()
        engine.wake()
        assert engine.needs_weights
        assert all(not p.any() for p in engine.model.parameters()), "they were given up"
        engine.submit(make_requests())
        with pytest.raises(RuntimeError, match="needs an engine that is awake; this one is sync"):
            engine.step()
        engine.sleep()  # from a checkpoint to the export
        engine.wake()
        engine.abort([request.id for request in make_requests()])
        report = sync.push(version)
        assert report.bytes == sum(p.nbytes for p in engine.model.parameters())
        assert not engine.needs_weights
        assert [p.data_ptr() for p in engine.model.parameters()] == places
        found = run(engine, make_requests())
        assert {x.weight_versions[0] for x in found.values()} == {version}
        for name, completion in expected.items():
            assert found[name].token_ids == completion.token_ids
            assert found[name].logprobs == completion.logprobs


def test_R2_a_weight_that_is_not_delivered_after_sleep_is_named(own):
    engine = sleeper(own.hone)
    manifest = build_manifest(engine.named_weights(), 1)
    engine.sleep()
    engine.wake()
    engine.begin_sync()
    with pytest.raises(RuntimeError, match=r"is incomplete(.|\n)*values"):
        engine.finish_sync(manifest)
    assert engine.state is EngineState.SYNCING


def test_weights_of_a_trainer_stay(own):
    """Aliases of its parameters are not the engine's to give up."""
    engine = own.engine(enable_sleep=True)
    before = build_manifest(engine.named_weights(), 0)
    engine.sleep()
    engine.wake()
    assert not engine.needs_weights
    assert build_manifest(engine.named_weights(), 0) == before


def test_ties_and_merged_projections_outlive_the_move(own):
    model = own.hone
    model.tie_weights()
    layer = model.model.layers[0]
    head = model.lm_head
    head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[4:])  # a rank's rows
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = SleepingWeights(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert head.weight.data_ptr() == model.model.embed_tokens.weight[4:].data_ptr()
    q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    assert q.data_ptr() + q.nbytes == k.data_ptr()
    unique = sum(p.nbytes for p in model.parameters()) - head.weight.nbytes
    assert unique <= weights.num_bytes < unique + 512 * len(before)


def test_pages_go_back_to_the_system():
    size, process = 1 << 26, psutil.Process(os.getpid())
    arena = HostArena(size)
    tensor = arena.tensor((size // 4,), torch.float32)
    tensor.fill_(1.0)
    held = process.memory_info().rss
    arena.unmap()
    assert process.memory_info().rss < held - 0.9 * size
    arena.map()
    tensor.fill_(2.0)
    assert tensor.sum() == size // 2


def test_R14_a_wake_without_memory_says_both_sizes_and_can_be_repeated(own, monkeypatch):
    driver = FakeDriver(2**22)
    monkeypatch.setattr(module, "HostArena", lambda size: Arena(size, None, driver=driver))
    weights = SleepingWeights(own.hone)
    held = driver.held
    weights.sleep()
    assert driver.held == 0
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    driver.capacity = held - 1
    with pytest.raises(UserError, match=r"the engine's weights need 0\.00 GiB on cpu: .* are free"):
        weights.wake()
    assert driver.held == 0
    driver.capacity = held
    weights.wake()
    assert driver.held == held
