"""Parameters, FLOPs and bytes of a decoder, from its `config.json` alone.

    shape = ModelShape.from_config("Qwen3-8B/config.json")
    shape.num_params, shape.kv_bytes_per_token(2), shape.forward_flops([512, 2048])

A matrix product counts 2 FLOPs per weight and token; attention 4 FLOPs per query head, head
dimension and visible key (scores and weighted values). Norms, activations and the softmax are left
out, as everywhere in the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["FUSED_FAMILIES", "SUPPORTED_FAMILIES", "ModelShape", "public_shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a family's code fixes and its `config.json` may leave unsaid."""

    norms_per_layer: int = 2
    """Vectors of hidden size in a layer."""
    qkv_bias: bool = False
    """Query, key and value biases that no key of the config switches."""
    head_norms: bool = False
    """A norm over head_dim for queries and one for keys."""
    tied: bool = False
    head_dim: int | None = None
    """None: hidden size / heads."""
    fused_decode: bool = True
    """Whether generation has layers of its own, which tensor parallelism and exact mode need."""


SUPPORTED_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms=True, head_dim=128),
    "gemma": _Family(tied=True, head_dim=256, fused_decode=False),
    "gemma2": _Family(norms_per_layer=4, tied=True, head_dim=256, fused_decode=False),
    "gemma3_text": _Family(
        norms_per_layer=4, head_norms=True, tied=True, head_dim=256, fused_decode=False
    ),
}
"""Values of `model_type` that hone trains and samples."""

FUSED_FAMILIES = tuple(x for x, family in SUPPORTED_FAMILIES.items() if family.fused_decode)
"""Those whose decode is fused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers that fix a dense decoder's cost."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """The output head is the embedding matrix."""
    attention_bias: bool = False
    """Biases on all four attention projections."""
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Keys a query of a sliding layer sees, itself included."""
    num_sliding_layers: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path) -> Self:
        """Read a Hugging Face configuration: its dictionary, `config.json`, or the model folder.

        Raises ValueError for a model type outside `SUPPORTED_FAMILIES` and for missing keys.
        """
        if not isinstance(config, Mapping):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            config = dict[str, Any](json.loads(path.read_text()))
        name = str(config.get("model_type"))
        family = SUPPORTED_FAMILIES.get(name)
        if family is None:
            raise ValueError(
                f"Cannot plan for model_type {name!r}; known are {', '.join(SUPPORTED_FAMILIES)}."
            )
        try:
            hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
            sliding = _num_sliding_layers(name, config)
            return cls(
                family=name,
                num_layers=config["num_hidden_layers"],
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=config.get("num_key_value_heads") or num_heads,
                head_dim=config.get("head_dim") or family.head_dim or hidden_size // num_heads,
                intermediate_size=config["intermediate_size"],
                vocab_size=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", family.tied)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                sliding_window=config["sliding_window"] if sliding else None,
                num_sliding_layers=sliding,
            )
        except KeyError as error:
            raise ValueError(f"The configuration of the {name} model lacks {error}.") from error

    @property
    def head_params(self) -> int:
        """The output matrix, whether it is the embedding or its own."""
        return self.vocab_size * self.hidden_size

    @property
    def body_params(self) -> int:
        """Everything between embedding and output matrix."""
        family = SUPPORTED_FAMILIES[self.family]
        hidden, inter = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (2 * q_size + 2 * kv_size)
        if self.attention_bias or family.qkv_bias:
            attention += q_size + 2 * kv_size
        if self.attention_bias and not family.qkv_bias:
            attention += hidden
        if family.head_norms:
            attention += 2 * self.head_dim
        mlp = 3 * hidden * inter + (2 * inter + hidden if self.mlp_bias else 0)
        return self.num_layers * (attention + mlp + family.norms_per_layer * hidden) + hidden

    @property
    def num_params(self) -> int:
        """All distinct parameters, as `sum(p.numel() for p in model.parameters())` counts them."""
        return self.body_params + self.head_params * (1 if self.tied else 2)

    def weight_bytes(self, bytes_per_param: int = 2) -> int:
        """Memory of all weights."""
        return self.num_params * bytes_per_param

    def decode_bytes(self, bytes_per_param: int = 2) -> int:
        """Weights that one decode step reads: body and head, but no untied embedding matrix."""
        return (self.body_params + self.head_params) * bytes_per_param

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    @property
    def attention_flops_per_key(self) -> int:
        """FLOPs of one query token against one key, over all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def visible_keys(self, lengths: ArrayLike) -> float:
        """Query-key pairs of causal attention in sequences of these lengths; the mean over layers.

        Taken as half the square, without the diagonal's extra half key.
        """
        n = np.asarray(lengths, dtype=np.float64)
        pairs = float((n * n).sum() / 2)
        if self.sliding_window is None:
            return pairs
        outside = np.maximum(n - self.sliding_window, 0.0)
        return pairs - float((outside * outside).sum() / 2) * self.sliding_share

    @property
    def sliding_share(self) -> float:
        """Share of the layers whose attention is windowed."""
        return self.num_sliding_layers / self.num_layers

    def forward_flops(self, lengths: ArrayLike, *, num_head_tokens: int | None = None) -> float:
        """FLOPs of one forward pass over packed sequences of these lengths.

        `num_head_tokens` counts the tokens whose logits are computed; None: all.
        """
        num_tokens = float(np.asarray(lengths, dtype=np.float64).sum())
        head_tokens = num_tokens if num_head_tokens is None else num_head_tokens
        linear = 2.0 * (self.body_params * num_tokens + self.head_params * head_tokens)
        return linear + self.attention_flops_per_key * self.visible_keys(lengths)


def _num_sliding_layers(family: str, config: Mapping[str, Any]) -> int:
    """How many layers attend within `sliding_window`, for configurations of any age."""
    num_layers: int = config["num_hidden_layers"]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    if layer_types := config.get("layer_types"):
        return sum(kind == "sliding_attention" for kind in layer_types)
    match family:
        case "mistral":
            return num_layers
        case "qwen2" | "qwen3":
            return max(num_layers - config.get("max_window_layers", num_layers), 0)
        case "gemma2":
            return (num_layers + 1) // 2
        case "gemma3_text":
            return num_layers - num_layers // config.get("sliding_window_pattern", 6)
        case _:
            return 0


def public_shape(name: str) -> ModelShape | None:
    """The shape of a public model by its name in lower case, such as `qwen3-8b`; None: unknown."""
    match name:
        case "qwen3-0.6b":
            sizes = (28, 1024, 16, 3072)
        case "qwen3-1.7b":
            sizes = (28, 2048, 16, 6144)
        case "qwen3-4b":
            sizes = (36, 2560, 32, 9728)
        case "qwen3-8b":
            sizes = (36, 4096, 32, 12288)
        case _:
            return None
    num_layers, hidden_size, num_heads, intermediate_size = sizes
    return ModelShape(
        family="qwen3",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        vocab_size=151_936,
        tied=name != "qwen3-8b",
    )
