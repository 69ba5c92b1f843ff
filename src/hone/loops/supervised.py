"""Supervised fine-tuning: the same loop and trainer, packed rows, no engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hone.algorithms.configured import algorithm_of
from hone.config.tree import SFTConfig
from hone.data.sft import SFTData, load_sft
from hone.loops.launch import Launch, load_for_training
from hone.loops.loop import run_to_end
from hone.loops.recorder import recording
from hone.loops.resuming import restore
from hone.loops.run import Outcome, Run
from hone.models.adapters import adapt
from hone.models.tokenizer import load_tokenizer
from hone.observe.metrics import Mean, Metrics
from hone.trainer.models import Models
from hone.trainer.trainer import Trainer
from hone.types import Row

__all__ = ["SFTRun", "build_run", "evaluate", "run"]


def run(cfg: SFTConfig) -> Outcome:
    """As `run_to_end`."""
    return run_to_end(cfg, partial(build_run, cfg))


class _Stopped(Exception):
    """An evaluation has been cut short."""


@dataclass(kw_only=True)
class SFTRun(Run[Row]):
    """Trains on demonstrations."""

    cfg: SFTConfig
    data: SFTData

    def collect(self, step: int) -> list[Row]:
        del step
        with self.span("data"):
            return self.data.train.take(self.cfg.data.examples_per_step)

    def evaluate(self, step: int) -> Metrics:
        del step
        try:
            return evaluate(self.trainer, self.data.eval, before_pass=self._stop_if_asked)
        except _Stopped:
            return {}

    def _stop_if_asked(self) -> None:
        """Collective, so that all processes leave an evaluation before the same pass."""
        if self.interrupt.is_requested():
            raise _Stopped

    def rank(self, evaluated: Mapping[str, float]) -> float | None:
        return -evaluated["eval/loss"] if evaluated else None

    def record(self, step: int, batch: list[Row], rows: Sequence[Row], metrics: Metrics) -> None:
        self.recorder.record(step, metrics, rows=rows)

    def state(self) -> dict[str, Any]:
        return super().state() | {"data": self.data.train.state_dict()}


@contextmanager
def build_run(cfg: SFTConfig, start: Launch) -> Generator[SFTRun]:
    """Build a run, restored from its checkpoint."""
    mesh = start.mesh
    tokenizer = load_tokenizer(cfg.model)
    data = load_sft(cfg.data, tokenizer, seed=cfg.run.seed)
    model = load_for_training(cfg.model, mesh, seed=cfg.run.seed)
    if cfg.model.lora.rank:
        adapt(model, cfg.model.lora, seed=cfg.run.seed)
    algorithm = algorithm_of(cfg)
    trainer = Trainer(
        model,
        cfg.trainer,
        algorithm.objectives["policy"],
        total_steps=cfg.run.steps,
        dump_dir=start.dir,
        mesh=mesh,
    )
    models = Models({"policy": trainer})
    if start.checkpoint is not None:
        state: Mapping[str, Any] = start.checkpoint.parts
        restore(models, state)
        data.train.load_state_dict(state["data"])
    start.save_config()
    with recording(start, model) as recorder:
        yield SFTRun(
            cfg=cfg,
            launch=start,
            algorithm=algorithm,
            models=models,
            data=data,
            tokenizer=tokenizer,
            recorder=recorder,
        )


def evaluate(
    trainer: Trainer, rows: Sequence[Row], *, before_pass: Callable[[], None] = lambda: None
) -> Metrics:
    """Mean cross-entropy over the trained tokens, in nats; no gradient. Collective. `before_pass`
    as in `row_outputs`."""
    return {"eval/loss": Mean.of(-torch.cat(trainer.logprobs(rows, before_pass=before_pass)))}
