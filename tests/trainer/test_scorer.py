"""A reference on a device of its own gives the numbers of the one beside the policy."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.algorithms.settings import Output
from hone.distributed.mesh import Mesh
from hone.trainer.batcher import Batcher
from hone.trainer.frozen import FrozenScorer
from hone.trainer.settings import TrainerConfig
from hone.types import Row
from tests.trainer.examples import eager_twin, logprobs_of, random_rows, tiny_model

LOGPROBS = frozenset[Output]({"logprobs"})
SETTINGS = {
    "whole": {"max_tokens_per_forward": 4096},
    "passes": {"max_tokens_per_forward": 70},
    "rows": {"micro_batch_size": 3},
    "rows with gradient alone": {"micro_batch_size": 1, "max_tokens_per_forward": 70},
}


def rows_with_one_untrained(num_rows: int, seed: int) -> list[Row]:
    rows = random_rows(num_rows, seed=seed)
    rows[5].loss_mask = [False] * len(rows[5].loss_mask)
    return rows


def elsewhere(
    batcher: Batcher, scorer: FrozenScorer, rows: list[Row], num_devices: int
) -> list[Tensor]:
    """What `num_devices` references find, in an order of their own."""
    found = [torch.empty(0)] * len(rows)
    passes = batcher.plan_scoring_passes(rows, num_devices)
    random.Random(0).shuffle(passes)
    for indices in passes:
        values = torch.from_numpy(scorer.score([rows[i] for i in indices], LOGPROBS)[0])
        lengths = [rows[i].num_trained for i in indices]
        for i, logprobs in zip(indices, values.split(lengths), strict=True):
            found[i] = logprobs
    return found


def expected_of(model: PreTrainedModel, row: Row, temperature: float) -> Tensor:
    """In float64, one row at a time."""
    with torch.no_grad():
        logits = eager_twin(model)(torch.tensor([row.token_ids])).logits[0, :-1]
    logprobs = (logits / temperature).log_softmax(-1)
    labels = torch.tensor(row.token_ids[1:])
    return logprobs.gather(-1, labels[:, None])[:, 0][torch.tensor(row.loss_mask[1:])]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_numbers_are_those_of_a_reference_beside_the_policy(name: str, seed: int) -> None:
    """With one device bit for bit; with three, whose passes are others, to the last bits."""
    cfg = TrainerConfig.model_validate(SETTINGS[name])
    reference, rows = tiny_model(seed=3 + seed), rows_with_one_untrained(22, seed)
    mesh = Mesh.alone("cpu")
    beside = logprobs_of(
        FrozenScorer(copy.deepcopy(reference), cfg, temperature=0.7, mesh=mesh), rows
    )
    scorer = FrozenScorer(copy.deepcopy(reference), cfg, temperature=0.7)
    batcher = Batcher.of(cfg, tiny_model(seed=seed))
    for found, own in zip(elsewhere(batcher, scorer, rows, 1), beside, strict=True):
        assert torch.equal(found, own)
    for row, found in zip(rows, elsewhere(batcher, scorer, rows, 3), strict=True):
        expected = expected_of(reference, row, 0.7)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_passes_without_gradient_have_a_cap_of_their_own() -> None:
    """Tokens, where the others count rows; the rows of the others where it is unset."""
    mesh, rows = Mesh.alone("cpu"), random_rows(20, seed=7)

    def largest(**settings: int) -> tuple[int, int]:
        """Rows of a pass with gradient, and of one without."""
        batcher = Batcher.of(TrainerConfig.model_validate(settings), tiny_model())
        each = (batcher.passes(rows, kind, mesh) for kind in ("backward", "forward"))
        with_gradient, without = (max(len(own) for own in passes[0]) for passes in each)
        return with_gradient, without

    assert largest(micro_batch_size=2) == (2, 2)
    with_gradient, without = largest(micro_batch_size=2, max_tokens_per_forward=4096)
    assert (with_gradient, without) == (2, 20)
    with_gradient, without = largest(max_tokens_per_microbatch=4096, max_tokens_per_forward=70)
    assert with_gradient == 20
    assert without < 10


def test_passes_are_of_like_size_for_each_device_and_the_dearest_come_first() -> None:
    cfg = TrainerConfig(max_tokens_per_forward=70)
    batcher = Batcher.of(cfg, tiny_model())
    rows = random_rows(40, seed=7)
    passes = batcher.plan_scoring_passes(rows, 4)
    sizes = [sum(rows[i].num_tokens for i in indices) for indices in passes]
    assert sorted(i for indices in passes for i in indices) == list(range(40))
    assert max(sizes) <= 70
    assert sizes == sorted(sizes, reverse=True)
    assert len(passes) % 4 == 0
    shares = [sum(sizes[device::4]) for device in range(4)]
    assert max(shares) < 1.1 * min(shares)
    assert batcher.plan_scoring_passes([], 4) == []
    scorer = FrozenScorer(tiny_model(), cfg, temperature=1.0)
    assert scorer.score([], LOGPROBS).shape == (1, 0)
