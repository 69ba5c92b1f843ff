"""Passes of one model, forward and backward, in one process.

    outputs = model.forward(batch, {"logprobs"})             # of every trained token, [N]
    loss, metrics = model.forward_backward(batches, objective)

First the modules are changed: the number format of matrix products, exact mode's decoder,
recomputation, compilation. After that all passes have the same form: hidden states of the tokens,
then log-probabilities by the chunked head. `distributed_model.py` and `pipeline_model.py` override
the steps that differ with several processes, and `build.py` chooses among the three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.algorithms.algorithm import Objective, Outputs
from hone.algorithms.settings import Output
from hone.distributed.mesh import Mesh
from hone.model_input import ContentPiece
from hone.models.contents import follow_inputs, require_features
from hone.models.cpu_products import multiply_by_onednn
from hone.models.decoder import (
    decoder_layers,
    hidden_states,
    layer_groups,
)
from hone.models.heads import token_values
from hone.observe.metrics import Mean, Metrics, Sum, merge
from hone.trainer.collating import on_device, to_device
from hone.trainer.logprobs import token_scores
from hone.trainer.policy import BasePolicy, Policy
from hone.trainer.settings import SFTTrainerConfig
from hone.trainer.shard import MicroBatchShard, whole_shard
from hone.types import MicroBatch

if TYPE_CHECKING:
    from hone.trainer.shown_tokens import ShownTokens

__all__ = ["Learning", "ParallelModel"]

T = TypeVar("T")
_LEARNT: tuple[Output, ...] = ("values", "logprobs_at", "logprobs")
"""Outputs that a loss can depend on; the first one present is used."""


class ParallelModel:
    """A model that runs passes. All ranks of its mesh run the same number of passes, of the same
    kinds.

    `temperature` divides the logits, and must be above 0. With `exact`, log-probabilities are the
    bits of an engine in exact mode. `hone.trainer.build` makes it and changes the modules in place.
    Rules of the configuration report settings that exclude each other.
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
        """The state before `freeze` or `train`, which a policy and its reference have in common.
        `top_k` is the number of words in the output `top_ids`. With `replays_routes` tokens pass
        the experts of their row's column `routes`."""
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature}: log-probabilities are trained at the temperature of "
                "sampling, which must be above 0"
            )
        self.module = module
        self.mesh = mesh
        self._cfg = cfg
        self._is_exact = exact
        self._replays_routes = replays_routes
        follow_inputs(module)
        if replays_routes:
            from hone.models.routes import follow_routes

            follow_routes(module)
        self._score = partial(
            token_scores,
            temperature=temperature,
            chunk_tokens=cfg.logits_chunk_tokens,
            exact=exact,
        )
        self._top_k = top_k
        self._compiles = cfg.compiles(mesh.device.type)
        if cfg.matmul_precision != "default":
            from hone.trainer.precision import apply_matmul_precision

            apply_matmul_precision(module, cfg.matmul_precision, mesh.device)
        self._backbone: Callable[..., Tensor] = partial(hidden_states, module)
        if exact:
            from hone.models.exact_decoder import PackedDecoder, require_exact

            require_exact(module)
            self._backbone = PackedDecoder(module, recompute=cfg.recompute == "full")
            self._compiles = False  # there is nothing to compile
        elif mesh.device.type == "cpu" and mesh.world.size == 1 and not self._compiles:
            multiply_by_onednn(module)

    def freeze(self) -> None:
        """Prepare the module for passes without gradient, once and before the first of them."""
        self._compile_forward()

    def train(self) -> BasePolicy:
        """Prepare the module for training, once and before the first pass; returns its weights."""
        self._prepare_layers()
        policy = Policy(
            self.module,
            offload_optimizer=self._cfg.offloads("optimizer"),
            offload_gradients=self._cfg.offloads("gradients"),
        )
        if self._compiles:
            from hone.models.compiler import compile_module

            for layer in decoder_layers(self.module):
                compile_module(layer)
        return policy

    def forward(self, batch: MicroBatch, outputs: frozenset[Output]) -> Outputs:
        """Outputs of the trained tokens of `batch`, which must be in host memory where the context
        axis has several ranks. Not for pipeline stages. Forward and backward are collective."""
        return self._with_weights(partial(self._forward, batch, outputs))

    def forward_each(
        self, batches: Iterable[MicroBatch], outputs: frozenset[Output]
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        """Yield each of `batches` with its outputs. With pipeline stages only the last stage has
        outputs, and as many batches are taken in advance as are in the pipeline at once."""
        for batch in batches:
            yield batch, self.forward(batch, outputs)

    def forward_backward(
        self,
        batches: Iterable[MicroBatch],
        objective: Objective,
        shown: ShownTokens | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Add the gradient of one optimizer step's loss, one micro-batch at a time.

        `shown` receives the outputs of each. Returns the loss, a scalar on the device, and the
        metrics, both over all rows and equal on every rank.
        """
        learning = Learning(objective, self.mesh, shown)
        num_passes = self._learn(batches, learning)
        loss, metrics = self._merge_ranks(learning.loss, merge(*learning.metrics))
        return loss, metrics | {"train/num_micro_batches": Sum(num_passes)}

    def recompute_all(self) -> bool:
        """Recompute all decoder layers from now on, keeping only their inputs; returns False where
        that changes nothing. Compiled layers are compiled again."""
        from hone.trainer.recompute import apply_recompute, can_recompute

        cfg, groups = self._cfg.recomputing_all(), layer_groups(self.module)
        if cfg == self._cfg or self._is_exact or not all(map(can_recompute, groups)):
            return False
        self._cfg = cfg
        for group in groups:
            apply_recompute(group, cfg)
        return True

    def free(self) -> None:
        """Free all gathered weights, after passes without gradient."""

    # -- overridden for several processes --------------------------------------------------------

    def _with_weights(self, compute: Callable[[], Outputs]) -> Outputs:
        """Result of `compute`, called while the weights are gathered."""
        return compute()

    def _share(self, batch: MicroBatch) -> MicroBatchShard:
        """The part of a micro-batch that this process computes."""
        return whole_shard(batch, self.mesh.device, replays_routes=self._replays_routes)

    def _embedded(self, batch: MicroBatch) -> Sequence[ContentPiece]:
        """The pieces of contents among the tokens whose embeddings this process has."""
        return batch.contents

    def _own_part(self, values_N: Tensor, share: MicroBatchShard) -> Tensor:
        """The entries of `values_N` (one value for each trained token of the micro-batch) that
        belong to `share`, on the device."""
        return to_device(values_N, share.labels.device)

    def _gather(self, values_n: Tensor, share: MicroBatchShard) -> Tensor:
        """One value for each trained token of the micro-batch, from those of `share`."""
        return values_n

    def _learn(self, batches: Iterable[MicroBatch], learning: Learning) -> int:
        """Run forward and backward of each micro-batch; returns their number."""
        num_passes = 0
        for batch, is_last in _marking_last(batches):
            num_passes += 1
            self._begin_micro_batch(is_last=is_last)
            learning.backward(self.forward(batch, learning.objective.outputs), batch)
        return num_passes

    def _begin_micro_batch(self, *, is_last: bool) -> None:
        """Called before each pass with gradient of an optimizer step."""

    def _merge_ranks(self, loss: Tensor, metrics: Metrics) -> tuple[Tensor, Metrics]:
        """The loss and the metrics over all rows, from those over this process's rows."""
        return loss, metrics

    # -- one pass --------------------------------------------------------------------------------

    def _forward(self, batch: MicroBatch, outputs: frozenset[Output]) -> Outputs:
        """`forward` with gathered weights."""
        share = self._share(batch)
        if batch.contents:
            features = require_features(self.module)
            share.context.contents = features.gather(self._embedded(batch))
        hidden_TD = self._backbone(share.input_ids, share.position_ids, share.context)
        return self._of_tokens(hidden_TD, share, batch, outputs)

    def _of_tokens(
        self,
        hidden_TD: Tensor,
        share: MicroBatchShard,
        batch: MicroBatch,
        outputs: frozenset[Output],
    ) -> Outputs:
        """Outputs of the head for this rank's hidden states, gathered over all ranks' trained
        tokens."""
        # Not index_select: its backward would add up the gradients of a state that predicts several
        # tokens in no fixed order.
        hidden_ND = hidden_TD[share.predict_index]
        if "values" in outputs:  # of a critic, which has no other head
            return {"values": self._gather(token_values(self.module, hidden_ND), share)}
        at_ids = None
        if "logprobs_at" in outputs:
            # A micro-batch without rows has no columns.
            ids = batch.column("at_ids") if batch.ids else batch.labels[:, None]
            at_ids = self._own_part(ids, share)
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
        return {output: self._gather(values, share) for output, values in scores.items()}

    def _prepare_layers(self) -> None:
        """Apply float8 products and recomputation to the layers, before they are compiled."""
        if self._compiles:
            _share_graphs(self.module)
        if self._cfg.recompute != "off" and not self._is_exact:  # that decoder recomputes by itself
            from hone.trainer.recompute import apply_recompute

            for group in layer_groups(self.module):
                apply_recompute(group, self._cfg, are_compiled=self._compiles)

    def _compile_forward(self) -> None:
        """Compile the forward of decoder layers without the hooks that gather their weights."""
        if self._compiles:
            from hone.models.compiler import compiled

            for layer in decoder_layers(self.module):
                layer.forward = compiled(layer.forward)


def _share_graphs(module: PreTrainedModel) -> None:
    """Let the first layer share the compiled graphs of the others where embeddings are frozen. Its
    input would be the only one without gradient, which would need graphs of its own."""
    embeddings = module.get_input_embeddings()
    if any(weight.requires_grad for weight in embeddings.parameters()):
        return

    def need_gradient(module: nn.Module, args: Any, embedded: Tensor) -> None:
        if torch.is_grad_enabled():
            embedded.requires_grad_()

    embeddings.register_forward_hook(need_gradient)


class Learning:
    """Loss, metrics and gradients of one optimizer step's micro-batches."""

    def __init__(self, objective: Objective, mesh: Mesh, shown: ShownTokens | None) -> None:
        self.objective, self._shown = objective, shown
        self._device = mesh.device
        self.loss = torch.zeros((), device=mesh.device)
        self.metrics: list[Metrics] = []
        """Metrics of each micro-batch that has rows."""

    def backward(self, outputs: Outputs, batch: MicroBatch) -> None:
        """Add loss, metrics and gradients of one micro-batch."""
        objective = self.objective
        scored = next(outputs[name] for name in _LEARNT if name in outputs)
        if not batch.ids:
            (0.0 * scored.sum()).backward()
            return
        # Nothing from here on waits for the device.
        if self._shown is not None:
            self._shown.see(batch, outputs)
        scored.retain_grad()
        batch = on_device(batch, self._device)
        losses = objective(outputs, batch)
        if losses.values.shape != batch.weights.shape:
            raise ValueError(
                f"the objective gives values of shape {tuple(losses.values.shape)}; per "
                f"{objective.per} they have {tuple(batch.weights.shape)}"
            )
        loss = (losses.values * batch.weights).sum()
        loss.backward()
        self.loss += loss.detach()
        assert scored.grad is not None
        has_gradient = Mean.of(scored.grad != 0)
        self.metrics.append(losses.metrics | {"train/share_with_gradient": has_gradient})


def _marking_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last."""
    remaining = iter(items)
    item = next(remaining, None)
    while item is not None:
        following = next(remaining, None)
        yield item, following is None
        item = following
