"""R4: the launch gate passes what is right and stops every delivery bug planted here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import cast

import pytest
import torch
from tests.loops.conftest import MakeConfig, assembled
from tests.models.exact_fakes import use_torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.config import UserError
from hone.config.trainer import ParityConfig
from hone.loops import loop
from hone.loops.parity import check_parity, measure_parity
from hone.loops.parts import RLParts
from hone.models.decoder import alias_module
from hone.models.generation import generation_model
from hone.types import Trainer, Trajectory


def first_rows(parts: RLParts) -> list[Trajectory]:
    groups = parts.collector.collect(1)
    return parts.models.prepare(parts.algorithm, groups, version=0)[0]


def test_R4_engine_and_trainer_agree(make_config: MakeConfig) -> None:
    with assembled(make_config(rollout={"prompts_per_step": 16})) as parts:
        parts.weights.push(0)
        report = measure_parity(first_rows(parts), parts.trainer)
    assert report.num_tokens > 200
    assert report.max_difference <= 1e-4
    assert report.kl <= 1e-9
    assert report.share_outside == 0.0


def sample_with(parts: RLParts, model: PreTrainedModel) -> None:
    """Let the engine sample from another model than the trainer's."""
    runner = parts.engine._runner
    runner.model = runner._decode.model = generation_model(model, compile=False)


def stale_layer(parts: RLParts) -> None:
    """One matrix of the engine is not the trainer's."""
    engine_model = alias_module(parts.model)
    layer = engine_model.base_model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight + 0.1 * torch.randn_like(layer.weight))
    sample_with(parts, engine_model)


def wrong_temperature(parts: RLParts) -> None:
    settings = parts.trainer.model._settings
    parts.trainer.model._settings = dataclasses.replace(settings, temperature=0.7)


def wrong_rope(parts: RLParts) -> None:
    """The engine's rotary frequencies are off, as when a scaling is ignored."""
    engine_model = alias_module(parts.model)
    rotary = engine_model.base_model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 3.0
    sample_with(parts, engine_model)


@pytest.mark.parametrize("bug", [stale_layer, wrong_temperature, wrong_rope])
def test_R4_planted_bugs_stop_the_launch(
    make_config: MakeConfig, bug: Callable[[RLParts], None]
) -> None:
    cfg = make_config(run={"steps": 2}, rollout={"prompts_per_step": 8})
    with assembled(cfg) as parts:
        _sharpen(parts)
        parts.weights.push(0)
        bug(parts)
        with pytest.raises(UserError, match=r"disagree.*trainer\.parity\.max_kl"):
            loop.train(parts)


def test_R4_shifted_labels_are_caught(make_config: MakeConfig) -> None:
    with assembled(make_config(rollout={"prompts_per_step": 8})) as parts:
        _sharpen(parts)
        parts.weights.push(0)
        rows = first_rows(parts)
        for row in rows:
            assert row.rollout_logprobs is not None
            row.rollout_logprobs = row.rollout_logprobs.roll(1)
        with pytest.raises(UserError, match="disagree"):
            check_parity(rows, parts.trainer, parts.cfg.trainer.parity, dtype="float32")


class FixedTrainer:
    """Gives each row log-probabilities that are `offsets` above the engine's."""

    def __init__(self, offsets: list[float]) -> None:
        self.offsets = torch.tensor(offsets)

    def logprobs(self, rows: Sequence[Trajectory], *, reference: bool = False) -> list[Tensor]:
        return [row.rollout_logprobs + self.offsets for row in rows]


FAR = math.log(1.15)  # a ratio outside [0.9, 1.1], whose k3 divergence is 0.01
LIMITS: list[tuple[list[float], dict[str, float], bool]] = [
    # offsets of four tokens, limits, and whether the gate passes
    ([FAR, 0.0, 0.0, 0.0], {"max_kl": 0.1, "max_outside": 0.3}, True),
    ([-FAR, 0.0, 0.0, 0.0], {"max_kl": 0.1, "max_outside": 0.2}, False),
    ([FAR, 0.0, 0.0, 0.0], {"max_kl": 0.1, "max_outside": 0.2}, False),
    ([FAR, 0.0, 0.0, 0.0], {"max_kl": 0.001, "max_outside": 0.3}, False),
    ([0.09, 0.09, -0.09, 0.09], {"max_kl": 0.1, "max_outside": 0.0}, True),
    ([0.09, 0.09, -0.09, 0.09], {"max_kl": 0.001, "max_outside": 0.0}, False),
]


@pytest.mark.parametrize(("offsets", "limits", "passes"), LIMITS)
def test_R4_each_limit_of_the_gate_stops_by_itself(
    offsets: list[float], limits: dict[str, float], passes: bool
) -> None:
    rows = rows_of_four_tokens()
    trainer = cast(Trainer, FixedTrainer(offsets))
    cfg = ParityConfig.model_validate(limits)
    if not passes:
        with pytest.raises(UserError, match="disagree"):
            check_parity(rows, trainer, cfg, dtype="float32")
        return
    report = check_parity(rows, trainer, cfg, dtype="float32")
    assert report is not None
    outside = sum(not 0.9 <= math.exp(offset) <= 1.1 for offset in offsets)
    assert report.share_outside == outside / 4
    # k3 of the trainer from the engine, on tokens of the engine
    assert report.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in offsets) / 4, rel=1e-4)


def rows_of_four_tokens() -> list[Trajectory]:
    return [
        Trajectory(
            id=f"{i}",
            token_ids=[1, 2, 3, 4, 5],
            loss_mask=[False, True, True, True, True],
            rollout_logprobs=torch.full((4,), -1.0),
            staleness=torch.zeros(4, dtype=torch.int32),
        )
        for i in range(3)
    ]


def test_R4_the_limit_on_the_divergence_is_that_of_the_number_format() -> None:
    """A divergence of 5e-5, which rounding to bfloat16 explains."""
    trainer, cfg = cast(Trainer, FixedTrainer([0.01] * 4)), ParityConfig()
    assert check_parity(rows_of_four_tokens(), trainer, cfg, dtype="bfloat16") is not None
    with pytest.raises(UserError, match="disagree"):
        check_parity(rows_of_four_tokens(), trainer, cfg, dtype="float32")


@pytest.mark.parametrize("position", range(3))
def test_R4_the_gate_looks_at_every_row(position: int) -> None:
    rows = rows_of_four_tokens()
    rows[position].rollout_logprobs = torch.full((4,), -3.0)

    class Same(FixedTrainer):
        def logprobs(self, rows: Sequence[Trajectory], *, reference: bool = False) -> list[Tensor]:
            return [torch.full((4,), -1.0) for _ in rows]

    with pytest.raises(UserError, match="disagree"):
        check_parity(rows, cast(Trainer, Same([])), ParityConfig(), dtype="bfloat16")


@pytest.mark.parametrize("stale", [0, 2])
def test_R4_the_gate_compares_tokens_of_the_present_weights_alone(stale: int) -> None:
    row = Trajectory(
        id="0",
        token_ids=[1, 2, 3],
        loss_mask=[False, True, True],
        rollout_logprobs=torch.full((2,), -1.0),
        staleness=torch.tensor([0, stale], dtype=torch.int32),
    )
    report = measure_parity([row], cast(Trainer, FixedTrainer([0.0, 1.0])))
    assert report.num_tokens == (1 if stale else 2)
    assert report.max_difference == (0.0 if stale else 1.0)


def test_R4_exact_gate_demands_equal_bits(make_config: MakeConfig) -> None:
    with assembled(make_config(rollout={"prompts_per_step": 8})) as parts:
        parts.weights.push(0)
        rows = first_rows(parts)
        cfg = parts.cfg.trainer.parity
        for row, logprobs in zip(rows, parts.trainer.logprobs(rows), strict=True):
            row.rollout_logprobs = logprobs
        report = check_parity(rows, parts.trainer, cfg, dtype="bfloat16", exact=True)
        assert report is not None
        assert report.max_difference == 0.0
        one = rows[3].rollout_logprobs
        assert one is not None
        one[-1] = torch.nextafter(one[-1], torch.tensor(0.0))
        check_parity(rows, parts.trainer, cfg, dtype="bfloat16")
        with pytest.raises(UserError, match=r"model\.exact is on, but .* differ by up to"):
            check_parity(rows, parts.trainer, cfg, dtype="bfloat16", exact=True)


@pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")
def test_model_exact_reaches_engine_trainer_and_gate(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch in place of the kernels, whose bits depend on the batch: the gate must say so."""
    products = use_torch(monkeypatch)
    cfg = make_config(run={"steps": 1}, rollout={"prompts_per_step": 8}, model={"exact": True})
    with assembled(cfg) as parts:
        _sharpen(parts)
        parts.weights.push(0)
        rows = first_rows(parts)
        assert products, "the engine"
        products.clear()
        assert measure_parity(rows, parts.trainer).max_difference < 1e-3
        assert products, "the trainer"
        wrong_rope(parts)
        with pytest.raises(UserError, match=r"model\.exact is on, but"):
            loop.train(parts)


def test_the_gate_can_be_opened(make_config: MakeConfig) -> None:
    cfg = make_config(run={"steps": 1}, trainer={"parity": {"enabled": False}})
    with assembled(cfg) as parts:
        wrong_temperature(parts)
        assert loop.train(parts).steps == 1


def _sharpen(parts: RLParts) -> None:
    """Random weights predict nearly uniformly, which hides what depends on the context."""
    with torch.no_grad():
        for parameter in parts.model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    for master in parts.trainer.policy.masters.values():
        assert master.dtype == torch.float32
