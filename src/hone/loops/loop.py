"""The loop of reinforcement learning: collect, train, push, once a step.

SPMD: every training process runs this loop. `step` counts updates: the row and the checkpoint of
step s describe the policy after s updates, which is weight version s. With `pipeline.enabled` the
engines sample during training too, and a step takes as long as the slower of both sides;
`generate` is then the time in which training waits for samples. With a staleness of 0 that is the
synchronous run.
"""

from __future__ import annotations

from hone.loops.interrupt import STOPPING, Interrupt
from hone.loops.parts import RLParts
from hone.loops.step import Outcome, StepEnd, gate, samples_of
from hone.rewards.scorer import check_failure_rate

__all__ = ["train"]


def train(parts: RLParts) -> Outcome:
    """Train until `run.steps` updates are done or, on Ctrl-C, the step in progress."""
    cfg, first = parts.cfg, parts.launch.steps_done
    span, done, is_gated = parts.recorder.spans.span, first, False
    with Interrupt(parts.launch.mesh, STOPPING) as interrupt:
        end = StepEnd(parts, interrupt)
        parts.weights.push(version=first)
        if end.stops_at_start(first):
            return Outcome(first, stopped_by=interrupt.number)

        parts.recorder.spans.take()  # start-up is no part of the first step
        for step in range(first + 1, cfg.run.steps + 1):
            parts.launch.watch.begin_step(step)
            with span("generate"), parts.core_for_rewards():
                groups = parts.collector.collect(step, parts.recorder.progress)
                parts.recorder.sampled(step, groups)
                check_failure_rate(samples_of(groups), cfg.reward.max_failure_rate)
            with parts.phase("train", step):
                with span("experience"):
                    rows, metrics = parts.models.prepare(parts.algorithm, groups, version=step - 1)
                    gated = {} if is_gated else gate(parts, rows)
                    is_gated, metrics = is_gated or bool(gated), metrics | gated
                with span("train"):
                    metrics |= parts.trainer.update(rows)
            with parts.phase("push", step), span("sync"):
                sync = parts.weights.push(version=step)
            done = step
            if end.finish(step, metrics, groups=groups, rows=rows, sync=sync):
                break
    return Outcome(done, stopped_by=interrupt.number if done < cfg.run.steps else None)
