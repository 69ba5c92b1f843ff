"""Supervised fine-tuning: the same trainer machinery, packed rows, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hone.algorithms.sft import CrossEntropy
from hone.checkpoint.random_state import capture_random_state
from hone.config.tree import SFTConfig
from hone.data.sft import load_sft
from hone.loops.interrupt import Interrupt
from hone.loops.launch import Launch, export, is_complete, launch, load_for_training
from hone.loops.parts import recording
from hone.loops.recorder import alarms_for
from hone.loops.resuming import restore
from hone.loops.saving import Saver, due
from hone.loops.step import Outcome
from hone.models.adapters import adapt
from hone.models.tokenizer import load_tokenizer
from hone.observe.metrics import Mean, Metrics, to_scalars
from hone.trainer.trainer import Trainer
from hone.types import Trajectory

__all__ = ["evaluate", "run"]


def run(cfg: SFTConfig) -> Outcome:
    """Train, export the model to `<run.dir>/model`, write the report.

    Of a run that has ended the report alone is written. As in the RL loop, step s is the model
    after s updates, Ctrl-C ends the run after the step in progress, and several processes all run
    this.
    """
    with launch(cfg.run, cfg.checkpoint, cfg.trainer.parallel, cfg) as begin:
        if is_complete(begin, cfg.model.lora):
            return Outcome(begin.steps_done)
        return _run(cfg, begin)


def _run(cfg: SFTConfig, begin: Launch) -> Outcome:
    mesh = begin.mesh
    tokenizer = load_tokenizer(cfg.model)
    data = load_sft(cfg.data, tokenizer, seed=cfg.run.seed)
    model = load_for_training(cfg.model, mesh, seed=cfg.run.seed)
    alarms = alarms_for(model)
    if cfg.model.lora.rank:
        adapt(model, cfg.model.lora, seed=cfg.run.seed)
    trainer = Trainer(
        model, cfg.trainer, CrossEntropy(), total_steps=cfg.run.steps, dump_dir=begin.dir, mesh=mesh
    )
    if begin.checkpoint is not None:
        state: Mapping[str, Any] = begin.checkpoint.parts
        restore(trainer, state)
        data.train.load_state_dict(state["data"])
    begin.save_config()

    def state_parts() -> dict[str, Any]:
        tensors, metadata = trainer.state_dict()
        return {
            "trainer": tensors,
            "trainer_metadata": metadata,
            "data": data.train.state_dict(),
            "random": capture_random_state(),
        }

    done = first = begin.steps_done
    with (
        recording(cfg, begin, alarms) as recorder,
        Interrupt(mesh, "the run saves after this step and ends") as interrupt,
    ):
        saver = Saver(begin.store, cfg.checkpoint, state_parts, published=recorder.saved)
        recorder.before_failure = saver.publish_written
        if cfg.eval.at_start and first == 0:
            recorder.record(0, evaluate(trainer, data.eval))
        if interrupt.is_requested():
            recorder.event("interrupted", step=first)
            return Outcome(first, stopped_by=interrupt.number)

        recorder.spans.take()  # start-up is no part of the first step
        for step in range(first + 1, cfg.run.steps + 1):
            begin.watch.begin_step(step)
            with recorder.spans.span("data"):
                rows = data.train.take(cfg.data.examples_per_step)
            with recorder.spans.span("train"):
                metrics: Metrics = dict(trainer.update(rows))
            done, rank = step, None
            if due(cfg.eval.every_n_steps, step) or (cfg.eval.at_end and step == cfg.run.steps):
                with recorder.spans.span("eval"):
                    evaluated = evaluate(trainer, data.eval)
                rank = -to_scalars(evaluated)["eval/loss"]
                metrics |= evaluated
            with recorder.spans.span("record"):
                recorder.record(step, metrics, rows=rows)
            with recorder.spans.span("checkpoint"):
                stop = interrupt.is_requested()
                is_last = stop or step == cfg.run.steps
                saver.after(step, rank, is_last=is_last)
            if stop:
                recorder.event("interrupted", step=step)
                break

    outcome = Outcome(done, stopped_by=interrupt.number if done < cfg.run.steps else None)
    with Interrupt(mesh, "the model is being written", earlier=outcome.stopped_by):
        if mesh.is_first:
            recorder.spans.write_trace(begin.dir / "trace.json")
        export(trainer, tokenizer, cfg.checkpoint, begin, cfg.model.lora)
    return outcome


def evaluate(trainer: Trainer, rows: Sequence[Trajectory]) -> Metrics:
    """Mean cross-entropy over the trained tokens, in nats; no gradient. Collective."""
    return {"eval/loss": Mean.of(-torch.cat(trainer.logprobs(rows)))}
