"""R1: the gradient depends on the set of samples only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.algorithms.settings import AlgorithmConfig
from hone.observe.metrics import to_scalars
from hone.trainer.trainer import Trainer
from hone.types import Column, MicroBatch, Row
from tests.tables import table
from tests.trainer.examples import (
    eager_twin,
    gradients,
    make_trainer,
    near_policy,
    random_rows,
    tiny_model,
)

MAX_COMPLETION = 24

CUTS: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 3},
    {"micro_batch_size": 8},
    {"micro_batch_size": 32},
    {"max_tokens_per_microbatch": 33},
    {"max_tokens_per_microbatch": 100},
    {"max_tokens_per_microbatch": 4096, "logits_chunk_tokens": 50},
]

OBJECTIVES: dict[str, dict[str, Any]] = {
    **{
        f"{loss} {aggregation}": {"loss": loss, "aggregation": aggregation}
        for loss in ("ppo_clip", "gspo", "cispo")
        for aggregation in ("token_mean", "sequence_mean", "constant")
    },
    "gmpo sequence_mean": {"loss": "gmpo", "aggregation": "sequence_mean"},
    "dual clip, k2, tis": {
        "dual_clip": 1.3,
        "clip_high": 0.1,
        "kl": {"coef": 0.3, "estimator": "k2"},
        "correction": {"kind": "tis", "high": 1.1},
    },
    "k3, icepop, entropy": {
        "kl": {"coef": 0.3, "estimator": "k3"},
        "correction": {"kind": "icepop", "low": 0.7, "high": 1.4},
        "entropy_coef": 0.1,
    },
    "gspo, sequence mask, entropy, k3": {
        "loss": "gspo",
        "aggregation": "sequence_mean",
        "kl": {"coef": 0.1, "estimator": "k3"},
        "correction": {"kind": "sequence_mask", "low": 0.95, "high": 1.05},
        "entropy_coef": 0.05,
    },
}


def slow_token_values(
    logprobs: Tensor, entropy: Tensor, row: Row, cfg: AlgorithmConfig
) -> list[Tensor]:
    """Loss of each trained token of one sequence, scalar by scalar, as the papers write it."""
    old, engine, ref = (
        row.column(f"logprobs/{who}").double() for who in ("policy", "engine", "reference")
    )
    sequence_ratio = torch.exp((logprobs - old).mean())
    sequence_gap = math.exp(float((old - engine).mean()))
    values: list[Tensor] = []
    for t in range(len(logprobs)):
        advantage = float(row.column("advantages")[t])
        ratio = torch.exp(logprobs[t] - old[t]) if cfg.loss != "gspo" else sequence_ratio
        low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
        clipped = ratio.clamp(low, high)
        if cfg.loss == "cispo":
            value = -clipped.detach() * advantage * logprobs[t]
        elif cfg.loss == "gmpo":
            ratios = torch.exp(logprobs - old)
            cut = ratios.clamp(max=high) if advantage > 0 else ratios.clamp(min=low)
            value = -(cut.prod() ** (1 / len(cut))) * advantage
        else:
            value = -torch.min(ratio * advantage, clipped * advantage)
            if cfg.dual_clip is not None and advantage < 0:
                value = value.clamp(max=-cfg.dual_clip * advantage)
        gap = math.exp(float(old[t] - engine[t]))
        inside = cfg.correction.low <= gap <= cfg.correction.high
        value = (
            value
            * {
                "none": 1.0,
                "tis": min(gap, cfg.correction.high),
                "icepop": gap if inside else 0.0,
                "sequence_mask": float(cfg.correction.low <= sequence_gap <= cfg.correction.high),
            }[cfg.correction.kind]
        )
        if cfg.kl.coef:
            d = logprobs[t] - ref[t]
            value = value + cfg.kl.coef * (
                d**2 / 2 if cfg.kl.estimator == "k2" else (-d).exp() - 1 + d
            )
        values.append(value - cfg.entropy_coef * entropy[t])
    return values


def slow_gradient(
    model: Any, rows: Sequence[Row], cfg: AlgorithmConfig
) -> tuple[float, dict[str, Tensor]]:
    """Each sequence alone through transformers' eager attention in float64, one loss for all."""
    twin = eager_twin(model)
    sequences: list[list[Tensor]] = []
    for row in rows:
        logits = twin(torch.tensor([row.token_ids])).logits[0]
        log_p = torch.log_softmax(logits, -1)
        positions = [t for t, trained in enumerate(row.loss_mask) if trained]
        logprobs = torch.stack([log_p[t - 1, row.token_ids[t]] for t in positions])
        entropy = torch.stack([-(log_p[t - 1].exp() * log_p[t - 1]).sum() for t in positions])
        sequences.append(slow_token_values(logprobs, entropy, row, cfg))
    if cfg.aggregation == "token_mean":
        loss = sum(sum(v) for v in sequences) / sum(len(v) for v in sequences)
    elif cfg.aggregation == "sequence_mean":
        loss = sum(sum(v) / len(v) for v in sequences) / len(sequences)
    else:
        loss = sum(sum(v) for v in sequences) / (len(sequences) * MAX_COMPLETION)
    assert isinstance(loss, Tensor)
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in twin.named_parameters() if p.grad is not None
    }


def check_gradient(
    trainer: Trainer, rows: Sequence[Row], expected: tuple[float, dict[str, Tensor]]
) -> None:
    loss, _ = trainer.forward_backward(rows)
    got = gradients(trainer)
    assert float(loss) == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    assert got.keys() == expected[1].keys()
    largest = max(float(g.abs().max()) for g in expected[1].values())
    for name, want in expected[1].items():
        error = float((got[name] - want).abs().max()) / largest
        assert error <= 1e-5, f"{name}: {error:.2e}"


def case(
    objective: str, *, shared_prompt: int = 0, **fields: Any
) -> tuple[Any, AlgorithmConfig, list[Row]]:
    model = tiny_model(**fields)
    cfg = AlgorithmConfig.model_validate(OBJECTIVES[objective])
    rows = random_rows(32, seed=5, max_completion=MAX_COMPLETION, shared_prompt=shared_prompt)
    near_policy(rows, make_trainer(model, cfg))
    return model, cfg, rows


@table("objective", OBJECTIVES)
def test_R1_gradient_is_that_of_the_set_for_every_objective(objective: str):
    model, cfg, rows = case(objective)
    expected = slow_gradient(model, rows, cfg)
    for number, cut in enumerate(CUTS[list(OBJECTIVES).index(objective) % 2 :: 2]):
        shuffled = random.Random(number).sample(rows, len(rows))
        check_gradient(make_trainer(model, cfg, **cut), shuffled, expected)


@pytest.mark.parametrize(
    "fields",
    [{}, {"family": "mistral", "sliding_window": 13}],
    ids=["full", "sliding window"],
)
def test_R1_rows_that_share_a_prompt_have_the_gradient_of_rows_with_one_each(
    fields: dict[str, Any],
):
    model, cfg, rows = case("k3, icepop, entropy", shared_prompt=40, **fields)
    expected = slow_gradient(model, rows, cfg)
    num_tokens: list[int] = []
    cuts = [cut for cut in CUTS if cut.get("max_tokens_per_microbatch") != 33]
    for number, cut in enumerate(cuts):
        trainer = make_trainer(model, cfg, **cut)
        batches = trainer.batcher.micro_batches
        passes = trainer.batcher.passes(rows, "backward", trainer.mesh)
        num_tokens.append(
            sum(b.num_tokens for b in batches(rows, [0.0] * 32, passes[0], trainer.mesh))
        )
        shuffled = random.Random(number).sample(rows, len(rows))
        check_gradient(trainer, shuffled, expected)
    total = sum(row.num_tokens for row in rows)
    assert min(num_tokens) < 0.7 * total


def with_weights(of: Callable[[MicroBatch, int], Tensor]) -> Callable[..., Any]:
    return lambda batches: [replace(b, weights=of(b, len(batches))) for b in batches]


def leaking_borders(batch: MicroBatch) -> MicroBatch:
    ends, total = batch.cu_seqlens[[0, -1]], batch.num_tokens
    return replace(batch, cu_seqlens=ends, max_seqlen=total, lengths=(total,))


def positions_run_on(batch: MicroBatch) -> MicroBatch:
    positions = torch.arange(batch.num_tokens)
    positions[1::2] += 1  # rotary attention sees differences only
    return replace(batch, position_ids=positions)


BUGS: dict[str, Callable[[list[MicroBatch]], list[MicroBatch]]] = {
    "mean of means": with_weights(
        lambda b, num: torch.full_like(b.weights, 1 / (len(b.labels) * num))
    ),
    "sum of means": with_weights(lambda b, _: torch.full_like(b.weights, 1 / len(b.labels))),
    "divided twice": with_weights(lambda b, _: b.weights * b.weights),
    "leaking borders": lambda batches: list(map(leaking_borders, batches)),
    "positions run on": lambda batches: list(map(positions_run_on, batches)),
    "last dropped": lambda batches: batches[:-1],
}


@table("bug", BUGS)
def test_R1_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch):
    model, cfg, rows = case("ppo_clip token_mean")
    expected = slow_gradient(model, rows, cfg)
    trainer = make_trainer(model, cfg, micro_batch_size=8)
    check_gradient(trainer, rows, expected)
    right = trainer._micro_batches
    monkeypatch.setattr(trainer, "_micro_batches", lambda *args: BUGS[bug](list(right(*args))))
    with pytest.raises(AssertionError):
        check_gradient(trainer, rows, expected)


@table("aggregation, expected", [("token_mean", 2.5), ("sequence_mean", 2.0)])
@table("cut", [{"micro_batch_size": 1}, {"micro_batch_size": 2}])
def test_R1_closed_forms(aggregation: str, expected: float, cut: dict[str, Any]):
    """Losses 1 over one token and 9 over three: 10 / 4 by tokens, (1 + 3) / 2 by sequences."""
    rows = [
        Row(
            id="a",
            token_ids=[1, 2],
            loss_mask=[False, True],
            columns={"advantages": Column(-torch.ones(1))},
        ),
        Row(
            id="b",
            token_ids=[1, 2, 3, 4],
            loss_mask=[False, True, True, True],
            columns={"advantages": Column(torch.full((3,), -3.0))},
        ),
    ]
    cfg = AlgorithmConfig.model_validate({"aggregation": aggregation})
    metrics = to_scalars(make_trainer(tiny_model(), cfg, **cut).update(rows))
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["train/num_tokens"] == 4


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_recomputation_changes_no_gradient(family: str):
    cfg = AlgorithmConfig(entropy_coef=0.1)
    rows = random_rows(8, seed=2)
    results: list[dict[str, Tensor]] = []
    for recompute in ("off", "full"):
        trainer = make_trainer(tiny_model(family), cfg, recompute=recompute)
        runs = [0]
        layer = trainer.policy.model.base_model.layers[0]
        layer.self_attn.register_forward_hook(
            lambda *_, runs=runs: runs.__setitem__(0, runs[0] + 1)
        )
        trainer.forward_backward(rows)
        assert runs[0] == (2 if recompute == "full" else 1)
        results.append(gradients(trainer))
    for name, want in results[0].items():
        torch.testing.assert_close(results[1][name], want, rtol=1e-6, atol=1e-8)
