"""A reinforcement run from configuration to trained model, whichever loop it takes."""

from __future__ import annotations

from hone.config.tree import RLConfig
from hone.loops import pipelined, sync
from hone.loops.apart import MakeEngines
from hone.loops.interrupt import Interrupt
from hone.loops.launch import export
from hone.loops.parts import assemble
from hone.loops.step import Outcome
from hone.observe.report import write_report

__all__ = ["Outcome", "run"]


def run(cfg: RLConfig, make_engines: MakeEngines | None = None) -> Outcome:
    """Assemble, train, export the policy to `<run.dir>/model`, write the report.

    `make_engines` starts the engines and references that have devices of their own.
    """
    with assemble(cfg, make_engines) as parts:
        outcome = pipelined.train(parts) if cfg.pipeline.enabled else sync.train(parts)
        if parts.launch.mesh.is_first:
            parts.recorder.spans.write_trace(parts.launch.dir / "trace.json")
        writing = Interrupt(
            parts.launch.mesh, "the model is being written", seen=outcome.interrupted
        )
        with parts.training(), writing:
            export(parts.trainer, parts.tokenizer, cfg.checkpoint, parts.launch, cfg.model.lora)
    if cfg.log.report and parts.launch.mesh.is_first:
        write_report(cfg.run.dir)
    return outcome
