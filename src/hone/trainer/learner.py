"""What supervised and reinforcement training share: score rows, add up gradients, step.

A learner owns the policy, its optimizer and the schedule. The trainers decide which rows make an
optimizer step and what their loss is.

With a mesh of several processes every one of them is given all rows and returns the same results.
Inside, the rows are dealt over the data axis; gradients are summed, log-probabilities gathered and
metrics merged over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.checkpoint.sharded import StoredTensor, take
from hone.config.errors import UserError
from hone.config.trainer import SFTTrainerConfig
from hone.distributed.mesh import Mesh
from hone.models.adapters import merged_weights
from hone.models.decoder import decoder_layers
from hone.observe.metrics import Last, Mean, Metric, Metrics, Sum, merge
from hone.trainer.optimizers import ParameterOptimizer
from hone.trainer.policy import NonFiniteError, Policy
from hone.trainer.recompute import apply_recompute
from hone.trainer.schedule import lr_scale
from hone.trainer.scoring import RowScorer, compile_forward
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.tensor import parallelize
from hone.types import MicroBatch, Trajectory

__all__ = ["Learner"]


class Learner(RowScorer, ABC):
    """A policy with everything an optimizer step needs."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: SFTTrainerConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
        dump_dir: Path | None = None,
        exact: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """`total_steps` counts optimizer steps, for the schedule. `temperature` divides the logits.
        `dump_dir` receives the rows of a step whose numbers are not finite. With `exact`,
        log-probabilities are the bits of an engine in exact mode; raises UserError where that is
        not served. `mesh` is shared by all processes that train together, each of which brings the
        same model, in host memory, on its device or deferred (`hone.models.deferred`); it is
        sharded in place."""
        super().__init__(model, cfg, temperature=temperature, exact=exact, mesh=mesh)
        self._apply_matmul_precision(model)
        self.policy = self._make_policy(model)
        self._total_steps = total_steps
        self._dump_dir = dump_dir
        self._optimizer = ParameterOptimizer(
            self.policy.masters,
            cfg.optimizer,
            self.policy.embedding_names,
            offload=cfg.offload_optimizer,
            host_masters=self.policy.host_masters,
            host_gradients=self.policy.host_gradients,
        )

    def _make_policy(self, model: PreTrainedModel) -> Policy | ShardedPolicy:
        cfg, mesh = self._shared_cfg, self._mesh
        if mesh.world.size == 1:
            if self._exact:
                self._decode_exactly(model)
            # The decoder of exact mode recomputes by itself, and there is nothing to compile.
            plain = not self._exact
            if cfg.offload_parameters:
                raise UserError(
                    "trainer.offload_parameters shards weights over several processes, and one was "
                    "started: turn it off, or start more (--nproc N)"
                )
            return Policy(
                model,
                recompute=cfg.recompute if plain else "off",
                recompute_every_n_layers=cfg.recompute_every_n_layers,
                offload_activations=cfg.offload_activations and plain,
                offload_optimizer=cfg.offload_optimizer,
                offload_gradients=cfg.offload_gradients,
                compile=self._compile and plain,
            )
        if self._exact:
            raise UserError(
                f"model.exact is served by one process, and {mesh.world.size} were started; set "
                "model.exact to false, or start one"
            )
        parallelize(model, mesh)
        apply_recompute(
            decoder_layers(model),
            mode=cfg.recompute,
            every=cfg.recompute_every_n_layers,
            offload=cfg.offload_activations,
        )
        if self._compile:
            compile_forward(model)
        policy = ShardedPolicy(
            model,
            mesh,
            stage=cfg.parallel.zero_stage,
            forward_prefetch=cfg.parallel.forward_prefetch,
            offload_gradients=cfg.offload_gradients,
            offload_parameters=cfg.offload_parameters,
        )
        self._sharded[model] = policy.sharded
        return policy

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights an engine must sample with, under Hugging Face names. With several processes
        whole tensors, gathered some at a time: collective, and each exists while it is held."""
        return merged_weights(self.policy.model, self.policy.named_weights())

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Masters and moments as named tensors, and counters that JSON can hold."""
        weights = {f"weights/{n}": p.detach() for n, p in self.policy.masters.items()}
        moments = {f"optimizer/{n}": t for n, t in self._optimizer.state_dict().items()}
        tensors = weights | moments
        return tensors, {"num_steps": self.num_steps, "num_tensors": len(tensors)}

    def load_state_dict(
        self, tensors: Mapping[str, Tensor | StoredTensor], metadata: Mapping[str, Any]
    ) -> None:
        """Take over what `state_dict` gave, of whatever processes. Of what is stored each process
        reads its own parts, one tensor after the other. Raises ValueError where it is incomplete
        or belongs to another model."""
        if len(tensors) != metadata["num_tensors"]:
            raise ValueError(
                f"the trainer's state has {len(tensors)} tensors, {metadata['num_tensors']} were "
                "saved; resume from another checkpoint"
            )
        self.policy.load_masters(_with_prefix(tensors, "weights/"))
        moments = _with_prefix(tensors, "optimizer/")
        self._optimizer.load_state_dict(_LaidOut(moments, self.policy.masters))
        self.num_steps = metadata["num_steps"]

    def sleep(self) -> None:
        """Move masters and moments to pinned host memory, so that an engine has the device. Raises
        as `Policy.sleep`."""
        self.policy.sleep(self._optimizer.device_tensors())

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises as `Policy.wake`."""
        self.policy.wake()

    @abstractmethod
    def forward_backward(self, rows: Sequence[Trajectory]) -> tuple[Tensor, Metrics]:
        """Add the gradient of one optimizer step's loss over `rows`, one micro-batch at a time.

        Returns the loss, a scalar on the device, and the metrics.
        """

    def train(self, rows: Sequence[Trajectory]) -> Metrics:
        """One optimizer step. Without a single trained token it is a no-op that is counted."""
        if not any(row.num_trained for row in rows):
            self._agree(rows, [])
            return {"train/num_skipped_steps": Sum(1)}
        loss, metrics = self.forward_backward(rows)
        return metrics | self._optimizer_step(rows, loss)

    def _passes(self, rows: Sequence[Trajectory], weights: Sequence[float]) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one optimizer step, each when the policy is ready for it.

        Those without `ids` hold no rows: they are there to run what other ranks run.
        """
        batches = self._micro_batches(rows, weights)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            if isinstance(self.policy, ShardedPolicy):
                self.policy.sharded.begin_micro_batch(is_last=following is None)
            yield batch
            batch = following

    def _micro_batches(
        self, rows: Sequence[Trajectory], weights: Sequence[float]
    ) -> Iterator[MicroBatch]:
        passes = self._plan(rows, self._shared_cfg.max_tokens_per_microbatch, self._mesh)
        for indices in passes[self._mesh.data.rank]:
            yield self._collate(rows, weights, indices, self._mesh)

    def _merge_ranks(self, loss: Tensor, metrics: Metrics) -> tuple[Tensor, Metrics]:
        """Sum of the loss over the data axis, and metrics of all rows, equal on every rank."""
        mesh = self._mesh
        if mesh.world.size == 1:
            return loss, metrics
        # All that share their rows know the same; the first of them speaks.
        speaks = mesh.context.rank == mesh.tensor.rank == 0
        own = (float(loss), {key: _on_host(metric) for key, metric in metrics.items()})
        spoken = [said for said in mesh.gather(own if speaks else None) if said is not None]
        losses, shards = zip(*spoken, strict=True)
        return loss.new_tensor(sum(losses)), merge(*shards)

    def _optimizer_step(self, rows: Sequence[Trajectory], loss: Tensor) -> Metrics:
        """Clip and apply the gradient that the micro-batches of `rows` have left.

        Raises NonFiniteError, with weights and optimizer untouched, for a loss or gradient that is
        not finite.
        """
        cfg = self._shared_cfg.optimizer
        norm = self.policy.gradient_norm()
        if not bool((norm + loss).isfinite()):
            parameter = self.policy.non_finite_gradient()
            self._stop(f"the gradient of {parameter}" if parameter else "the loss", rows)
        self.policy.clip_gradient(cfg.max_grad_norm, norm)
        scale = lr_scale(self.num_steps, cfg, self._total_steps)
        metrics = self.policy.apply(lambda: self._optimizer.step(scale))
        self.policy.drop_gradient()
        self.num_steps += 1
        return metrics | {
            "train/loss": Mean(loss, 1),
            "train/grad_norm": Mean(norm, 1),
            "train/lr": Last(cfg.lr * scale),
            "train/num_tokens": Sum(sum(row.num_trained for row in rows)),
            "train/num_optimizer_steps": Sum(1),
        }

    def _stop(self, culprit: str, rows: Sequence[Trajectory]) -> None:
        """Refuse an update because of `culprit`; keep its rows for inspection."""
        self.policy.drop_gradient()
        message = (
            f"{culprit} is not finite at optimizer step {self.num_steps}; weights and optimizer "
            "are as they were before it"
        )
        if self._dump_dir is not None:
            path = self._dump_dir / f"non_finite_step_{self.num_steps}.pt"
            if self._mesh.is_first:
                torch.save([asdict(row) for row in rows], path)
            message += f". Its rows are in {path}"
        raise NonFiniteError(message)


def _on_host(metric: Metric) -> Metric:
    """The same metric with numbers in place of tensors, which wait on a device."""
    tensors = {f.name: getattr(metric, f.name) for f in fields(cast(Any, metric))}
    numbers = {name: float(v) for name, v in tensors.items() if isinstance(v, Tensor)}
    return replace(cast(Any, metric), **numbers)


class _LaidOut(Mapping[str, Tensor]):
    """`<moment>/<parameter>` to a saved tensor, laid out as the parameter is when it is asked for:
    beside the moments of a model only one of them at a time has room."""

    def __init__(
        self, saved: Mapping[str, Tensor | StoredTensor], parameters: Mapping[str, Tensor]
    ) -> None:
        self._saved, self._parameters = saved, parameters

    def __getitem__(self, key: str) -> Tensor:
        saved, like = self._saved[key], self._parameters.get(key.partition("/")[2])
        if isinstance(saved, DTensor):
            return saved
        if isinstance(like, DTensor) and like.shape == saved.shape:
            return take(saved, like=like.detach())
        return saved.full() if isinstance(saved, StoredTensor) else saved

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def _with_prefix(
    tensors: Mapping[str, Tensor | StoredTensor], prefix: str
) -> dict[str, Tensor | StoredTensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
