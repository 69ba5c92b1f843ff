"""The forward that generates: hidden states and logits over the trainer's own parameters.

Nothing is copied, so whatever is written into a parameter of the model is sampled with at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.attention import PagedContext
from hone.models.contents import follow_inputs
from hone.models.decoder import (
    alias_module,
    head_product,
    head_weight,
    hidden_states,
    logit_softcap,
)
from hone.models.fused_layers import FusedDecoder, addresses_of, is_fusible, require_addresses
from hone.models.layer_ops import LayerOps, choose_kernels
from hone.models.ranks import ModelRanks

__all__ = ["GenerationModel", "generation_model"]

Backbone = Callable[[Tensor, Tensor, PagedContext], Tensor]


class GenerationModel:
    """The model as an engine uses it; built by `generation_model`.

    Letters: T packed tokens, N chosen rows, D model, V vocabulary.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: nn.Parameter,
        softcap: float | None,
        tp: ModelRanks | None = None,
        *,
        exact: bool = False,
        parameters: Iterable[Tensor] = (),
    ) -> None:
        """With `tp`, `head` has this rank's rows [V / size, D] of the vocabulary. `parameters` are
        those that the backbone and its captured graphs use, at their current addresses."""
        self._backbone = backbone
        self._head = head
        self._softcap = softcap
        self._tp = tp
        self._exact = exact
        self._addresses = addresses_of(parameters)

    def require_in_place(self) -> None:
        """Raise RuntimeError if parameters have moved in memory since this object was built: merged
        layers and captured graphs would use the old values."""
        require_addresses(self._addresses)

    @torch.inference_mode()
    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext
    ) -> Tensor:
        """Hidden states [T, D] after the final norm, for ids [T] and positions [T], or [A, T] where
        a family's rule has A axes that may differ (both int64).

        Stores keys and values of all T tokens. May be recorded in a CUDA graph once it has run with
        the same number of tokens; neither waits for the device.
        """
        return self._backbone(input_ids, position_ids, context)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, D], in float32, final soft cap included.

        Ranks that share the vocabulary all get the same bits of the whole.
        """
        logits = head_product(hidden, self._head, exact=self._exact).float()
        if self._tp is not None:
            logits = self._tp.gather_columns(logits)
        cap = self._softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def generation_model(
    model: PreTrainedModel,
    *,
    compile: bool,
    tp: ModelRanks | None = None,
    exact: bool = False,
    records_routes: bool = False,
) -> GenerationModel:
    """The forward that generates with the parameters of `model`.

    Families that `is_fusible` knows run fused layers: parameters that are used together are laid
    side by side, each in its own `nn.Parameter` as before, and must not be moved again afterwards
    (as `model.to` does), only written. Other families run the layers of transformers, each compiled
    if `compile` is set and the device is CUDA. Calling it again is harmless.

    With `tp`, `model` is one that `shard_model` made, and all calls are collective. With `exact`, a
    token's result does not depend on its batch; raises UserError where that is not served. With
    `records_routes` contexts may ask for the experts of each token.
    """
    if exact:
        from hone.models.exact_decoder import ExactOps, require_exact

        require_exact(model)
        assert tp is None or tp.size == 1, "sums over ranks are in another order than a trainer's"
        backbone: Backbone = FusedDecoder(model, ExactOps(choose_kernels(model.device)))
    elif is_fusible(model):
        kernels = choose_kernels(model.device)
        if tp is None:
            ops = LayerOps(kernels)
        else:
            ops = tp.layer_ops(kernels, width=model.config.hidden_size, dtype=model.dtype)
        backbone = FusedDecoder(model, ops)
    else:
        alias = alias_module(model)
        follow_inputs(alias)
        if records_routes:
            from hone.models.routes import follow_routes

            follow_routes(alias)
        if tp is not None:
            tp.divide_layers(alias)
        if compile and model.device.type == "cuda":
            for layer in cast(nn.ModuleList, alias.base_model.layers):
                layer.compile(dynamic=True)
        backbone = partial(hidden_states, alias)
    head = head_weight(model)
    is_shared = len(head) < model.config.vocab_size
    shared_by = tp if is_shared else None
    return GenerationModel(
        backbone,
        head,
        logit_softcap(model),
        shared_by,
        exact=exact,
        parameters=model.parameters(),
    )
