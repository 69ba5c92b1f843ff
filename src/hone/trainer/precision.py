"""The format in which the trained model's matrix products multiply.

`tf32` is torch's own setting for float32 products: 10 bits of mantissa in, float32 sums. It belongs
to the process, so that the engine of a run, which lives in it too, multiplies as its trainer does.

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

from hone.config.trainer import MatmulPrecision
from hone.errors import UserError
from hone.extras import import_extra
from hone.families.model_facts import FP8_ALIGNMENT
from hone.models.decoder import decoder_layers

__all__ = [
    "accumulation_dtype",
    "apply_matmul_precision",
    "multiply_in_float8",
    "require_matmul_precision",
]

_RECIPE = "rowwise"
"""Of torchao: scales of rows, in all three products."""

"""Products in float8 have widths that are multiples of this. Tokens, over which the weights'
gradients are summed, are filled up with zeros."""

_CAPABILITY = {"tf32": (8, 0), "fp8": (8, 9)}
_DTYPE = {"tf32": torch.float32, "fp8": torch.bfloat16}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format of sums over values of `dtype`: float32, or wider where `dtype` is."""
    return torch.promote_types(dtype, torch.float32)


def require_matmul_precision(
    precision: MatmulPrecision, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise UserError, with the reason, where products of a model of `dtype` on `device` cannot
    multiply so; nothing of the model is needed."""
    if precision == "default":
        return
    needed, served = _CAPABILITY[precision], _DTYPE[precision]
    if device.type != "cuda":
        reason = f"it needs an NVIDIA GPU, and this run is on {device.type}"
    elif (found := torch.cuda.get_device_capability(device)) < needed:
        reason = (
            f"it needs a GPU of compute capability {needed[0]}.{needed[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
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
    """Let the products of `model`, which computes on `device`, multiply so, in place.

    Call before its layers are compiled or sharded. Names, formats and tensors of its parameters
    stay. Raises UserError, with nothing changed, where that is not served.
    """
    if precision == "default":
        return
    require_matmul_precision(precision, model.dtype, device)
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    else:
        multiply_in_float8(model)


def multiply_in_float8(model: PreTrainedModel) -> None:
    """Replace the projections of the decoder layers by those that multiply in float8, in place.

    Those of other widths than multiples of 16 stay. Rules of `hone check` say where none fits, and
    that adapters are not multiplied so.
    """
    layers = decoder_layers(model)
    float8 = _torchao_float8()
    config = float8.Float8LinearConfig.from_recipe_name(_RECIPE)
    float8.convert_to_float8_training(
        layers,
        module_filter_fn=lambda module, _: _fits(module),
        config=replace(config, pad_inner_dim=True),
    )
    layers.train(layers.training)  # what is new is in training mode


def _fits(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not (
        module.in_features % FP8_ALIGNMENT or module.out_features % FP8_ALIGNMENT
    )


def _torchao_float8() -> Any:
    return import_extra(
        "torchao",
        module="torchao.float8",
        needed_by="trainer.matmul_precision=fp8",
    )
