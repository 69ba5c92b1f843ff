from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.trainer.collating import collate, empty_batch
from hone.trainer.packing import AttentionCost, digest, plan
from hone.types import Column, Row
from tests.tables import table
from tests.trainer.examples import random_rows

COST = AttentionCost.of(num_parameters=1_000_000, num_layers=4, attention_width=128)


def rows_of(lengths: list[int]) -> list[Row]:
    return [
        Row(id=f"r{i}", token_ids=[0] * n, loss_mask=[False] * n) for i, n in enumerate(lengths)
    ]


def pack(rows: list[Row], **options: Any) -> list[list[int]]:
    """The passes of one rank alone."""
    (passes,) = plan(rows, **options)
    return passes


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
    long = next(i for i, members in enumerate(bins) if 0 in members)
    assert tokens[long] < tokens[1 - long], "the bin with the long row must take fewer tokens"
    by_tokens = pack(rows_of(lengths), max_tokens=2400)
    assert max(loads) < max(sum(quadratic(lengths[i]) for i in b) for b in by_tokens)


def test_a_row_beyond_the_budget_is_named():
    with pytest.raises(ValueError, match=r"'r1' has 11 tokens.*budget of 10.*max_tokens_per_micro"):
        pack(rows_of([10, 11]), max_tokens=10)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 100), max_size=60),
    st.integers(100, 300),
    st.integers(1, 9),
    st.sampled_from([None, 1, 3]),
)
def test_R10_ranks_have_equally_many_passes_and_each_row_once(
    lengths: list[int], budget: int, num_ranks: int, size: int | None
):
    rows = rows_of(lengths)
    options: dict[str, Any] = {
        "max_tokens": budget,
        "num_ranks": num_ranks,
        "micro_batch_size": size,
        "cost": COST,
    }
    passes = plan(rows, **options)
    assert passes == plan(rows, **options)
    assert len(passes) == num_ranks
    assert len({len(own) for own in passes}) == 1
    flat = [members for own in passes for members in own]
    assert sorted(i for members in flat for i in members) == list(range(len(lengths)))
    for members in flat:
        assert len(members) <= size if size else sum(lengths[i] for i in members) <= budget
    for own in passes:
        assert not any(later and not earlier for earlier, later in pairwise(own)), "empty ones last"


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4000), max_size=120),
    st.integers(4000, 9000),
    st.integers(2, 9),
    st.sampled_from([None, 1, 3]),
)
def test_what_ranks_do_in_all_differs_by_no_more_than_one_pass_does(
    lengths: list[int], budget: int, num_ranks: int, size: int | None
):
    """Who has had most so far gets the cheapest pass next, so differences do not add up."""
    passes = plan(
        rows_of(lengths), max_tokens=budget, num_ranks=num_ranks, micro_batch_size=size, cost=COST
    )
    costs = [[sum(COST(lengths[i]) for i in members) for members in own] for own in passes]
    totals = [sum(own) for own in costs]
    in_one_pass = [max(together) - min(together) for together in zip(*costs, strict=True)]
    assert max(totals) - min(totals) <= max(in_one_pass, default=0.0) + 1e-9 * max(totals)


def share_of_work(passes: list[list[list[int]]], lengths: list[int]) -> float:
    """Of the time in which ranks wait for the slowest in every pass."""
    costs = [[sum(COST(lengths[i]) for i in members) for members in own] for own in passes]
    waited = len(passes) * sum(max(together) for together in zip(*costs, strict=True))
    return sum(map(sum, costs)) / waited


def test_ranks_do_not_wait_for_each_other():
    rng = random.Random(0)
    lengths = [min(int(rng.lognormvariate(6, 1)), 8000) + 100 for _ in range(1024)]
    passes = plan(rows_of(lengths), max_tokens=16384, num_ranks=8, cost=COST)
    assert share_of_work(passes, lengths) > 0.98


def test_digests_tell_rows_and_plans_apart():
    rows = rows_of([3, 4, 5])
    first = digest(rows, [[[0, 1], [2]]])
    assert first == digest(rows_of([3, 4, 5]), [[[0, 1], [2]]])
    assert first != digest(rows, [[[0], [1, 2]]])
    assert first != digest(rows, [[[0, 1]], [[2]]])
    assert first != digest(rows_of([3, 4, 6]), [[[0, 1], [2]]])
    assert first != digest(rows[:2], [[[0, 1], [2]]])


def test_an_empty_batch_trains_nothing():
    batch = empty_batch("cpu")
    assert batch.ids == ()
    assert not batch.weights.any()
    assert len(batch.labels) > 0


@table(
    "length",
    [lambda i: (i * 7919) % 4000 + 50, lambda i: 2049 + i % 3, lambda i: 2500 if i % 2 else 1],
)
def test_planning_looks_at_a_row_a_bounded_number_of_times(length: Callable[[int], int]):
    def num_lines(num_rows: int) -> int:
        """That Python runs."""
        events: list[str] = []

        def trace(frame: object, event: str, arg: object) -> Any:
            events.append(event)
            return trace

        rows = rows_of([length(i) for i in range(num_rows)])
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            plan(rows, max_tokens=4096, num_ranks=8, cost=COST)
        finally:
            sys.settrace(before)
        return len(events)

    assert num_lines(4096) < 5 * num_lines(1024)


def test_collate_equals_a_token_by_token_twin():
    rows, weights = random_rows(7, seed=3), [0.5 + i for i in range(7)]
    batch = collate(rows, weights, "cpu")
    ids, positions, predict, labels, owner, token_weights, advantages = ([] for _ in range(7))
    for s, row in enumerate(rows):
        n = 0
        for t, (token, trained) in enumerate(zip(row.token_ids, row.loss_mask, strict=True)):
            if trained:
                predict.append(len(ids) - 1)
                labels.append(token)
                owner.append(s)
                token_weights.append(weights[s])
                advantages.append(float(row.column("advantages")[n]))
                n += 1
            ids.append(token)
            positions.append(t)
    assert batch.input_ids.tolist() == ids
    assert batch.position_ids.tolist() == positions
    assert batch.predict_index.tolist() == predict
    assert batch.labels.tolist() == labels
    assert batch.sequence_index.tolist() == owner
    assert batch.weights.tolist() == token_weights
    assert batch.column("advantages").tolist() == advantages
    assert batch.cu_seqlens.diff().tolist() == list(batch.lengths) == [r.num_tokens for r in rows]
    assert batch.max_seqlen == max(batch.lengths)
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.input_ids.dtype == torch.int64
    assert batch.ids == tuple(row.id for row in rows)


def test_collate_refuses_rows_that_contradict_themselves():
    rows = random_rows(3)
    rows[1].columns["advantages"] = Column(torch.zeros(rows[1].num_trained + 1))
    with pytest.raises(ValueError, match=r"advantages of sequence 'r1'.*trains"):
        collate(rows, [1.0] * 3, "cpu")
    del rows[1].columns["advantages"]
    with pytest.raises(ValueError, match="advantages is set on 2 of 3 rows"):
        collate(rows, [1.0] * 3, "cpu")
    rows = random_rows(3)
    rows[2].loss_mask[0] = True
    with pytest.raises(ValueError, match="'r2' trains its first token"):
        collate(rows, [1.0] * 3, "cpu")


def paired_rows(num_pairs: int, seed: int) -> list[Row]:
    """Pairs that do not lie side by side, with columns of every extent, and a row by itself."""
    rows = random_rows(2 * num_pairs + 1, seed=seed, group_size=2)
    for number, row in enumerate(rows[:-1]):
        row.unit = f"pair {number % num_pairs}"
    for number, row in enumerate(rows):
        row.columns["chosen"] = Column(torch.tensor([number < num_pairs]), "row")
        row.columns["routing"] = Column(
            torch.tensor([[number, t] for t in range(row.num_tokens)]), "token"
        )
    return rows


@table("options", [{"max_tokens": 70}, {"max_tokens": 1, "micro_batch_size": 2}])
@table("num_ranks", [1, 3])
def test_rows_of_a_unit_share_a_pass(options: dict[str, Any], num_ranks: int):
    rows = paired_rows(9, seed=1)
    passes = plan(rows, num_ranks=num_ranks, cost=COST, **options)
    flat = [members for own in passes for members in own if members]
    assert sorted(i for members in flat for i in members) == list(range(len(rows)))
    assert len(flat) > 3
    for members in flat:
        inside = {rows[i].unit for i in members if rows[i].unit}
        assert all(sum(rows[i].unit == unit for i in members) == 2 for unit in inside)


def test_a_unit_beyond_the_cap_is_named():
    rows = rows_of([6, 5])
    for row in rows:
        row.unit = "pair"
    with pytest.raises(ValueError, match=r"'r0' and 'r1' together have 11 tokens.*budget of 10"):
        pack(rows, max_tokens=10)
    with pytest.raises(ValueError, match=r"'r0' and 'r1' must share.*micro_batch_size is 1; .* 2"):
        pack(rows, max_tokens=99, micro_batch_size=1)


def test_columns_and_weights_are_laid_end_to_end_by_what_they_are_per():
    rows = paired_rows(2, seed=2)
    batch = collate(rows, [1.0, 2.0, 3.0, 4.0, 5.0], "cpu")
    assert batch.column("chosen").tolist() == [True, True, False, False, False]
    routing = [[s, t] for s, row in enumerate(rows) for t in range(row.num_tokens)]
    assert batch.column("routing").tolist() == routing
    assert batch.unit_index.tolist() == [0, 1, 0, 1, 2]
    assert batch.num_units == 3
    by_row = collate(rows, [1.0, 2.0, 3.0, 4.0, 5.0], "cpu", per="row")
    assert by_row.weights.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    by_unit = collate(rows, [1.0, 2.0, 1.0, 2.0, 5.0], "cpu", per="unit")
    assert by_unit.weights.tolist() == [1.0, 2.0, 5.0]
    with pytest.raises(KeyError, match=r"no column 'chosn', only \['advantages', 'chosen', "):
        batch.column("chosn")
    with pytest.raises(KeyError, match="row 'r0' has no column 'chosn'"):
        rows[0].column("chosn")


@table(
    "column, words",
    [
        (Column(torch.zeros(2), "row"), r"chosen of sequence 'r1' has shape \(2,\).*has one value"),
        (Column(torch.zeros(3), "token"), "'r1' is per token, .* that of 'r0' is per row"),
        (Column(torch.zeros(1, 3), "row"), r"'r1' is per row, of shape \(1, 3\); that of 'r0'"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(column: Column, words: str):
    rows = paired_rows(2, seed=2)
    rows[1].columns["chosen"] = column
    with pytest.raises(ValueError, match=words):
        collate(rows, [1.0] * 5, "cpu")
