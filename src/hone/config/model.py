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

    trust_remote_code: bool = False
    """Run Python code that comes with the model or its tokenizer."""
