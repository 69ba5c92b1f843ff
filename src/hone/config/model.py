"""Which model is trained, and in which number formats."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hone.config.base import Section

__all__ = ["ModelConfig"]


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
    batch, packing, chunks of a prompt or speculation: samples are exactly on-policy, and the launch
    gate demands a difference of 0. Needs CUDA, bfloat16 and a family with fused layers (llama,
    mistral, qwen2, qwen3); without tensor parallelism and FP8 keys and values. On an H200
    a decode step takes a tenth longer (of small models and batches up to a third), scoring too,
    training as long as before; `trainer.compile` then compiles the head alone."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model or its tokenizer."""
