"""Rows of a group that bring their prompt into a pass once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.distributed.mesh import Mesh
from hone.prefixes import COPIED, MIN_SAVED
from hone.trainer.batcher import Batcher
from hone.trainer.collating import collate
from hone.trainer.packing import AttentionCost, plan
from hone.trainer.prefixes import pass_tokens, shared_prefixes
from hone.types import Column, Row
from tests.tables import table
from tests.trainer.examples import gradients, make_trainer, random_rows, tiny_model

COST = AttentionCost.of(num_parameters=1_000_000, num_layers=4, attention_width=128)


def group_rows(
    prompt: int, completions: list[int], *, group: str = "g", unit: str = ""
) -> list[Row]:
    """A group whose completions differ in their first token."""
    return [
        Row(
            id=f"{group}.{number}",
            group_id="" if unit else group,
            unit=unit,
            token_ids=[7] * prompt + [10 + number] * length,
            loss_mask=[False] * prompt + [True] * length,
        )
        for number, length in enumerate(completions)
    ]


def test_the_prompt_is_found_and_never_a_trained_token():
    assert shared_prefixes(group_rows(5, [3, 1, 9])) == [5, 5, 5]
    rows = group_rows(5, [3, 3])
    rows[1].token_ids = list(rows[0].token_ids)  # the same answer twice
    assert shared_prefixes(rows) == [5, 5]
    rows[1].token_ids[3] = 8
    assert shared_prefixes(rows) == [3, 3]
    rows[1].loss_mask[2] = True
    assert shared_prefixes(rows) == [2, 2]


def test_rows_of_other_groups_and_rows_by_themselves_share_nothing():
    rows = group_rows(5, [3], group="a") + group_rows(5, [3], group="b")
    assert shared_prefixes(rows) == [0, 0]
    for row in rows:
        row.group_id = ""
    assert shared_prefixes(rows) == [0, 0]
    assert shared_prefixes([]) == []


def test_a_preference_shares_its_prompt():
    assert shared_prefixes(group_rows(5, [3, 4], unit="pair")) == [5, 5]


def test_untrained_rows_keep_a_token_of_their_own():
    rows = group_rows(6, [0, 0, 2])
    assert shared_prefixes(rows) == [5, 5, 5]


def episode_rows(contexts: list[tuple[str, list[int]]]) -> list[Row]:
    """Rows of a group, of which each trains four tokens after its context, by episode."""
    return [
        Row(
            id=f"{episode}#{number}",
            group_id="g",
            episode=episode,
            token_ids=[*context, *(20 + number + t for t in range(4))],
            loss_mask=[False] * len(context) + [True] * 4,
            columns={"advantages": Column(torch.full((4,), 0.5 - number))},
        )
        for number, (episode, context) in enumerate(contexts)
    ]


PROMPT, SUMMARY = [7] * 12, [7] * 4 + [9] * 9
REWRITTEN = [
    ("a", PROMPT), ("a", [*PROMPT, 3, 4]), ("a", SUMMARY),
    ("b", PROMPT), ("b", [8, *PROMPT]), ("c", PROMPT),
]  # fmt: skip


def test_a_rewritten_history_does_not_take_the_prompt_from_its_group():
    """Rows that go on from the prompt share it, also later ones of an episode."""
    rows = episode_rows(REWRITTEN)
    assert shared_prefixes(rows) == [12, 12, 0, 12, 0, 12]
    assert shared_prefixes(rows[:3]) == [12, 12, 0], "a single episode shares its own"
    for row in rows:
        row.episode = ""
    assert shared_prefixes(rows) == [0] * 6, "the first token differs"


@table("cap", [512, 40])
def test_rows_that_share_a_prompt_train_as_rows_that_do_not(cap: int):
    rows = episode_rows(REWRITTEN)
    trainer = make_trainer(tiny_model(), max_tokens_per_microbatch=cap)
    shared, _ = trainer.forward_backward(rows)
    found = gradients(trainer)
    trainer.batcher = replace(trainer.batcher, shares_prefixes=False)
    alone, _ = trainer.forward_backward(rows)
    assert float(shared) == pytest.approx(float(alone), abs=1e-6)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_too_little_is_not_shared():
    saved = (1 - COPIED) * 7 * 10
    longest = int((saved / MIN_SAVED - 80) / 8)
    assert shared_prefixes(group_rows(10, [longest] * 8)) == [10] * 8
    assert shared_prefixes(group_rows(10, [longest + 1] * 8)) == [0] * 8


@table("seed", range(4))
def test_collate_equals_a_token_by_token_twin(seed: int):
    rows = random_rows(17, seed=seed, shared_prompt=30)
    random.Random(seed).shuffle(rows)
    check_collated(rows, shared_prefixes(rows))


@table("order", [[0, 1, 2, 3, 4, 5], [2, 1, 0], [4, 5, 3], [2, 4, 1, 5]])
def test_collate_skips_rows_of_other_contexts(order: list[int]):
    """Also where such a row is the first one of the group in a pass."""
    rows = episode_rows(REWRITTEN)
    prefixes = shared_prefixes(rows)
    check_collated([rows[i] for i in order], [prefixes[i] for i in order])


def check_collated(rows: list[Row], prefixes: list[int]) -> None:
    for number, row in enumerate(rows):
        values = torch.tensor([[number, t] for t in range(row.num_tokens)])
        row.columns["routes"] = Column(values, "token")
    assert any(prefixes)
    batch = collate(rows, [1.0] * len(rows), "cpu", prefixes=prefixes)
    keys = batch.keys
    assert keys is not None
    place: dict[tuple[str, int], int] = {}  # of each token that is packed, by owner and position
    predict: list[int] = []
    routes: list[list[int]] = []
    lengths: list[int] = []
    index: list[int] = []
    for row, prefix in zip(rows, prefixes, strict=True):
        number_before = len(place)
        own: list[int] = []
        for t in range(row.num_tokens):
            name = (f"prompt of {row.group_id}" if t < prefix else row.id, t)
            if name not in place:
                place[name] = len(place)
                routes.append(row.column("routes")[t].tolist())
                assert batch.input_ids[place[name]] == row.token_ids[t]
                assert batch.position_ids[place[name]] == t
            own.append(place[name])
        lengths.append(len(place) - number_before)
        predict += [own[t - 1] for t, trained in enumerate(row.loss_mask) if trained]
        index += own
    assert batch.num_tokens == len(place) < sum(row.num_tokens for row in rows)
    assert batch.predict_index.tolist() == predict
    assert batch.labels.tolist() == [
        token for row in rows for token, m in zip(row.token_ids, row.loss_mask, strict=True) if m
    ]
    assert batch.column("routes").tolist() == routes
    assert batch.cu_seqlens.diff().tolist() == list(batch.lengths) == lengths
    assert batch.max_seqlen == max(lengths)
    assert keys.index.tolist() == index
    assert keys.cu_seqlens.diff().tolist() == list(keys.lengths) == [r.num_tokens for r in rows]
    assert keys.max_seqlen == max(keys.lengths)
    for token, (start, end) in enumerate(zip(keys.uses_starts, keys.uses_starts[1:], strict=False)):
        uses = keys.uses[start:end].tolist()
        assert uses == [at for at, used in enumerate(index) if used == token]


def test_rows_that_share_nothing_have_no_keys_of_others():
    rows = random_rows(5, seed=0)
    assert collate(rows, [1.0] * 5, "cpu", prefixes=[0] * 5).keys is None
    alone = group_rows(5, [3])
    assert collate(alone, [1.0], "cpu", prefixes=[5]).keys is None


def drawn_rows(draw: random.Random, groups: int) -> list[Row]:
    rows: list[Row] = []
    for group in range(groups):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 9))]
        rows += group_rows(draw.randint(1, 60), lengths, group=str(group))
    draw.shuffle(rows)
    return rows


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 12),
    st.integers(110, 400),
    st.integers(1, 5),
    st.sampled_from([None, 1, 3]),
)
def test_each_row_once_and_no_pass_above_the_cap(
    seed: int, groups: int, budget: int, num_ranks: int, size: int | None
):
    rows = drawn_rows(random.Random(seed), groups)
    prefixes = shared_prefixes(rows)
    options: dict[str, Any] = {
        "max_tokens": budget,
        "num_ranks": num_ranks,
        "micro_batch_size": size,
        "cost": COST,
    }
    passes = plan(rows, prefixes=prefixes, **options)
    assert passes == plan(rows, prefixes=prefixes, **options)
    assert len({len(own) for own in passes}) == 1
    flat = [members for own in passes for members in own]
    assert sorted(i for members in flat for i in members) == list(range(len(rows)))
    for members in flat:
        own = [rows[i] for i in members]
        tokens = pass_tokens(own, [prefixes[i] for i in members])
        assert len(members) <= size if size else tokens <= budget
        if members:
            batch = collate(own, [1.0] * len(own), "cpu", prefixes=[prefixes[i] for i in members])
            copied = sum(row.num_tokens for row in own) - batch.num_tokens
            assert tokens >= batch.num_tokens + COPIED * copied
    slowest = time_of(rows, passes, prefixes)
    assert slowest <= time_of(rows, plan(rows, **options), [0] * len(rows)) * (1 + 1e-9)


def time_of(rows: list[Row], passes: list[list[list[int]]], prefixes: list[int]) -> float:
    """The sum over passes of what the slowest rank takes."""

    def of(members: list[int]) -> float:
        seen: set[str] = set()
        total = 0.0
        for i in members:
            total += COST(rows[i].num_tokens)
            if rows[i].group_id in seen and prefixes[i]:
                total -= (1 - COPIED) * COST(prefixes[i])
            seen.add(rows[i].group_id)
        return total

    return sum(max(map(of, together)) for together in zip(*passes, strict=True))


@table("prompt, least", [(256, 0.98), (1024, 0.96)])
@table("num_ranks", [1, 4])
def test_few_groups_lie_in_two_passes_and_passes_are_full(
    prompt: int, least: float, num_ranks: int
):
    draw = random.Random(1)
    rows: list[Row] = []
    for group in range(32):
        lengths = [draw.randint(900, 1100) for _ in range(8)]
        rows += group_rows(prompt, lengths, group=str(group))
    prefixes = shared_prefixes(rows)
    passes = plan(rows, prefixes=prefixes, max_tokens=16384, num_ranks=num_ranks, cost=COST)
    once = sum(COST(row.num_tokens) for row in rows)
    once -= (1 - COPIED) * 32 * 7 * COST(prompt)
    assert once / num_ranks / time_of(rows, passes, prefixes) > least * (
        0.93 if num_ranks > 1 else 1
    )


def test_a_pair_fits_where_its_prompt_does_once():
    rows = group_rows(60, [20, 20], unit="pair")
    assert plan(rows, prefixes=shared_prefixes(rows), max_tokens=108) == [[[0, 1]]]
    with pytest.raises(ValueError, match="together have 160 tokens"):
        plan(rows, max_tokens=108)
    with pytest.raises(ValueError, match=r"together have 108 tokens.*budget of 107"):
        plan(rows, prefixes=shared_prefixes(rows), max_tokens=107)


def test_a_cap_that_is_lowered_counts_a_prompt_once():
    batcher = Batcher(max_tokens=400, max_tokens_forward=None, micro_batch_size=None, cost=COST)
    rows = group_rows(60, [20] * 8)
    mesh = Mesh.alone(torch.device("cpu"))
    (passes,) = batcher.passes(rows, "backward", mesh)
    assert passes == [list(range(8))]
    assert batcher.lower("backward", rows, mesh) == (60 + 8 * 20 + 7 * 8) // 2
    (passes,) = batcher.passes(rows, "backward", mesh)
    assert len(passes) == 3
