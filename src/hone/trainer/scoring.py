"""Log-probabilities of rows under one or several models, over all processes that train together.

A scorer says how rows become passes and passes become log-probabilities. The trainers are scorers
that also train; a frozen model that has a device of its own is scored by one that does nothing else
(`ReferenceScorer`), with the same kernels and in the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hone.config.errors import UserError
from hone.config.trainer import SFTTrainerConfig, TrainerConfig
from hone.distributed.mesh import Mesh
from hone.models.decoder import decoder_layers, hidden_states
from hone.models.exact_decoder import PackedDecoder, require_exact
from hone.trainer.context import gather, split
from hone.trainer.logprobs import token_logprobs
from hone.trainer.packing import AttentionCost, Plan, check_rows, collate, digest, empty_batch, plan
from hone.trainer.precision import apply_matmul_precision
from hone.trainer.sharded import ShardedModel
from hone.trainer.tensor import parallelize
from hone.types import MicroBatch, Trajectory

__all__ = ["ReferenceScorer", "RowScorer", "compile_forward"]


class RowScorer:
    """Scores rows under models of one shape, all with the same settings and in the same passes.

    With a mesh of several processes every one of them is given all rows and returns the same
    results; inside, the rows are dealt over the data axis.
    """

    num_steps: int = 0
    """Optimizer steps done, by which processes know that they are at the same one."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: SFTTrainerConfig,
        *,
        temperature: float = 1.0,
        exact: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """`model` is one of those to be scored, before anything has been done to it. Others as in
        `Learner`."""
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature}: log-probabilities are trained at the temperature that "
                "samples, which must be above 0"
            )
        self._exact = exact
        self._temperature = temperature
        self._backbones: dict[PreTrainedModel, Callable[..., Tensor]] = {}
        """Instead of the model's own modules."""
        self._sharded: dict[PreTrainedModel, ShardedModel] = {}
        self._shared_cfg = cfg
        self._mesh = Mesh.alone(model.device) if mesh is None else mesh
        on_gpu = self._mesh.device.type == "cuda"
        self._compile = on_gpu if cfg.compile is None else cfg.compile
        self._cost = _attention_cost(model)

    def plan_elsewhere(self, rows: Sequence[Trajectory], num_devices: int) -> list[list[int]]:
        """Row indices of the passes in which `num_devices` others, each with a whole model, score
        all trained tokens: the dearest first, and of like sums for each device.

        With one device these are the passes of one process. Raises ValueError as `packing.plan`.
        """
        passes = self._cut(rows, self._forward_tokens, num_devices, balance=True)
        return [own[number] for number in range(len(passes[0])) for own in passes if own[number]]

    def _add_reference(self, model: PreTrainedModel) -> None:
        """Make ready a frozen model that is scored as the policy is."""
        cfg, mesh = self._shared_cfg.parallel, self._mesh
        # As the policy, which would have a divergence from itself otherwise.
        self._apply_matmul_precision(model)
        if self._exact:
            self._decode_exactly(model)
        if mesh.world.size == 1:
            if self._compile and not self._exact:
                compile_forward(model)
            return
        mesh = mesh.for_reference(cfg)
        parallelize(model, mesh)
        if self._compile:
            compile_forward(model)
        self._sharded[model] = ShardedModel(
            model.requires_grad_(False), mesh, stage=3, forward_prefetch=cfg.forward_prefetch
        )

    def _apply_matmul_precision(self, model: PreTrainedModel) -> None:
        cfg = self._shared_cfg
        own_products = self._exact or self._mesh.tensor.size > 1
        if cfg.matmul_precision == "fp8" and own_products:
            raise UserError(
                "trainer.matmul_precision=fp8 is for the whole projections of transformers' "
                "layers: set it to default, or model.exact to false and "
                "trainer.parallel.tensor_parallel_size to 1"
            )
        apply_matmul_precision(model, cfg.matmul_precision, self._mesh.device)

    def _decode_exactly(self, model: PreTrainedModel) -> None:
        require_exact(model)
        recompute = self._shared_cfg.recompute == "full"
        self._backbones[model] = PackedDecoder(model, recompute=recompute)

    @property
    def groups(self) -> set[dist.ProcessGroup]:
        """Every group that training has collectives in."""
        return self._mesh.groups.union(*(model.mesh.groups for model in self._sharded.values()))

    def _score(
        self, model: PreTrainedModel, batch: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability and entropy of the trained tokens, [N] float32.

        `batch` lies in host memory where the context axis has several ranks.
        """
        score = partial(self._score_whole, model, batch, with_entropy=with_entropy)
        sharded = self._sharded.get(model)
        return score() if sharded is None else sharded(score)

    def _score_whole(
        self, model: PreTrainedModel, batch: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`_score` where the weights that it needs are whole."""
        mesh = self._mesh_of(model)
        share = split(batch, mesh)
        backbone = self._backbones.get(model) or partial(hidden_states, model)
        hidden_TD = backbone(share.input_ids, share.position_ids, share.context)
        # Not index_select: gradients of a state that predicts several tokens add up in any order.
        hidden_ND = hidden_TD[share.predict_index]
        logprobs, entropy = token_logprobs(
            model,
            hidden_ND,
            share.labels,
            temperature=self._temperature,
            chunk_tokens=self._shared_cfg.logits_chunk_tokens,
            with_entropy=with_entropy,
            compile=self._compile,
            exact=self._exact,
            tensor=mesh.tensor,
        )
        return gather(logprobs, share), None if entropy is None else gather(entropy, share)

    def _mesh_of(self, model: PreTrainedModel) -> Mesh:
        sharded = self._sharded.get(model)
        return self._mesh if sharded is None else sharded.mesh

    @property
    def _forward_tokens(self) -> int:
        """Token budget of a pass without gradient, of one device."""
        cfg = self._shared_cfg
        return cfg.max_tokens_per_forward or 2 * cfg.max_tokens_per_microbatch

    def _score_rows(self, model: PreTrainedModel, rows: Sequence[Trajectory]) -> list[Tensor]:
        """Log-probabilities of each row's trained tokens, [N_i] float32 on the CPU, no gradient."""
        mesh = self._mesh_of(model)
        passes = self._plan(rows, self._forward_tokens, mesh)
        scored = [torch.empty(0, device=mesh.device)]
        with torch.no_grad():
            for indices in passes[mesh.data.rank]:
                batch = self._collate(rows, [0.0] * len(rows), indices, mesh)
                logprobs, _ = self._score(model, batch, with_entropy=False)
                scored += [logprobs] if indices else []
        if sharded := self._sharded.get(model):
            sharded.free()

        result = [torch.empty(0)] * len(rows)
        orders = [[i for indices in own for i in indices] for own in passes]
        lengths = [[rows[i].num_trained for i in order] for order in orders]
        everyones = mesh.gather_values(torch.cat(scored), [sum(own) for own in lengths])
        for order, own, values in zip(orders, lengths, everyones, strict=True):
            for i, logprobs in zip(order, values.split(own), strict=True):
                result[i] = logprobs.clone()
        return result

    def _plan(self, rows: Sequence[Trajectory], max_tokens: int, mesh: Mesh) -> Plan:
        """Row indices of each pass of each rank along data; a row without trained tokens is in
        none. `max_tokens` are those of one device. Raises DisagreementError, before anything is
        computed, where processes have different rows or plans."""
        balance = self._shared_cfg.parallel.balance_data
        passes = self._cut(rows, max_tokens * mesh.context.size, mesh.data.size, balance=balance)
        self._agree(rows, passes)
        if mesh.world.size > 1:  # on every rank, not just on that which will collate the bad one
            check_rows([row for row in rows if row.num_trained])
        return passes

    def _cut(
        self, rows: Sequence[Trajectory], max_tokens: int, num_ranks: int, *, balance: bool
    ) -> Plan:
        """The passes of `_plan`, from the rows alone."""
        trained = [i for i, row in enumerate(rows) if row.num_trained]
        passes = plan(
            [rows[i] for i in trained],
            max_tokens=max_tokens,
            num_ranks=num_ranks,
            micro_batch_size=self._shared_cfg.micro_batch_size,
            cost=self._cost,
            balance=balance,
        )
        return [[[trained[m] for m in members] for members in own] for own in passes]

    def _agree(self, rows: Sequence[Trajectory], passes: Plan) -> None:
        """Raise DisagreementError on every process where one has other rows, or would run other
        passes. Collective, as everything is that follows from either."""
        if self._mesh.world.size > 1:
            numbers = {"step": self.num_steps, "rows": len(rows), "passes": list(map(len, passes))}
            self._mesh.agree("rows and micro-batches", numbers | {"of": digest(rows, passes)})

    def _collate(
        self,
        rows: Sequence[Trajectory],
        weights: Sequence[float],
        indices: Sequence[int],
        mesh: Mesh,
    ) -> MicroBatch:
        device = mesh.device if mesh.context.size == 1 else "cpu"
        if not indices:
            return empty_batch(device)
        return collate([rows[i] for i in indices], [weights[i] for i in indices], device)


class ReferenceScorer(RowScorer):
    """A whole frozen model on a device of its own, scored as one beside the policy is."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: TrainerConfig,
        *,
        temperature: float,
        exact: bool = False,
    ) -> None:
        """`cfg` is the trainers'."""
        super().__init__(model, cfg, temperature=temperature, exact=exact)
        self._model = model.requires_grad_(False)
        self._add_reference(self._model)

    def score(self, rows: Sequence[Trajectory]) -> npt.NDArray[np.float32]:
        """Log-probabilities of the trained tokens of `rows`, one row's after the other's."""
        return torch.cat([torch.empty(0), *self._score_rows(self._model, rows)]).numpy()


def compile_forward(model: PreTrainedModel) -> None:
    """Compile what decoder layers compute, but not the hooks that gather their weights."""
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _attention_cost(model: PreTrainedModel) -> AttentionCost:
    config = model.config
    heads: int = config.num_attention_heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return AttentionCost.of(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layers=config.num_hidden_layers,
        attention_width=heads * head_dim,
    )
