"""Training of one model: a batcher, a model, and an optimizer.

    for step_rows in batcher.optimizer_steps(rows):
        batches = batcher.micro_batches(step_rows, objective.weights(step_rows))
        loss, metrics = model.forward_backward(batches, objective)
        optimizer.step(norm of the gradient)

Every token's weight in the loss is fixed over the whole optimizer step before the first forward. So
neither the division into micro-batches nor a retry after an out-of-memory error
(`out_of_memory.py`) can change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.algorithms.algorithm import Objective, Outputs
from hone.algorithms.settings import Output
from hone.checkpoint.export import export_hf
from hone.checkpoint.sharded import StoredTensor, bytes_on
from hone.distributed.mesh import Mesh
from hone.models.adapted import adapters_of, merged_weights
from hone.observe.metrics import Mean, Metrics, Sum, merge
from hone.trainer.batcher import Batcher
from hone.trainer.build import attempts, trained_model
from hone.trainer.optimizer import Optimizer
from hone.trainer.policy import NonFiniteError
from hone.trainer.scorer import agree, agreed_passes, row_outputs
from hone.trainer.settings import SFTTrainerConfig
from hone.types import MicroBatch, Row

if TYPE_CHECKING:
    from hone.trainer.shown_tokens import ShownTokens

__all__ = ["Trainer"]


class Trainer:
    """A model in training, which makes optimizer steps from rows.

        trainer = Trainer(model, TrainerConfig(), algorithm.objectives["policy"], total_steps=100)
        metrics = trainer.update(rows)

    With a mesh of several processes, each process passes all rows and gets the same results.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: SFTTrainerConfig,
        objective: Objective,
        *,
        total_steps: int,
        role: str = "policy",
        temperature: float = 1.0,
        seed: int = 0,
        dump_dir: Path | None = None,
        on_exhausted: Callable[[], str] | None = None,
        exact: bool = False,
        replays_routes: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """`model` comes from `load_model` and is changed in place; `objective` is the loss, that of
        an algorithm for the model's `role`. `total_steps` is the number of optimizer steps of the
        whole run, for the schedule of the learning rate. `temperature` is that of the sampling,
        `seed` orders mini-batches. `dump_dir` receives the rows of a step whose numbers are not
        finite, and the notes of `Repair` (`out_of_memory.py`); `on_exhausted` as there. `exact` and
        `replays_routes` as of `ParallelModel`. `mesh` is shared by all processes that train
        together, each of which brings the same model, in host memory, on its device or deferred
        (`hone.models.deferred`); it is changed in place."""
        mesh = Mesh.alone(model.device) if mesh is None else mesh
        self.mesh = mesh
        self.objective = objective
        self.role = role
        self.repair = attempts(cfg, mesh, role=role, folder=dump_dir, on_exhausted=on_exhausted)
        cfg = self.repair.cfg
        self.batcher = Batcher.of(cfg, model, seed=seed, exact=exact)
        self.model, self.policy = trained_model(
            model,
            cfg,
            mesh,
            temperature=temperature,
            exact=exact,
            replays_routes=replays_routes,
        )
        self.repair.adopt(self.batcher, self.model.recompute_all)
        self.optimizer = Optimizer(
            self.policy, cfg.optimizer, total_steps=total_steps, offload=cfg.offloads("optimizer")
        )
        self.num_updates = 0
        self._dump_dir = dump_dir

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Implements `RowScorer`: the scores are those of the weights when the returned function is
        called."""
        return partial(self.outputs, rows, outputs)

    def logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """Log-probabilities of each row's trained tokens, [N_i] float32 on the CPU, without
        gradient."""
        return [of_row["logprobs"] for of_row in self.outputs(rows, frozenset({"logprobs"}))]

    def outputs(
        self,
        rows: Sequence[Row],
        outputs: frozenset[Output],
        *,
        before_pass: Callable[[], None] = lambda: None,
    ) -> list[Outputs]:
        """The outputs of each row's trained tokens, as of `row_outputs`."""
        step = self.optimizer.num_steps

        def score() -> list[Outputs]:
            return row_outputs(
                self.model, self.batcher, rows, outputs, step=step, before_pass=before_pass
            )

        return self.repair.until_it_fits("forward", rows, score)

    def update(self, rows: Sequence[Row], shown: ShownTokens | None = None) -> Metrics:
        """Train on the rows of one rollout, or one step's demonstrations; `shown` receives the
        outputs.

        Rows need the columns that the objective names, and those of `outputs_before`. Raises
        NonFiniteError for numbers that are not finite, ValueError for a row that does not fit into
        a micro-batch, and DisagreementError on every process where one has other rows.
        """
        agree(rows, [], self.mesh, step=self.optimizer.num_steps)
        self._check(rows)
        steps = self.batcher.optimizer_steps(rows, self.num_updates)
        metrics = merge(*(self._step(step_rows, shown) for step_rows in steps))
        self.num_updates += 1
        return metrics

    def _step(self, rows: Sequence[Row], shown: ShownTokens | None) -> Metrics:
        """One optimizer step. Without a single trained token it is a no-op that is counted.

        Raises NonFiniteError, with weights and optimizer untouched, for a loss or gradient that is
        not finite.
        """
        if not any(row.num_trained for row in rows):
            return {"train/num_skipped_steps": Sum(1)}
        loss, metrics = self.forward_backward(rows, shown)
        if shown is not None:
            shown.num_steps += 1
        norm = self.policy.gradient_norm()
        if not bool((norm + loss).isfinite()):
            parameter = self.policy.non_finite_gradient()
            self._stop(f"the gradient of {parameter}" if parameter else "the loss", rows)
        try:
            metrics |= self.optimizer.step(norm)
        except torch.OutOfMemoryError as error:
            self.policy.drop_gradient()
            raise self.repair.exhausted("The optimizer's step", str(error)) from error
        return metrics | {
            "train/loss": Mean(loss, 1),
            "train/num_tokens": Sum(sum(row.num_trained for row in rows)),
            "train/num_optimizer_steps": Sum(1),
        }

    def forward_backward(
        self, rows: Sequence[Row], shown: ShownTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        """The gradient of one optimizer step over `rows`; loss and metrics as
        `ParallelModel.forward_backward`. Raises as `Repair.until_it_fits`."""

        def compute() -> tuple[Tensor, Metrics]:
            batches = self._micro_batches(rows, self.objective.weights(rows))
            return self.model.forward_backward(batches, self.objective, shown)

        discard = self.policy.drop_gradient
        return self.repair.until_it_fits("backward", rows, compute, discard=discard)

    def _micro_batches(self, rows: Sequence[Row], weights: Sequence[float]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one optimizer step."""
        step, mesh = self.optimizer.num_steps, self.mesh
        passes = agreed_passes(self.batcher, rows, "backward", mesh, step=step)
        own = passes[mesh.data.rank]
        return self.batcher.micro_batches(rows, weights, own, mesh, per=self.objective.per)

    def outputs_before(self, rows: Sequence[Row]) -> frozenset[Output]:
        """Outputs that `update` needs as columns `<output>/<role>` before its first optimizer step
        on `rows`; empty where it makes only one step."""
        several = self.batcher.makes_several_steps(rows)
        return self.objective.outputs_before if several else frozenset()

    def _check(self, rows: Sequence[Row]) -> None:
        """Refuse rows with missing or non-finite values, naming the row."""
        before = (f"{output}/{self.role}" for output in self.outputs_before(rows))
        for name in sorted(self.objective.columns.union(before)):
            for row in rows:
                if name not in row.columns:
                    raise ValueError(
                        f"sequence {row.id!r} has no {name}, which this objective needs"
                    )
        for name in sorted({name for row in rows for name in row.columns}):
            having = [row for row in rows if name in row.columns]
            if not having[0].column(name).is_floating_point():
                continue
            values = torch.cat([row.column(name).flatten() for row in having])
            if not bool(values.isfinite().all()):
                culprit = next(r for r in having if not r.column(name).isfinite().all())
                self._stop(f"{name} of sequence {culprit.id!r}", rows)

    def _stop(self, culprit: str, rows: Sequence[Row]) -> None:
        """Refuse an update because of `culprit`; keep its rows for inspection."""
        self.policy.drop_gradient()
        number = self.optimizer.num_steps
        message = (
            f"{culprit} is not finite at optimizer step {number}; weights and optimizer "
            "are as they were before it"
        )
        if self._dump_dir is not None:
            path = self._dump_dir / f"non_finite_step_{number}.pt"
            try:
                if self.mesh.is_first:
                    torch.save([asdict(row) for row in rows], path)
                message += f". Its rows are in {path}"
            except (OSError, RuntimeError) as error:  # torch's own where the disk is full
                with suppress(OSError):
                    path.unlink()
                message += f". Its rows could not be written to {path} (run.dir): {error}"
        raise NonFiniteError(message)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights an engine must sample with, under Hugging Face names. With several processes
        they are whole tensors, gathered in groups: collective, and each exists as long as the
        caller refers to it."""
        return merged_weights(self.policy.model, self.policy.named_weights())

    def export_hf(
        self,
        folder: Path | str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        dtype: torch.dtype | None = None,
        step: int | None = None,
    ) -> Path:
        """Write the model as a Hugging Face folder, which `from_pretrained` loads without hone:
        config, weights, tokenizer and chat template. Returns the folder.

        Weights are of the format that the model computes in, or of `dtype`, to which float32
        masters are then rounded; adapters are merged into them. `step` goes into the folder's
        manifest. Collective; raises as `hone.checkpoint.export.export_hf`.
        """
        policy = self.policy
        dtype = dtype or policy.dtype
        is_as_computed = adapters_of(policy.model) is not None or dtype == policy.dtype
        weights = self.named_weights() if is_as_computed else policy.named_masters()
        return export_hf(policy.model, tokenizer, folder, dtype, weights, mesh=self.mesh, step=step)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Masters and moments as named tensors, and counters that JSON can hold. Those of other
        pipeline stages are on the meta device. Collective."""
        tensors = self.optimizer.state_dict()
        if self.mesh.pipeline.size > 1:
            from hone.trainer.pipeline import with_other_stages

            tensors = with_other_stages(tensors, self.mesh)
        return tensors, {
            "num_steps": self.optimizer.num_steps,
            "num_updates": self.num_updates,
            "num_tensors": len(tensors),
        }

    def load_state_dict(
        self, tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, Any]
    ) -> None:
        """Load the state of `state_dict`, as `Optimizer.load_state_dict`. Raises ValueError where
        it is incomplete or belongs to another model."""
        if len(tensors) != metadata["num_tensors"]:
            raise ValueError(
                f"the trainer's state has {len(tensors)} tensors, {metadata['num_tensors']} were "
                "saved; resume from another checkpoint"
            )
        self.optimizer.load_state_dict(tensors)
        self.optimizer.num_steps = metadata["num_steps"]
        self.num_updates = metadata["num_updates"]

    @property
    def device_bytes(self) -> int:
        """Bytes that this process keeps on its device between two steps: weights, masters and
        moments."""
        tensors = [*self.policy.model.parameters(), *self.optimizer.device_tensors()]
        return bytes_on(self.mesh.device, tensors)

    def sleep(self) -> None:
        """Move masters and moments to pinned host memory, so that an engine has the device, and
        with them the weights of a role that no engine samples with. Raises as `Policy.sleep`."""
        self.optimizer.sleep(with_weights=self.role != "policy")

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises as `Policy.wake`."""
        self.optimizer.wake()
