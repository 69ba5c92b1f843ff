"""R4: the launch gate passes what is right and stops every delivery bug planted here."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.loops.conftest import MakeConfig, built_run
from tests.models.exact_fakes import use_torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.errors import UserError
from hone.loops import loop
from hone.loops.reinforce import RLRun
from hone.models.decoder import alias_module
from hone.models.generation import generation_model
from hone.types import Column, Row, Trainer
from hone.weights.parity import check_parity, measure_parity


def first_rows(run: RLRun) -> list[Row]:
    return run.algorithm.rows(run.collector.collect(1), version=0)


def test_R4_engine_and_trainer_agree(make_config: MakeConfig) -> None:
    with built_run(make_config(rollout={"prompts_per_step": 16})) as run:
        run.sampling.weights.push(0)
        report = measure_parity(first_rows(run), run.trainer)
    assert report.num_tokens > 200
    assert report.max_difference <= 1e-4
    assert report.kl <= 1e-9
    assert report.share_outside == 0.0


@contextmanager
def other_engine_model(run: RLRun) -> Generator[PreTrainedModel]:
    """A model in place of the trainer's, from which the engine samples after it was changed."""
    model, runner = alias_module(run.trainer.policy.model), run.sampling.engine._runner
    yield model
    runner.model = runner._decode.model = generation_model(model, compile=False)


def stale_layer(run: RLRun) -> None:
    """One matrix of the engine is not the trainer's."""
    with other_engine_model(run) as model:
        layer = model.base_model.layers[1].mlp.down_proj
        layer.weight = torch.nn.Parameter(layer.weight + 0.1 * torch.randn_like(layer.weight))


def wrong_temperature(run: RLRun) -> None:
    run.trainer.model._score = partial(run.trainer.model._score, temperature=0.7)


def wrong_rope(run: RLRun) -> None:
    """The engine's rotary frequencies are off, as when a scaling is ignored."""
    with other_engine_model(run) as model:
        rotary = model.base_model.rotary_emb
        rotary.inv_freq = rotary.inv_freq * 3.0


@pytest.mark.parametrize("bug", [stale_layer, wrong_temperature, wrong_rope])
def test_R4_planted_bugs_stop_the_launch(
    make_config: MakeConfig, bug: Callable[[RLRun], None]
) -> None:
    cfg = make_config(run={"steps": 2}, rollout={"prompts_per_step": 8})
    with built_run(cfg) as run:
        _sharpen(run)
        run.sampling.weights.push(0)
        bug(run)
        with pytest.raises(UserError, match=r"disagree.*trainer\.parity"):
            loop.train(run)


def test_R4_shifted_labels_are_caught(make_config: MakeConfig) -> None:
    with built_run(make_config(rollout={"prompts_per_step": 8})) as run:
        _sharpen(run)
        run.sampling.weights.push(0)
        rows = first_rows(run)
        for row in rows:
            row.columns["logprobs/engine"] = Column(row.column("logprobs/engine").roll(1))
        with pytest.raises(UserError, match="disagree"):
            check_parity(rows, run.trainer, run.cfg.trainer.parity, dtype="float32")


class FixedTrainer:
    """Gives each row log-probabilities that are `offsets` above the engine's."""

    def __init__(self, offsets: list[float]) -> None:
        self.offsets = torch.tensor(offsets)

    def logprobs(self, rows: Sequence[Row], *, reference: bool = False) -> list[Tensor]:
        return [row.column("logprobs/engine") + self.offsets for row in rows]


FAR = math.log(1.15)  # a ratio outside [0.9, 1.1], whose k3 divergence is 0.01
LIMITS: list[tuple[list[float], float, bool]] = [
    # offsets of four tokens, the limit of the divergence, and whether the gate passes
    ([-FAR, 0.0, 0.0, 0.0], 0.1, False),
    ([FAR, 0.0, 0.0, 0.0], 0.1, False),
    ([0.09, 0.09, -0.09, 0.09], 0.1, True),
    ([0.09, 0.09, -0.09, 0.09], 0.001, False),
]


@pytest.mark.parametrize(("offsets", "limit", "passes"), LIMITS)
def test_R4_each_limit_of_the_gate_stops_by_itself(
    offsets: list[float], limit: float, passes: bool
) -> None:
    rows = rows_of_four_tokens()
    trainer = cast(Trainer, FixedTrainer(offsets))
    if not passes:
        with pytest.raises(UserError, match="disagree"):
            check_parity(rows, trainer, limit, dtype="float32")
        return
    report = check_parity(rows, trainer, limit, dtype="float32")
    assert report is not None
    outside = sum(not 0.9 <= math.exp(offset) <= 1.1 for offset in offsets)
    assert report.share_outside == outside / 4
    # k3 of the trainer from the engine, on tokens of the engine
    assert report.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in offsets) / 4, rel=1e-4)


def rows_of_four_tokens() -> list[Row]:
    return [
        Row(
            id=f"{i}",
            token_ids=[1, 2, 3, 4, 5],
            loss_mask=[False, True, True, True, True],
            columns={
                "logprobs/engine": Column(torch.full((4,), -1.0)),
                "staleness": Column(torch.zeros(4, dtype=torch.int32)),
            },
        )
        for i in range(3)
    ]


def test_R4_the_limit_on_the_divergence_is_that_of_the_number_format() -> None:
    """A divergence of 5e-5, which rounding to bfloat16 explains."""
    trainer = cast(Trainer, FixedTrainer([0.01] * 4))
    assert check_parity(rows_of_four_tokens(), trainer, "auto", dtype="bfloat16") is not None
    with pytest.raises(UserError, match="disagree"):
        check_parity(rows_of_four_tokens(), trainer, "auto", dtype="float32")


@pytest.mark.parametrize("position", range(3))
def test_R4_the_gate_looks_at_every_row(position: int) -> None:
    rows = rows_of_four_tokens()
    trainer = SimpleNamespace(logprobs=lambda chosen: [torch.full((4,), -1.0) for _ in chosen])
    rows[position].columns["logprobs/engine"] = Column(torch.full((4,), -3.0))
    with pytest.raises(UserError, match="disagree"):
        check_parity(rows, cast(Trainer, trainer), "auto", dtype="bfloat16")


@pytest.mark.parametrize("stale", [0, 2])
def test_R4_the_gate_compares_tokens_of_the_present_weights_alone(stale: int) -> None:
    row = Row(
        id="0",
        token_ids=[1, 2, 3],
        loss_mask=[False, True, True],
        columns={
            "logprobs/engine": Column(torch.full((2,), -1.0)),
            "staleness": Column(torch.tensor([0, stale], dtype=torch.int32)),
        },
    )
    report = measure_parity([row], cast(Trainer, FixedTrainer([0.0, 1.0])))
    assert report.num_tokens == (1 if stale else 2)
    assert report.max_difference == (0.0 if stale else 1.0)


def test_R4_exact_gate_demands_equal_bits(make_config: MakeConfig) -> None:
    with built_run(make_config(rollout={"prompts_per_step": 8})) as run:
        run.sampling.weights.push(0)
        rows = first_rows(run)
        cfg = run.cfg.trainer.parity
        for row, logprobs in zip(rows, run.trainer.logprobs(rows), strict=True):
            row.columns["logprobs/engine"] = Column(logprobs)
        report = check_parity(rows, run.trainer, cfg, dtype="bfloat16", exact=True)
        assert report is not None
        assert report.max_difference == 0.0
        one = rows[3].column("logprobs/engine")
        assert one is not None
        one[-1] = torch.nextafter(one[-1], torch.tensor(0.0))
        check_parity(rows, run.trainer, cfg, dtype="bfloat16")
        with pytest.raises(UserError, match=r"model\.exact is on, but .* differ by up to"):
            check_parity(rows, run.trainer, cfg, dtype="bfloat16", exact=True)


@pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")
def test_model_exact_reaches_engine_trainer_and_gate(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch in place of the kernels, whose bits depend on the batch: the gate must say so."""
    products = use_torch(monkeypatch)
    cfg = make_config(run={"steps": 1}, rollout={"prompts_per_step": 8}, model={"exact": True})
    with built_run(cfg) as run:
        _sharpen(run)
        run.sampling.weights.push(0)
        rows = first_rows(run)
        assert products, "the engine"
        products.clear()
        assert measure_parity(rows, run.trainer).max_difference < 1e-3
        assert products, "the trainer"
        wrong_rope(run)
        with pytest.raises(UserError, match=r"model\.exact is on, but"):
            loop.train(run)


def test_the_gate_can_be_opened(make_config: MakeConfig) -> None:
    cfg = make_config(run={"steps": 1}, trainer={"parity": "off"})
    with built_run(cfg) as run:
        wrong_temperature(run)
        assert loop.train(run).steps == 1


def _sharpen(run: RLRun) -> None:
    """Random weights predict nearly uniformly, which hides what depends on the context."""
    with torch.no_grad():
        for parameter in run.trainer.policy.model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    for master in run.trainer.policy.masters.values():
        assert master.dtype == torch.float32
