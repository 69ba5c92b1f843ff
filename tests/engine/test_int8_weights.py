"""An engine with weights of 8-bit codes, against one that samples with what they stand for."""

from __future__ import annotations

import copy

import pytest
import torch

from hone.engine import base
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models import int8_rows
from hone.models.int8_rows import is_packed, pack_rows, unpack_rows
from hone.models.load import blank_model, load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.weights import sync
from hone.weights.buckets import WeightEntry
from hone.weights.receiver import _changed_shards
from hone.weights.sync import NonFiniteWeightsError, WeightSync
from tests.engine.int8_ranks import FAMILIES, Trainer, complete, make_folder, rounded
from tests.ranks import parts_of, run_ranks


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp(request.param), request.param)


def engine_of(model, **fields):
    cfg = EngineConfig(
        **{"max_num_seqs": 4, "kv_cache_gib": 0.01, "weight_dtype": "int8", **fields}
    )
    return EmbeddedEngine(
        model, cfg, eos_token_ids=(3,), max_model_len=64, block_size=4, owns_weights=True
    )


def load(folder, *, packs_rows, seed=0):
    cfg = ModelConfig(path=str(folder), init="random")
    return load_model(cfg, device="cpu", seed=seed, packs_rows=packs_rows)


def blank(folder):
    cfg = ModelConfig(path=str(folder), init="random")
    return blank_model(cfg, device="cpu", packs_rows=True)


def test_R4_samples_with_what_the_codes_stand_for(folder):
    """The same tokens and, up to the order of sums, the same log-probabilities."""
    model = load(folder, packs_rows=False)
    expected = complete(engine_of(rounded(model)))
    for packed in (load(folder, packs_rows=True), blank(folder)):
        engine = engine_of(packed)
        WeightSync(Trainer(model), engine).push(1)
        found = complete(engine)
        assert {k: v.token_ids for k, v in found.items()} == {
            k: v.token_ids for k, v in expected.items()
        }
        for key, one in found.items():
            torch.testing.assert_close(
                torch.tensor(one.logprobs), torch.tensor(expected[key].logprobs), rtol=0, atol=1e-5
            )
    other = complete(engine_of(model))
    assert any(found[key].logprobs != one.logprobs for key, one in other.items()), "it rounds"


def test_statistics_tell_the_bytes_of_its_own_weights(folder):
    whole, packed = (load(folder, packs_rows=packs_rows) for packs_rows in (False, True))
    size = engine_of(packed).stats().weight_bytes
    assert size == sum(tensor.nbytes for tensor in packed.parameters())
    assert size < engine_of(whole).stats().weight_bytes
    cfg = EngineConfig(max_num_seqs=4, kv_cache_gib=0.01)
    shared = EmbeddedEngine(whole, cfg, eos_token_ids=(3,), max_model_len=64, block_size=4)
    assert shared.stats().weight_bytes == 0, "they are the trainer's"


def test_loading_packs_what_a_sync_delivers(folder):
    delivered = blank(folder)
    WeightSync(Trainer(load(folder, packs_rows=False)), engine_of(delivered)).push(1)
    loaded = dict(export_weights(load(folder, packs_rows=True)))
    for name, tensor in export_weights(delivered):
        assert torch.equal(tensor, loaded[name]), name


def test_R2_R3_weights_that_slept_are_delivered_again_and_proven(folder, monkeypatch):
    model = load(folder, packs_rows=False)
    engine = engine_of(blank(folder), enable_sleep=True)
    pushes = WeightSync(Trainer(model), engine)
    pushes.push(1)
    before = complete(engine)
    engine.sleep()
    engine.wake()
    assert engine.needs_weights
    report = pushes.push(2)
    assert report.bytes == sum(tensor.nbytes for _, tensor in engine.named_weights())
    after = complete(engine)
    assert {k: v.logprobs for k, v in after.items()} == {k: v.logprobs for k, v in before.items()}

    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.25)
    deliver, victim = base.deliver, "model.layers.1.self_attn.o_proj.weight"

    def wrong_code(pairs):
        num_bytes = deliver(pairs)
        dict(engine.named_weights())[victim][0, 3] += 1
        return num_bytes

    with monkeypatch.context() as planted:
        planted.setattr(base, "deliver", wrong_code)
        with pytest.raises(RuntimeError, match=f"{victim}: values"):
            WeightSync(Trainer(changed), engine).push(3)
    with monkeypatch.context() as planted:
        planted.setattr(base, "deliver", lambda pairs: 0)  # none arrives
        with pytest.raises(RuntimeError, match="version 4 is incomplete"):
            WeightSync(Trainer(changed), engine).push(4)
    WeightSync(Trainer(changed), engine).push(5)
    held = dict(engine.named_weights())
    assert is_packed(held[victim])
    assert torch.equal(held[victim], pack_rows(dict(export_weights(changed))[victim]))


def test_values_that_are_not_finite_are_not_packed(folder):
    model = load(folder, packs_rows=False)
    engine = engine_of(blank(folder))
    with torch.no_grad():
        dict(model.named_parameters())["model.layers.1.self_attn.v_proj.weight"][2, 5] = torch.nan
    with pytest.raises(NonFiniteWeightsError, match=r"1 of \d+ values of .*v_proj"):
        WeightSync(Trainer(model), engine).push(1)


def test_scales_of_another_row_are_seen(folder, monkeypatch):
    """Red where codes and scales do not belong together."""
    model = load(folder, packs_rows=False)
    expected = complete(engine_of(rounded(model)))

    def shifted(weight):
        packed = pack_rows(weight)
        packed[..., -16:] = packed[..., -16:].roll(1, -2)
        return packed

    monkeypatch.setattr("hone.engine.engine.pack_rows", shifted)
    engine = engine_of(blank(folder))
    WeightSync(Trainer(model), engine).push(1)
    found = complete(engine)
    gaps = [
        abs(a - b)
        for key in expected
        for a, b in zip(found[key].logprobs, expected[key].logprobs, strict=False)
    ]
    assert max(gaps) > 1e-3


def test_R3_ranks_get_their_parts(tmp_path):
    """Two ranks sample what one does that has rounded each rank's part of a row by itself."""
    for found in parts_of(run_ranks("tests.engine.int8_ranks", 2)):
        for family in FAMILIES:
            outcome = found["engine"][family]
            assert outcome["same tokens"], family
            assert outcome["gap"] < 1e-5, family
            assert outcome["share"] < 0.56, family


def test_R3_packed_parts_that_are_as_large_as_the_whole_are_proven():
    """Half a row of 32 values takes 32 bytes with its scale."""
    whole = torch.randn(4, 32)

    class HalfEngine:
        held = torch.zeros(4, 32, dtype=torch.int8)
        write = base.EngineBase.write

        def named_weights(self):
            return [("w", self.held)]

        def shard(self, name, tensor):
            return pack_rows(tensor[:, :16])

    delivery = sync.Delivery(HalfEngine())
    assert pack_rows(whole[:, :16]).shape == whole.shape
    parts = delivery.sources([("w", whole)], are_finite=True)
    entries = [WeightEntry(names=("w",), shape=(4, 32), dtype=torch.float32)]
    assert [name for name, _ in _changed_shards(parts, entries, delivery)] == ["w"]


def test_unpacking_keeps_the_format():
    packed = pack_rows(torch.randn(3, 32))
    assert unpack_rows(packed, torch.float16).dtype is torch.float16
    assert int8_rows.packed_like(packed, packed) is packed
