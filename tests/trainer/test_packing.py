from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.trainer.packing import AttentionCost, collate, pack
from hone.types import Trajectory
from tests.trainer.examples import random_rows

COST = AttentionCost.of(num_parameters=1_000_000, num_layers=4, attention_width=128)


def rows_of(lengths: list[int]) -> list[Trajectory]:
    return [
        Trajectory(id=f"r{i}", token_ids=[0] * n, loss_mask=[False] * n)
        for i, n in enumerate(lengths)
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=80), st.integers(100, 400))
def test_each_row_is_in_one_bin_and_no_bin_exceeds_the_cap(lengths: list[int], budget: int):
    bins = pack(rows_of(lengths), max_tokens=budget, cost=COST)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(members and sum(lengths[i] for i in members) <= budget for members in bins)
    assert bins == pack(rows_of(lengths), max_tokens=budget, cost=COST)
    # Two bins that fit into one would be a pass too many, were it not for balance: with rows of
    # at most `longest` tokens, first-fit arguments bound the number of bins.
    if lengths:
        usable = budget - max(lengths) + 1
        assert len(bins) <= -(-sum(lengths) // usable)


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 12))
def test_fixed_micro_batches_ignore_lengths(lengths: list[int], size: int):
    bins = pack(rows_of(lengths), max_tokens=1, micro_batch_size=size)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert len(bins) == -(-len(lengths) // size)
    assert all(len(members) <= size for members in bins)


def test_bins_are_balanced_by_flops_not_by_tokens():
    lengths = [1000] + [50] * 60
    quadratic = AttentionCost(per_token=1.0, per_token_squared=0.01)
    bins = pack(rows_of(lengths), max_tokens=2400, cost=quadratic)
    loads = [sum(quadratic(lengths[i]) for i in members) for members in bins]
    tokens = [sum(lengths[i] for i in members) for members in bins]
    assert len(bins) == 2
    assert 0 in bins[0]
    assert bins[0] == [0, *bins[0][1:]]
    assert tokens[0] < tokens[1], "the bin with the long row must take fewer tokens"
    by_tokens = pack(rows_of(lengths), max_tokens=2400)
    assert max(loads) < max(sum(quadratic(lengths[i]) for i in b) for b in by_tokens)


def test_a_row_beyond_the_budget_is_named():
    with pytest.raises(ValueError, match=r"'r1' has 11 tokens.*budget of 10.*max_tokens_per_micro"):
        pack(rows_of([10, 11]), max_tokens=10)


@pytest.mark.parametrize(
    "lengths",
    [
        [(i * 7919) % 4000 + 50 for i in range(8192)],
        [2049 + i % 3 for i in range(8192)],
        [2500 if i % 2 else 1 for i in range(8192)],
    ],
    ids=["spread", "one a bin", "bimodal"],
)
def test_packing_8192_rows_takes_well_under_a_second(lengths: list[int]):
    rows = rows_of(lengths)
    start = time.process_time()
    pack(rows, max_tokens=4096, cost=COST)
    assert time.process_time() - start < 1.0


def test_collate_equals_a_token_by_token_twin():
    rows, weights = random_rows(7, seed=3), [0.5 + i for i in range(7)]
    batch = collate(rows, weights, "cpu")
    ids, positions, predict, labels, owner, token_weights, advantages = ([] for _ in range(7))
    for s, row in enumerate(rows):
        assert row.advantages is not None
        n = 0
        for t, (token, trained) in enumerate(zip(row.token_ids, row.loss_mask, strict=True)):
            if trained:
                predict.append(len(ids) - 1)
                labels.append(token)
                owner.append(s)
                token_weights.append(weights[s])
                advantages.append(float(row.advantages[n]))
                n += 1
            ids.append(token)
            positions.append(t)
    assert batch.input_ids.tolist() == ids
    assert batch.position_ids.tolist() == positions
    assert batch.predict_index.tolist() == predict
    assert batch.labels.tolist() == labels
    assert batch.sequence_index.tolist() == owner
    assert batch.weights.tolist() == token_weights
    assert batch.advantages is not None
    assert batch.advantages.tolist() == advantages
    assert batch.cu_seqlens.diff().tolist() == list(batch.lengths) == [r.num_tokens for r in rows]
    assert batch.max_seqlen == max(batch.lengths)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.input_ids.dtype == torch.int64
    assert batch.ids == tuple(row.id for row in rows)


def test_collate_refuses_rows_that_contradict_themselves():
    rows = random_rows(3)
    rows[1].advantages = torch.zeros(rows[1].num_trained + 1)
    with pytest.raises(ValueError, match=r"advantages of sequence 'r1'.*trains"):
        collate(rows, [1.0] * 3, "cpu")
    rows[1].advantages = None
    with pytest.raises(ValueError, match="advantages is set on 2 of 3 rows"):
        collate(rows, [1.0] * 3, "cpu")
    rows = random_rows(3)
    rows[2].loss_mask[0] = True
    with pytest.raises(ValueError, match="'r2' trains its first token"):
        collate(rows, [1.0] * 3, "cpu")
