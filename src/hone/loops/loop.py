"""The loop of every run that trains: collect, train, push, once a step.

SPMD: every training process runs this loop. `step` counts updates: the row and the checkpoint of
step s describe the model after s updates, which is weight version s.

    hone rl     collect   samples and their rewards, within max_staleness; 0 is the synchronous run
                prepare   log-probabilities of reference and policy, the parity gate, advantages
                push      every engine holds the new weights, and has proven it
    hone sft    collect   demonstrations; nothing to score or to push

With `pipeline.max_staleness` above 0 engines go on sampling while the trainer trains, and
collecting is the time in which training waits for samples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hone.config.tree import RLConfig, SFTConfig
from hone.garbage import rare_garbage_collection
from hone.loops.launch import Launch, is_complete, launch
from hone.loops.run import Outcome, Run
from hone.observe.pages import Pages
from hone.observe.resumed_run import exported_step

__all__ = ["run_to_end", "train"]


def train(run: Run[Any]) -> Outcome:
    """Train for `run.steps` updates and write the model. Ctrl-C ends the run after the step in
    progress. Whether the model can be written is tested first."""
    with run.interrupt, rare_garbage_collection():
        run.rehearse()
        if run.start():
            return run.outcome
        if run.launch.steps_done >= run.launch.total_steps:  # an earlier launch ended in between
            with run.phase("save", run.launch.steps_done):
                run.export(run.launch.steps_done)
        for step in run.steps():
            batch = run.collect(step)
            with run.phase("train", step):
                rows, metrics = run.prepare(batch, step)
                metrics |= run.update(rows, step)
            with run.phase("push", step):
                metrics |= run.push(step)
            if run.finish(step, batch, rows, metrics):
                break
    return run.outcome


def run_to_end(
    cfg: RLConfig | SFTConfig,
    build: Callable[[Launch], AbstractContextManager[Run[Any]]],
    pages: Pages | None,
) -> Outcome:
    """Build the run, train, write the model to `<run.dir>/model` and, with `pages`, the report.

    If the run is already complete, only the report is written.
    """
    with launch(cfg, pages) as start:
        if is_complete(start):
            return Outcome(max(start.steps_done, exported_step(cfg) or 0))
        with build(start) as built:
            return train(built)
