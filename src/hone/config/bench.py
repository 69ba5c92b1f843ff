"""What `hone bench` measures: a model or the shape of one, and a workload."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.config.base import Section
from hone.models.settings import LoraConfig, TrainedModelConfig

__all__ = ["WORKLOADS", "BenchModelConfig", "BenchTrainModelConfig", "DecodeConfig", "RowsConfig"]

WORKLOADS = ("decode", "uniform", "groups")
"""Named workloads; any other name is a file of requests."""


class BenchModelConfig(Section):
    """The model to sample from: a folder or hub name, or a public shape with random weights."""

    path: str | None = None
    """Folder in the Hugging Face layout, or a hub name; with `init` random `config.json` is
    enough. No tokenizer is needed."""

    shape: (
        Literal[
            "qwen3-0.6b",
            "qwen3-1.7b",
            "qwen3-4b",
            "qwen3-8b",
            "qwen3.5-0.8b",
            "qwen3.5-2b",
            "qwen3.5-4b",
            "qwen3.5-9b",
        ]
        | None
    ) = None
    """Public shape to fill with random weights, in place of `path`; nothing is downloaded. Of
    Qwen3.5 it is the decoder alone."""

    init: Literal["pretrained", "random"] = "pretrained"
    """`random` reads only the shape from `config.json` and draws the weights from `run.seed`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Format of weights and arithmetic; `auto` is bfloat16 on CUDA and float32 on a CPU."""

    exact: bool = False
    """Sample in exact mode, in which a token gets the same bits in every batch. Needs CUDA,
    bfloat16 and a family with fused layers; without tensor parallelism and FP8 keys and values.
    vLLM, where compared, runs as it always does."""


class DecodeConfig(Section):
    """The workload `decode`: a full batch of sequences that all decode at about one context."""

    batch: int = Field(default=256, ge=1)
    """Sequences that decode together."""

    context: int = Field(default=1024, ge=2)
    """Tokens of context, the mean over sequences and steps."""

    steps: int = Field(default=128, ge=1)
    """Decode steps of the full batch."""


class BenchTrainModelConfig(BenchModelConfig):
    """The model to train: a folder or hub name, or a public shape with random weights."""

    exact: bool = False
    """Compute as in a run with `model.exact`. One process with CUDA and bfloat16."""

    lora: LoraConfig = LoraConfig()
    """Train adapters instead of all weights."""

    def as_trained(self, path: str | None = None) -> TrainedModelConfig:
        """The section of a run that names the same model; a public shape lies at `path`."""
        return TrainedModelConfig(
            path=path or self.path or "",
            init="random" if self.shape is not None else self.init,
            dtype=self.dtype,
            exact=self.exact,
            lora=self.lora,
        )


class RowsConfig(Section):
    """Rows of one length and random ids, of which every token but the first is trained."""

    per_step: int = Field(default=64, ge=1)
    """Rows of an optimizer step, over all devices."""

    tokens: int = Field(default=2048, ge=2)
    """Tokens of a row."""
