"""The end of a step: evaluate, record, save, and perhaps stop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hone.config.errors import UserError
from hone.loops.interrupt import Interrupt
from hone.loops.parity import check_parity
from hone.loops.parts import RLParts
from hone.loops.saving import Saver, due
from hone.loops.untrained import Untrained, is_stalled, why_untrained
from hone.models.load import compute_dtype
from hone.observe.metrics import Last, Metrics, to_scalars
from hone.rollout.metrics import rollout_metrics
from hone.types import Group, Sample, Trajectory
from hone.weights.sync import SyncReport

__all__ = ["Outcome", "StepEnd", "gate", "samples_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Updates done in all, earlier launches included."""
    stopped_by: int | None = None
    """The signal that ended the run before its last step; None where none did."""


class StepEnd:
    """The end of each step of a run."""

    def __init__(self, parts: RLParts, interrupt: Interrupt) -> None:
        self._parts = parts
        self._interrupt = interrupt
        self._untrained: list[Untrained] = []
        """The last steps in a row without a trained token."""
        self._saver = Saver(
            parts.launch.store,
            parts.cfg.checkpoint,
            parts.state,
            partial(parts.phase, "save"),
            parts.recorder.saved,
        )
        parts.recorder.before_failure = self._saver.publish_written

    def stops_at_start(self, first: int) -> bool:
        """Make the evaluation at the start, where there is one, and return whether the run was
        asked to end before its first step. `first` is the number of steps done. Collective."""
        if self._parts.cfg.eval.at_start and first == 0:
            evaluated = self._evaluate(first)
            if evaluated is not None:
                self._parts.recorder.record(first, evaluated)
        stop = self._interrupt.is_requested()
        if stop:
            self._parts.recorder.event("interrupted", step=first)
        return stop

    def finish(
        self,
        step: int,
        metrics: Metrics,
        *,
        groups: Sequence[Group],
        rows: Sequence[Trajectory],
        sync: SyncReport,
    ) -> bool:
        """Whether the run was asked to end after `step`. Collective.

        Raises UserError, once `step` is saved, where so many in a row had no trained token that
        the run `is_stalled`.
        """
        cfg = self._parts.cfg
        if due(cfg.eval.every_n_steps, step) or (cfg.eval.at_end and step == cfg.run.steps):
            with self._parts.collector.idle():
                evaluated = self._evaluate(step) or {}
                rank = to_scalars(evaluated).get(cfg.eval.metric)
                metrics = metrics | evaluated
                return self._record(step, metrics, rank, groups=groups, rows=rows, sync=sync)
        return self._record(step, metrics, None, groups=groups, rows=rows, sync=sync)

    def _evaluate(self, step: int) -> Metrics | None:
        """Metrics of an evaluation after `step`; None where a signal has cut it short. Collective.

        A signal ends it at once, since nothing of it has to be saved, and sampling and scoring a
        large held-out set takes longer than a scheduler waits between SIGTERM and SIGKILL.
        """
        evaluated = self._parts.evaluate(should_stop=self._interrupt.has_come)
        if evaluated is None:
            _log.warning("the evaluation after step %d was stopped; it is not recorded", step)
        return evaluated

    def _record(
        self,
        step: int,
        metrics: Metrics,
        rank: float | None,
        *,
        groups: Sequence[Group],
        rows: Sequence[Trajectory],
        sync: SyncReport,
    ) -> bool:
        parts, cfg, span = self._parts, self._parts.cfg, self._parts.recorder.spans.span
        with span("record"):
            metrics |= rollout_metrics(groups, parts.collector.counts)
            why = why_untrained(
                cfg,
                groups,
                rows,
                parts.collector.counts,
                correction=to_scalars(metrics).get("off_policy/correction"),
            )
            self._untrained = [*self._untrained, why] if why else []
            metrics |= {
                "train/untrained_steps": Last(len(self._untrained)),
                "time/sync/proof_s": Last(sync.seconds),
            }
            parts.recorder.record(
                step, metrics, groups=groups, rows=rows, why_untrained=why and why.cause
            )
        # After the row is written: a run that dies in between computes the step again.
        with span("checkpoint"):
            has_stalled = is_stalled(self._untrained)
            stop = self._interrupt.is_requested() or has_stalled
            self._saver.after(step, rank, is_last=stop or step == cfg.run.steps)
        if has_stalled:
            assert why is not None
            raise UserError(
                f"{len(self._untrained)} updates in a row had no token to train, and the run ends "
                f"after step {step}, which is saved. {why.cause}"
            )
        if stop:
            parts.recorder.event("interrupted", step=step)
        return stop


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """All samples, group by group."""
    return [sample for group in groups for sample in group.samples]


def gate(parts: RLParts, rows: list[Trajectory]) -> Metrics:
    """The launch gate's report as metrics; raises where engine and trainer disagree."""
    dtype = compute_dtype(parts.cfg.model, parts.launch.device)
    report = check_parity(
        rows,
        parts.trainer,
        parts.cfg.trainer.parity,
        dtype="bfloat16" if dtype.itemsize == 2 else "float32",
        exact=parts.cfg.model.exact,
    )
    if report is None:
        return {}
    return {
        "off_policy/parity/kl": Last(report.kl),
        "off_policy/parity/share_outside": Last(report.share_outside),
        "off_policy/parity/max_difference": Last(report.max_difference),
    }
