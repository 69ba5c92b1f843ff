"""Which model is trained, and in which number formats."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from hone.config.base import Section

__all__ = ["Dtype", "LoraConfig", "ModelConfig", "TrainedModelConfig", "compute_dtype"]

Dtype = Literal["float32", "bfloat16"]


class LoraConfig(Section):
    """Low-rank adapters: the base weights are frozen, small matrices beside them are trained."""

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights."""

    alpha: float = Field(default=32.0, gt=0)
    """The adapters' output is scaled by `alpha / rank`."""

    target_modules: tuple[str, ...] = ()
    """Projections that get adapters, by name: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`,
    `up_proj`, `down_proj`; none named: all of a layer's. Experts have some, a pair of matrices for
    each, only where they are named: `experts.gate_up_proj`, `experts.down_proj`."""

    load_in_4bit: bool = False
    """Keep the frozen projections in 4-bit NormalFloat: an eighth of the memory of float32, for
    weights that are rounded for good, in what is sampled and exported too."""


class ModelConfig(Section):
    """The policy: a Hugging Face causal language model."""

    path: str
    """Folder in the Hugging Face layout, or a hub name such as `Qwen/Qwen3-0.6B`."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; unset: the model's own."""

    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's chat template."""

    init: Literal["pretrained", "random"] = "pretrained"
    """`random` reads only the shape from `config.json` and draws the weights from `run.seed`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Format of forward and backward; `auto` is bfloat16 on CUDA and float32 on a CPU. Master
    weights and optimizer states are float32 in any case."""

    exact: bool = False
    """Log-probabilities of sampled tokens are the same bits in engine and trainer, whatever the
    batch, packing, or chunks of a prompt: samples are exactly on-policy, and the launch
    gate demands a difference of 0. Needs CUDA, bfloat16 and a family with fused layers; without
    tensor parallelism and FP8 keys and values. On an H200 a decode step takes a tenth longer (of
    small models and batches up to a third), scoring too, training as long as before;
    `trainer.compile` then compiles the head alone."""

    image_cache_gib: float = Field(1.0, ge=0)
    """Device memory, in GiB, for features of images that are kept between passes; each process that
    computes with the model has as much. What has no room is encoded again by the model's tower."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model or its tokenizer."""


class TrainedModelConfig(ModelConfig):
    """The policy, and which of its weights are trained."""

    lora: LoraConfig = LoraConfig()
    """Train adapters instead of all weights."""


def compute_dtype(dtype: Literal["auto", "float32", "bfloat16"], kind: str) -> Dtype:
    """The format that `model.dtype` is on a kind of device."""
    if dtype != "auto":
        return dtype
    return "float32" if kind == "cpu" else "bfloat16"
