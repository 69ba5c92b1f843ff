"""The loss of reward models against TRL's, in float64 through transformers' own padded forward:
whatever cut into micro-batches, the gradient is that of the whole step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hone.algorithms.preferences import reward_model
from hone.algorithms.preferences.reward_model import (
    BradleyTerry,
    RewardModeling,
    bradley_terry,
    valued_at_end,
)
from hone.algorithms.settings import BradleyTerryConfig
from hone.attention import ATTENTION_NAME
from hone.observe.metrics import to_scalars
from hone.trainer.models import Models
from hone.trainer.settings import SFTTrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Preference, Row
from tests.algorithms.test_preferences import CUTS
from tests.tables import table
from tests.trainer.examples import VOCAB, gradients, random_rows, tiny_model

PAD = 0


def value_model() -> PreTrainedModel:
    config = tiny_model().config
    config.num_labels, config.pad_token_id = 1, PAD
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        ).eval()


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """In float64, with transformers' own attention."""
    twin = AutoModelForSequenceClassification.from_config(
        copy.deepcopy(model.config), dtype=torch.float64, attn_implementation="eager"
    )
    twin.load_state_dict(model.state_dict())
    return twin.double().eval()


def pairs(number: int) -> list[Preference]:
    """With margins; the last two rows end with padding, as where the end token pads too."""
    rows = random_rows(2 * number, seed=3)
    for row in rows[-2:]:
        row.token_ids += [PAD] * 3
        row.loss_mask += [True] * 3
    return [
        Preference(f"pair {i}", (rows[i], rows[number + i]), (True, False), margin=0.1 * i)
        for i in range(number)
    ]


def rewards_of(model: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    """As users of transformers get them: one padded batch."""
    longest = max(row.num_tokens for row in rows)
    ids = torch.tensor([row.token_ids + [PAD] * (longest - row.num_tokens) for row in rows])
    mask = torch.tensor([[1] * row.num_tokens + [0] * (longest - row.num_tokens) for row in rows])
    return model(ids, attention_mask=mask).logits.squeeze(-1)


def trl_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, center: float) -> Tensor:
    """`RewardTrainer.compute_loss` of TRL 1.16."""
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()
    return loss + center * torch.mean((chosen + rejected) ** 2)


def models_of(algorithm: RewardModeling, **cut: Any) -> Models:
    cfg = SFTTrainerConfig.model_validate(cut)
    objective = algorithm.objectives["policy"]
    return Models({"policy": Trainer(value_model(), cfg, objective, total_steps=9)})


def step(algorithm: RewardModeling, items: Sequence[Preference], **cut: Any) -> tuple[Any, Trainer]:
    models = models_of(algorithm, **cut)
    rows, _ = models.prepare(algorithm, items, version=0)
    return models.trainer.forward_backward(rows), models.trainer


def expected(items: Sequence[Preference], center: float) -> tuple[float, dict[str, Tensor]]:
    twin = twin_of(value_model())
    sides = [rewards_of(twin, [item.rows[side] for item in items]) for side in (0, 1)]
    margin = torch.tensor([item.margin for item in items], dtype=torch.float64)
    loss = trl_loss(*sides, margin, center)
    loss.backward()
    found = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


def assert_close(trainer: Trainer, wanted: dict[str, Tensor]) -> None:
    largest = max(float(g.abs().max()) for g in wanted.values())
    found = gradients(trainer)
    assert found.keys() == wanted.keys()
    for name, got in found.items():
        assert float((got - wanted[name]).abs().max()) / largest < 1e-5, name


def by_hand(chosen: float, rejected: float, margin: float, center: float) -> float:
    difference = chosen - rejected - margin
    return math.log1p(math.exp(-difference)) + center * (chosen + rejected) ** 2


FINITE = st.floats(-20, 20)


@given(chosen=FINITE, rejected=FINITE, margin=st.floats(0, 3), center=st.sampled_from([0.0, 0.01]))
def test_the_loss_of_a_pair_equals_its_formula(
    chosen: float, rejected: float, margin: float, center: float
) -> None:
    given = (torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected, margin))
    value = float(bradley_terry(*given, center_coef=center))
    assert value == pytest.approx(by_hand(chosen, rejected, margin, center), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_R1_loss_and_gradient_are_those_of_trl_however_rows_are_cut(center: float) -> None:
    items = pairs(8)
    value, wanted = expected(items, center)
    for cut in CUTS:
        algorithm = RewardModeling(BradleyTerryConfig(center_coef=center), pad_id=PAD)
        (loss, _), trainer = step(algorithm, items, **cut)
        assert float(loss) == pytest.approx(value, rel=1e-5)
        assert_close(trainer, wanted)


@table(
    "mistake",
    ["swapped", "the token before the last", "padding is read", "mean of micro-batches", "margin"],
)
def test_R1_planted_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    items = pairs(8)
    _, wanted = expected(items, 0.1)
    algorithm = RewardModeling(BradleyTerryConfig(center_coef=0.1), pad_id=PAD)
    match mistake:
        case "swapped":
            items = [replace(item, labels=(False, True)) for item in items]
        case "the token before the last":

            def before_the_last(row_id: str, token_ids: Sequence[int], *, pad_id: int) -> Row:
                return valued_at_end(row_id, token_ids[:-1], pad_id=pad_id)

            monkeypatch.setattr(reward_model, "valued_at_end", before_the_last)
        case "padding is read":
            algorithm = RewardModeling(BradleyTerryConfig(center_coef=0.1), pad_id=None)
        case "mean of micro-batches":
            monkeypatch.setattr(BradleyTerry, "weights", lambda self, rows: [1.0] * len(rows))
        case _:
            items = [replace(item, margin=-item.margin) for item in items]
    _, trainer = step(algorithm, items, micro_batch_size=4)
    with pytest.raises(AssertionError):
        assert_close(trainer, wanted)


@table("cut", CUTS)
def test_metrics_have_the_names_and_values_of_trl(cut: dict[str, Any]) -> None:
    items = pairs(6)
    algorithm = RewardModeling(BradleyTerryConfig(), pad_id=PAD)
    (_, metrics), _ = step(algorithm, items, **cut)
    found = to_scalars(metrics)
    with torch.no_grad():
        twin = twin_of(value_model())
        chosen, rejected = (rewards_of(twin, [x.rows[side] for x in items]) for side in (0, 1))
    everything = torch.cat([chosen, rejected])
    assert found["accuracy"] == float((chosen > rejected).double().mean())
    assert found["margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert found["min_reward"] == pytest.approx(float(everything.min()), abs=1e-5)
    assert found["mean_reward"] == pytest.approx(float(everything.mean()), abs=1e-5)
    assert found["max_reward"] == pytest.approx(float(everything.max()), abs=1e-5)


@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
@example(ids=[PAD] * 4)  # which has its value at its first token
@example(ids=[PAD, 5, PAD, 6, PAD])
def test_a_row_ends_where_transformers_says(ids: list[int]) -> None:
    """By the very expression of `GenericForSequenceClassification`."""
    tensor = torch.tensor([ids])
    last = int((torch.arange(len(ids)) * (tensor != PAD)).argmax(-1))
    row = valued_at_end("x", ids, pad_id=PAD)
    assert row.loss_mask.index(True) - 1 == last
    assert row.token_ids[: last + 1] == ids[: last + 1]
    assert row.loss_mask == [False] * (last + 1) + [True]
    assert row.num_tokens == last + 2
