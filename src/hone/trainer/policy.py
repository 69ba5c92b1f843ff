"""The model being trained and the float32 copies that the optimizer moves.

The module computes in its own format. Where that is narrower than float32, each parameter has a
float32 *master*: gradients are added up in float32 as each micro-batch leaves them, the optimizer
moves the master, and the rounded master is written back in place. A bfloat16 weight alone would
swallow updates below 1/256 of itself. Where the module computes in float32, its parameters are the
masters. A tensor shared by two layers has one master.

Masters may lie in pinned host memory for good (`offload_optimizer`); then gradients lie beside them
in `host_masters` and the optimizer's step writes the module. And all but the module may go there
while an engine generates (`sleep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.checkpoint.sharded import StoredTensor
from hone.config.errors import UserError
from hone.models.decoder import decoder_layers, head_weight
from hone.observe.metrics import Mean, Metrics
from hone.trainer.offload import HostMasters, Parking
from hone.trainer.recompute import RecomputeMode, apply_recompute

__all__ = ["NonFiniteError", "Policy", "require_layout"]

_MAX_SAMPLED_ELEMENTS = 1 << 22
_MAX_SAMPLED_ON_HOST = 1 << 18
"""Elements that lie far apart cost a host a cache miss each."""


class NonFiniteError(ValueError):
    """A loss, gradient or weight is infinite or not a number. Training must not go on."""


class Policy:
    """A causal language model with masters, gradient norm and update statistics."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        recompute: RecomputeMode = "off",
        recompute_every_n_layers: int = 1,
        offload_activations: bool = False,
        offload_optimizer: bool = False,
        compile: bool = False,
    ) -> None:
        """The first three as in `apply_recompute`. `offload_optimizer` keeps the masters of a
        module that is narrower than float32 in pinned host memory; raises UserError where there is
        too little. `compile` compiles each layer."""
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        # A shared tensor once; those that are frozen have no masters.
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self.host_masters: HostMasters | None = None
        """For `ParameterOptimizer`, where the masters lie on the host."""
        if self.dtype in (torch.float32, torch.float64):
            self._masters = self.parameters
        elif offload_optimizer:
            self.host_masters = HostMasters(self.parameters)
            self._masters = self.host_masters.masters
        else:
            self._masters = {
                name: nn.Parameter(parameter.detach().float())
                for name, parameter in self.parameters.items()
            }
        if self._masters is not self.parameters:
            for name, parameter in self.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._gradient_mover(name))
        layers = decoder_layers(model)
        apply_recompute(
            layers, mode=recompute, every=recompute_every_n_layers, offload=offload_activations
        )
        if compile:
            for layer in layers:
                layer.compile(dynamic=True)  # no two micro-batches have the same shape
        self._parking = Parking()

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves, by the names of the module's parameters."""
        self._require_awake()
        return self._masters

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The masters' gradients, float32, on the module's device."""
        if self.host_masters is not None:
            return self.host_masters.gradients
        return {name: p.grad for name, p in self.masters.items() if p.grad is not None}

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """The float32 gradient of one of the module's parameters, to be added to in place; zeros
        where nothing has been added yet."""
        name = self._names[cast(nn.Parameter, parameter)]
        if self.host_masters is not None:
            gradients = self.host_masters.gradients
            if name not in gradients:
                gradients[name] = torch.zeros_like(parameter, dtype=torch.float32)
            return gradients[name]
        master = self._masters[name]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    @property
    def embedding_names(self) -> set[str]:
        """Names of the input embedding and the output head."""
        ends = (self.model.get_input_embeddings().weight, head_weight(self.model))
        return {name for name, p in self.parameters.items() if any(p is end for end in ends)}

    def gradient_norm(self) -> Tensor:
        """Global 2-norm of the masters' gradients; inf or nan where one is not finite."""
        return nn.utils.get_total_norm(list(self.gradients.values()))

    def clip_gradient(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients whose global norm is `norm` down to `max_norm`; 0 leaves them."""
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in self.gradients.values():
                gradient.mul_(factor)

    def drop_gradient(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.masters.values(), *self.parameters.values()):
            parameter.grad = None
        if self.host_masters is not None:
            self.host_masters.gradients.clear()

    def non_finite_gradient(self) -> str | None:
        """Name of the first parameter whose gradient is not finite."""
        for name, gradient in self.gradients.items():
            if not bool(gradient.isfinite().all()):
                return name
        return None

    @torch.no_grad()
    def apply(self, update: Callable[[], None]) -> Metrics:
        """Let `update` move the masters, write them into the module, and measure the move.

        Where the masters lie on the host, `update` writes the module, as the optimizer does.
        `train/update_to_weight_ratio` is |change| / |weights| of the masters and
        `train/share_unchanged` the share of the module's elements that kept their value. Both are
        exact up to 4 million parameters, 262,144 on the host, and beyond that taken from every k-th
        element.
        Raises NonFiniteError where a moved weight is not finite.
        """
        before = self._sampled_masters()
        update()
        after = self._sampled_masters()
        if self.masters is not self.parameters and self.host_masters is None:
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

    def load_masters(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        """Take over saved masters. Raises as `require_layout`, with nothing changed."""
        require_layout(self.masters, tensors)
        with torch.no_grad():
            for name, master in self.masters.items():
                saved = tensors[name]
                master.copy_(saved.full() if isinstance(saved, StoredTensor) else saved)
                self.parameters[name].copy_(master)

    def sleep(self, moments: Iterable[Tensor] = ()) -> None:
        """Move masters, gradients and an optimizer's `moments` from the device to pinned host
        memory, and their device memory to the driver.

        The module stays, since an engine computes with its weights. Pass
        `ParameterOptimizer.device_tensors()`. Raises RuntimeError while asleep, and UserError, with
        nothing moved, where the host has too little memory.
        """
        self._require_awake()
        tensors = [*self.gradients.values(), *moments]
        if self._masters is not self.parameters and self.host_masters is None:
            tensors += [master.detach() for master in self._masters.values()]
        self._parking.park(tensors)

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises torch.OutOfMemoryError, still asleep, where
        the device has too little memory free."""
        self._parking.restore()

    def _require_awake(self) -> None:
        if self._parking.is_parked:
            raise RuntimeError("the policy sleeps: its masters are away until wake()")

    def _gradient_mover(self, name: str) -> Callable[[Tensor], None]:
        """Hook that adds a parameter's fresh gradient to its master's and frees it."""
        host, master = self.host_masters, self._masters[name]

        def move(parameter: Tensor) -> None:
            if parameter.grad is None:
                return  # a function that adds to the master itself gives autograd nothing
            if host is not None:
                host.add_gradient(name, parameter.grad)
            elif master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return move

    def _sampled_masters(self) -> Tensor:
        masters = self.masters.values()
        limit = _MAX_SAMPLED_ELEMENTS if self.host_masters is None else _MAX_SAMPLED_ON_HOST
        stride = ceil(sum(p.numel() for p in masters) / limit)
        return torch.cat([p.detach().flatten()[::stride] for p in masters])


def require_layout(
    masters: Mapping[str, Tensor], saved: Mapping[str, Tensor | StoredTensor]
) -> None:
    """Raise unless saved tensors have the masters' names and (whole) shapes: UserError where
    adapters of another rank are the reason, ValueError otherwise."""
    expected = {name: tuple(p.shape) for name, p in masters.items()}
    got = {name: tuple(t.shape) for name, t in saved.items()}
    if got == expected:
        return
    saved_rank, rank = _adapter_rank(got), _adapter_rank(expected)
    if saved_rank != rank:
        raise UserError(
            f"the checkpoint was trained with model.lora.rank {saved_rank}, and model.lora.rank is "
            f"{rank} now. Set it to {saved_rank} to go on, or choose another run.dir to start "
            "afresh."
        )
    wrong = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
    raise ValueError(
        f"the checkpoint's weights are not this model's: {len(wrong)} tensors differ in "
        f"name or shape, first {wrong[0]!r} (checkpoint {got.get(wrong[0])}, model "
        f"{expected.get(wrong[0])})"
    )


def _adapter_rank(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rank of the adapters among tensors of these shapes; 0 where there are none."""
    return next((shape[0] for name, shape in shapes.items() if name.endswith("lora_A")), 0)
