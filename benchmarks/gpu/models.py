"""Models with random weights in the shapes of public ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hone.attention import ATTENTION_NAME
from hone.attention.recurrent.launches import use_found_launches
from hone.models.contents import follow_inputs
from hone.models.decoder import decoder_layers
from hone.models.tiny import SHAPES
from hone.trainer.policy import Policy
from hone.trainer.recompute import apply_recompute
from hone.trainer.settings import SFTTrainerConfig

FIELDS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
"""What transformers calls some keys of `SHAPES`."""


def build(
    shape: str,
    *,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    **fields: Any,
) -> PreTrainedModel:
    """One of `SHAPES` in `dtype`, the same weights each time; `fields` are those of its config."""
    known = {FIELDS.get(key, key): value for key, value in SHAPES[shape].items()}
    if num_layers is not None:
        known["num_hidden_layers"] = num_layers
    return random_model(**(known | fields), dtype=dtype, device=device)


def random_model(
    family: str, *, dtype: torch.dtype, device: torch.device | str = "cuda", **fields: Any
) -> PreTrainedModel:
    """A model of a family with these fields of its config, drawn in bfloat16 whatever `dtype` is,
    so that models that differ in `dtype` alone have the same weights."""
    use_found_launches(torch.device(device))
    config = AutoConfig.for_model(family, **fields)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    # Not `to(bfloat16)`, which would round the rotary frequencies.
    return (model if dtype == torch.bfloat16 else model.to(dtype)).eval()


def compiled_policy(
    model: PreTrainedModel,
    *,
    recompute: Any = "off",
    recompute_every_n_layers: int = 1,
    offload_activations: bool = False,
    **offloads: bool,
) -> Policy:
    """As a trainer of one process has it."""
    follow_inputs(model)
    layers = decoder_layers(model)
    cfg = SFTTrainerConfig(
        recompute=recompute,
        recompute_every_n_layers=recompute_every_n_layers,
        offload_activations=offload_activations,
    )
    apply_recompute(layers, cfg)
    policy = Policy(model, **offloads)
    for layer in layers:
        layer.compile(dynamic=True)
    return policy
