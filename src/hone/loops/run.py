"""A run that trains: what the loop calls, and what all commands do between two steps."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from hone.algorithms.algorithm import Algorithm
from hone.checkpoint.random_state import capture_random_state
from hone.config.errors import UserError
from hone.loops.interrupt import STOPPING, Interrupt
from hone.loops.launch import Launch, export, export_role
from hone.loops.recorder import Recorder
from hone.loops.resuming import saved_names
from hone.loops.saving import Saver
from hone.observe.metrics import Metrics, to_scalars
from hone.observe.tracing import PREPARATION, UPDATE
from hone.trainer.models import Models
from hone.trainer.trainer import Trainer
from hone.types import Row

__all__ = ["Outcome", "Phase", "Run"]

Item = TypeVar("Item")
Phase = Literal["train", "push", "evaluate", "save"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Updates done in all, earlier launches included."""
    stopped_by: int | None = None
    """The signal that ended the run before its last step; None where none did."""


@dataclass(kw_only=True)
class Run(ABC, Generic[Item]):
    """What the loop works with. All processes have the same parts, and make the same calls.

    A step collects `Item`s, of which the algorithm makes rows.
    """

    launch: Launch
    algorithm: Algorithm[Item]
    models: Models
    tokenizer: PreTrainedTokenizerBase
    recorder: Recorder

    def __post_init__(self) -> None:
        self.span = self.recorder.spans.span
        self.outcome = Outcome(self.launch.steps_done)
        self.interrupt = Interrupt(self.launch.everyone, STOPPING)
        self.saver = Saver(
            self.launch.store,
            self.launch.cfg.checkpoint,
            self.state,
            partial(self.phase, "save"),
            self.recorder.saved,
        )
        self.recorder.before_failure = self.saver.publish_written

    @property
    def trainer(self) -> Trainer:
        """Of the policy. Raises KeyError in processes that train another model."""
        return self.models.trainer

    # -- a step ----------------------------------------------------------------------------------

    @abstractmethod
    def collect(self, step: int) -> list[Item]:
        """What `step` trains on. Collective, as are all of these."""

    def prepare(self, batch: list[Item], step: int) -> tuple[list[Row], Metrics]:
        """Its rows, with everything that the losses need."""
        with self.span(PREPARATION):
            return self.models.prepare(self.algorithm, batch, version=step - 1)

    def update(self, rows: Sequence[Row], step: int) -> Metrics:
        """Train on `rows`."""
        with self.span(UPDATE):
            shown = self.recorder.shown_ids
            return self.models.update(self.algorithm, rows, step, shown_ids=shown)

    def push(self, step: int) -> Metrics:
        """Bring weight version `step` to what samples with it."""
        del step
        return {}

    def phase(self, name: Phase, step: int) -> AbstractContextManager[None]:
        """Inside, devices and engines are as a part of `step` needs them."""
        del name, step
        return nullcontext()

    @abstractmethod
    def evaluate(self, step: int) -> Metrics:
        """Metrics of an evaluation after `step`; none where a signal has cut it short: it ends it
        at once, since nothing of it has to be saved, and a large held-out set takes longer than a
        scheduler waits between SIGTERM and SIGKILL."""

    @abstractmethod
    def rank(self, evaluated: Mapping[str, float]) -> float | None:
        """How good a checkpoint of this evaluation is; None without one."""

    @abstractmethod
    def record(
        self, step: int, batch: list[Item], rows: Sequence[Row], metrics: Metrics
    ) -> str | None:
        """Write the row of `step`; why the run cannot go on, if it cannot."""

    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold, by part."""
        state: dict[str, Any] = {"random": capture_random_state()}
        for name, trainer in saved_names(self.models).items():
            state[name], state[f"{name}_metadata"] = trainer.state_dict()
        return state

    # -- between steps ---------------------------------------------------------------------------

    def start(self) -> bool:
        """Deliver the weights and make the evaluation at the start, where there is one. Whether the
        run was asked to end before its first step."""
        first = self.launch.steps_done
        self.push(first)
        if self.launch.cfg.eval.at_start and first == 0 and (evaluated := self._evaluate(first)):
            self.recorder.record(first, evaluated)
        stop = self.interrupt.is_requested()
        if stop:
            self.recorder.event("interrupted", step=first)
            self.outcome = Outcome(first, self.interrupt.number)
        self.recorder.spans.take()  # start-up is no part of the first step
        return stop

    def steps(self) -> Iterator[int]:
        """The updates that are to be made."""
        for step in range(self.launch.steps_done + 1, self.launch.total_steps + 1):
            self.launch.watch.begin_step(step)
            yield step

    def finish(self, step: int, batch: list[Item], rows: Sequence[Row], metrics: Metrics) -> bool:
        """Evaluate, record and save. Whether the run was asked to end after `step`.

        Raises UserError, once `step` is saved, where the run cannot go on.
        """
        cfg, is_last = self.launch.cfg.eval, step == self.launch.total_steps
        evaluates = cfg.is_due(step, self.launch.total_steps)
        with self.phase("evaluate", step) if evaluates else nullcontext():
            evaluated = self._evaluate(step) if evaluates else {}
            rank = self.rank(to_scalars(evaluated))
            with self.span("record"):
                problem = self.record(step, batch, rows, metrics | evaluated)
            # After the row is written: a run that dies in between computes the step again.
            with self.span("checkpoint"):
                stop = self.interrupt.is_requested()
                self.saver.after(step, rank, is_last=is_last or stop or problem is not None)
        if problem is not None:
            raise UserError(problem)
        if stop:
            self.recorder.event("interrupted", step=step)
        self.outcome = Outcome(step, self.interrupt.number if stop and not is_last else None)
        return stop

    def export(self) -> None:
        """Write the trained model, unless this launch was stopped before its first step."""
        launch, outcome = self.launch, self.outcome
        if launch.everyone.is_first:
            self.recorder.spans.write_trace(launch.dir / "trace.json")
        if outcome.stopped_by is not None and outcome.steps == launch.steps_done:
            return
        notice = "the model is being written"
        writing = Interrupt(launch.everyone, notice, earlier=outcome.stopped_by)
        with self.phase("save", outcome.steps), writing:
            for role, trainer in self.models.learners.items():
                if role != "policy":
                    export_role(trainer, self.tokenizer, launch)
            launch.everyone.gather(None)  # the policy's is the last, whoever writes
            if "policy" in self.models.learners:
                export(self.trainer, self.tokenizer, launch)

    def _evaluate(self, step: int) -> Metrics:
        with self.span("eval"):
            evaluated = self.evaluate(step)
        if not evaluated:
            _log.warning("the evaluation after step %d was stopped; it is not recorded", step)
        return evaluated
