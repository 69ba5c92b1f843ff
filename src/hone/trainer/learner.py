"""What supervised and reinforcement training share: score rows, add up gradients, step.

A learner owns the policy, its optimizer and the schedule. The trainers decide which rows make an
optimizer step and what their loss is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.config.trainer import SFTTrainerConfig
from hone.models.decoder import hidden_states
from hone.models.exact_decoder import PackedDecoder, require_exact
from hone.models.manifest import export_weights
from hone.observe.metrics import Last, Mean, Metrics, Sum
from hone.trainer.logprobs import token_logprobs
from hone.trainer.optimizers import ParameterOptimizer
from hone.trainer.packing import AttentionCost, collate, pack
from hone.trainer.policy import NonFiniteError, Policy
from hone.trainer.schedule import lr_scale
from hone.types import MicroBatch, Trajectory

__all__ = ["Learner"]


class Learner(ABC):
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
    ) -> None:
        """`total_steps` counts optimizer steps, for the schedule. `temperature` divides the logits.
        `dump_dir` receives the rows of a step whose numbers are not finite. With `exact`,
        log-probabilities are the bits of an engine in exact mode; raises UserError where that is
        not served."""
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature}: log-probabilities are trained at the temperature that "
                "samples, which must be above 0"
            )
        self._compile = model.device.type == "cuda" if cfg.compile is None else cfg.compile
        self._exact = exact
        self._decoders: dict[PreTrainedModel, PackedDecoder] = {}
        self.policy = Policy(
            model,
            recompute=cfg.recompute and not exact,  # `PackedDecoder` does its own
            compile=self._compile and not exact,
        )
        self.num_steps = 0
        self._shared_cfg = cfg
        self._total_steps = total_steps
        self._temperature = temperature
        self._dump_dir = dump_dir
        self._optimizer = ParameterOptimizer(
            self.policy.masters, cfg.optimizer, self.policy.embedding_names
        )
        self._cost = _attention_cost(model)
        self._prepare(model)

    def _prepare(self, model: PreTrainedModel) -> None:
        """Set up the forward of a model that will be scored."""
        if self._exact:
            require_exact(model)
            self._decoders[model] = PackedDecoder(model, recompute=self._shared_cfg.recompute)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights an engine must sample with, under Hugging Face names."""
        return export_weights(self.policy.model)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Masters and moments as named tensors, and counters that JSON can hold."""
        weights = {f"weights/{n}": p.detach() for n, p in self.policy.masters.items()}
        moments = {f"optimizer/{n}": t for n, t in self._optimizer.state_dict().items()}
        tensors = weights | moments
        return tensors, {"num_steps": self.num_steps, "num_tensors": len(tensors)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError where it is incomplete or belongs to
        another model."""
        if len(tensors) != metadata["num_tensors"]:
            raise ValueError(
                f"the trainer's state has {len(tensors)} tensors, {metadata['num_tensors']} were "
                "saved; resume from another checkpoint"
            )
        self.policy.load_masters(_with_prefix(tensors, "weights/"))
        self._optimizer.load_state_dict(_with_prefix(tensors, "optimizer/"))
        self.num_steps = metadata["num_steps"]

    @abstractmethod
    def forward_backward(self, rows: Sequence[Trajectory]) -> tuple[Tensor, Metrics]:
        """Add the gradient of one optimizer step's loss over `rows`, one micro-batch at a time.

        Returns the loss, a scalar on the device, and the metrics.
        """

    def train(self, rows: Sequence[Trajectory]) -> Metrics:
        """One optimizer step. Without a single trained token it is a no-op that is counted."""
        if not any(row.num_trained for row in rows):
            return {"train/num_skipped_steps": Sum(1)}
        loss, metrics = self.forward_backward(rows)
        return metrics | self._optimizer_step(rows, loss)

    def _score(
        self, model: PreTrainedModel, batch: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability and entropy of the trained tokens, [N] float32."""
        context = PackedContext(
            cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen, lengths=batch.lengths
        )
        backbone = self._decoders[model] if self._exact else partial(hidden_states, model)
        hidden_TD = backbone(batch.input_ids, batch.position_ids, context)
        return token_logprobs(
            model,
            hidden_TD.index_select(0, batch.predict_index),
            batch.labels,
            temperature=self._temperature,
            chunk_tokens=self._shared_cfg.logits_chunk_tokens,
            with_entropy=with_entropy,
            compile=self._compile,
            exact=self._exact,
        )

    def _score_rows(self, model: PreTrainedModel, rows: Sequence[Trajectory]) -> list[Tensor]:
        """Log-probabilities of each row's trained tokens, [N_i] float32 on the CPU, no gradient."""
        cfg = self._shared_cfg
        budget = cfg.max_tokens_per_forward or 2 * cfg.max_tokens_per_microbatch
        scored: list[tuple[list[int], Tensor]] = []
        with torch.inference_mode():
            for indices, batch in self._pack(rows, [0.0] * len(rows), budget):
                scored.append((indices, self._score(model, batch, with_entropy=False)[0]))
        result = [torch.empty(0)] * len(rows)
        for indices, logprobs in scored:
            lengths = [rows[i].num_trained for i in indices]
            for i, values in zip(indices, logprobs.cpu().split(lengths), strict=True):
                result[i] = values.clone()
        return result

    def _micro_batches(
        self, rows: Sequence[Trajectory], weights: Sequence[float]
    ) -> Iterator[MicroBatch]:
        """The micro-batches of one optimizer step."""
        for _, batch in self._pack(rows, weights, self._shared_cfg.max_tokens_per_microbatch):
            yield batch

    def _pack(
        self, rows: Sequence[Trajectory], weights: Sequence[float], max_tokens: int
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        """Row indices and tensors of each pass; a row without trained tokens is in none."""
        trained = [i for i, row in enumerate(rows) if row.num_trained]
        bins = pack(
            [rows[i] for i in trained],
            max_tokens=max_tokens,
            micro_batch_size=self._shared_cfg.micro_batch_size,
            cost=self._cost,
        )
        for members in bins:
            indices = [trained[m] for m in members]
            yield (
                indices,
                collate(
                    [rows[i] for i in indices], [weights[i] for i in indices], self.policy.device
                ),
            )

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
            torch.save([asdict(row) for row in rows], path)
            message += f". Its rows are in {path}"
        raise NonFiniteError(message)


def _attention_cost(model: PreTrainedModel) -> AttentionCost:
    config = model.config
    heads: int = config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return AttentionCost.of(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layers=config.num_hidden_layers,
        attention_width=heads * head_dim,
    )


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
