"""Passes of one model, forward and backward, over however many processes hold it.

    outputs = model.forward(batch, {"logprobs"})             # of every trained token, [N]
    loss, metrics = model.forward_backward(batches, objective)

First the modules are changed: the format of their products, exact mode's decoder, the split over
the tensor axis, recomputation, compilation, shards. After that all passes look the same: a share of
the tokens (`context.py`), hidden states, log-probabilities by the chunked head, gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.algorithms.algorithm import Objective, Outputs
from hone.config.algorithm import Output
from hone.config.trainer import SFTTrainerConfig
from hone.distributed.mesh import Mesh
from hone.models.cpu_products import multiply_by_onednn
from hone.models.decoder import (
    decoder_layers,
    hidden_states,
    layer_groups,
    layer_outputs,
    only_group,
)
from hone.models.exact_decoder import PackedDecoder, require_exact
from hone.models.heads import token_values
from hone.models.routes import follow_routes
from hone.observe.metrics import Mean, Metrics, Sum, merge, on_host
from hone.trainer.collating import on_device
from hone.trainer.context import Share, gather, own_part, split
from hone.trainer.experts import divide_experts
from hone.trainer.logprobs import token_scores
from hone.trainer.pipeline import Pipeline, add_tied_gradients, cut_stage
from hone.trainer.policy import BasePolicy, Policy
from hone.trainer.precision import apply_matmul_precision
from hone.trainer.recompute import apply_recompute, can_recompute, recompute_fully
from hone.trainer.sharded import ShardedModel, ShardedPolicy
from hone.trainer.shown_tokens import ShownTokens
from hone.trainer.tensor import parallelize
from hone.types import MicroBatch

__all__ = ["ParallelModel"]

T = TypeVar("T")
_LEARNT: tuple[Output, ...] = ("values", "logprobs_at", "logprobs")
"""Outputs that losses are of, the first that there is."""


class ParallelModel:
    """A model that passes run through. All ranks of its mesh run equally many, of the same kinds.

    `temperature` divides the logits, and must be above 0. With `exact`, log-probabilities are the
    bits of an engine in exact mode. Made by `frozen` or `trained`, which change the modules in
    place; what excludes what is told by the rules of the configuration.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        cfg: SFTTrainerConfig,
        mesh: Mesh,
        *,
        temperature: float = 1.0,
        exact: bool = False,
        top_k: int = 1,
        replays_routes: bool = False,
    ) -> None:
        """What a policy and its reference have in common. Before the module is compiled, split or
        sharded."""
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature}: log-probabilities are trained at the temperature that "
                "samples, which must be above 0"
            )
        self.module = module
        self.mesh = mesh
        self._cfg = cfg
        self._is_exact = exact
        self._replays_routes = replays_routes
        if replays_routes:
            follow_routes(module)
        self._score = partial(
            token_scores,
            temperature=temperature,
            chunk_tokens=cfg.logits_chunk_tokens,
            exact=exact,
        )
        self._top_k = top_k
        self._compiles = mesh.device.type == "cuda" if cfg.compile is None else cfg.compile
        self._sharded: ShardedModel | None = None
        self._pipeline: Pipeline | None = None
        apply_matmul_precision(module, cfg.matmul_precision, mesh.device)
        self._backbone: Callable[..., Tensor] = partial(hidden_states, module)
        if exact:
            require_exact(module)
            self._backbone = PackedDecoder(module, recompute=cfg.recompute == "full")
            self._compiles = False  # there is nothing to compile
        elif mesh.device.type == "cpu" and mesh.world.size == 1 and not self._compiles:
            multiply_by_onednn(module)

    @classmethod
    def frozen(
        cls,
        module: PreTrainedModel,
        cfg: SFTTrainerConfig,
        mesh: Mesh,
        *,
        temperature: float = 1.0,
        exact: bool = False,
        top_k: int = 1,
    ) -> ParallelModel:
        """A model that is only scored; several processes hold shards of it over their own mesh,
        `mesh.for_reference`. It computes as the policy does, which would have a divergence from
        itself otherwise. `top_k` words are its `top_ids`."""
        module.requires_grad_(False)
        model = cls(module, cfg, mesh, temperature=temperature, exact=exact, top_k=top_k)
        if mesh.world.size > 1:
            model.mesh = mesh.for_reference(cfg.parallel)
            parallelize(module, model.mesh)
            divide_experts(module, model.mesh)
        model._compile_forward()
        if mesh.world.size > 1:
            model._sharded = ShardedModel(module, model.mesh, stage=3)
        return model

    @classmethod
    def trained(
        cls,
        module: PreTrainedModel,
        cfg: SFTTrainerConfig,
        mesh: Mesh,
        *,
        temperature: float = 1.0,
        exact: bool = False,
        replays_routes: bool = False,
    ) -> tuple[ParallelModel, BasePolicy]:
        """The model in training, and its weights: masters and gradients. With `replays_routes`
        tokens pass the experts that the column `routes` of their rows says."""
        is_alone = mesh.world.size == 1
        model = cls(
            module,
            cfg,
            mesh,
            temperature=temperature,
            exact=exact,
            replays_routes=replays_routes,
        )
        if mesh.pipeline.size > 1:
            cut_stage(module, mesh)
            model._pipeline = Pipeline(module, mesh)
        parallelize(module, mesh)
        divide_experts(module, mesh)
        if model._compiles:
            _share_graphs(module)
        if not exact:  # whose decoder recomputes by itself
            for group in layer_groups(module):
                apply_recompute(group, cfg)
        if is_alone:
            policy = Policy(
                module,
                offload_optimizer=cfg.offloads("optimizer"),
                offload_gradients=cfg.offloads("gradients"),
            )
            for layer in decoder_layers(module) if model._compiles else ():
                layer.compile(dynamic=True)  # no two micro-batches have the same shape
            return model, policy
        model._compile_forward()
        policy = ShardedPolicy(
            module,
            mesh,
            stage=cfg.parallel.zero_stage,
            offload_gradients=cfg.offloads("gradients"),
            offload_parameters=cfg.offloads("parameters"),
        )
        model._sharded = policy.sharded
        return model, policy

    def forward(self, batch: MicroBatch, outputs: frozenset[Output]) -> Outputs:
        """Of the trained tokens of `batch`, which lies in host memory where the context axis has
        several ranks. Of a model in no pipeline stages. Collective, as its backward is."""
        if self._sharded is None:
            return self._forward(batch, outputs)
        return self._sharded(partial(self._forward, batch, outputs))

    def forward_each(
        self, batches: Iterable[MicroBatch], outputs: frozenset[Output]
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        """Each of `batches`, and `forward` of it; of pipeline stages the last has outputs alone.
        So many batches are asked for as are on their way through the stages at once."""
        if self._pipeline is None:
            for batch in batches:
                yield batch, self.forward(batch, outputs)
            return
        run, remaining = partial(self._run_stage, outputs), iter(batches)
        while together := [*islice(remaining, self._pipeline.batches_together)]:
            for batch, found in zip(together, self._pipeline.forward(together, run), strict=True):
                yield batch, found or {}

    def forward_backward(
        self,
        batches: Iterable[MicroBatch],
        objective: Objective,
        shown: ShownTokens | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Add the gradient of one optimizer step's loss, one micro-batch at a time.

        `shown` sees the outputs of each. Returns the loss, a scalar on the device, and the metrics:
        of all rows, equal on every rank.
        """
        learning = _Learning(objective, self.mesh, shown)
        if self._pipeline is not None:
            assert self._sharded is not None
            num_passes = self._pipeline.forward_backward(
                batches,
                partial(self._run_stage, objective.outputs),
                learning.backward,
                self._sharded.begin_micro_batch,
            )
            add_tied_gradients(self.module, self.mesh)
        else:
            num_passes = 0
            for batch, is_last in _marking_last(batches):
                num_passes += 1
                if self._sharded is not None:
                    self._sharded.begin_micro_batch(is_last=is_last)
                learning.backward(self.forward(batch, objective.outputs), batch)
        loss, metrics = self._merge_ranks(learning.loss, merge(*learning.metrics))
        return loss, metrics | {"train/num_micro_batches": Sum(num_passes)}

    def recompute_all(self) -> bool:
        """From now on keep only the inputs of decoder layers; False where nothing changes by it.
        Compiled layers are compiled again."""
        cfg, groups = recompute_fully(self._cfg), layer_groups(self.module)
        if cfg == self._cfg or self._is_exact or not all(map(can_recompute, groups)):
            return False
        self._cfg = cfg
        for group in groups:
            apply_recompute(group, cfg)
        return True

    def free(self) -> None:
        """Keep no more of the weights than this process's share: after passes without gradient."""
        if self._pipeline is not None:
            self._pipeline.finish()
        if self._sharded is not None:
            self._sharded.free()

    def _forward(self, batch: MicroBatch, outputs: frozenset[Output]) -> Outputs:
        """`forward` where the weights that it needs are whole."""
        share = split(batch, self.mesh, replays_routes=self._replays_routes)
        hidden_TD = self._backbone(share.input_ids, share.position_ids, share.context)
        return self._of_tokens(hidden_TD, share, batch, outputs)

    def _run_stage(
        self, outputs: frozenset[Output], batch: MicroBatch, entering: Tensor | None, group: int
    ) -> Outputs | Tensor:
        """Of what enters a group of layers of this pipeline stage, [1, T, D], or nothing in the
        first of all, what leaves it, of the same shape, or in the last of all the outputs."""
        assert self._sharded is not None
        return self._sharded(partial(self._forward_group, batch, outputs, entering, group))

    def _forward_group(
        self, batch: MicroBatch, outputs: frozenset[Output], entering: Tensor | None, group: int
    ) -> Outputs | Tensor:
        share = split(batch, self.mesh, replays_routes=self._replays_routes)
        name = "input_ids" if entering is None else "inputs_embeds"
        enters = share.input_ids.unsqueeze(0) if entering is None else entering
        with only_group(self.module, group):
            leaving = layer_outputs(self.module, {name: enters}, share.position_ids, share.context)
        if not (self.mesh.is_last_stage and group == self.mesh.sizes.virtual_stages - 1):
            return leaving
        return self._of_tokens(leaving.squeeze(0), share, batch, outputs)

    def _of_tokens(
        self, hidden_TD: Tensor, share: Share, batch: MicroBatch, outputs: frozenset[Output]
    ) -> Outputs:
        """What the head says of this rank's hidden states, of all ranks' trained tokens."""
        # Not index_select: gradients of a state that predicts several tokens add up in any order.
        hidden_ND = hidden_TD[share.predict_index]
        if "values" in outputs:  # of a critic, which has no other head
            return {"values": gather(token_values(self.module, hidden_ND), share)}
        at_ids = None
        if "logprobs_at" in outputs:
            # What has no rows has no columns.
            ids = batch.column("at_ids") if batch.ids else batch.labels[:, None]
            at_ids = own_part(ids, share)
        scores = self._score(
            self.module,
            hidden_ND,
            share.labels,
            with_entropy="entropy" in outputs,
            with_mean="mean_logits" in outputs,
            at_ids_NK=at_ids,
            top_k=self._top_k if "top_ids" in outputs else 0,
            tensor=self.mesh.tensor,
        )
        return {output: gather(values, share) for output, values in scores.items()}

    def _compile_forward(self) -> None:
        """Compile what decoder layers compute, but not the hooks that gather their weights."""
        for layer in decoder_layers(self.module) if self._compiles else ():
            layer.forward = torch.compile(layer.forward, dynamic=True)

    def _merge_ranks(self, loss: Tensor, metrics: Metrics) -> tuple[Tensor, Metrics]:
        """Sum of the loss over the data axis, and metrics of all rows, equal on every rank."""
        mesh = self.mesh
        if mesh.world.size == 1:
            return loss, metrics
        # All that share their rows know the same; the first of them, in the last stage, reports.
        reports = mesh.context.rank == mesh.tensor.rank == 0 and mesh.is_last_stage
        own = (float(loss), on_host(metrics))
        everyones = mesh.gather(own if reports else None)
        losses, shards = zip(*(found for found in everyones if found is not None), strict=True)
        return loss.new_tensor(sum(losses)), merge(*shards)


def _share_graphs(module: PreTrainedModel) -> None:
    """Let the first layer run what is compiled for the others, where embeddings are frozen: its
    input would be the only one that needs no gradient, which takes graphs of its own."""
    embeddings = module.get_input_embeddings()
    if any(weight.requires_grad for weight in embeddings.parameters()):
        return

    def need_gradient(module: nn.Module, args: Any, embedded: Tensor) -> None:
        if torch.is_grad_enabled():
            embedded.requires_grad_()

    embeddings.register_forward_hook(need_gradient)


class _Learning:
    """Loss, metrics and gradients of one optimizer step's micro-batches."""

    def __init__(self, objective: Objective, mesh: Mesh, shown: ShownTokens | None) -> None:
        self._objective, self._shown = objective, shown
        self._device = mesh.device
        self.loss = torch.zeros((), device=mesh.device)
        self.metrics: list[Metrics] = []
        """Of each micro-batch with rows."""

    def backward(self, outputs: Outputs, batch: MicroBatch) -> None:
        """Add those of one."""
        objective = self._objective
        scored = next(outputs[name] for name in _LEARNT if name in outputs)
        if not batch.ids:
            (0.0 * scored.sum()).backward()
            return
        # Nothing from here on waits for the device.
        if self._shown is not None:
            self._shown.see(batch, outputs)
        scored.retain_grad()
        batch = on_device(batch, self._device)
        found = objective(outputs, batch)
        if found.values.shape != batch.weights.shape:
            raise ValueError(
                f"the objective gives values of shape {tuple(found.values.shape)}; per "
                f"{objective.per} they have {tuple(batch.weights.shape)}"
            )
        loss = (found.values * batch.weights).sum()
        loss.backward()
        self.loss += loss.detach()
        assert scored.grad is not None
        has_gradient = Mean.of(scored.grad != 0)
        self.metrics.append(found.metrics | {"train/share_with_gradient": has_gradient})


def _marking_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last."""
    remaining = iter(items)
    item = next(remaining, None)
    while item is not None:
        following = next(remaining, None)
        yield item, following is None
        item = following
