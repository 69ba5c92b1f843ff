"""Supervised fine-tuning: the same trainer machinery, packed rows, no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.checkpoint.export import export_hf
from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.config.tree import SFTConfig
from hone.data.sft import load_sft
from hone.loops.interrupt import Interrupt
from hone.loops.launch import export_dtype, launch
from hone.loops.recorder import Recorder, alarms_for
from hone.loops.saving import Saver, due
from hone.loops.sync import Outcome
from hone.models.load import load_model
from hone.models.tokenizer import load_tokenizer
from hone.observe.console import Console
from hone.observe.loggers import RunLog
from hone.observe.metrics import Metrics, to_scalars
from hone.observe.report import write_report
from hone.observe.spans import Spans
from hone.trainer.trainer import SupervisedTrainer

__all__ = ["run"]


def run(cfg: SFTConfig) -> Outcome:
    """Train, export the model to `<run.dir>/model`, write the report.

    As in the RL loop, step s is the model after s updates, and Ctrl-C ends the run after the step
    in progress.
    """
    begin = launch(cfg.run, cfg.checkpoint, cfg)
    tokenizer = load_tokenizer(cfg.model)
    data = load_sft(cfg.data, tokenizer, seed=cfg.run.seed)
    model = load_model(cfg.model, device=begin.device, seed=cfg.run.seed)
    trainer = SupervisedTrainer(model, cfg.trainer, total_steps=cfg.run.steps, dump_dir=begin.dir)
    if begin.checkpoint is not None:
        state: Mapping[str, Any] = begin.checkpoint.parts
        trainer.load_state_dict(state["trainer"], state["trainer_metadata"])
        data.train.load_state_dict(state["data"])
        restore_random_state(state["random"])

    def state_parts() -> dict[str, Any]:
        tensors, metadata = trainer.state_dict()
        return {
            "trainer": tensors,
            "trainer_metadata": metadata,
            "data": data.train.state_dict(),
            "random": capture_random_state(),
        }

    saver = Saver(begin.store, cfg.checkpoint, state_parts)
    done = first = begin.steps_done
    settings = cfg.model_dump(mode="json")
    with (
        RunLog(begin.dir, cfg.log, resume_step=begin.resume_step, config=settings) as log,
        Console(cfg.run.steps, done=first) as console,
        Interrupt() as interrupt,
    ):
        recorder = Recorder(log, console, alarms_for(model), Spans(), begin.device)
        if cfg.eval.at_start and first == 0:
            recorder.record(0, trainer.evaluate(data.eval))

        recorder.spans.take()  # start-up is no part of the first step
        for step in range(first + 1, cfg.run.steps + 1):
            with recorder.spans.span("data"):
                rows = data.train.take(cfg.data.examples_per_step)
            with recorder.spans.span("train"):
                metrics: Metrics = dict(trainer.update(rows))
            done, rank = step, None
            if due(cfg.eval.every_n_steps, step) or (cfg.eval.at_end and step == cfg.run.steps):
                with recorder.spans.span("eval"):
                    evaluated = trainer.evaluate(data.eval)
                rank = -to_scalars(evaluated)["eval/loss"]
                metrics |= evaluated
            with recorder.spans.span("record"):
                recorder.record(step, metrics, rows=rows)
            with recorder.spans.span("checkpoint"):
                stop = interrupt.requested
                is_last = stop or step == cfg.run.steps
                if saver.after(step, rank, is_last=is_last):
                    log.event("checkpoint", step=step, metric=rank)
            if stop:
                break

    recorder.spans.write_trace(begin.dir / "trace.json")
    dtype = export_dtype(cfg.checkpoint, model)
    export_hf(model, tokenizer, begin.dir / "model", dtype, masters=trainer.policy.masters)
    if cfg.log.report:
        write_report(begin.dir)
    return Outcome(done, interrupt.requested and done < cfg.run.steps)
