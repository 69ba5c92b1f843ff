"""Decoder layers that keep less for backward and compute the rest again.

`full` keeps a layer's input. `selective` also keeps the results of attention and, in layers that
are not compiled, of matrix products: what costs least to hold for the time it takes to compute. A
compiled layer consists of pieces between its attention calls, which are computed again as wholes.
`uniform:N` keeps the input of every N layers. Backward sees the bits that forward saw.

The layers of a span run when its last is called: those before give back what they are given.

The method is that of Chen et al., arXiv:1604.06174; selective policies are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import GradientCheckpointingLayer

from hone.config.trainer import RecomputeMode, SFTTrainerConfig
from hone.trainer.offload import ActivationOffload

__all__ = ["apply_recompute", "can_recompute", "recompute_fully"]

C = TypeVar("C", bound=SFTTrainerConfig)


for _module in ("torch.nn.attention.varlen", "hone.attention.flash4"):
    import_module(_module)  # registers an operator named here
_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.torch_attn._varlen_attn.default,
        torch.ops.hone.flash4.default,
        torch.ops.aten._flash_attention_forward.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operators whose results `selective` keeps."""


def apply_recompute(layers: nn.ModuleList, cfg: SFTTrainerConfig) -> None:
    """Let the layers that `cfg` names compute again what they do not keep.

    With `offload_activations`, what they keep waits in host memory (`ActivationOffload`). Call
    before `layer.compile` and `fully_shard`. Only the layers themselves are put in training mode,
    which is when they recompute; what they are made of stays in evaluation mode, so no dropout is
    switched on. Raises ValueError for layers that transformers cannot checkpoint.
    """
    if cfg.recompute == "off":
        return
    if not can_recompute(layers):
        raise ValueError(
            f"{type(layers[0]).__name__} is no GradientCheckpointingLayer of transformers; set "
            "trainer.recompute to off for this model"
        )
    offload = ActivationOffload() if cfg.offload_activations else None
    run = _layer_runner(cfg.recompute_mode, offload)
    for span in cfg.recomputed_spans(len(layers)):
        callers = [run] if len(span) == 1 else _together(len(span), run)
        for number, caller in zip(span, callers, strict=True):
            recomputed: Any = layers[number]
            recomputed.gradient_checkpointing = True
            recomputed._gradient_checkpointing_func = caller
            recomputed.training = True


def can_recompute(layers: nn.ModuleList) -> bool:
    """Whether transformers can checkpoint these layers."""
    return all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)


def recompute_fully(cfg: C) -> C:
    """The configuration in which all layers are computed again."""
    if cfg.recomputed_together > 1:
        return cfg
    return cfg.model_copy(update={"recompute": "full", "recompute_every_n_layers": 1})


def _together(num_layers: int, run: Callable[..., Any]) -> list[Callable[..., Any]]:
    """What calls each of so many neighbouring layers, which run as one when the last is called."""
    calls: list[Callable[..., Tensor]] = []

    def call(position: int, layer_call: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        del calls[position:]  # of a pass that has failed midway
        calls.append(layer_call)
        if position < num_layers - 1:
            return hidden
        span = tuple(calls)
        calls.clear()
        return run(partial(_one_after_the_other, span), hidden)

    return [partial(call, position) for position in range(num_layers)]


def _one_after_the_other(calls: Sequence[Callable[..., Tensor]], hidden: Tensor) -> Tensor:
    for call in calls:
        hidden = call(hidden)
    return hidden


def _layer_runner(
    mode: RecomputeMode, offload: ActivationOffload | None
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """What calls a layer. A function, since modules that are copied share it."""
    context_fn = (
        partial(create_selective_checkpoint_contexts, _policy)
        if mode == "selective"
        else noop_context_fn
    )

    def run(layer_call: Callable[..., Any], *inputs: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return layer_call(*inputs)
        # The inputs are the only tensors that these hooks see: those inside have checkpoint's own.
        hooks: AbstractContextManager[Any] = nullcontext() if offload is None else offload.hooks()
        with hooks:
            return checkpoint(
                layer_call,
                *inputs,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=context_fn,
            )

    return run


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operator in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
