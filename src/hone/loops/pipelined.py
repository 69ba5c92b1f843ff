"""The asynchronous loop: engines go on sampling while the trainer trains.

The samples of a step were begun with the weights of at most `pipeline.max_staleness` updates ago;
each of their tokens knows the version that drew it. What is begun when, and which complete groups
make a step, is decided by `hone.rollout.stream`; with a staleness of 0 it is the synchronous loop.

A step takes as long as the slower of both sides: `generate` is the time in which training waits
for samples.
"""

from __future__ import annotations

from hone.loops.interrupt import STOPPING, Interrupt
from hone.loops.parts import RLParts
from hone.loops.step import Outcome, StepEnd, gate, samples_of
from hone.rewards.scorer import check_failure_rate

__all__ = ["train"]


def train(parts: RLParts) -> Outcome:
    """The loop. Returns after `run.steps` updates or, on Ctrl-C, after the step in progress."""
    cfg, first, stream = parts.cfg, parts.launch.steps_done, parts.stream
    span, done, is_gated = parts.recorder.spans.span, first, False
    assert stream is not None, "assembled without pipeline.enabled"
    with Interrupt(parts.launch.mesh, STOPPING) as interrupt:
        end = StepEnd(parts, interrupt, at_rest=stream.suspended, readable=stream.suspended)
        parts.weights.push(version=first)
        if end.stops_at_start(first):
            return Outcome(first, stopped_by=interrupt.number)

        parts.recorder.spans.take()  # start-up is no part of the first step
        for step in range(first + 1, cfg.run.steps + 1):
            parts.launch.watch.begin_step(step)
            with span("generate"), parts.core_for_rewards():
                groups = stream.collect(step, parts.recorder.progress)
                parts.recorder.sampled(step, groups)
                check_failure_rate(samples_of(groups), cfg.reward.max_failure_rate)
            with stream.in_background():
                with span("experience"):
                    rows, metrics = parts.models.prepare(parts.algorithm, groups, version=step - 1)
                    gated = {} if is_gated else gate(parts, rows)
                    is_gated, metrics = is_gated or bool(gated), metrics | gated
                with span("train"):
                    metrics |= parts.trainer.update(rows)
            with span("sync"), stream.changing_weights(version=step):
                sync = parts.weights.push(version=step)
            done = step
            if end.finish(step, metrics, groups=groups, rows=rows, sync=sync):
                break
    return Outcome(done, stopped_by=interrupt.number if done < cfg.run.steps else None)
