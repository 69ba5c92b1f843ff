"""What samples are shown with: the update's own log-probabilities and entropies, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hone.distributed.mesh import Mesh
from hone.trainer.shown_tokens import ShownTokens
from hone.types import Row
from tests.trainer.examples import eager_twin, make_trainer, random_rows, tiny_model

CUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"max_tokens_per_microbatch": 70},
    {"max_tokens_per_microbatch": 4096, "logits_chunk_tokens": 50},
]


def reference(row: Row, model: Any) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each trained token, in float64, from all logits."""
    with torch.no_grad():
        logits = model(torch.tensor([row.token_ids])).logits[0].double()
    log_p = logits.log_softmax(-1)
    places = [place for place, trained in enumerate(row.loss_mask) if trained]
    own = torch.stack([log_p[place - 1, row.token_ids[place]] for place in places])
    entropy = torch.stack([-(log_p[p - 1].exp() * log_p[p - 1]).sum() for p in places])
    return own, entropy


@pytest.mark.parametrize("settings", CUTS, ids=str)
def test_rows_that_are_shown_have_what_the_policy_said_before_the_update(
    settings: dict[str, Any],
) -> None:
    rows = random_rows(9)
    for row in rows:
        del row.columns["logprobs/policy"]
    model = tiny_model()
    twin = eager_twin(model)
    trainer = make_trainer(model, **settings)
    shown = ShownTokens(frozenset({"r2", "r7", "r8", "absent"}))
    trainer.update(rows, shown)
    shown.add_to(rows, trainer.mesh)
    for row in rows:
        names = {name for name in row.columns if name.endswith("/policy")}
        if row.id not in shown.ids:
            assert not names
            continue
        assert names == {"logprobs/policy", "entropy/policy"}
        logprobs, entropy = reference(row, twin)
        torch.testing.assert_close(
            row.column("logprobs/policy").double(), logprobs, atol=2e-5, rtol=0
        )
        torch.testing.assert_close(
            row.column("entropy/policy").double(), entropy, atol=2e-5, rtol=0
        )


def test_of_several_optimizer_steps_the_first_counts_and_no_score_is_replaced() -> None:
    rows = random_rows(8)
    before = {row.id: row.column("logprobs/policy").clone() for row in rows}
    model = tiny_model()
    twin = eager_twin(model)
    trainer = make_trainer(model, num_epochs=2, optimizer={"lr": 0.1})
    shown = ShownTokens(frozenset({"r0", "r5"}))
    trainer.update(rows, shown)
    shown.add_to(rows, Mesh.alone(torch.device("cpu")))
    for row in rows:
        assert torch.equal(row.column("logprobs/policy"), before[row.id])
        if row.id in shown.ids:
            _, entropy = reference(row, twin)
            error = (row.column("entropy/policy") - entropy).abs().max()
            assert error < 2e-5, "of the second epoch, which a step of 0.1 has moved"
