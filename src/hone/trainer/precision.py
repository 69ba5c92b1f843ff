"""Number formats of the trained model's matrix products.

`tf32` is torch's own setting for float32 products: 10 bits of mantissa in, float32 sums. It holds
for the whole process, so an engine in the same process multiplies in the same way as its trainer.

`fp8` has the projections of decoder layers multiply in float8, by torchao: the output, the gradient
of the input and that of the weight (Micikevicius et al., arXiv:2209.05433). Operands are rounded
to e4m3 just before each product, with one scale, a power of two, for each row that is multiplied,
from its largest magnitude at that moment. Sums, what lies between products and all parameters stay
as they are. Scales of rows rather than of whole tensors, so that the log-probabilities of a token
do not depend on what it is packed with: two passes over a sample, whose ratio is trained on, then
round alike. Only sums over tokens, in the weights' gradients, are rounded by what a micro-batch
holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hone.errors import UserError
from hone.extras import import_extra
from hone.families.model_facts import FP8_ALIGNMENT
from hone.models.decoder import decoder_layers
from hone.trainer.settings import MatmulPrecision

__all__ = [
    "apply_matmul_precision",
    "multiply_in_float8",
    "require_matmul_precision",
]

_RECIPE = "rowwise"
"""torchao's recipe: one scale per row, in all three products."""

"""Products in float8 have widths that are multiples of this. The token dimension, over which weight
gradients are summed, is padded with zeros."""

_CAPABILITY = {"tf32": (8, 0), "fp8": (8, 9)}
_DTYPE = {"tf32": torch.float32, "fp8": torch.bfloat16}


def require_matmul_precision(
    precision: MatmulPrecision, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise UserError with the reason where `precision` does not serve models of `dtype` on
    `device`. The model itself is not needed."""
    if precision == "default":
        return
    needed, served = _CAPABILITY[precision], _DTYPE[precision]
    if device.type != "cuda":
        reason = f"it needs an NVIDIA GPU, and this run is on {device.type}"
    elif (capability := torch.cuda.get_device_capability(device)) < needed:
        reason = (
            f"it needs a GPU of compute capability {needed[0]}.{needed[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    elif dtype != served:
        own, wanted = (str(d).removeprefix("torch.") for d in (dtype, served))
        reason = f"it is for models that compute in {wanted}, and model.dtype is {own} here"
    else:
        reason = None
    if reason is not None:
        raise UserError(
            f"trainer.matmul_precision is {precision}, but {reason}. Set it to default."
        )
    if precision == "fp8":
        _torchao_float8()


def apply_matmul_precision(
    model: PreTrainedModel, precision: MatmulPrecision, device: torch.device
) -> None:
    """Set the format of the matrix products of `model`, which computes on `device`, in place.

    Call before its layers are compiled or sharded. Names, formats and tensors of its parameters
    stay. Raises UserError, with nothing changed, where `precision` is not served.
    """
    if precision == "default":
        return
    require_matmul_precision(precision, model.dtype, device)
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    else:
        multiply_in_float8(model)


def multiply_in_float8(model: PreTrainedModel) -> None:
    """Replace the projections of the decoder layers by float8 ones, in place.

    Projections whose widths are not multiples of 16 stay, and those that give the decays and step
    sizes of gated linear attention: one number a head and token, whose errors a state adds up.
    Rules of `hone check` refuse models without a fitting projection, and adapters.
    """
    layers = decoder_layers(model)
    float8 = _torchao_float8()
    config = float8.Float8LinearConfig.from_recipe_name(_RECIPE)
    float8.convert_to_float8_training(
        layers,
        module_filter_fn=_fits,
        config=replace(config, pad_inner_dim=True),
    )
    layers.train(layers.training)  # new modules start in training mode


def _fits(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear) or name.endswith(("in_proj_a", "in_proj_b")):
        return False
    return module.in_features % FP8_ALIGNMENT == module.out_features % FP8_ALIGNMENT == 0


def _torchao_float8() -> Any:
    return import_extra(
        "torchao",
        module="torchao.float8",
        needed_by="trainer.matmul_precision=fp8",
    )
