"""Losses of preferences against the formulas of their papers, by hand in float64, and through the
trainer: whatever cut into micro-batches, the gradient is that of the whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hone.algorithms.preferences.dpo import DPO, PairObjective
from hone.algorithms.preferences.kto import KTO, mismatched
from hone.algorithms.preferences.losses import LOSSES, SFT_WEIGHT, Pairs, kto
from hone.algorithms.settings import REFERENCE_FREE, PairLossName, PreferenceConfig
from hone.observe.metrics import to_scalars
from hone.trainer.frozen import FrozenScorer
from hone.trainer.models import Models
from hone.trainer.settings import SFTTrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Preference, Row
from tests.tables import table
from tests.trainer.examples import eager_twin, gradients, random_rows, tiny_model

CUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 2},
    {"micro_batch_size": 5},
    {"max_tokens_per_microbatch": 90},
    {},
]

WITH_A_TARGET = {"apo_down", "ipo", "sft", "sppo_hard"}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(mean_logprob: float) -> float:
    p = math.exp(mean_logprob)
    return math.log(p / (1 - p))


def by_hand(
    name: str, scores: tuple[float, float], lengths: tuple[int, int], cfg: PreferenceConfig
) -> float:
    """The loss of one pair; of a loss without reference scores are log-probabilities."""
    (c, r), (nc, nr) = scores, lengths
    beta, eps = cfg.beta, cfg.label_smoothing
    x = beta * (c - r)

    def smoothed(z: float) -> float:
        return -(1 - eps) * math.log(sigmoid(z)) - eps * math.log(sigmoid(-z))

    match name:
        case "sigmoid" | "cpo":
            return smoothed(x)
        case "hinge":
            return max(0.0, 1 - x)
        case "ipo":
            return (c / nc - r / nr - 1 / (2 * beta)) ** 2
        case "exo_pair":
            p = sigmoid(x)
            return p * math.log(p / (1 - eps)) + (1 - p) * math.log((1 - p) / eps)
        case "nca_pair":
            p, q = sigmoid(beta * c), sigmoid(beta * r)
            return -math.log(p) - 0.5 * math.log(1 - p) - 0.5 * math.log(1 - q)
        case "robust":
            p = sigmoid(x)
            return (-(1 - eps) * math.log(p) + eps * math.log(1 - p)) / (1 - 2 * eps)
        case "bco_pair":
            return -math.log(sigmoid(beta * c)) - math.log(1 - sigmoid(beta * r))
        case "sppo_hard":
            return (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2
        case "apo_zero":
            return 1 - sigmoid(beta * c) + sigmoid(beta * r)
        case "apo_down":
            return sigmoid(beta * c) + 1 - sigmoid(x)
        case "discopop":
            share = sigmoid(x / 0.05)
            return (1 - share) * -math.log(sigmoid(x)) + share * math.exp(-x)
        case "simpo":
            return smoothed(beta * (c / nc - r / nr) - cfg.simpo_gamma)
        case "orpo":
            return -beta * math.log(sigmoid(log_odds(c / nc) - log_odds(r / nr)))
        case _:
            return 0.0


def random_pairs(number: int, seed: int) -> Pairs:
    draw = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        return -10 * torch.rand(number, generator=draw, dtype=torch.float64) - 0.1

    lengths = torch.randint(1, 9, (2, number), generator=draw).double()
    return Pairs(values(), values(), values(), values(), *lengths)


@table("name", get_args(PairLossName))
def test_R21_each_loss_equals_its_formula(name: str) -> None:
    cfg = PreferenceConfig(beta=0.3, label_smoothing=0.1)
    pairs = random_pairs(40, seed=len(name))
    got = LOSSES[name](pairs, cfg)
    free = name in REFERENCE_FREE
    for i, value in enumerate(got.tolist()):
        c = pairs.chosen[i] - (0 if free else pairs.reference_chosen[i])
        r = pairs.rejected[i] - (0 if free else pairs.reference_rejected[i])
        lengths = int(pairs.num_chosen[i]), int(pairs.num_rejected[i])
        assert value == pytest.approx(by_hand(name, (float(c), float(r)), lengths, cfg), rel=1e-9)


@table("name", sorted(set(get_args(PairLossName)) - WITH_A_TARGET))
def test_a_likelier_chosen_one_lowers_the_loss(name: str) -> None:
    """The planted mistake is the swap, which raises it. Of apo_down,
    which lowers the chosen one too, and losses with a target it does not hold."""
    cfg = PreferenceConfig(beta=0.1, label_smoothing=0.01)
    pairs = random_pairs(40, seed=1)
    chosen = pairs.chosen.clone().requires_grad_()
    moved = Pairs(chosen, *(getattr(pairs, k) for k in list(Pairs.__slots__)[1:]))
    value = LOSSES[name](moved, cfg).sum()
    (slope,) = torch.autograd.grad(value, chosen)
    assert (slope <= 1e-12).float().mean() > (0.5 if name in ("nca_pair", "discopop") else 0.99)


def test_kto_equals_its_formula() -> None:
    cfg = PreferenceConfig(loss="kto", beta=0.2, desirable_weight=1.5, undesirable_weight=0.7)
    scores = torch.linspace(-9, 9, 19, dtype=torch.float64)
    good = torch.arange(19) % 3 == 0
    divergence = torch.full_like(scores, 1.25)
    for score, is_good, value in zip(
        scores.tolist(), good.tolist(), kto(scores, good, divergence, cfg).tolist(), strict=True
    ):
        z = 0.2 * (score - 1.25)
        expected = 1.5 * (1 - sigmoid(z)) if is_good else 0.7 * (1 - sigmoid(-z))
        assert value == pytest.approx(expected, rel=1e-12)


def preferences(number: int, *, single: bool = False) -> list[Preference]:
    rows = random_rows((1 if single else 2) * number, seed=3)
    if single:
        return [Preference(row.id, (row,), (i % 2 == 0,)) for i, row in enumerate(rows)]
    return [
        Preference(f"pair {i}", (rows[i], rows[number + i]), (True, False)) for i in range(number)
    ]


def models_of(objective: Any, **cut: Any) -> Models:
    cfg = SFTTrainerConfig.model_validate(cut)
    model, reference = tiny_model(), tiny_model()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    return Models(
        {"policy": Trainer(model, cfg, objective, total_steps=10)},
        {"reference": FrozenScorer(reference, cfg)},
    )


def totals(twin: Any, rows: Sequence[Row]) -> Tensor:
    found: list[Tensor] = []
    for row in rows:
        log_p = torch.log_softmax(twin(torch.tensor([row.token_ids])).logits[0], -1)
        trained = [t for t, is_trained in enumerate(row.loss_mask) if is_trained]
        found.append(torch.stack([log_p[t - 1, row.token_ids[t]] for t in trained]).sum())
    return torch.stack(found)


def expected_gradient(cfg: PreferenceConfig, items: Sequence[Preference]) -> tuple[float, Any]:
    """In float64, a row at a time, over all pairs of the step."""
    model, reference = tiny_model(), tiny_model()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    twin, frozen = eager_twin(model), eager_twin(reference)
    chosen, rejected = ([item.rows[side] for item in items] for side in (0, 1))
    counts = [
        torch.tensor([row.num_trained for row in rows]).double() for rows in (chosen, rejected)
    ]
    with torch.no_grad():
        held = [totals(frozen, rows) for rows in (chosen, rejected)]
    own = [totals(twin, rows) for rows in (chosen, rejected)]
    loss = torch.zeros((), dtype=torch.float64)
    for name, weight in cfg.losses.items():
        loss = loss + weight * LOSSES[name](Pairs(*own, *held, *counts), cfg).mean()
        loss = loss - weight * SFT_WEIGHT.get(name, 0.0) * own[0].sum() / counts[0].sum()
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in twin.named_parameters() if p.grad is not None
    }


def assert_close(trainer: Trainer, expected: Any) -> None:
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, got in gradients(trainer).items():
        assert float((got - expected[name]).abs().max()) / largest < 1e-5, name


@table("loss", ["sigmoid", "ipo", "orpo", {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}])
def test_R1_the_gradient_of_pairs_does_not_depend_on_micro_batches(loss: Any) -> None:
    cfg, items = PreferenceConfig(loss=loss), preferences(8)
    value, expected = expected_gradient(cfg, items)
    for cut in CUTS:
        algorithm = DPO(cfg)
        models = models_of(algorithm.objectives["policy"], **cut)
        rows, _ = models.prepare(algorithm, items, version=0)
        got, _ = models.trainer.forward_backward(rows)
        assert float(got) == pytest.approx(value, rel=1e-5)
        assert_close(models.trainer, expected)


@pytest.mark.parametrize("mistake", ["swapped", "no reference", "mean of micro-batches"])
def test_R1_planted_mistakes_are_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, items = PreferenceConfig(), preferences(8)
    _, expected = expected_gradient(cfg, items)
    algorithm = DPO(cfg)
    objective = algorithm.objectives["policy"]
    if mistake == "swapped":
        items = [Preference(x.id, x.rows, (False, True)) for x in items]
    elif mistake == "mean of micro-batches":
        monkeypatch.setattr(PairObjective, "weights", lambda self, rows: [1.0] * len(rows))
    models = models_of(objective, micro_batch_size=4)
    rows, _ = models.prepare(algorithm, items, version=0)
    if mistake == "no reference":
        for row in rows:
            row.columns["logprobs/reference"].values.zero_()
    models.trainer.forward_backward(rows)
    with pytest.raises(AssertionError):
        assert_close(models.trainer, expected)


def test_metrics_have_the_names_and_values_of_trl() -> None:
    cfg, items = PreferenceConfig(beta=0.5), preferences(6)
    algorithm = DPO(cfg)
    models = models_of(algorithm.objectives["policy"], micro_batch_size=2)
    rows, _ = models.prepare(algorithm, items, version=0)
    _, metrics = models.trainer.forward_backward(rows)
    found = to_scalars(metrics)
    own = models.trainer.logprobs(rows)
    sums = torch.stack([x.sum() for x in own]).double()
    held = torch.stack([row.column("logprobs/reference").sum() for row in rows]).double()
    rewards = 0.5 * (sums - held)
    chosen, rejected = rewards[0::2], rewards[1::2]
    # Differences of sums near 100, in float32, of passes that are packed otherwise.
    close = partial(pytest.approx, rel=1e-5, abs=1e-5)
    assert found["rewards/chosen"] == close(float(chosen.mean()))
    assert found["rewards/rejected"] == close(float(rejected.mean()))
    assert found["rewards/margins"] == close(float((chosen - rejected).mean()))
    assert found["rewards/accuracies"] == float((chosen > rejected).double().mean())
    assert found["logps/chosen"] == pytest.approx(float(sums[0::2].mean()), rel=1e-5)
    per_token = -float(sums[0::2].sum()) / sum(row.num_trained for row in rows[0::2])
    assert found["nll_loss"] == pytest.approx(per_token, rel=1e-5)
    twin = eager_twin(tiny_model())
    assert found["logits/chosen"] == pytest.approx(mean_logit(twin, rows[0::2]), abs=1e-6)
    assert found["logits/rejected"] == pytest.approx(mean_logit(twin, rows[1::2]), abs=1e-6)


def mean_logit(twin: Any, rows: Sequence[Row]) -> float:
    """Over all words, at the tokens that predict those of completions."""
    found: list[Tensor] = []
    for row in rows:
        logits = twin(torch.tensor([row.token_ids])).logits[0].detach()
        trained = [t for t, is_trained in enumerate(row.loss_mask) if is_trained]
        found += [logits[t - 1].mean() for t in trained]
    return float(torch.stack(found).mean())


def test_orpo_says_its_odds() -> None:
    algorithm = DPO(PreferenceConfig(loss="orpo"))
    models = models_of(algorithm.objectives["policy"], micro_batch_size=2)
    rows, _ = models.prepare(algorithm, preferences(6), version=0)
    _, metrics = models.trainer.forward_backward(rows)
    odds = [log_odds(float(x.double().mean())) for x in models.trainer.logprobs(rows)]
    ratios = [chosen - rejected for chosen, rejected in zip(odds[::2], odds[1::2], strict=True)]
    found = to_scalars(metrics)
    assert found["log_odds_chosen"] == pytest.approx(sum(ratios) / 6, rel=1e-4)
    means = [float(x.mean()) for x in models.trainer.logprobs(rows)[::2]]
    assert found["rewards/chosen"] == pytest.approx(0.1 * sum(means) / 6, rel=1e-4)
    expected = sum(map(math.log, map(sigmoid, ratios))) / 6
    assert found["log_odds_ratio"] == pytest.approx(expected, rel=1e-4)


def by_definition(prompts: Sequence[Any], pairs: list[tuple[int, int]]) -> None:
    """No completion answers the prompt that it is scored with; each is scored once at most, and as
    many as there can be."""
    assert all(prompts[asked] != prompts[said] for asked, said in pairs)
    for places in zip(*pairs, strict=True):
        assert len(set(places)) == len(places)
    number, most = len(prompts), max((prompts.count(each) for each in prompts), default=0)
    assert len(pairs) == min(number, 2 * (number - most))


@given(st.lists(st.integers(0, 4), max_size=12))
def test_kto_scores_completions_of_other_prompts(prompts: list[int]) -> None:
    by_definition(prompts, mismatched(prompts))
    if len(set(prompts)) == len(prompts) > 1:
        before = [len(prompts) - 1, *range(len(prompts) - 1)]
        assert mismatched(prompts) == [*enumerate(before)], "the row before"


def test_kto_planted_completions_of_the_row_before_are_seen() -> None:
    prompts = [0, 0, 1, 1, 2, 2]
    with pytest.raises(AssertionError):
        by_definition(prompts, [(i, i - 1 if i else 5) for i in range(6)])


def test_kto_has_no_divergence_of_one_prompt(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its completions; it is said once."""
    algorithm = KTO(PreferenceConfig(loss="kto"), max_tokens=64)
    (item,) = preferences(1, single=True)
    for batch in ([item], [item] * 3):
        rows = algorithm.rows(batch, 0)
        assert len(rows) == len(batch)
        for row in rows:
            row.columns["logprobs/policy"] = Column(torch.zeros(row.num_trained))
            row.columns["logprobs/reference"] = Column(-torch.ones(row.num_trained))
        assert algorithm.targets(rows, batch) == {}
        assert all(float(row.column("divergence")) == 0 for row in rows)
    assert caplog.text.count("the 1 rows of a step have one prompt") == 1


def test_kto_cuts_completions_to_the_longest_row() -> None:
    """That of another prompt may be longer than there is room for; one token is scored at least."""
    items = preferences(9, single=True)
    lengths = [item.rows[0].num_tokens for item in items]
    prompts = [item.rows[0].loss_mask.index(True) for item in items]
    for longest in (max(lengths), min(lengths), 1):
        algorithm = KTO(PreferenceConfig(loss="kto"), max_tokens=longest)
        for number, row in enumerate(algorithm.rows(items, 0)[9:]):
            whole = prompts[number] + lengths[number - 1] - prompts[number - 1]
            assert row.num_tokens == min(whole, max(longest, prompts[number] + 1))
            assert row.num_trained >= 1


def test_kto_estimates_its_divergence_from_other_prompts_completions() -> None:
    cfg, items = PreferenceConfig(loss="kto"), preferences(6, single=True)
    # Three rows of a prompt are neighbours, as those that are read from pairs.
    (first,) = items[0].rows
    asked = first.token_ids[: first.loss_mask.index(True)]
    for item in items[1:3]:
        (row,) = item.rows
        start = row.loss_mask.index(True)
        row.token_ids[:start], row.loss_mask[:start] = asked, [False] * len(asked)
    algorithm = KTO(cfg, max_tokens=64)
    models = models_of(algorithm.objectives["policy"], micro_batch_size=2)
    rows, metrics = models.prepare(algorithm, items, version=0)
    assert [row.id for row in rows] == [item.id for item in items]
    own, reference = eager_twin(tiny_model()), tiny_model()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
        swapped: list[Row] = []
        for i, item in enumerate(items):
            (row,), (other,) = item.rows, items[i - 3].rows
            prompt, start = row.token_ids[: row.loss_mask.index(True)], other.loss_mask.index(True)
            assert prompt != other.token_ids[:start]
            mask = [False] * len(prompt) + other.loss_mask[start:]
            swapped.append(Row(id="", token_ids=prompt + other.token_ids[start:], loss_mask=mask))
        scores = totals(own, swapped) - totals(eager_twin(reference), swapped)
    expected = max(float(scores.mean()), 0.0)
    assert to_scalars(metrics)["kl"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert all(float(row.column("divergence")) == pytest.approx(expected, abs=1e-4) for row in rows)
    models.trainer.forward_backward(rows)
    first = gradients(models.trainer)
    whole = models_of(algorithm.objectives["policy"])
    rows, _ = whole.prepare(algorithm, items, version=0)
    whole.trainer.forward_backward(rows)
    for name, got in gradients(whole.trainer).items():
        assert torch.allclose(got, first[name], atol=1e-6), name


@pytest.mark.parametrize("labels", ["101110", "111111"])
def test_kto_says_its_margin_by_the_name_of_trl(labels: str) -> None:
    """The difference of the means over all rows, however these are cut; none of one label alone."""
    items = [
        replace(item, labels=(label == "1",))
        for item, label in zip(preferences(6, single=True), labels, strict=True)
    ]
    algorithm = KTO(PreferenceConfig(loss="kto", beta=0.5), max_tokens=64)
    models = models_of(algorithm.objectives["policy"], micro_batch_size=2)
    rows, _ = models.prepare(algorithm, items, version=0)
    _, metrics = models.trainer.forward_backward(rows)
    found = to_scalars(metrics)
    assert len({found["rewards/chosen"], found.get("rewards/rejected")}) == 2
    difference = found["rewards/chosen"] - found.get("rewards/rejected", math.nan)
    margin = found.get("rewards/margins", math.nan)
    assert margin == pytest.approx(difference, rel=1e-5, nan_ok=True)
    chosen = [row for row, label in zip(rows, labels, strict=True) if label == "1"]
    expected = mean_logit(eager_twin(tiny_model()), chosen)
    assert found["logits/chosen"] == pytest.approx(expected, abs=1e-6)
    assert ("logits/rejected" in found) == ("0" in labels)


def test_a_pair_that_a_step_has_twice_is_two_units() -> None:
    (item,) = preferences(1)
    rows = DPO(PreferenceConfig()).rows([item, item], 0)
    assert len({row.unit for row in rows}) == 2


@table("seed", range(3))
def test_smoothing_is_a_mixture_of_both_orders(seed: int) -> None:
    pairs = random_pairs(10, seed)
    swapped = Pairs(
        pairs.rejected,
        pairs.chosen,
        pairs.reference_rejected,
        pairs.reference_chosen,
        pairs.num_rejected,
        pairs.num_chosen,
    )
    plain = PreferenceConfig()
    mixed = 0.8 * LOSSES["sigmoid"](pairs, plain) + 0.2 * LOSSES["sigmoid"](swapped, plain)
    assert torch.allclose(LOSSES["sigmoid"](pairs, PreferenceConfig(label_smoothing=0.2)), mixed)
