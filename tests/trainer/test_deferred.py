"""Deferred weights: every process gets the bits of its part, and nobody holds or reads them all.

Loading sends no messages. So the ranks of a group are played one after the other, over a process
group that only pretends; `tests.checkpoint.test_sharded` has a real one.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hone.checkpoint.sharded import Region, local_part, region_of
from hone.distributed import joined
from hone.distributed.joined import JoinedMesh
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.families.spec import EXPERT_MATRICES
from hone.models import weight_files
from hone.models.adapters import adapt
from hone.models.load import load_deferred, load_model
from hone.models.settings import LoraConfig, ModelConfig
from hone.models.tiny import make_tiny_model
from hone.models.weight_files import FileWeights
from hone.trainer import sharded
from hone.trainer.experts import divide_experts
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.tensor import parallelize

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
EXPERTS = {
    "family": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS = {
    "bfloat16 of float32, tied": (TIED, "float32", "bfloat16"),
    "float32 of bfloat16, untied": (UNTIED, "bfloat16", "float32"),
    "bfloat16, untied": ({"family": "qwen2", **UNTIED}, "bfloat16", "bfloat16"),
    "float32, drawn": ({"family": "llama", **UNTIED}, None, "float32"),
    "bfloat16, drawn, tied": (TIED, None, "bfloat16"),
    "experts": (UNTIED | EXPERTS, "bfloat16", "bfloat16"),
    "experts, drawn": (UNTIED | EXPERTS, None, "float32"),
}
"""Fields of the config, format of the files (None: random weights) and format that computes."""
CASES = [
    ("bfloat16 of float32, tied", 2, {"zero_stage": 0}),
    ("float32 of bfloat16, untied", 2, {"zero_stage": 1}),
    ("float32, drawn", 2, {"zero_stage": 2}),
    ("bfloat16, untied", 2, {"tensor_parallel_size": 2, "zero_stage": 3}),
    ("bfloat16, drawn, tied", 2, {"tensor_parallel_size": 2, "zero_stage": 0}),
    ("bfloat16 of float32, tied", 4, {"zero_stage": 3}),
    ("bfloat16, drawn, tied", 4, {"zero_stage": 2, "fsdp_size": 2}),
    ("bfloat16 of float32, tied", 4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    ("float32, drawn", 4, {"ring_size": 2, "tensor_parallel_size": 2, "zero_stage": 3}),
]
ADAPTERS = {"adapters": LoraConfig(rank=4), "4 bits": LoraConfig(rank=4, load_in_4bit=True)}


def save(folder, fields, stored):
    """A model in several safetensors files, or its config alone."""
    folder = make_tiny_model(folder, **SHAPE | fields, weights=stored is not None, seed=3)
    if stored is not None:
        model = load_model(ModelConfig(path=str(folder), dtype=stored), device=CPU, seed=0)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="8KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    @cache
    def make(name):
        fields, stored, dtype = MODELS[name]
        folder = save(tmp_path_factory.mktemp("model"), fields, stored)
        init = "random" if stored is None else "pretrained"
        return ModelConfig(path=str(folder), dtype=dtype, init=init)

    return make


@contextmanager
def rank_of(rank, world, parallel):
    """The mesh of one of several ranks, of which none can talk."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    make = joined.new_group

    def fake(ranks, timeout, backend=None):
        return make(ranks, timeout)

    try:
        with patch.object(joined, "new_group", fake):
            sizes = AxisSizes.of(ParallelConfig(**parallel), world)
            yield JoinedMesh.of_group(sizes, CPU, timeout=timedelta(seconds=5))
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it takes the meshes of two ranks for one


def spread(model, mesh, parallel, **options):
    parallelize(model, mesh)
    divide_experts(model, mesh)
    return ShardedPolicy(model, mesh, stage=parallel["zero_stage"], **options)


def parts(model):
    return {
        name: (region_of(tensor), local_part(tensor.detach()).clone())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def of_each_rank(make, world, parallel, **options):
    """What each rank holds of the model that it makes."""
    found = []
    for rank in range(world):
        with rank_of(rank, world, parallel) as mesh:
            model = make()
            spread(model, mesh, parallel, **options)
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            assert (head.weight is embedding.weight) == model.config.tie_word_embeddings
            found.append(parts(model))
    return found


def deferred(cfg, lora=None):
    model = load_deferred(cfg, device=CPU, seed=7)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    if lora is not None:
        adapt(model, lora, seed=5)
    return model


def whole(cfg, lora=None):
    model = load_model(cfg, device=CPU, seed=7, on_host=True)
    if lora is not None:
        adapt(model, lora, seed=5)
    return model


def wrong(found, expected):
    """Names of what is not the same, on some rank."""
    names = set()
    for own, wanted in zip(found, expected, strict=True):
        assert own.keys() == wanted.keys()
        for name, (region, values) in wanted.items():
            same = own[name][1].dtype == values.dtype and torch.equal(own[name][1], values)
            names |= set() if same and own[name][0] == region else {name}
    return names


@pytest.mark.parametrize(("model", "world", "parallel"), CASES)
def test_parts_are_bits_of_the_whole(config_of, model, world, parallel):
    cfg = config_of(model)
    loaded = whole(cfg)
    expected = of_each_rank(lambda: copy.deepcopy(loaded), world, parallel)
    assert not wrong(of_each_rank(lambda: deferred(cfg), world, parallel), expected)


def test_parts_that_wait_on_the_host_are_filled_there(config_of):
    cfg, parallel = config_of("bfloat16 of float32, tied"), {"zero_stage": 3}
    expected = of_each_rank(lambda: whole(cfg), 2, parallel)
    found = of_each_rank(lambda: deferred(cfg), 2, parallel, offload_parameters=True)
    assert not wrong(found, expected)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("model", ["bfloat16 of float32, tied", "float32, drawn"])
def test_adapters_are_the_same_too(config_of, model, kind):
    cfg, lora, parallel = config_of(model), ADAPTERS[kind], {"zero_stage": 3}
    expected = of_each_rank(lambda: whole(cfg, lora), 2, parallel)
    found = of_each_rank(lambda: deferred(cfg, lora), 2, parallel)
    assert any("lora_A" in name for name in found[0])
    assert any("codes" in name for name in found[0]) == lora.load_in_4bit
    assert not wrong(found, expected)


@pytest.mark.parametrize("model", ["experts", "experts, drawn"])
@pytest.mark.parametrize(("size", "is_4bit"), [(1, False), (2, False), (1, True)])
def test_adapters_of_experts_are_the_same_too(config_of, model, size, is_4bit):
    cfg, parallel = config_of(model), {"zero_stage": 3, "expert_parallel_size": size}
    targets = ("o_proj", *EXPERT_MATRICES)
    lora = LoraConfig(rank=4, target_modules=targets, load_in_4bit=is_4bit)
    expected = of_each_rank(lambda: whole(cfg, lora), 2, parallel)
    found = of_each_rank(lambda: deferred(cfg, lora), 2, parallel)
    assert any(f"{EXPERT_MATRICES[0]}.lora_A" in name for name in found[0])
    assert any(f"{EXPERT_MATRICES[0]}.codes" in name for name in found[0]) == is_4bit
    assert not wrong(found, expected)


# ---------------------------------------------------------------- planted bugs


def of_another_rank(tensor):
    """The region of the next rank, where it is as large."""
    region = region_of(tensor)
    if not isinstance(tensor, DTensor) or tensor.shape[0] % 4:
        return region
    size = region.shape[0]
    first = (region.offsets[0] + size) % tensor.shape[0]
    return Region((first, *region.offsets[1:]), region.shape)


BUGS = {
    "region of the wrong rank": (sharded, "region_of", of_another_rank, "q_proj"),
    "weights are not rounded": (
        sharded,
        "_fill",
        lambda model, source, device, dtypes: sharded_fill(model, source, device, {}),
        "q_proj",
    ),
}
sharded_fill = sharded._fill


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(config_of, bug):
    cfg, parallel = config_of("bfloat16 of float32, tied"), {"zero_stage": 3}
    expected = of_each_rank(lambda: whole(cfg), 2, parallel)
    room, name, replacement, culprit = BUGS[bug]
    with patch.object(room, name, replacement):
        found = of_each_rank(lambda: deferred(cfg), 2, parallel)
    assert any(culprit in name for name in wrong(found, expected))


def test_a_buffer_of_garbage_is_seen(config_of):
    cfg, parallel = config_of("bfloat16 of float32, tied"), {"zero_stage": 3}
    expected = of_each_rank(lambda: whole(cfg), 2, parallel)
    family = type(whole(cfg))
    with patch.object(family, "_init_weights", lambda self, module: None):
        found = of_each_rank(lambda: deferred(cfg), 2, parallel)
    assert {name.rpartition(".")[2] for name in wrong(found, expected)} == {
        "inv_freq",
        "original_inv_freq",
    }


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.rotary_emb.inv_freq"])
def test_a_tensor_that_does_not_come_is_an_error(config_of, lost):
    cfg, parallel = config_of("bfloat16 of float32, tied"), {"zero_stage": 3}
    give = FileWeights.give

    def forgetful(self, take, *, device):
        give(self, lambda weight: weight.name == lost or take(weight), device=device)

    with (
        rank_of(0, 2, parallel) as mesh,
        patch.object(FileWeights, "give", forgetful),
        pytest.raises(RuntimeError, match=f"1 tensors were not loaded, as {lost}"),
    ):
        spread(deferred(cfg), mesh, parallel)


def test_a_tensor_that_comes_twice_is_an_error(config_of):
    cfg, parallel = config_of("bfloat16 of float32, tied"), {"zero_stage": 3}
    give = FileWeights.give

    def twice(self, take, *, device):
        give(self, lambda weight: (take(weight), take(weight)), device=device)

    with (
        rank_of(0, 2, parallel) as mesh,
        patch.object(FileWeights, "give", twice),
        pytest.raises(RuntimeError, match="has been loaded already"),
    ):
        spread(deferred(cfg), mesh, parallel)


# ---------------------------------------------------------------- memory


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made inside, that were there at once."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._note(tensor)
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, tensor):
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()

    @property
    def now(self):
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        return sum(num_bytes for _, num_bytes in self._storages.values())


def count_reads(sizes):
    """In place of `safe_open`: notes how many bytes each read returns."""
    original = weight_files.safe_open

    class Slice:
        def __init__(self, stored):
            self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype
            self._stored = stored

        def __getitem__(self, region):
            with _disable_current_modes():  # the mapped file takes no memory
                values = self._stored[region]
            sizes.append(values.nbytes)
            return values.clone()  # no view of the file, so that what is kept of it counts

    class File:
        def __init__(self, name, **options):
            self._file = original(name, **options)

        def __enter__(self):
            self._open = self._file.__enter__()
            self.keys, self.get_tensor = self._open.keys, self._open.get_tensor
            return self

        def __exit__(self, *error):
            return self._file.__exit__(*error)

        def get_slice(self, key):
            return Slice(self._open.get_slice(key))

    return File


def load_one_rank(cfg, make):
    """Bytes read, the most bytes alive, and those that are left, of one of four."""
    parallel = {"zero_stage": 3}
    reads = []
    with (
        rank_of(1, 4, parallel) as mesh,
        patch.object(weight_files, "safe_open", count_reads(reads)),
    ):
        with LiveBytes() as live:
            model = make(cfg)
            policy = spread(model, mesh, parallel)
        left = sum(local_part(t.detach()).nbytes for t in (*model.parameters(), *model.buffers()))
        own = sum(p.to_local().numel() for p in policy.parameters.values())
    return {
        "read": sum(reads),
        "largest": max(reads, default=0),
        "peak": live.peak,
        "left": left,
        "own": own,
    }


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_memory_does_not_grow_with_the_model(tmp_path, init):
    """Beside its shards a process has no more than a part of a tensor, in two formats, or one
    module's weights where it draws them."""
    whole_embedding, own_rows = 97 * 24, 25 * 24
    beside = {}
    for num_layers in (2, 6):
        folder = save(tmp_path / f"{num_layers}", {**UNTIED, "num_layers": num_layers}, "float32")
        found = load_one_rank(ModelConfig(path=str(folder), init=init, dtype="bfloat16"), deferred)
        beside[num_layers] = found["peak"] - found["left"]
        if init == "pretrained":
            assert found["read"] == 4 * found["own"]
            assert found["largest"] == 4 * own_rows
    most = (4 + 2) * own_rows if init == "pretrained" else 2 * (whole_embedding + own_rows)
    assert beside[2] == beside[6] <= most + 64  # scalars


def test_without_deferring_it_does(tmp_path):
    folder = save(tmp_path, {**UNTIED, "num_layers": 6}, "float32")
    cfg = ModelConfig(path=str(folder), dtype="bfloat16")
    found = load_one_rank(cfg, whole)
    assert found["peak"] - found["left"] > sum(p.nbytes for p in whole(cfg).parameters()) // 2
