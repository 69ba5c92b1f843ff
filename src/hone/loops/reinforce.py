"""A reinforcement run from configuration to trained model."""

from __future__ import annotations

from hone.config.tree import RLConfig
from hone.loops.interrupt import Interrupt
from hone.loops.launch import Launch, export, is_complete, launch
from hone.loops.loop import train
from hone.loops.parts import assemble
from hone.loops.remote import MakePools
from hone.loops.step import Outcome
from hone.loops.workers import thread_pools

__all__ = ["Outcome", "run"]


def run(cfg: RLConfig, make_pools: MakePools = thread_pools) -> Outcome:
    """Assemble, train, export the policy to `<run.dir>/model`, write the report.

    Of a run that has ended the report alone is written. `make_pools` starts the engines and
    references that have devices of their own.
    """
    with launch(cfg.run, cfg.checkpoint, cfg.trainer.parallel, cfg) as begin:
        if is_complete(begin, cfg.model.lora):
            return Outcome(begin.steps_done)
        return _run(cfg, begin, make_pools)


def _run(cfg: RLConfig, begin: Launch, make_pools: MakePools) -> Outcome:
    with assemble(cfg, begin, make_pools) as parts:
        outcome = train(parts)
        if begin.mesh.is_first:
            parts.recorder.spans.write_trace(begin.dir / "trace.json")
        if outcome.stopped_by is not None and outcome.steps == begin.steps_done:
            return outcome  # before the first step: there is nothing new to write
        notice = "the model is being written"
        writing = Interrupt(begin.mesh, notice, earlier=outcome.stopped_by)
        with parts.phase("save", outcome.steps), writing:
            export(parts.trainer, parts.tokenizer, cfg.checkpoint, begin, cfg.model.lora)
    return outcome
