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
from hone.checkpoint.atomic import CheckpointError
from hone.checkpoint.random_state import capture_random_state
from hone.errors import UserError
from hone.loops.interrupt import STOPPING, Interrupt
from hone.loops.launch import Launch, export, export_role, rehearse
from hone.loops.recorder import Recorder
from hone.loops.resuming import saved_names
from hone.loops.saving import Saver, time_in_words
from hone.observe.disk import write_rate
from hone.observe.metrics import Metrics, to_scalars
from hone.observe.tracing import PREPARATION, UPDATE
from hone.trainer.models import Models
from hone.trainer.trainer import Trainer
from hone.types import Row

__all__ = ["Outcome", "Phase", "Run"]

Item = TypeVar("Item")
Phase = Literal["train", "push", "evaluate", "save"]
_log = logging.getLogger(__name__)

_RATE_BYTES = 1 << 27
"""Written to see how fast the disk is, where a model is no smaller."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Updates done in all, earlier launches included."""
    stopped_by: int | None = None
    """The signal that ended the run before its last step; None where none did."""
    is_saved: bool = True
    """Whether the state of the last step is on disk, from which the run can go on."""


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
        early = self.launch.early.take()
        self.interrupt = Interrupt(self.launch.everyone, STOPPING, earlier=early)
        self._model_bytes = 0
        self._bytes_per_s: float | None = None
        """Of the disk of `run.dir`; None where so little is written that it takes no time."""
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

    def rehearse(self) -> None:
        """Try all that writing the trained models will need, and see how long it will take.
        Collective. Raises as `rehearse_export`."""
        launch = self.launch
        with self.span("rehearsal"):
            learners = self.models.learners.values()
            self._model_bytes = sum(rehearse(own, self.tokenizer, launch) for own in learners)
            rate = None
            if launch.everyone.is_first and self._model_bytes >= _RATE_BYTES:
                rate = write_rate(launch.dir, _RATE_BYTES)
            self._bytes_per_s = launch.everyone.broadcast(rate)

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
            is_first = step == self.launch.steps_done + 1
            if is_first and self.launch.mesh.device.type == "cuda":
                self.recorder.waiting("the first step also compiles kernels")
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
                problem = self._why_folder_is_lost(step) or problem
            # After the row is written: a run that dies in between computes the step again.
            with self.span("checkpoint"):
                stop, is_saved = self.interrupt.is_requested(), True
                if is_last or stop or problem is not None:
                    goes_on = not is_last or problem is not None
                    is_saved = self._write_end(step, rank, goes_on=goes_on)
                else:
                    self._save(step, rank)
        if problem is not None:
            raise UserError(problem)
        if stop:
            self.recorder.event("interrupted", step=step)
        stopped_by = self.interrupt.number if stop and not is_last else None
        self.outcome = Outcome(step, stopped_by, is_saved=is_saved)
        return stop

    def export(self, step: int) -> None:
        """Write the models that `step` has trained, the policy first. Called where `state` can be.
        Collective.

        Raises CheckpointError or ValueError where one cannot be written, on all processes that
        train it, once the others are.
        """
        launch = self.launch
        if launch.everyone.is_first:
            self.recorder.spans.write_trace(launch.dir / "trace.json")
        problem: CheckpointError | ValueError | None = None
        for role, trainer in sorted(self.models.learners.items(), key=lambda x: x[0] != "policy"):
            write = export if role == "policy" else export_role
            try:
                write(trainer, self.tokenizer, launch, step=step)
            except (CheckpointError, ValueError) as error:
                problem = problem or error
        launch.everyone.gather(None)  # what others train is written as well
        if problem is not None:
            raise problem

    def _save(self, step: int, rank: float | None) -> None:
        """Save `step` if it is due. Where that, or the save before, has failed, the run ends, with
        the model of `step`. Raises CheckpointError."""
        try:
            self.saver.after(step, rank)
        except CheckpointError as error:
            with self.phase("save", step):
                try:
                    self.export(step)
                except CheckpointError as another:
                    raise CheckpointError(f"{error} Nor was the model: {another}") from error
            text = f"{error} The model of step {step} was written: {self.launch.dir / 'model'}."
            raise CheckpointError(text) from error
        if step == self.launch.steps_done + 1 and self._bytes_per_s is not None:
            # There are moments by now.
            words = time_in_words(self._model_bytes, self._state_bytes(), self._bytes_per_s)
            self.interrupt.notice = f"{STOPPING}: {words}"

    def _state_bytes(self) -> int:
        """Of what a checkpoint has of all that learns here. Collective."""
        states = [trainer.state_dict()[0] for trainer in self.models.learners.values()]
        return sum(tensor.nbytes for state in states for tensor in state.values())

    def _write_end(self, step: int, rank: float | None, *, goes_on: bool) -> bool:
        """Write the model and after it, where the run is to go on or saves on schedule, its state.
        Whether that is on disk: a model without it is no failed run. Collective.

        Raises what kept the model from being written, once the state is saved.
        """
        problem: CheckpointError | ValueError | None = None
        writing = Interrupt(
            self.launch.everyone, "the model is being written", earlier=self.interrupt.number
        )
        with self.phase("save", step), writing:
            try:
                self.export(step)
            except (CheckpointError, ValueError) as error:  # in all processes
                problem = error
            is_saved = self._save_last(step, rank, goes_on=goes_on or problem is not None)
        if problem is not None:
            raise problem
        return is_saved

    def _save_last(self, step: int, rank: float | None, *, goes_on: bool) -> bool:
        """Save `step` as the last of this launch. Whether its state is on disk."""
        if not (goes_on or self.launch.cfg.checkpoint.every_n_steps):
            self.saver.settle()
            return False
        try:
            self.saver.last(step, rank)
        except CheckpointError as error:
            _log.warning("warning: the state of step %d is not saved. %s", step, error)
            self.recorder.event("unsaved", step=step, message=str(error))
            return False
        return True

    def _why_folder_is_lost(self, step: int) -> str | None:
        """Why the run ends, where its folder was deleted: the lock and the configuration are there
        anew then. Collective. Raises UserError where another run has the folder."""
        launch, is_taken = self.launch, False
        found: str | None = None
        if launch.lock is not None and not launch.lock.is_held():
            found = f"run.dir={str(launch.dir)!r} was deleted while the run was at work"
            try:
                launch.lock.take_again()
                launch.save_config()
            except UserError as error:
                found, is_taken = f"{found}: {error}", True
        found, is_taken = launch.everyone.broadcast((found, is_taken))
        if is_taken:
            raise UserError(found)
        return found and (
            f"{found}, and with it the records of its steps: it ends after step {step}, which is "
            "saved. The same command goes on from there."
        )

    def _evaluate(self, step: int) -> Metrics:
        with self.span("eval"):
            evaluated = self.evaluate(step)
        if not evaluated:
            _log.warning("the evaluation after step %d was stopped; it is not recorded", step)
        return evaluated
