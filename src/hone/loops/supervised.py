"""Supervised fine-tuning: the same loop and trainer, packed rows, no engine."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hone.algorithms.sft import CrossEntropy
from hone.config.tree import SFTConfig
from hone.data.sft import SFTData, load_sft
from hone.loops.launch import Launch, is_complete, launch, load_for_training
from hone.loops.loop import train
from hone.loops.recorder import recording
from hone.loops.resuming import restore
from hone.loops.run import Outcome, Run
from hone.models.adapters import adapt
from hone.models.tokenizer import load_tokenizer
from hone.observe.metrics import Mean, Metrics
from hone.trainer.trainer import Trainer
from hone.types import Trajectory

__all__ = ["SFTRun", "build_run", "evaluate", "run"]


def run(cfg: SFTConfig) -> Outcome:
    """Build, train, export the model to `<run.dir>/model`, write the report.

    Of a run that has ended the report alone is written.
    """
    with launch(cfg) as start:
        if is_complete(start):
            return Outcome(start.steps_done)
        with build_run(cfg, start) as built:
            outcome = train(built)
            built.export()
            return outcome


@dataclass(kw_only=True)
class SFTRun(Run[list[Trajectory]]):
    """Trains on demonstrations."""

    cfg: SFTConfig
    data: SFTData

    notice = "the run saves after this step and ends"

    def collect(self, step: int) -> list[Trajectory]:
        del step
        with self.span("data"):
            return self.data.train.take(self.cfg.data.examples_per_step)

    def prepare(self, batch: list[Trajectory], step: int) -> tuple[list[Trajectory], Metrics]:
        del step
        return batch, {}

    def evaluate(self, step: int) -> Metrics:
        del step
        return evaluate(self.trainer, self.data.eval)

    def rank(self, evaluated: Mapping[str, float]) -> float | None:
        return -evaluated["eval/loss"] if evaluated else None

    def record(
        self,
        step: int,
        batch: list[Trajectory],
        rows: Sequence[Trajectory],
        metrics: Metrics,
    ) -> None:
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
    trainer = Trainer(
        model, cfg.trainer, CrossEntropy(), total_steps=cfg.run.steps, dump_dir=start.dir, mesh=mesh
    )
    if start.checkpoint is not None:
        state: Mapping[str, Any] = start.checkpoint.parts
        restore(trainer, state)
        data.train.load_state_dict(state["data"])
    start.save_config()
    with recording(start, model) as recorder:
        yield SFTRun(
            cfg=cfg,
            launch=start,
            trainer=trainer,
            data=data,
            tokenizer=tokenizer,
            recorder=recorder,
        )


def evaluate(trainer: Trainer, rows: Sequence[Trajectory]) -> Metrics:
    """Mean cross-entropy over the trained tokens, in nats; no gradient. Collective."""
    return {"eval/loss": Mean.of(-torch.cat(trainer.logprobs(rows)))}
