"""Facts about a model before it is loaded, from its `config.json` or its public name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hone.distributed.settings import ulysses_problem
from hone.families.config_values import impossible_values
from hone.families.registry import (
    DENSE_FUSED_FAMILIES,
    DIVIDED_FAMILIES,
    FUSED_FAMILIES,
    spec_of,
    unserved,
)
from hone.families.shape import ModelShape, public_shape
from hone.families.spec import RECURRENT_DIVIDED_FIELDS
from hone.families.vision.registry import VISION_FIELD, decoder_config, unserved_family
from hone.hub import config_of
from hone.paths import must_be_local

__all__ = [
    "EXACT_ALIGNMENT",
    "EXACT_HEAD_DIMS",
    "FP8_ALIGNMENT",
    "NF4_BLOCK",
    "ModelFacts",
]

EXACT_HEAD_DIMS = (32, 64, 128)
"""Head sizes that exact mode's attention supports."""
EXACT_ALIGNMENT = 8
"""Number of 16-bit values in 16 bytes, to which rows of matrices must be aligned."""
FP8_ALIGNMENT = 16
"""Alignment of float8 products, in values. Projections of other widths stay unquantised."""
NF4_BLOCK = 64
"""Number of 4-bit values that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Limits and sizes of a decoder. None where its `config.json` does not give them."""

    family: str | None = None
    """`model_type`, of a vision-language model that of its decoder."""
    vision_family: str | None = None
    """`model_type` of the vision-language model."""
    context_length: int | None = None
    """Number of positions that the model was made for."""
    vocab_size: int | None = None
    kv_values_per_token: int | None = None
    """Number of values that one token adds to the KV cache, over all layers."""
    divided: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sizes that tensor parallelism divides among devices, by key."""
    hidden_act: str | None = None
    """The MLP's activation. None is the family's: silu if layers are fused."""
    unserved: tuple[str, ...] = ()
    """Unsupported settings, as `field=value`."""
    classifies: bool | None = None
    """Whether it classifies or scores instead of predicting tokens."""
    num_labels: int | None = None
    """Number of labels of a classifier; two if the file has none."""
    shape: ModelShape | None = None
    """All sizes. None if the file lacks some."""
    lacks: str | None = None
    """The missing sizes, as a sentence."""

    @classmethod
    def read(cls, model_path: str | Path) -> Self | None:
        """Facts of a local model folder. None for a hub name or an unreadable file."""
        try:
            config: Any = json.loads((Path(model_path) / "config.json").read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict) or any(impossible_values(config)):
            return None
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Facts of a parsed `config.json`."""
        shape = lacks = None
        try:
            shape = ModelShape.from_config(config)
        except ValueError as error:
            lacks = str(error)
        config = dict(decoder_config(config))
        text = config.get("text_config", config)
        kinds = config.get("architectures")
        return cls(
            family=config.get("model_type"),
            vision_family=config.get(VISION_FIELD),
            context_length=text.get("max_position_embeddings"),
            vocab_size=text.get("vocab_size"),
            kv_values_per_token=(
                _kv_values_per_token(text) if shape is None else shape.kv_bytes_per_token(1)
            ),
            divided={
                key: text[key]
                for key in spec_of(str(config.get("model_type"))).divided_fields
                if text.get(key)
            },
            hidden_act=text.get("hidden_act"),
            unserved=tuple(unserved(config)),
            classifies=any("SequenceClassification" in x for x in kinds) if kinds else None,
            num_labels=config.get("num_labels") or len(config.get("id2label") or (0, 1)),
            shape=shape,
            lacks=lacks,
        )

    @classmethod
    def known(cls, model_path: str, *, may_fetch: bool = False) -> Self | None:
        """Facts as `read`. For a hub name those of its `config.json` in the local cache, or on the
        hub with `may_fetch`, else of the public shape of that name, or of a vision-language family
        that is not served."""
        if Path(model_path).exists() or must_be_local(model_path):
            return cls.read(model_path)
        if "/" in model_path and (file := config_of(model_path, may_fetch=may_fetch)) is not None:
            return cls.read(file.parent)
        name = model_path.rpartition("/")[2].lower()
        if (shape := public_shape(name)) is not None:
            return cls.of_shape(shape)
        family = unserved_family(name)
        return None if family is None else cls(family=family, unserved=("vision_config",))

    @classmethod
    def of_shape(cls, shape: ModelShape) -> Self:
        """Facts of a shape, without the context length."""
        sizes = [shape.num_heads, shape.num_kv_heads, shape.intermediate_size]
        if shape.recurrent is not None:
            sizes += [shape.recurrent.num_key_heads, shape.recurrent.num_value_heads]
        return cls(
            family=shape.family,
            vision_family=shape.vision_family,
            vocab_size=shape.vocab_size,
            kv_values_per_token=shape.kv_bytes_per_token(1),
            divided=dict(zip(spec_of(shape.family).divided_fields, sizes, strict=True)),
            shape=shape,
        )

    @property
    def has_dense_fused_layers(self) -> bool:
        """Whether decoding uses hone's fused layers and none has experts, as exact mode needs.
        Unknown families count as true."""
        return self.family in (None, *DENSE_FUSED_FAMILIES) and self.hidden_act in (None, "silu")

    @property
    def has_fused_layers(self) -> bool:
        """Whether decoding uses hone's fused layers. Unknown families count as true."""
        return self.family in (None, *FUSED_FAMILIES) and self.hidden_act in (None, "silu")

    @property
    def is_divided(self) -> bool:
        """Whether several ranks of an engine can share its layers. Unknown families count as
        true."""
        return self.family in (None, *DIVIDED_FAMILIES) and self.hidden_act in (None, "silu")

    def undivided(self, size: int) -> list[str]:
        """Sizes that are no multiple of `size` ranks, as `key = number`."""
        numbers = dict(self.divided)
        if self.shape is not None and self.shape.num_experts:
            numbers["the number of experts"] = self.shape.num_experts
            numbers["the inner size of shared experts"] = self.shape.shared_expert_size
        return [f"{key} = {number}" for key, number in numbers.items() if number % size]

    def ulysses_problems(self, size: int, *, tensor_parallel_size: int) -> list[str]:
        """Why `size` processes, of which each is one of so many that share matrices, cannot share
        its heads; empty where they can, or where the heads are not known."""
        numbers = {key: number // tensor_parallel_size for key, number in self.divided.items()}
        heads = numbers.get("num_attention_heads")
        if heads is None:
            return []
        problem = ulysses_problem(size, heads, numbers.get("num_key_value_heads", heads))
        found = [] if problem is None else [problem]
        for key in RECURRENT_DIVIDED_FIELDS:
            if (number := numbers.get(key, size)) % size:
                found.append(f"each process takes equally many of {key} = {number}")
        return found

    @property
    def ring_problem(self) -> str | None:
        """Why a ring of processes cannot share its rows; None where it can."""
        if not spec_of(str(self.family)).is_hybrid:
            return None
        return (
            "its layers of gated linear attention read a row from its first token to its last, and "
            "a ring has parts of it in another order"
        )

    @property
    def exact_misfits(self) -> list[str]:
        """Sizes that exact mode's kernels do not support, as `name = number`."""
        shape = self.shape
        if shape is None:
            return []
        widths = {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads x head_dim": shape.num_heads * shape.head_dim,
        }
        misfits = [f"{name} = {n}" for name, n in widths.items() if n % EXACT_ALIGNMENT]
        is_served = shape.head_dim in EXACT_HEAD_DIMS
        return misfits if is_served else [f"head_dim = {shape.head_dim}", *misfits]

    def kv_bytes_per_token(self, dtype: str) -> int | None:
        """Bytes of one token in a KV cache of `dtype`."""
        values = self.kv_values_per_token
        return None if values is None else values * {"float32": 4, "fp8": 1}.get(dtype, 2)


def _kv_values_per_token(config: dict[str, Any]) -> int | None:
    """The number of keys and values of a token over all layers, for a file that lacks other
    sizes."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if not layers or not heads or not hidden:
        return None
    head_dim = config.get("head_dim") or hidden // heads
    return 2 * layers * (config.get("num_key_value_heads") or heads) * head_dim
