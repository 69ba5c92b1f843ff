"""R20: what is trained is data, not a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.algorithms.settings import AlgorithmConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, MicroBatch, Row
from tests.trainer.examples import make_trainer, random_rows, tiny_model

Tokens = set[tuple[str, int]]
"""(row id, position of the token)"""


def tokens_with_gradient(trainer: Trainer, rows: list[Row]) -> Tokens:
    """Tokens whose prediction carries gradient, read off the backbone's output: the hidden state
    at t - 1 predicts token t."""
    found: Tokens = set()
    seen: list[Tensor] = []
    order: list[MicroBatch] = []
    original = trainer._micro_batches

    def recording(*args: Any) -> Iterator[MicroBatch]:
        for batch in original(*args):
            order.append(batch)
            yield batch

    def retain(module: Any, args: Any, output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    trainer._micro_batches = recording
    hook = trainer.policy.model.base_model.norm.register_forward_hook(retain)
    trainer.forward_backward(rows)
    hook.remove()
    for batch, hidden in zip(order, seen, strict=True):
        assert hidden.grad is not None
        positions = hidden.grad[0].abs().sum(-1).nonzero().squeeze(-1)
        for position in positions.tolist():
            sequence = int((batch.cu_seqlens <= position).sum()) - 1
            found.add((batch.ids[sequence], position - int(batch.cu_seqlens[sequence]) + 1))
    return found


def sampled_tokens(rows: list[Row]) -> Tokens:
    return {(row.id, t) for row in rows for t, sampled in enumerate(row.loss_mask) if sampled}


def check_tokens(rows: list[Row], given: list[Row]) -> None:
    trainer = make_trainer(tiny_model(), AlgorithmConfig(loss="cispo"), micro_batch_size=5)
    assert tokens_with_gradient(trainer, given) == sampled_tokens(rows)


def test_R20_gradient_tokens_are_the_sampled_tokens():
    rows = random_rows(12, seed=8)
    check_tokens(rows, rows)


def shifted(mask: list[bool]) -> list[bool]:
    return [False, *mask[:-1]]


def inverted(mask: list[bool]) -> list[bool]:
    return [False, *(not trained for trained in mask[1:])]


def whole_completion(mask: list[bool]) -> list[bool]:
    first = mask.index(True)
    return [t >= first for t in range(len(mask))]


@pytest.mark.parametrize("bug", [shifted, inverted, whole_completion])
def test_R20_planted_masks_are_caught(bug: Callable[[list[bool]], list[bool]]):
    rows, given = random_rows(12, seed=8), random_rows(12, seed=8)
    for row in given:
        row.loss_mask = bug(row.loss_mask)
        num_trained = sum(row.loss_mask)
        row.columns["advantages"] = Column(torch.ones(num_trained))
        row.columns["logprobs/policy"] = Column(-torch.ones(num_trained))
        row.columns["logprobs/engine"] = Column(-torch.ones(num_trained))
        row.columns["logprobs/reference"] = Column(-torch.ones(num_trained))
    with pytest.raises(AssertionError):
        check_tokens(rows, given)


def test_R20_logprobs_are_those_of_the_labels():
    """Against the whole logits of each sequence alone; a shift by one token would differ."""
    trainer = make_trainer(tiny_model())
    rows = random_rows(6, seed=3)
    for row, got in zip(rows, trainer.logprobs(rows), strict=True):
        alone = Row(
            id="alone", token_ids=row.token_ids, loss_mask=[False] + [True] * (row.num_tokens - 1)
        )
        every = trainer.logprobs([alone])[0]
        mask = torch.tensor(row.loss_mask[1:])
        torch.testing.assert_close(got, every[mask], rtol=1e-5, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(got, every.roll(1)[mask], rtol=1e-5, atol=1e-5)
