"""The base class of training runs: the methods that the loop calls, and the work between two
steps."""

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
"""Bytes of the write test that measures the disk. Smaller models are not worth a test."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    steps: int
    """Updates done so far, including those of earlier launches."""
    stopped_by: int | None = None
    """The signal that ended the run before its last step, or None."""
    is_saved: bool = True
    """Whether the state of the last step is on disk, so that the run can be resumed."""


@dataclass(kw_only=True)
class Run(ABC, Generic[Item]):
    """A training run. Every process builds the same parts and makes the same calls.

    A step collects `Item`s, and the algorithm turns them into rows.
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
        """Write speed of the disk of `run.dir`. None where the models are too small for it to
        matter."""
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
        """The policy's trainer. Raises KeyError in processes that train another model."""
        return self.models.trainer

    # -- a step ----------------------------------------------------------------------------------

    @abstractmethod
    def collect(self, step: int) -> list[Item]:
        """The items that `step` trains on. Collective, as are all methods of a step."""

    def prepare(self, batch: list[Item], step: int) -> tuple[list[Row], Metrics]:
        """Rows of the batch, with all columns that the losses need."""
        with self.span(PREPARATION):
            return self.models.prepare(self.algorithm, batch, version=step - 1)

    def update(self, rows: Sequence[Row], step: int) -> Metrics:
        """Train on `rows`."""
        with self.span(UPDATE):
            shown = self.recorder.shown_ids
            return self.models.update(self.algorithm, rows, step, shown_ids=shown)

    def push(self, step: int) -> Metrics:
        """Send weight version `step` to the engines."""
        del step
        return {}

    def phase(self, name: Phase, step: int) -> AbstractContextManager[None]:
        """Context manager that puts devices and engines into the state which phase `name` needs."""
        del name, step
        return nullcontext()

    @abstractmethod
    def evaluate(self, step: int) -> Metrics:
        """Metrics of an evaluation after `step`, or none if a signal cut it short.

        A signal stops an evaluation at once: nothing of it has to be saved, and a large held-out
        set takes longer than a scheduler waits between SIGTERM and SIGKILL.
        """

    @abstractmethod
    def checkpoint_metric(self, evaluated: Mapping[str, float]) -> float | None:
        """The metric of `evaluated` by which checkpoints are compared, larger is better. None
        without one."""

    @abstractmethod
    def record(
        self, step: int, batch: list[Item], rows: Sequence[Row], metrics: Metrics
    ) -> str | None:
        """Write the metrics row of `step`. Returns the reason if the run cannot go on."""

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores, by part name."""
        state: dict[str, Any] = {"random": capture_random_state()}
        for name, trainer in saved_names(self.models).items():
            state[name], state[f"{name}_metadata"] = trainer.state_dict()
        return state

    # -- between steps ---------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Check that the trained models can be written, and measure how long it will take.
        Collective. Raises as `rehearse_export`."""
        launch = self.launch
        with self.span("rehearsal"):
            learners = self.models.learners.values()
            self._model_bytes = sum(rehearse(x, self.tokenizer, launch) for x in learners)
            rate = None
            if launch.everyone.is_first and self._model_bytes >= _RATE_BYTES:
                rate = write_rate(launch.dir, _RATE_BYTES)
            self._bytes_per_s = launch.everyone.broadcast(rate)

    def start(self) -> bool:
        """Push the weights and run the evaluation at step 0 if there is one. Returns whether a
        signal asked the run to end before its first step."""
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
        """Iterate over the updates that are left."""
        for step in range(self.launch.steps_done + 1, self.launch.total_steps + 1):
            self.launch.watch.begin_step(step)
            is_first = step == self.launch.steps_done + 1
            if is_first and self.launch.mesh.device.type == "cuda":
                self.recorder.waiting("the first step also compiles kernels")
            yield step

    def finish(self, step: int, batch: list[Item], rows: Sequence[Row], metrics: Metrics) -> bool:
        """Evaluate, record and save. Returns whether a signal asked the run to end after `step`.

        Raises UserError, once `step` is saved, where the run cannot go on.
        """
        cfg, is_last = self.launch.cfg.eval, step == self.launch.total_steps
        evaluates = cfg.is_due(step, self.launch.total_steps)
        with self.phase("evaluate", step) if evaluates else nullcontext():
            evaluated = self._evaluate(step) if evaluates else {}
            metric = self.checkpoint_metric(to_scalars(evaluated))
            with self.span("record"):
                problem = self.record(step, batch, rows, metrics | evaluated)
                stop, is_saved = self.interrupt.is_requested(), True
                problem = self._why_folder_is_lost(step, stop=stop) or problem
            # After the row is written: a run that dies in between computes the step again.
            with self.span("checkpoint"):
                if is_last or stop or problem is not None:
                    goes_on = not is_last or problem is not None
                    is_saved = self._write_end(step, metric, goes_on=goes_on)
                else:
                    self._save(step, metric)
        if problem is not None:
            raise UserError(problem)
        if stop:
            self.recorder.event("interrupted", step=step)
        stopped_by = self.interrupt.number if stop and not is_last else None
        self.outcome = Outcome(step, stopped_by, is_saved=is_saved)
        return stop

    def export(self, step: int) -> None:
        """Write the trained models, the policy first. Collective. Must be called in a phase in
        which `state` can be read.

        Raises CheckpointError or ValueError if a model cannot be written, on all processes that
        train it, after the other models are written.
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
        launch.everyone.gather(None)  # the models of other processes are written as well
        if problem is not None:
            raise problem

    def _save(self, step: int, metric: float | None) -> None:
        """Save `step` if it is due. If this save or the one before failed, write the model of
        `step` and raise CheckpointError."""
        try:
            self.saver.after(step, metric)
        except CheckpointError as error:
            with self.phase("save", step):
                try:
                    self.export(step)
                except CheckpointError as another:
                    raise CheckpointError(f"{error} Nor was the model: {another}") from error
            text = f"{error} The model of step {step} was written: {self.launch.dir / 'model'}."
            raise CheckpointError(text) from error
        if step == self.launch.steps_done + 1 and self._bytes_per_s is not None:
            # The optimizer has its moments by now, so that the state has its full size.
            words = time_in_words(self._model_bytes, self._state_bytes(), self._bytes_per_s)
            self.interrupt.notice = f"{STOPPING}: {words}"

    def _state_bytes(self) -> int:
        """Bytes of the state of all trainers of this process in a checkpoint. Collective."""
        states = [trainer.state_dict()[0] for trainer in self.models.learners.values()]
        return sum(tensor.nbytes for state in states for tensor in state.values())

    def _write_end(self, step: int, metric: float | None, *, goes_on: bool) -> bool:
        """Write the model and then the state, if the run may be resumed or saves on schedule.
        Collective.

        Returns whether the state is on disk: a run whose model is written has not failed without
        it. If the model cannot be written, its error is raised after the state is saved. Raises
        UserError if the folder was deleted meanwhile.
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
            self._require_folder()
            is_saved = self._save_last(step, metric, goes_on=goes_on or problem is not None)
            self._require_folder()
        if problem is not None:
            raise problem
        return is_saved

    def _save_last(self, step: int, metric: float | None, *, goes_on: bool) -> bool:
        """Save `step` as the last of this launch. Returns whether its state is on disk."""
        if not (goes_on or self.launch.cfg.checkpoint.every_n_steps):
            self.saver.settle()
            return False
        try:
            self.saver.last(step, metric)
        except CheckpointError as error:
            _log.warning("warning: the state of step %d is not saved. %s", step, error)
            self.recorder.event("unsaved", step=step, message=str(error))
            return False
        return True

    def _why_folder_is_lost(self, step: int, *, stop: bool) -> str | None:
        """Reason to end the run if its folder was deleted, or None. The lock and the configuration
        are then written anew. Collective.

        Raises UserError if another run has taken the folder, or if a signal ends the run (`stop`):
        who stops a run and deletes its folder wants nothing of it, and may start another one there.
        """
        launch, is_left = self.launch, stop
        reason: str | None = None
        if launch.lock is not None and not launch.lock.is_held():
            reason = f"run.dir={str(launch.dir)!r} was deleted while the run was at work"
            if stop:
                reason += f", and a signal ends it: step {step} is not saved"
            else:
                try:
                    launch.lock.take_again()
                    launch.save_config()
                except UserError as error:
                    reason, is_left = f"{reason}: {error}", True
        reason, is_left = launch.everyone.broadcast((reason, is_left))
        if reason is not None and is_left:
            raise UserError(reason)
        return reason and (
            f"{reason}, and with it the records of its steps: it ends after step {step}, which is "
            "saved. The same command goes on from there."
        )

    def _require_folder(self) -> None:
        """Raise UserError in all processes if the folder was deleted. Collective."""
        launch = self.launch
        is_lost = launch.lock is not None and not launch.lock.is_held()
        if launch.everyone.broadcast(is_lost):
            raise UserError(
                f"run.dir={str(launch.dir)!r} was deleted while the run wrote its end into it. It "
                "writes nothing more there, since another run may begin in that folder."
            )

    def _evaluate(self, step: int) -> Metrics:
        with self.span("eval"):
            evaluated = self.evaluate(step)
        if not evaluated:
            _log.warning("the evaluation after step %d was stopped; it is not recorded", step)
        return evaluated
