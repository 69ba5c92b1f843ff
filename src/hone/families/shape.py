"""Parameters, FLOPs and bytes of a decoder, from its `config.json` alone.

    shape = ModelShape.from_config("Qwen3-8B/config.json")
    shape.num_params, shape.kv_bytes_per_token(2), shape.forward_flops([512, 2048])

A matrix product and the convolution of a recurrent layer count 2 FLOPs per weight and token;
attention 4 FLOPs per query head, head dimension and visible key (scores and weighted values); a
recurrence what it takes in chunks (`RecurrentLayers.flops_per_token`). Norms, activations and the
softmax are left out, as everywhere in the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hone.families.registry import public_configs, spec_of
from hone.families.spec import ROW_TAIL_BYTES, ModelSpec, RecurrentLayers
from hone.families.vision.registry import (
    VISION,
    VISION_FIELD,
    complete_config,
    decoder_config,
)

if TYPE_CHECKING:
    from hone.families.vision.spec import TowerCost

__all__ = ["Floats", "ModelShape", "TensorShape", "public_shape"]

TILE_OUTPUTS, TILE_INPUTS = 64, 128
"""Tile of int8 codes that kernels multiply (`hone.models.int8_kernels`)."""
_ROUTER, _SHARED_GATE, _CONVOLUTION = "mlp.gate", "shared_expert_gate", "conv1d"
_UNPACKED = (_ROUTER, _SHARED_GATE, _CONVOLUTION)
"""Matrices of a layer that are never int8 codes."""
_SPLIT_DIMS = {"rows": 0, "columns": 1, "qkv_rows": 0, "experts": 0, "shared": None}

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A parameter, named and shaped as in transformers, which the model has `count` times."""

    name: str
    """Name of the module without its path; with `.bias` for biases."""
    size: tuple[int, ...]
    split: int | None
    """Dimension that tensor parallelism divides."""
    count: int = 1
    in_layer: bool = True
    of_experts: bool = False
    """Whether it stacks all experts of a layer."""

    @property
    def numel(self) -> int:
        """Number of values of one parameter."""
        return prod(self.size)

    def local(self, tensor: int) -> tuple[int, ...]:
        """Shape of the shard of one of `tensor` ranks."""
        return tuple(-(-n // tensor) if i == self.split else n for i, n in enumerate(self.size))

    def is_cut(self, tensor: int) -> bool:
        """Whether kernels can multiply the int8 codes of one of `tensor` ranks directly."""
        *_, outputs, inputs = self.local(tensor)
        return outputs % TILE_OUTPUTS == 0 and inputs % TILE_INPUTS == 0

    @property
    def is_layer_matrix(self) -> bool:
        """Whether an engine may store it as int8 codes."""
        is_matrix = len(self.size) > 1 and self.name not in _UNPACKED
        return self.in_layer and is_matrix

    def adapter(self, rank: int) -> tuple[TensorShape, TensorShape]:
        """A and B of an adapter of this rank beside it, in a stack beside each of its matrices."""

        def of(name: str, dim: int) -> TensorShape:
            size = (*self.size[:dim], rank, *self.size[dim + 1 :])
            split = None if self.split == dim else self.split
            return replace(self, name=name, size=size, split=split)

        last = len(self.size) - 1
        return of("lora_A", last - 1), of("lora_B", last)

    def num_bytes(self, tensor: int, bytes_per_param: int, *, packs_rows: bool) -> int:
        """Bytes of one parameter on one of `tensor` ranks of an engine."""
        local = self.local(tensor)
        if packs_rows and self.is_layer_matrix:
            return prod(local) + ROW_TAIL_BYTES * prod(local[:-1])
        return prod(local) * bytes_per_param


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that determine the cost of a decoder, and of its tower where it has one."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """Whether the output head is the embedding matrix."""
    attention_bias: bool = False
    """Whether all four attention projections have biases."""
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Number of keys that a query of a sliding layer sees, itself included."""
    num_sliding_layers: int = 0
    expert_layers: tuple[int, ...] = ()
    """Layers with experts in place of the MLP of `intermediate_size`."""
    num_experts: int = 0
    """Experts of such a layer."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Intermediate size of one expert."""
    shared_expert_size: int = 0
    """Intermediate size of all shared experts together, which every token passes."""
    recurrent: RecurrentLayers | None = None
    """The layers that have gated linear attention in place of attention, and their sizes."""
    head_norms_off: bool = False
    """Whether the config switches off the head norms that the family has."""
    vision_family: str | None = None
    """`model_type` of the vision-language model whose decoder this is."""
    tower: TowerCost | None = None
    """Its tower, which is no part of the other sizes."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path) -> Self:
        """Read a Hugging Face configuration: its dictionary, `config.json`, or the model folder. A
        family without a `ModelSpec` gets the layer sizes of Llama. Raises ValueError for missing
        keys."""
        if not isinstance(config, Mapping):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            config = dict[str, Any](json.loads(path.read_text()))
        whole, config = complete_config(config), decoder_config(config)
        name = str(config.get("model_type"))
        spec, vision = spec_of(name), VISION.get(str(config.get(VISION_FIELD)))
        try:
            hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
            sliding = sum(window is not None for window in spec.layer_windows(config))
            has_dense = len(spec.expert_layers(config)) < config["num_hidden_layers"]
            return cls(
                family=name,
                num_layers=config["num_hidden_layers"],
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=config.get("num_key_value_heads") or num_heads,
                head_dim=config.get("head_dim") or spec.head_dim or hidden_size // num_heads,
                intermediate_size=(
                    config["intermediate_size"] if has_dense else config.get("intermediate_size", 0)
                ),
                vocab_size=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings", spec.tied)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                sliding_window=config["sliding_window"] if sliding else None,
                num_sliding_layers=sliding,
                recurrent=spec.recurrent_layers(config),
                head_norms_off=spec.head_norms and not spec.has_head_norms(config),
                vision_family=None if vision is None else vision.model_type,
                # A decoder's own configuration does not describe the tower.
                tower=vision.tower_cost(whole) if vision and "vision_config" in whole else None,
                **_experts(config, spec),
            )
        except KeyError as error:
            raise ValueError(f"The configuration of the {name} model lacks {error}.") from error

    @property
    def head_params(self) -> int:
        """Parameters of the output matrix, whether or not it is the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def body_params(self) -> int:
        """Parameters between embedding and output matrix."""
        return _body_params(self)

    @property
    def active_body_params(self) -> int:
        """Body parameters that a token uses: of a layer's experts only its own."""
        idle = self.num_experts - self.experts_per_token
        return self.body_params - idle * self._params_per_expert

    @property
    def num_expert_layers(self) -> int:
        return len(self.expert_layers)

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of all layers."""
        return self.num_experts * self._params_per_expert

    @property
    def _params_per_expert(self) -> int:
        """Parameters of one expert in all layers."""
        return 3 * self.hidden_size * self.expert_size * self.num_expert_layers

    @property
    def recurrent_indices(self) -> tuple[int, ...]:
        """The layers without attention."""
        return () if self.recurrent is None else self.recurrent.indices

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - len(self.recurrent_indices)

    def part(self, layers: Sequence[int]) -> Self:
        """The shape of a model that has these layers alone, numbered from 0. The number of windowed
        layers stays that of the whole model, since a shape does not say which they are."""
        places = range(len(layers))
        recurrent = self.recurrent
        if recurrent is not None:
            own = tuple(i for i in places if layers[i] in recurrent.indices)
            recurrent = replace(recurrent, indices=own)
        return replace(
            self,
            num_layers=len(layers),
            expert_layers=tuple(i for i in places if layers[i] in self.expert_layers),
            recurrent=recurrent,
        )

    @property
    def has_head_norms(self) -> bool:
        return spec_of(self.family).head_norms and not self.head_norms_off

    @property
    def mlp_size(self) -> int:
        """Values between the two products of the widest layer's MLP, or of a token's experts."""
        is_dense = self.num_expert_layers < self.num_layers
        of_experts = self.experts_per_token * self.expert_size + self.shared_expert_size
        return max(of_experts, self.intermediate_size if is_dense else 0)

    def tensors(self) -> tuple[TensorShape, ...]:
        """All parameters of the model; one entry stands for those of all layers."""
        return _tensors(self)

    def passed(self, tensor: TensorShape) -> int:
        """Number of values of one parameter that a token uses: of experts those of its own."""
        if not tensor.of_experts:
            return tensor.numel
        return tensor.numel // self.num_experts * self.experts_per_token

    def matrices_of_layer(self, index: int) -> list[TensorShape]:
        """The matrices of one layer, and stacks of them."""
        tensors = self.part([index]).tensors()
        return [t for t in tensors if t.in_layer and len(t.size) > 1]

    def _tensors(self) -> Iterator[TensorShape]:
        spec = spec_of(self.family)
        hidden, inter, vocab = self.hidden_size, self.intermediate_size, self.vocab_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield TensorShape("embed_tokens", (vocab, hidden), 0, in_layer=False)
        if not self.tied:
            yield TensorShape("lm_head", (vocab, hidden), 0, in_layer=False)
        yield TensorShape("norm", (hidden,), None, in_layer=False)
        o_bias = self.attention_bias and spec.o_bias and not spec.qkv_bias
        qkv_bias = self.attention_bias or spec.qkv_bias
        num_sparse, num_dense = self.num_expert_layers, self.num_layers - self.num_expert_layers
        attending, gated_q = self.num_attention_layers, (2 if spec.gated_attention else 1) * q
        for name, rows, columns, has_bias, count in (
            ("self_attn.q_proj", gated_q, hidden, qkv_bias, attending),
            ("self_attn.k_proj", kv, hidden, qkv_bias, attending),
            ("self_attn.v_proj", kv, hidden, qkv_bias, attending),
            ("self_attn.o_proj", hidden, q, o_bias, attending),
            ("mlp.gate_proj", inter, hidden, self.mlp_bias, num_dense),
            ("mlp.up_proj", inter, hidden, self.mlp_bias, num_dense),
            ("mlp.down_proj", hidden, inter, self.mlp_bias, num_dense),
        ):
            if not count:
                continue
            split = _SPLIT_DIMS[(spec.tensor_plan or {}).get(name, "shared")]
            name = name.rpartition(".")[2]
            yield TensorShape(name, (rows, columns), split, count)
            if has_bias:
                bias_split = 0 if split == 0 else None
                yield TensorShape(f"{name}.bias", (rows,), bias_split, count)
        if self.recurrent_indices:
            yield from self._recurrent_tensors(spec)
        if num_sparse:
            is_divided = spec.tensor_plan is not None
            number, size = self.num_experts, self.expert_size
            yield TensorShape(_ROUTER, (number, hidden), None, num_sparse)
            for name, rows, columns in (("gate_up", 2 * size, hidden), ("down", hidden, size)):
                yield TensorShape(
                    f"experts.{name}_proj",
                    (number, rows, columns),
                    0 if is_divided else None,
                    num_sparse,
                    of_experts=True,
                )
            if shared := self.shared_expert_size:
                own, inputs = (0, 1) if is_divided else (None, None)
                yield TensorShape("gate_proj", (shared, hidden), own, num_sparse)
                yield TensorShape("up_proj", (shared, hidden), own, num_sparse)
                yield TensorShape("down_proj", (hidden, shared), inputs, num_sparse)
                if spec.experts is not None and spec.experts.gated_shared:
                    yield TensorShape(_SHARED_GATE, (1, hidden), None, num_sparse)
        yield TensorShape("layer norms", (hidden,), None, self.num_layers * spec.norms_per_layer)
        if self.has_head_norms and attending:
            for name, width in (("q_norm", q), ("k_norm", kv)):
                size = width if spec.joint_head_norms else self.head_dim
                yield TensorShape(name, (size,), None, attending)

    def _recurrent_tensors(self, spec: ModelSpec) -> Iterator[TensorShape]:
        """Those of `linear_attn`."""
        own, hidden = self.recurrent, self.hidden_size
        assert own is not None
        heads, values = own.num_value_heads, own.value_width
        for name, size in (
            ("in_proj_qkv", (own.num_channels, hidden)),
            ("in_proj_z", (values, hidden)),
            ("in_proj_b", (heads, hidden)),
            ("in_proj_a", (heads, hidden)),
            (_CONVOLUTION, (own.num_channels, 1, own.kernel_size)),
            ("A_log", (heads,)),
            ("dt_bias", (heads,)),
            ("linear_attn.norm", (own.value_dim,)),
            ("out_proj", (hidden, values)),
        ):
            is_own = name in ("A_log", "dt_bias")
            module = "linear_attn" if is_own else f"linear_attn.{name.rpartition('.')[2]}"
            split = _SPLIT_DIMS[(spec.tensor_plan or {}).get(module, "shared")]
            yield TensorShape(name, size, split, len(own.indices))

    @property
    def num_params(self) -> int:
        """All distinct parameters, as `sum(p.numel() for p in model.parameters())` counts them."""
        return self.body_params + self.head_params * (1 if self.tied else 2)

    def weight_bytes(self, bytes_per_param: int = 2) -> int:
        """Bytes of all weights."""
        return self.num_params * bytes_per_param

    def rank_bytes(self, size: int, bytes_per_param: int = 2, *, packs_rows: bool = False) -> int:
        """Bytes of the weights of one of `size` ranks of an engine, with `packs_rows` under
        `engine.weight_dtype=int8`. Every rank has the whole embedding."""
        return _rank_bytes(self, size, bytes_per_param, packs_rows)

    def decode_bytes(self, bytes_per_param: int = 2, *, packs_rows: bool = False) -> int:
        """Bytes of weights that one decode step of many sequences reads: body and head, but no
        untied embedding matrix. For few sequences subtract `untouched_experts`."""
        whole = self.rank_bytes(1, bytes_per_param, packs_rows=packs_rows)
        return whole - (0 if self.tied else self.head_params * bytes_per_param)

    @property
    def unused_share(self) -> float:
        """Share of a layer's experts that a token does not use."""
        return 1 - self.experts_per_token / self.num_experts if self.num_experts else 0.0

    def untouched_experts(self, num_seqs: Floats) -> Floats:
        """Expected parameters of experts that no token of `num_seqs` sequences uses, if all are
        equally likely. Elementwise."""
        return self.expert_params * self.unused_share**num_seqs

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes of the keys and values of one token over all layers."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    def state_bytes(self, bytes_per_value: int = 2) -> int:
        """Bytes of the states of one sequence, 0 without recurrent layers; see
        `RecurrentLayers.state_bytes`."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes(bytes_per_value)

    @property
    def attention_flops_per_key(self) -> int:
        """FLOPs of one query token against one key, over all layers."""
        return 4 * self.num_attention_layers * self.num_heads * self.head_dim

    @property
    def recurrence_work(self) -> int:
        """Values of one token at the widest moment of a recurrent layer's forward pass."""
        has_some = self.recurrent is not None and self.recurrent.indices
        return self.recurrent.work_values if self.recurrent is not None and has_some else 0

    @property
    def recurrence_flops_per_token(self) -> int:
        """FLOPs of the recurrence for one token, over all recurrent layers."""
        return 0 if self.recurrent is None else self.recurrent.flops_per_token

    def visible_keys(self, lengths: ArrayLike) -> float:
        """Query-key pairs of causal attention in sequences of these lengths, averaged over the
        layers with attention. Half the square, without the diagonal's extra half key."""
        n = np.asarray(lengths, dtype=np.float64)
        pairs = float((n * n).sum() / 2)
        if self.sliding_window is None:
            return pairs
        outside = np.maximum(n - self.sliding_window, 0.0)
        return pairs - float((outside * outside).sum() / 2) * self.sliding_share

    @property
    def sliding_share(self) -> float:
        """Share of the layers with attention in which it is windowed."""
        return self.num_sliding_layers / max(self.num_attention_layers, 1)

    def mixing_flops(self, lengths: ArrayLike) -> float:
        """FLOPs of attention and recurrence, which multiply no weights, in one forward pass."""
        num_tokens = float(np.asarray(lengths, dtype=np.float64).sum())
        recurrence = self.recurrence_flops_per_token * num_tokens
        return self.attention_flops_per_key * self.visible_keys(lengths) + recurrence

    def forward_flops(self, lengths: ArrayLike, *, num_head_tokens: int | None = None) -> float:
        """FLOPs of one forward pass over packed sequences of these lengths.

        `num_head_tokens` counts the tokens whose logits are computed; None: all.
        """
        num_tokens = float(np.asarray(lengths, dtype=np.float64).sum())
        head_tokens = num_tokens if num_head_tokens is None else num_head_tokens
        linear = 2.0 * (self.active_body_params * num_tokens + self.head_params * head_tokens)
        return linear + self.mixing_flops(lengths)


@lru_cache
def _tensors(shape: ModelShape) -> tuple[TensorShape, ...]:
    return tuple(shape._tensors())  # pyright: ignore[reportPrivateUsage]


@lru_cache
def _rank_bytes(shape: ModelShape, size: int, bytes_per_param: int, packs_rows: bool) -> int:
    return sum(
        t.count
        * t.num_bytes(
            1 if t.name == "embed_tokens" else size, bytes_per_param, packs_rows=packs_rows
        )
        for t in shape.tensors()
    )


@lru_cache
def _body_params(shape: ModelShape) -> int:
    return sum(t.numel * t.count for t in shape.tensors() if t.in_layer) + shape.hidden_size


def _experts(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Fields of a shape for experts. Raises KeyError if `config` lacks one."""
    layout = spec.experts
    if layout is None:
        return {}
    return {
        "expert_layers": tuple(spec.expert_layers(config)),
        "num_experts": config[next((n for n in layout.numbers if n in config), layout.numbers[0])],
        "experts_per_token": config[layout.per_token],
        "expert_size": config[layout.size],
        "shared_expert_size": layout.shared_size(config),
    }


def public_shape(name: str) -> ModelShape | None:
    """The shape of a public model by its name in lower case, such as `qwen3-8b`, which its variants
    (`qwen3-8b-base`) share. None if unknown."""
    for variant in ("-instruct", "-base", "-chat", "-it", "-pt"):
        name = name.removesuffix(variant)
    config = public_configs().get(name.removeprefix("meta-"))
    return None if config is None else ModelShape.from_config(config)
