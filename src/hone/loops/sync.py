"""The synchronous loop: generate, score, train, sync, one after the other.

With several processes all run this same sentence. Each generates and scores its share of the
groups and then knows all of them, so that what follows from them is equal in all.

Every sample of a step is drawn with the weights of that step, so training is on-policy. `step`
counts updates: the row and the checkpoint of step s describe the policy after s updates, which is
weight version s.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.tree import RLConfig
from hone.loops.interrupt import Interrupt
from hone.loops.launch import export
from hone.loops.parity import check_parity
from hone.loops.parts import RLParts, assemble
from hone.loops.saving import Saver, due
from hone.models.load import compute_dtype
from hone.observe.metrics import Last, Metrics, Sum, to_scalars
from hone.observe.report import write_report
from hone.rewards.scorer import check_failure_rate
from hone.rollout.evaluate import evaluate, summarise
from hone.rollout.metrics import rollout_metrics
from hone.types import Group, Sample, Trajectory

__all__ = ["Outcome", "run", "train"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Updates done in all, earlier launches included."""
    interrupted: bool


def run(cfg: RLConfig) -> Outcome:
    """Assemble, train, export the policy to `<run.dir>/model`, write the report."""
    with assemble(cfg) as parts:
        outcome = train(parts)
        writing = Interrupt(
            parts.launch.mesh, "the model is being written", seen=outcome.interrupted
        )
        with parts.training(), writing:
            export(parts.trainer, parts.tokenizer, cfg.checkpoint, parts.launch, cfg.model.lora)
    if cfg.log.report and parts.launch.mesh.is_first:
        write_report(cfg.run.dir)
    return outcome


def train(parts: RLParts) -> Outcome:
    """The loop. Returns after `run.steps` updates or, on Ctrl-C, after the step in progress."""
    cfg, first = parts.cfg, parts.launch.steps_done
    span = parts.recorder.spans.span
    saver = Saver(parts.launch.store, cfg.checkpoint, parts.state, parts.training)
    done = first

    with Interrupt(parts.launch.mesh, "the run saves after this step and ends") as interrupt:
        parts.weights.push(version=first)
        if cfg.eval.at_start and first == 0:
            parts.recorder.record(0, _evaluate(parts))

        parts.recorder.spans.take()  # start-up is no part of the first step
        for step in range(first + 1, cfg.run.steps + 1):
            parts.launch.watch.begin_step(step)
            with span("generate"), parts.core_for_rewards():
                groups = parts.rollout.collect(step, parts.recorder.progress)
                check_failure_rate(_samples(groups), cfg.reward.max_failure_rate)
            with parts.training():
                with span("experience"):
                    rows = parts.experience.build(groups, version=step - 1)
                    metrics = _gate(parts, rows) if step == first + 1 else {}
                with span("train"):
                    metrics |= parts.trainer.update(rows)
            with span("sync"):
                sync = parts.weights.push(version=step)
            done, rank = step, None

            if due(cfg.eval.every_n_steps, step) or (cfg.eval.at_end and step == cfg.run.steps):
                with span("eval"):
                    evaluated = _evaluate(parts)
                rank = to_scalars(evaluated).get(cfg.eval.metric)
                metrics |= evaluated
            with span("record"):
                metrics |= rollout_metrics(groups, parts.rollout.counts)
                metrics |= {
                    "time/sync/proof_s": Last(sync.seconds),
                    "rollout/groups_without_baseline": Sum(parts.experience.num_dropped_groups),
                }
                parts.recorder.record(step, metrics, groups=groups, rows=rows)
            # After the row is written: a run that dies in between computes the step again.
            with span("checkpoint"):
                stop = interrupt.is_requested()
                is_last = stop or step == cfg.run.steps
                if saver.after(step, rank, is_last=is_last):
                    parts.recorder.event("checkpoint", step=step, metric=rank)
            if stop:
                parts.recorder.event("interrupted", step=step)
                break

    if parts.launch.mesh.is_first:
        parts.recorder.spans.write_trace(parts.launch.dir / "trace.json")
    return Outcome(done, done < cfg.run.steps)


def _samples(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _gate(parts: RLParts, rows: list[Trajectory]) -> Metrics:
    """The launch gate's report as metrics; raises where engine and trainer disagree."""
    dtype = compute_dtype(parts.cfg.model, parts.launch.device)
    name = "bfloat16" if dtype.itemsize == 2 else "float32"
    report = check_parity(
        rows,
        parts.trainer,
        parts.cfg.trainer.parity,
        dtype=name,
        exact=parts.cfg.model.exact,
    )
    if report is None:
        return {}
    return {
        "off_policy/parity/kl": Last(report.kl),
        "off_policy/parity/share_outside": Last(report.share_outside),
        "off_policy/parity/max_difference": Last(report.max_difference),
    }


def _evaluate(parts: RLParts) -> Metrics:
    with parts.core_for_rewards():
        samples = evaluate(
            parts.data.eval,
            engine=parts.engine,
            scorer=parts.scorer,
            cfg=parts.cfg.eval,
            decode=parts.decode,
            seed=parts.cfg.run.seed,
            peers=parts.peers,
        )
    return summarise(samples, parts.cfg.eval)
