"""Trains a critic in one of several processes (`tests.ranks`); rank 0 also alone."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from hone.algorithms.ppo import ValueObjective
from hone.models import load
from hone.models.load import load_value_model
from hone.models.settings import ModelConfig
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column
from tests.rank_cases import STEP, everywhere, of_each, on_mesh, scalars, start
from tests.trainer.examples import gradients, random_rows
from tests.trainer.parallel_cases import LAYOUTS

FOLDER = Path()


def critic_rows(num_rows):
    """Rows whose returns and former values lie near the values of a model."""
    rows, generator = random_rows(num_rows, seed=4), torch.Generator().manual_seed(2)
    for row in rows:
        row.columns = {
            name: Column(torch.randn(row.num_trained, generator=generator))
            for name in ("returns", "values/critic")
        }
    return rows


def make_critic(name, dtype, parallel=None, **settings):
    """Of a folder of `test_critic_ranks`; alone where `parallel` is None."""
    cfg = ModelConfig(path=str(FOLDER / name))
    # The configuration knows no float64, in which sums in another order show nothing.
    with patch.object(load, "compute_dtype", lambda *_: dtype):
        model = load_value_model(cfg, device="cpu", seed=0, deferred=parallel is not None)
    return Trainer(
        model,
        TrainerConfig.model_validate({**STEP, **settings, "parallel": parallel or {}}),
        ValueObjective(0.5),
        total_steps=9,
        role="critic",
        mesh=None if parallel is None else on_mesh(parallel),
    )


def learn(trainer, rows):
    """What two steps show."""
    values = [found["values"].tolist() for found in trainer.begin(rows, frozenset({"values"}))()]
    loss, _ = trainer.forward_backward(rows)
    found = gradients(trainer)
    metrics = [scalars(trainer.update(rows)) for _ in range(2)]
    weights = {name: tensor.double().clone() for name, tensor in trainer.named_weights()}
    return {"values": values, "loss": float(loss), "metrics": metrics}, found, weights


def compare(name, dtype, parallel, rows, **settings):
    plain, found, weights = learn(make_critic(name, dtype, parallel, **settings), rows)
    result = {"same everywhere": all(other == plain for other in everywhere(plain))}
    if dist.get_rank():
        return result
    alone, expected, expected_weights = learn(make_critic(name, dtype, **settings), rows)
    return result | {
        "values": max(
            abs(x - y)
            for own, want in zip(plain["values"], alone["values"], strict=True)
            for x, y in zip(own, want, strict=True)
        ),
        "loss": abs(plain["loss"] - alone["loss"]) / alone["loss"],
        "gradient": of_each(found, expected),
        "weights": of_each(weights, expected_weights),
    }


def layouts():
    """Of a critic with a head that has learnt."""
    rows, budget = critic_rows(13), {"max_tokens_per_microbatch": 60}
    return {
        f"{name}, {dtype}": compare("critic", dtype, parallel, rows, **budget)
        for name, parallel in LAYOUTS[dist.get_world_size()].items()
        for dtype in (torch.float32, torch.float64)
    }


def fresh():
    """Of a language model with a head of its own, and of one without, in bfloat16."""
    return {
        name: compare(name, torch.bfloat16, {"zero_stage": 3}, critic_rows(6), micro_batch_size=1)
        for name in ("tied", "untied")
    }


def no_rows():
    """A rank without any."""
    return compare("critic", torch.float32, {"zero_stage": 3}, critic_rows(1))


def main(folder):
    global FOLDER
    FOLDER = Path(folder)
    start((layouts, fresh, no_rows))
