"""The model being trained and the float32 copies that the optimizer moves.

The module computes in its own format. Where that is narrower than float32, each parameter has a
float32 *master*: gradients are added up in float32 as each micro-batch leaves them, the optimizer
moves the master, and the rounded master is written back in place. A bfloat16 weight alone would
swallow updates below 1/256 of itself. Where the module computes in float32, its parameters are the
masters. A tensor shared by two layers has one master.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.models.decoder import head_weight
from hone.observe.metrics import Mean, Metrics

__all__ = ["NonFiniteError", "Policy"]

_MAX_SAMPLED_ELEMENTS = 1 << 22


class NonFiniteError(ValueError):
    """A loss, gradient or weight is infinite or not a number. Training must not go on."""


class Policy:
    """A causal language model with masters, gradient norm and update statistics."""

    def __init__(
        self, model: PreTrainedModel, *, recompute: bool = False, compile: bool = False
    ) -> None:
        """`recompute` keeps only each decoder layer's input for backward; `compile` compiles each
        layer."""
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self.parameters = dict(model.named_parameters())  # a shared tensor once
        if self.dtype in (torch.float32, torch.float64):
            self.masters = self.parameters
        else:
            self.masters = {
                name: nn.Parameter(parameter.detach().float())
                for name, parameter in self.parameters.items()
            }
            for name, parameter in self.parameters.items():
                parameter.register_post_accumulate_grad_hook(_move_gradient(self.masters[name]))
        if recompute:
            _recompute_layers(model)
        if compile:
            for layer in _decoder_layers(model):
                layer.compile(dynamic=True)  # no two micro-batches have the same shape

    @property
    def embedding_names(self) -> set[str]:
        """Names of the input embedding and the output head."""
        ends = (self.model.get_input_embeddings().weight, head_weight(self.model))
        return {name for name, p in self.parameters.items() if any(p is end for end in ends)}

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the masters' gradients; inf or nan where one is not finite."""
        return nn.utils.get_total_norm(
            [p.grad for p in self.masters.values() if p.grad is not None]
        )

    def clip_gradient(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients whose global norm is `norm` down to `max_norm`; 0 leaves them."""
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(self.masters.values(), max_norm, norm)

    def drop_gradient(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.masters.values(), *self.parameters.values()):
            parameter.grad = None

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient is not finite."""
        for name, parameter in self.masters.items():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return name
        return None

    @torch.no_grad()
    def apply(self, update: Callable[[], None]) -> Metrics:
        """Let `update` move the masters, write them into the module, and measure the move.

        `train/update_to_weight_ratio` is |change| / |weights| of the masters and
        `train/share_unchanged` the share of the module's elements that kept their value. Both are
        exact up to 4 million parameters and beyond that taken from every k-th element.
        Raises NonFiniteError where a moved weight is not finite.
        """
        before = self._sampled_masters()
        update()
        after = self._sampled_masters()
        if self.masters is not self.parameters:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])
        ratio = (after - before).norm() / before.norm().clamp(min=1e-30)
        if not bool(ratio.isfinite()):
            raise NonFiniteError(
                "the optimizer produced weights that are not finite: lower trainer.optimizer.lr "
                "and go on from the last checkpoint"
            )
        unchanged = before.to(self.dtype) == after.to(self.dtype)
        return {
            "train/update_to_weight_ratio": Mean.of(ratio[None]),
            "train/share_unchanged": Mean.of(unchanged),
        }

    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over saved masters. Raises ValueError unless names and shapes are the model's."""
        expected = {name: tuple(p.shape) for name, p in self.masters.items()}
        got = {name: tuple(t.shape) for name, t in tensors.items()}
        if got != expected:
            wrong = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
            raise ValueError(
                f"the checkpoint's weights are not this model's: {len(wrong)} tensors differ in "
                f"name or shape, first {wrong[0]!r} (checkpoint {got.get(wrong[0])}, model "
                f"{expected.get(wrong[0])})"
            )
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[name])
                self.parameters[name].copy_(master)

    def _sampled_masters(self) -> Tensor:
        masters = self.masters.values()
        stride = ceil(sum(p.numel() for p in masters) / _MAX_SAMPLED_ELEMENTS)
        return torch.cat([p.detach().flatten()[::stride] for p in masters])


def _move_gradient(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Hook that adds a parameter's fresh gradient to its master's and frees it."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move


def _recompute_layers(model: PreTrainedModel) -> None:
    """Only the layers themselves are put in training mode, which is when they recompute; what they
    are made of stays in evaluation mode, so no dropout is switched on."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in _decoder_layers(model):
        layer.training = True


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    return cast(nn.ModuleList, model.base_model.layers)
