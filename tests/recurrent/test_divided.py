"""What ranks of an engine hold of a hybrid model, and that together they sample as one does."""

from __future__ import annotations

import pytest
import torch

from hone.models.load import load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tensor_parallel import TensorParallel, check_divides, shard_model
from tests.models.families import family_folder
from tests.ranks import Parts, parts_of, run_ranks
from tests.recurrent.models import hybrid_model
from tests.tables import check_rows

CPU = torch.device("cpu")
BLOCKS = (2, 8), (2, 8), (4, 12)
"""Heads and their sizes, of queries, keys and values."""


@pytest.fixture(scope="module")
def two() -> list[Parts]:
    return parts_of(run_ranks("tests.recurrent.divided_ranks", 2))


def heads_of(rank: int) -> list[int]:
    """Rows of the stacked queries, keys and values that a rank has, head by head."""
    rows: list[int] = []
    start = 0
    for number, size in BLOCKS:
        for head in range(number):
            if head // (number // 2) == rank:
                rows += range(start + head * size, start + (head + 1) * size)
        start += number * size
    return rows


def test_a_rank_has_whole_heads():
    model = hybrid_model(torch.float32)
    layer = model.model.layers[0].linear_attn
    for rank in range(2):
        tp = TensorParallel(rank=rank, size=2, device=CPU)
        shard = shard_model(model, tp)
        own = shard.model.layers[0].linear_attn
        rows, values = heads_of(rank), slice(24 * rank, 24 * rank + 24)
        heads = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(own.in_proj_qkv.weight, layer.in_proj_qkv.weight[rows])
        assert torch.equal(own.conv1d.weight, layer.conv1d.weight[rows])
        assert torch.equal(own.in_proj_z.weight, layer.in_proj_z.weight[values])
        assert torch.equal(own.out_proj.weight, layer.out_proj.weight[:, values])
        for name in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
            assert torch.equal(own.get_parameter(name), layer.get_parameter(name)[heads])
        assert torch.equal(own.norm.weight, layer.norm.weight)
        assert (own.num_k_heads, own.num_v_heads, own.key_dim, own.value_dim) == (1, 2, 8, 24)
        assert own.conv_dim == own.conv1d.in_channels == own.conv1d.groups == len(rows)
        config = shard.config
        assert (config.linear_num_key_heads, config.linear_num_value_heads) == (1, 2)
        parts = dict(export_weights(shard))
        again = {name: tp.shard_of(name, tensor, config) for name, tensor in export_weights(model)}
        assert all(torch.equal(parts[name], tensor) for name, tensor in again.items())


def test_ranks_load_the_parts_of_one_model():
    cfg = ModelConfig(path=str(family_folder("qwen3_5_text")))
    full = load_model(cfg, device=CPU)
    for rank in range(2):
        tp = TensorParallel(rank=rank, size=2, device=CPU)
        shard = load_model(cfg, device=CPU, tp=tp)
        for (name, part), (_, whole) in zip(
            export_weights(shard), export_weights(full), strict=True
        ):
            assert torch.equal(part, tp.shard_of(name, whole, full.config)), name
        assert shard.model.layers[0].linear_attn.num_v_heads == 2


def test_heads_that_do_not_divide_are_refused():
    config = hybrid_model(linear_num_key_heads=1).config
    with pytest.raises(ValueError, match="linear_num_key_heads = 1"):
        check_divides(config, 2)


def test_engines_of_all_ranks_sample_as_one_does(two: list[Parts]):
    def check(name: str) -> None:
        for rank in two:
            found = rank["engines"][name]
            assert found["same tokens"]
            assert found["equal on all ranks"]
            assert found["gap"] < 1e-4

    check_rows(two[0]["engines"].keys(), check)


def test_a_sync_gives_each_rank_its_rows(two: list[Parts]):
    for rank in two:
        found = rank["sync"]
        assert found["differed"]
        assert found["same tokens"]
        assert found["gap"] < 1e-4


def test_rows_as_they_lie_are_caught(two: list[Parts]):
    assert not two[0]["planted"]["same tokens"]
