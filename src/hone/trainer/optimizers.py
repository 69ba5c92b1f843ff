"""AdamW, and Muon for hidden matrices, over named float32 parameters.

Both come from torch. What this file adds: which parameter gets which rule, one learning-rate
factor for all, and a state of named tensors that any checkpoint format can hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from hone.config.trainer import OptimizerConfig

__all__ = ["ParameterOptimizer"]


class ParameterOptimizer:
    """One optimizer over named parameters.

    With `name="muon"`, matrices outside `embeddings` are updated by Muon (Keller Jordan,
    https://kellerjordan.github.io/posts/muon/): Nesterov momentum, five Newton-Schulz steps in
    bfloat16, and his scale `sqrt(max(1, rows / columns))`, for which rates near 0.02 are usual.
    All else gets AdamW (arXiv:1711.05101). Vectors (norms, biases) are never decayed.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], cfg: OptimizerConfig, embeddings: set[str]
    ) -> None:
        """`embeddings` names the input embedding and the output head."""
        self._parameters = dict(parameters)
        muon: list[nn.Parameter] = []
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            if parameter.ndim < 2:
                vectors.append(parameter)
            elif cfg.name == "muon" and parameter.ndim == 2 and name not in embeddings:
                muon.append(parameter)
            else:
                matrices.append(parameter)
        adamw = AdamW(
            [
                {"params": matrices, "weight_decay": cfg.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=cfg.lr,
            betas=cfg.betas,
            eps=cfg.eps,
            fused=True,
        )
        self._optimizers: list[Optimizer] = [adamw]
        self._peak_lrs = [cfg.lr]
        if muon:
            self._optimizers.append(
                Muon(
                    muon,
                    lr=cfg.muon_lr,
                    weight_decay=cfg.weight_decay,
                    momentum=cfg.muon_momentum,
                    adjust_lr_fn="original",
                )
            )
            self._peak_lrs.append(cfg.muon_lr)
        names = {parameter: name for name, parameter in parameters.items()}
        self._owners = {
            names[parameter]: optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def step(self, lr_scale: float) -> None:
        """Apply the gradients at `lr_scale` times the peak rates, and drop them."""
        for optimizer, peak in zip(self._optimizers, self._peak_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * lr_scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """`<moment>/<parameter>` to tensor; parameters that never had a gradient have none."""
        return {
            f"{moment}/{name}": value
            for name, parameter in self._parameters.items()
            for moment, value in self._owners[name].state.get(parameter, {}).items()
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a saved state. Raises ValueError for unknown parameters and wrong shapes."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for key, value in tensors.items():
            moment, _, name = key.partition("/")
            parameter = self._parameters.get(name)
            if parameter is None or value.shape not in ((), parameter.shape):
                raise ValueError(
                    f"optimizer state {key!r} of shape {tuple(value.shape)} fits no parameter of "
                    "this model; resume with the model that wrote the checkpoint"
                )
            self._owners[name].state[parameter][moment] = value.to(parameter.device, copy=True)
