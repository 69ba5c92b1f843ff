"""Loading the policy: pretrained, or with random weights in a given shape."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hone.attention import ATTENTION_NAME
from hone.config.errors import UserError
from hone.config.model import ModelConfig
from hone.config.paths import must_be_local
from hone.models.exact import exact_supported
from hone.models.support import check_supported
from hone.models.tensor_parallel import (
    TensorParallel,
    check_divides,
    fit_to_rank,
    shard_model,
    shard_of,
)

__all__ = ["check_exact", "compute_dtype", "load_config", "load_model"]

logger = logging.getLogger(__name__)


def compute_dtype(cfg: ModelConfig, device: torch.device | str) -> torch.dtype:
    """Format of forward and backward: as configured; `auto` is bfloat16 on CUDA, else float32."""
    if cfg.dtype == "auto":
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[cfg.dtype]


def load_model(
    cfg: ModelConfig,
    *,
    device: torch.device | str,
    seed: int,
    tp: TensorParallel | None = None,
    on_host: bool = False,
) -> PreTrainedModel:
    """The model of `cfg` on `device` in its compute dtype, in eval mode, with our attention.

    `seed` draws the weights under `init: random`. With `tp`, only this rank's parts of them reach
    the device, as `shard_model` makes them; together they are the weights of one process. With
    `on_host` the same model stays in host memory, for whoever takes it to the device in parts.
    Raises FileNotFoundError where the folder or the weights are missing, UserError where the model
    is not supported, cannot be divided, or its weights are incomplete.
    """
    config = load_config(cfg)
    device = torch.device(device)
    tp = tp or TensorParallel(rank=0, size=1, device=device)
    check_divides(config, tp.size)
    options: dict[str, Any] = {
        "dtype": compute_dtype(cfg, device),
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": cfg.trust_remote_code,
    }
    if cfg.init == "random":
        model = _random(config, device, seed, options, tp, on_host=on_host)
    else:
        model = shard_model(_pretrained(cfg.path, config, options), tp)
    # The override in transformers has no usable type.
    nn.Module.to(model, "cpu" if on_host else device)
    return model.eval()


def load_config(cfg: ModelConfig) -> PreTrainedConfig:
    """The checked `config.json` of `cfg.path`; raises as `load_model` does."""
    _check_folder(cfg.path)
    if not Path(cfg.path).exists():
        logger.info("%s comes from the Hugging Face hub; a first download may take long", cfg.path)
    try:
        config = AutoConfig.from_pretrained(cfg.path, trust_remote_code=cfg.trust_remote_code)
    except OSError as error:
        raise FileNotFoundError(
            f"model.path={cfg.path!r} holds no usable config.json: {error}"
        ) from error
    except ValueError as error:
        raise UserError(f"model.path={cfg.path!r} is of no known family: {error}") from error
    check_supported(config)
    return config


def check_exact(cfg: ModelConfig, device: torch.device) -> None:
    """Raise UserError where `cfg.exact` is on and model or device cannot serve it.

    From `config.json` alone, before any weight is loaded.
    """
    if not cfg.exact:
        return
    config = load_config(cfg)
    config.dtype = compute_dtype(cfg, device)
    if reason := exact_supported(config, device):
        raise UserError(f"model.exact: {reason}; or set model.exact=false")


def _check_folder(path: str) -> None:
    """A path that exists must be a folder; one that does not must at least look like a hub name."""
    found = Path(path)
    if found.exists():
        if not found.is_dir():
            raise UserError(f"model.path={path!r} is a file; give the folder with config.json")
        if not (found / "config.json").is_file():
            raise FileNotFoundError(f"model.path={path!r} holds no config.json")
    elif must_be_local(path):
        raise FileNotFoundError(f"model.path={path!r}: no such folder")


def _random(
    config: PreTrainedConfig,
    device: torch.device,
    seed: int,
    options: dict[str, Any],
    tp: TensorParallel,
    *,
    on_host: bool,
) -> PreTrainedModel:
    """Weights drawn directly in dtype on the device, leaving the global random state as it was.

    Every rank draws all weights, one module's after the other's, and keeps its parts of them, or
    moves them to the host.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    drawn: dict[nn.Parameter, nn.Parameter] = {}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for prefix, module in model.named_modules():
            shapes = dict(module.named_parameters(recurse=False))
            if any(shape not in drawn for shape in shapes.values()) or not shapes:
                module.to_empty(device=device, recurse=False)
                model._init_weights(module)  # pyright: ignore[reportPrivateUsage] families override
            for name, shape in shapes.items():
                if shape not in drawn:  # else tied to one that is
                    whole = module.get_parameter(name)
                    whole.data = whole.data.cpu() if on_host else whole.data
                    part = shard_of(f"{prefix}.{name}", whole, tp)
                    drawn[shape] = whole if part is whole else nn.Parameter(part.clone(), False)
                setattr(module, name, drawn[shape])
    if tp.size > 1:
        model.requires_grad_(False)
        fit_to_rank(model, tp)
    return model


def _pretrained(path: str, config: PreTrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, output_loading_info=True, **options
        )
    except OSError as error:
        raise FileNotFoundError(
            f"model.path={path!r} holds no loadable weights: {error} "
            "For untrained weights in this shape set model.init=random"
        ) from error
    model, info = loaded
    if absent := sorted(info["missing_keys"]):
        raise UserError(
            f"model.path={path!r} lacks {len(absent)} weights, among them {absent[:3]}: "
            "the checkpoint does not belong to its config.json"
        )
    return model
