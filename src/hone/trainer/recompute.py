"""Activation recomputation: decoder layers keep less for backward and compute the rest again.

`full` keeps a layer's input. `selective` also keeps the results of attention and, in layers that
are not compiled, of matrix products: the tensors that take least memory for their time of
computation. Kernels of gated linear attention run again. A compiled layer consists of graphs
between its attention calls, and each graph is recomputed as a whole. `uniform:N` keeps the input of
every N layers. Backward sees the bits that forward saw.

The layers of a span run when its last one is called; calls of the earlier ones return their input.

The method is that of Chen et al., arXiv:1604.06174; selective policies are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import GradientCheckpointingLayer

from hone.trainer.settings import SFTTrainerConfig

if TYPE_CHECKING:
    from hone.trainer.offload import ActivationOffload

__all__ = ["apply_recompute", "can_recompute"]

for _module in ("torch.nn.attention.varlen", "hone.attention.flash4", "hone.models.products"):
    import_module(_module)  # registers an operator named here
_ATTENTION = (
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.hone.flash4.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.hone.nf4_product.default,
)


def apply_recompute(
    layers: nn.ModuleList, cfg: SFTTrainerConfig, *, are_compiled: bool = False
) -> None:
    """Switch on recomputation in the layers that `cfg` names, and that `are_compiled` later.

    With `offload_activations`, the kept tensors wait in host memory (`ActivationOffload`). Call
    before `layer.compile` and `fully_shard`. Only the layers themselves are put in training mode,
    in which they recompute; their submodules stay in evaluation mode, so no dropout is switched on.
    Raises ValueError for layers that transformers cannot checkpoint, and for `auto`, in whose place
    the plan of a run has a value.
    """
    if cfg.recompute == "off":
        return
    if cfg.recompute == "auto":
        raise ValueError("trainer.recompute auto is settled by the plan of a run; name a value")
    if not can_recompute(layers):
        raise ValueError(
            f"{type(layers[0]).__name__} is no GradientCheckpointingLayer of transformers; set "
            "trainer.recompute to off for this model"
        )
    offload = None
    if cfg.offload_activations:
        from hone.trainer.offload import ActivationOffload

        offload = ActivationOffload()
    context_fn = noop_context_fn
    if cfg.recompute_mode == "selective":
        # Divided experts are in no graph of a compiled layer, which recomputes them all the same.
        kept = [*_ATTENTION, *(() if are_compiled else _PRODUCTS)]
        context_fn = partial(create_selective_checkpoint_contexts, kept)
    run = _layer_runner(context_fn, offload)
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


def _together(num_layers: int, run: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Callables for `num_layers` neighbouring layers, which run as one when the last is called."""
    calls: list[Callable[..., Tensor]] = []

    def call(position: int, layer_call: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        del calls[position:]  # left by a pass that failed midway
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
    context_fn: Callable[[], Any], offload: ActivationOffload | None
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The callable that runs a layer. It is a function, since copies of a module share it."""

    def run(layer_call: Callable[..., Any], *inputs: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return layer_call(*inputs)
        # These hooks see only the inputs: tensors inside have the hooks of torch's checkpoint.
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
