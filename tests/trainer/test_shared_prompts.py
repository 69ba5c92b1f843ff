"""Micro-batches in which the rows of a group have one copy of their prompt."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.attention import shared_prompts
from hone.config.algorithm import AlgorithmConfig
from hone.config.errors import UserError
from hone.config.trainer import TrainerConfig
from hone.trainer import scoring
from hone.trainer.packing import AttentionCost, collate, plan
from hone.trainer.trainer import PolicyTrainer
from hone.types import Trajectory
from tests.trainer.examples import VOCAB, gradients, make_trainer, near_policy, tiny_model

LOGPROBS, GRADIENTS = 1e-5, 1e-4
COST = AttentionCost.of(num_parameters=1_000_000, num_layers=4, attention_width=128)


def group_rows(
    num_groups: int, *, size: int = 4, max_prompt: int = 12, max_completion: int = 9, seed: int = 0
) -> list[Trajectory]:
    """Groups with masked tokens here and there, in no order, log-probs and advantages set.

    In every third group one row has another prompt, in every third one begins with masked tokens.
    """
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    rows: list[Trajectory] = []
    for g in range(num_groups):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, max_prompt))]
        for i in range(size):
            own = [rng.randrange(VOCAB) for _ in range(rng.randint(2, max_completion))]
            mask = [True, *(rng.random() < 0.8 for _ in own[1:])]
            ids = list(prompt)
            if i == 1 and g % 3 == 1:
                ids[-1] = (ids[-1] + 1) % VOCAB
            if i == 2 and g % 3 == 2:
                mask[0], mask[1] = False, True
            mask = [False] * len(ids) + mask
            num_trained = sum(mask)
            old = -2.5 + 0.8 * torch.randn(num_trained, generator=draw)
            rows.append(
                Trajectory(
                    id=f"g{g}/{i}",
                    group_id=f"g{g}",
                    token_ids=ids + own,
                    loss_mask=mask,
                    rollout_logprobs=old + 0.1,
                    old_logprobs=old,
                    ref_logprobs=old - 0.1,
                    advantages=torch.randn(1, generator=draw).expand(num_trained).clone(),
                )
            )
    rng.shuffle(rows)
    return rows


def prompt_of(row: Trajectory) -> tuple[int, ...]:
    return tuple(row.token_ids[: row.loss_mask.index(True)])


def tokens_laid_out(rows: list[Trajectory]) -> int:
    prompts = {(row.group_id, prompt_of(row)) for row in rows}
    own = sum(row.num_tokens - len(prompt_of(row)) for row in rows)
    return own + sum(len(prompt) for _, prompt in prompts)


# ---------------------------------------------------------------- layout


def test_every_token_sees_the_ids_and_positions_of_its_row():
    rows = group_rows(5, seed=1)
    weights = [0.5 + i for i in range(len(rows))]
    batch = collate(rows, weights, "cpu", share_prompts=True)
    plain = collate(rows, weights, "cpu")
    for name in ("labels", "sequence_index", "weights", "advantages", "rollout_logprobs"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), name
    assert (batch.ids, batch.max_seqlen) == (plain.ids, plain.max_seqlen)
    assert batch.num_tokens == sum(batch.lengths) == tokens_laid_out(rows) < plain.num_tokens
    assert batch.cu_seqlens.diff().tolist() == list(batch.lengths)

    # Each trained token is predicted by the last one of its prompt, or follows its own piece.
    ids, positions = batch.input_ids.tolist(), batch.position_ids.tolist()
    borders = batch.cu_seqlens.tolist()
    num_prompts = len(batch.shared_prompts)
    prompt_ends = {borders[g + 1] - 1 for g in range(num_prompts)}
    trained = iter(batch.predict_index.tolist())
    for row in rows:
        for t, is_trained in enumerate(row.loss_mask):
            if not is_trained:
                continue
            place = next(trained)
            assert ids[place] == row.token_ids[t - 1]
            assert positions[place] == t - 1
            if t == len(prompt_of(row)):
                first = place - (t - 1)
                assert ids[first : place + 1] == row.token_ids[:t]
                assert place in prompt_ends or first in borders
            else:
                assert ids[place + 1] == row.token_ids[t]
    shared = batch.predict_index[:, None] == torch.tensor(sorted(prompt_ends))
    assert shared.sum(0).tolist() == list(batch.shared_prompts)
    # One row of groups 1 and 4 has another prompt, one of group 2 begins with a masked token.
    assert sorted(batch.shared_prompts) == [3, 3, 3, 4, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"group_id": "another"},
        {"group_id": ""},
        {"token_ids": [1, 2, 9, 4, 5]},
        {"loss_mask": [False, True, False, True, True]},  # trains its prompt
        {"loss_mask": [False] * 5},
    ],
    ids=str,
)
def test_rows_that_differ_before_the_first_trained_token_share_nothing(change):
    mask = [False, False, False, True, True]
    one = Trajectory(id="a", group_id="g", token_ids=[1, 2, 3, 4, 5], loss_mask=mask)
    other = replace(one, id="b")
    assert collate([one, other], [1, 1], "cpu", share_prompts=True).lengths == (3, 2, 2)
    other = replace(other, **change)
    batch = collate([one, other], [1, 1], "cpu", share_prompts=True)
    assert batch.lengths == (5, 5)
    assert batch.shared_prompts == ()


# ---------------------------------------------------------------- plan


@settings(max_examples=150, deadline=None)
@given(
    num_groups=st.integers(0, 12),
    size=st.integers(1, 9),
    budget=st.integers(21, 200),
    num_ranks=st.integers(1, 4),
    balance=st.booleans(),
    seed=st.integers(0, 99),
)
def test_plan_counts_tokens_as_they_are_laid_out(  # noqa: PLR0917
    num_groups, size, budget, num_ranks, balance, seed
):
    rows = group_rows(num_groups, size=size, seed=seed)
    options = {"max_tokens": budget, "num_ranks": num_ranks, "cost": COST, "balance": balance}
    passes = plan(rows, **options, share_prompts=True)
    assert passes == plan(rows, **options, share_prompts=True)
    assert len(passes) == num_ranks
    assert len({len(own) for own in passes}) == 1
    members = [indices for own in passes for indices in own]
    assert sorted(i for indices in members for i in indices) == list(range(len(rows)))
    tokens = [tokens_laid_out([rows[i] for i in indices]) for indices in members]
    assert max(tokens, default=0) <= budget
    if balance:
        # A pass repeats one prompt at most, and neighbours in the line fill more than one budget.
        assert sum(tokens) <= tokens_laid_out(rows) + 12 * len(members)
        num_bins = -(-2 * (tokens_laid_out(rows) + 12 * len(members)) // budget) + 1
        assert len(passes[0]) <= -(-num_bins // num_ranks)


def test_more_rows_fit_and_a_group_stays_together():
    rows = group_rows(8, size=8, max_prompt=1, max_completion=9, seed=2)
    prompt = list(range(40))
    rows = [
        replace(row, token_ids=prompt + row.token_ids, loss_mask=[False] * 40 + row.loss_mask)
        for row in rows
    ]
    shared = plan(rows, max_tokens=250, share_prompts=True)[0]
    assert len(shared) < len(plan(rows, max_tokens=250)[0]) / 2
    tokens = sum(tokens_laid_out([rows[i] for i in indices]) for indices in shared)
    assert tokens <= tokens_laid_out(rows) + 50 * (len(shared) - 1)


def test_a_large_group_is_cut_into_equal_parts_over_ranks():
    mask = [False] * 30 + [True] * 10
    one = Trajectory(id="x", group_id="g", token_ids=list(range(40)), loss_mask=mask)
    rows = [replace(one, id=str(i)) for i in range(64)]
    passes = plan(rows, max_tokens=130, share_prompts=True)
    assert [len(indices) for indices in passes[0]] == [10, 10, 10, 10, 10, 10, 4]
    passes = plan(rows, max_tokens=10_000, num_ranks=4, share_prompts=True)
    assert [[len(indices) for indices in own] for own in passes] == [[16]] * 4
    passes = plan(rows, max_tokens=1, micro_batch_size=8, num_ranks=2, share_prompts=True)
    assert [[len(indices) for indices in own] for own in passes] == [[8] * 4] * 2


def test_passes_are_balanced_by_cost():
    rows = group_rows(40, size=8, max_prompt=30, max_completion=60, seed=4)
    passes = plan(rows, max_tokens=2000, num_ranks=4, cost=COST, share_prompts=True)

    def load(indices: list[int]) -> float:
        members = [rows[i] for i in indices]
        prompts = [(row.group_id, prompt_of(row)) for row in members]
        saved = sum(COST(len(prompt)) for _, prompt in prompts)
        saved -= sum(COST(len(prompt)) for _, prompt in set(prompts))
        return sum(COST(row.num_tokens) for row in members) - saved

    loads = [load(indices) for own in passes for indices in own]
    dearest_row = max(COST(row.num_tokens) for row in rows)
    assert max(loads) <= sum(loads) / len(loads) + dearest_row
    totals = [sum(map(load, own)) for own in passes]
    assert max(totals) < 1.05 * min(totals)


def test_planning_8192_rows_takes_well_under_a_second():
    mask = [False] * 100 + [True] * 200
    ids = list(range(300))
    rows = [
        Trajectory(id=str(i), group_id=str(i // 8), token_ids=ids, loss_mask=mask)
        for i in range(8192)
    ]
    start = time.process_time()
    plan(rows, max_tokens=4096, num_ranks=8, cost=COST, share_prompts=True)
    assert time.process_time() - start < 1.0


def test_a_row_beyond_the_budget_is_named():
    rows = group_rows(1, size=2)
    with pytest.raises(ValueError, match=r"'g0/\d' has .* budget of 2 "):
        plan(rows, max_tokens=2, share_prompts=True)


# ---------------------------------------------------------------- numbers

ROWS = group_rows(6, seed=3)
OBJECTIVES = {
    "ppo": AlgorithmConfig(),
    "gspo, k3, entropy": AlgorithmConfig.model_validate(
        {
            "loss": "gspo",
            "aggregation": "sequence_mean",
            "kl": {"coef": 0.1, "estimator": "k3"},
            "entropy_coef": 0.05,
        }
    ),
}
MODELS = {
    "qwen3": ("qwen3", {}),
    "window": ("mistral", {"sliding_window": 5}),
    "softcap": ("gemma2", {"sliding_window": 6, "attn_logit_softcapping": 3.0}),
}
CUTS = (
    {},
    {"max_tokens_per_microbatch": 60, "max_tokens_per_forward": 45},
    {"micro_batch_size": 3},
    {"recompute": "full"},
    {"recompute": "selective"},
)


def numbers(rows, model, objective, **settings):
    trainer = make_trainer(model, objective, **settings)
    logprobs = torch.cat(trainer.logprobs(rows))
    loss, _ = trainer.forward_backward(rows)
    return logprobs, float(loss), gradients(trainer)


def differences(found, expected):
    """Of log-probs and loss, and relative of the worst parameter's gradient."""
    floor = 1e-3 * max(g.norm() for g in expected[2].values())
    return (
        max((found[0] - expected[0]).abs().max().item(), abs(found[1] - expected[1])),
        max(
            ((found[2][n] - g).norm() / max(g.norm(), floor)).item() for n, g in expected[2].items()
        ),
    )


def near_rows(model) -> list[Trajectory]:
    rows = [replace(row) for row in ROWS]
    near_policy(rows, make_trainer(model))
    return rows


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("family", MODELS)
def test_R1_numbers_are_those_of_ordinary_packing(family, objective):
    name, fields = MODELS[family]
    model = tiny_model(name, **fields)
    rows = near_rows(model)
    expected = numbers(rows, model, objective)
    for cut in CUTS:
        found = numbers(rows, model, objective, share_prompts=True, **cut)
        forward, backward = differences(found, expected)
        assert forward < LOGPROBS, cut
        assert backward < GRADIENTS, cut


def test_R7_no_completion_moves_anothers_log_probs():
    model = tiny_model()
    trainer = make_trainer(model, share_prompts=True)
    before = trainer.logprobs(ROWS)
    for index in range(0, len(ROWS), 5):
        rows = [replace(row) for row in ROWS]
        last = rows[index].token_ids[-1]
        rows[index].token_ids = [*rows[index].token_ids[:-1], (last + 1) % VOCAB]
        after = trainer.logprobs(rows)
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            assert i == index or torch.equal(one, other)


def test_weights_of_tokens_are_the_same():
    model = tiny_model()
    seen = []
    for share in (False, True):
        trainer = make_trainer(model, share_prompts=share, max_tokens_per_microbatch=60)
        weights = [1 / (i + 3) for i in range(len(ROWS))]
        batches = list(trainer._micro_batches(ROWS, weights))
        by_row = {}
        for batch in batches:
            for name, n in zip(batch.ids, batch.sequence_index.bincount().tolist(), strict=True):
                start = sum(batch.sequence_index < batch.ids.index(name))
                by_row[name] = batch.weights[start : start + n].tolist()
        seen.append((by_row, len(batches)))
    assert seen[0][0] == seen[1][0]
    assert seen[1][1] < seen[0][1]


def positions_restart(batch):
    parts = [torch.arange(n) for n in batch.lengths]
    return replace(batch, position_ids=torch.cat(parts))


def predicted_from_own_row(batch):
    """The first token of a completion from its own first one."""
    first = batch.position_ids.new_tensor(batch.cu_seqlens[:-1].tolist())
    predict = batch.predict_index.clone()
    ends = batch.cu_seqlens[1 : len(batch.shared_prompts) + 1] - 1
    is_first = (predict[:, None] == ends).any(1)
    predict[is_first] = first[len(batch.shared_prompts)]
    return replace(batch, predict_index=predict)


def predicted_by_the_prompt_before(batch):
    ends = (batch.cu_seqlens[1 : len(batch.shared_prompts) + 1] - 1).long()
    predict = batch.predict_index.clone()
    for end, before in zip(ends, ends.roll(1), strict=True):
        predict[batch.predict_index == end] = before
    return replace(batch, predict_index=predict)


@pytest.mark.parametrize(
    "bug", [positions_restart, predicted_from_own_row, predicted_by_the_prompt_before]
)
def test_planted_layouts_are_seen(bug, monkeypatch):
    model = tiny_model()
    expected = numbers(ROWS, model, OBJECTIVES["ppo"])
    monkeypatch.setattr(scoring, "collate", lambda *a, **o: bug(collate(*a, **o)))
    found = numbers(ROWS, model, OBJECTIVES["ppo"], share_prompts=True)
    assert differences(found, expected)[0] > 100 * LOGPROBS


def once(real):
    """Gradients of a prompt's keys and values from its own tokens alone."""
    return lambda total, shares: real(total, shares[:1])


class _FirstOnly(torch.autograd.Function):
    """Rows of hidden states; one that is named several times gets the gradient of the last."""

    @staticmethod
    def forward(ctx, hidden, index):
        ctx.save_for_backward(index)
        ctx.shape = hidden.shape
        return hidden.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape)
        total[index] = grad
        return total, None


def test_planted_gradients_of_a_prompt_that_count_once(monkeypatch):
    model = tiny_model()
    expected = numbers(ROWS, model, OBJECTIVES["ppo"])
    with monkeypatch.context() as patch:
        patch.setattr(shared_prompts, "add_key_gradients", once(shared_prompts.add_key_gradients))
        found = numbers(ROWS, model, OBJECTIVES["ppo"], share_prompts=True)
    forward, backward = differences(found, expected)
    assert forward < LOGPROBS
    assert backward > 100 * GRADIENTS

    real = scoring.hidden_states

    class Hidden:
        def __init__(self, hidden):
            self.hidden = hidden

        def __getitem__(self, index):
            return _FirstOnly.apply(self.hidden, index)

    monkeypatch.setattr(scoring, "hidden_states", lambda *a: Hidden(real(*a)))
    found = numbers(ROWS, model, OBJECTIVES["ppo"], share_prompts=True)
    forward, backward = differences(found, expected)
    assert forward < LOGPROBS
    assert backward > 100 * GRADIENTS


def test_exact_mode_refuses_to_share():
    with pytest.raises(UserError, match=r"share_prompts is not served with model\.exact"):
        PolicyTrainer(
            tiny_model(),
            TrainerConfig(share_prompts=True),
            AlgorithmConfig(),
            temperature=1.0,
            max_completion_tokens=9,
            total_steps=1,
            exact=True,
        )
