"""Specification of a model family: facts that are fixed in transformers' code and not in
`config.json`.

Planning, checks, loading, training and generation read them only here. A family is one file of this
package, named after its `model_type`, with a `SPEC`; `hone.families.registry` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from hone.segments import CHUNK

__all__ = [
    "DENSE_TENSOR_PLAN",
    "DIVIDED_FIELDS",
    "EXPERTS_TENSOR_PLAN",
    "EXPERT_MATRICES",
    "GENERIC_FIELDS",
    "HEAD_NORMS_TENSOR_PLAN",
    "PROJECTIONS",
    "RECURRENT_DIVIDED_FIELDS",
    "RECURRENT_PROJECTIONS",
    "RECURRENT_TENSOR_PLAN",
    "ROW_TAIL_BYTES",
    "UNSERVED_FIELDS",
    "UNSERVED_GENERIC_FIELDS",
    "DecodeLayout",
    "ExpertLayout",
    "Json",
    "ModelSpec",
    "RecurrentLayers",
    "Split",
    "listed_or",
    "sizes",
]

Json = Mapping[str, Any]
"""A parsed `config.json`."""

Split = Literal["rows", "columns", "qkv_rows", "experts", "shared"]
"""How ranks share a module's parameters. Weights are [out, in], as in torch.

`rows`: each rank has some outputs, also of the bias. `columns`: each has some inputs and computes a
partial sum; its bias is whole. `qkv_rows`: rows of all queries, all keys and all values of gated
linear attention lie behind each other, and each rank has some of each of the three. `experts`: each
has some whole experts of a layer and computes a partial sum. `shared`: whole on every rank, each of
which has a part of its gradient.
"""

ROW_TAIL_BYTES = 16
"""Bytes after each row of int8 codes, including its scale (`hone.models.int8_rows`)."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a dense layer."""

EXPERT_MATRICES = ("experts.gate_up_proj", "experts.down_proj")
"""The stacked matrices of a layer's experts (`ExpertLayout`)."""

RECURRENT_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""The matrices of a layer of gated linear attention (`RecurrentLayers`)."""

DENSE_TENSOR_PLAN: Mapping[str, Split] = {
    "input_layernorm": "shared",
    "self_attn.q_proj": "rows",
    "self_attn.k_proj": "rows",
    "self_attn.v_proj": "rows",
    "self_attn.o_proj": "columns",
    "post_attention_layernorm": "shared",
    "mlp.gate_proj": "rows",
    "mlp.up_proj": "rows",
    "mlp.down_proj": "columns",
}
"""Heads and the inner size of the MLP are divided (Megatron-LM, arXiv:1909.08053)."""

HEAD_NORMS_TENSOR_PLAN: Mapping[str, Split] = {
    "self_attn.q_norm": "shared",
    "self_attn.k_norm": "shared",
}

RECURRENT_TENSOR_PLAN: Mapping[str, Split] = {
    "linear_attn": "rows",  # decay and time step of each head
    "linear_attn.in_proj_qkv": "qkv_rows",
    "linear_attn.conv1d": "qkv_rows",
    "linear_attn.in_proj_z": "rows",
    "linear_attn.in_proj_b": "rows",
    "linear_attn.in_proj_a": "rows",
    "linear_attn.norm": "shared",
    "linear_attn.out_proj": "columns",
}
"""Split of the modules that replace attention in layers with gated linear attention: heads are
divided."""

EXPERTS_TENSOR_PLAN: Mapping[str, Split] = {"mlp.gate": "shared", "mlp.experts": "experts"}
"""Split of the modules that replace the MLP in layers with experts. All ranks choose the same
experts, with the whole router."""

DIVIDED_FIELDS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes in `config.json` that are divided by the number of ranks."""

RECURRENT_DIVIDED_FIELDS = ("linear_num_key_heads", "linear_num_value_heads")
"""Sizes of a hybrid family that are divided besides."""

UNSERVED_FIELDS = (
    "quantization_config",
    "attention_sinks",
    "attention_dropout",
    "logit_scale",
    "logits_scaling",
    "use_bidirectional_attention",
)
"""Fields of `config.json` that change the computation in an unsupported way."""

GENERIC_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""Sizes that the `config.json` of a family without a spec must have."""

UNSERVED_GENERIC_FIELDS = (
    "quantization_config",
    "attention_sinks",
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "kv_lora_rank",
    "moe_num_experts",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "vision_config",
)
"""Fields that must be unset in that file: with them a model is no dense text decoder, or its keys
and values differ in size."""


_LINEAR = "torch.nn.modules.linear.Linear"


def listed_or(config: Json, layer: int, default: bool) -> bool:
    """Whether `layer_types` lists a layer as windowed. Without the list, `default`."""
    layer_types = config.get("layer_types")
    return layer_types[layer] == "sliding_attention" if layer_types else default


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """The transformers classes that the fused decode replaces.

    It computes pre-norm layers with SwiGLU, or a mixture of such experts, whose modules are named
    as in Llama, Qwen3-MoE or GLM-4 MoE, and of hybrids as in Qwen3.5. Any other class, including a
    subclass, may compute something else and runs unchanged.
    """

    module: str
    """Python module of the family's classes."""
    prefix: str
    """Prefix of the class names, before `Attention`, `RMSNorm` and so on."""
    mixture: str = "SparseMoeBlock"
    """Suffix of the class of a mixture of experts."""
    router: str = "TopKRouter"
    """Suffix of the class of its router."""
    backbone: str = "Model"
    """Suffix of the class of the backbone."""
    mlp: str | None = None
    """Class of an MLP. None: `MLP` behind the prefix."""
    rotary: str = "RotaryEmbedding"
    """Suffix of the class of the rotary embedding."""
    has_zero_centred_norms: bool = False
    """Whether norms multiply by 1 + weight, in float32, and round once. Those of gated linear
    attention never do."""

    def classes(
        self, *, head_norms: bool, has_attention: bool = True, has_recurrence: bool = False
    ) -> dict[str, str]:
        """Full class names by module of the backbone, with layer numbers as `*`, without
        `mlp_classes`. A hybrid may have layers of one kind only."""
        family = f"{self.module}.{self.prefix}"
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        norms = ("q_norm", "k_norm") if head_norms else ()
        kinds: dict[str, str] = {}
        if has_attention:
            kinds |= {
                "layers.*.self_attn": f"{family}Attention",
                **{f"layers.*.self_attn.{name}": _LINEAR for name in attention},
                **{f"layers.*.self_attn.{name}": f"{family}RMSNorm" for name in norms},
            }
        if has_recurrence:
            kinds |= {
                "layers.*.linear_attn": f"{family}GatedDeltaNet",
                "layers.*.linear_attn.conv1d": "torch.nn.modules.conv.Conv1d",
                "layers.*.linear_attn.norm": f"{family}RMSNormGated",
                **{f"layers.*.linear_attn.{name}": _LINEAR for name in RECURRENT_PROJECTIONS},
            }
        return {
            "": f"{family}{self.backbone}",
            "embed_tokens": "torch.nn.modules.sparse.Embedding",
            "rotary_emb": f"{family}{self.rotary}",
            "norm": f"{family}RMSNorm",
            "layers": "torch.nn.modules.container.ModuleList",
            "layers.*": f"{family}DecoderLayer",
            "layers.*.input_layernorm": f"{family}RMSNorm",
            "layers.*.post_attention_layernorm": f"{family}RMSNorm",
            **kinds,
        }

    def mlp_classes(self, experts: ExpertLayout | None) -> set[tuple[str, str]]:
        """Full class names of MLPs and of the modules that replace them in layers with `experts`.
        The activation, silu, is left out."""
        family, mlp = f"{self.module}.{self.prefix}", "layers.*.mlp"
        names = ("gate_proj", "up_proj", "down_proj")
        places = [mlp, f"{mlp}.shared_experts"] if experts and experts.shared else [mlp]
        mlp_class = f"{family}MLP" if self.mlp is None else f"{self.module}.{self.mlp}"
        found = {(place, mlp_class) for place in places}
        found |= {(f"{place}.{name}", _LINEAR) for place in places for name in names}
        if experts:
            found |= {
                (mlp, f"{family}{self.mixture}"),
                (f"{mlp}.gate", f"{family}{self.router}"),
                (f"{mlp}.experts", f"{family}Experts"),
            }
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Layout of layers with experts in transformers: `mlp.gate` scores the experts of a token,
    `mlp.experts` has the matrices of all experts in two tensors."""

    has_experts: Callable[[Json, int], bool]
    """Whether the layer with this index has experts instead of an MLP."""
    numbers: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Fields of `config.json`, one of which has the number of experts of a layer."""
    per_token: str = "num_experts_per_tok"
    """The field with the number of experts per token."""
    size: str = "moe_intermediate_size"
    """The field with the intermediate size of one expert."""
    shared: str | None = None
    """The field with the number of shared experts, which every token passes in addition:
    `mlp.shared_experts`, one MLP."""
    gated_shared: str | None = None
    """The field with the intermediate size of one shared expert, `mlp.shared_expert`, whose output
    is multiplied by the sigmoid of `mlp.shared_expert_gate`. A family has one kind at most."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router turns logits into scores. Gate weights are the scores of the chosen experts,
    divided by their sum if the router normalises."""

    def shared_size(self, config: Json) -> int:
        """Intermediate size of all shared experts together, 0 without any. Raises KeyError if the
        config lacks a field."""
        if self.gated_shared is not None:
            return config[self.gated_shared]
        return config[self.size] * config[self.shared] if self.shared else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayers:
    """The layers of a model with gated linear attention, and the sizes of their states.

    In transformers such a layer has `linear_attn` in place of `self_attn`. Its heads keep a state
    [key_dim, value_dim] each; its convolution has the channels of all queries, keys and values.
    """

    indices: tuple[int, ...]
    """Numbers of these layers in the model, from 0, in ascending order."""
    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads, each of which serves as many value heads."""
    key_dim: int
    value_dim: int
    kernel_size: int
    """Tokens that the convolution reads, the newest included."""

    @classmethod
    def of(cls, config: Json) -> Self:
        """The layers that a `config.json` describes. Raises KeyError where a size is missing."""
        number = config["num_hidden_layers"]
        every = config.get("full_attention_interval") or 4
        types = config.get("layer_types") or [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(number)
        ]
        return cls(
            indices=tuple(i for i, name in enumerate(types) if name == "linear_attention"),
            num_key_heads=config["linear_num_key_heads"],
            num_value_heads=config["linear_num_value_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            kernel_size=config["linear_conv_kernel_dim"],
        )

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Channels of all queries, all keys and all values."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.value_width

    @property
    def num_channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.qkv_rows)

    @property
    def value_width(self) -> int:
        """Width of all values of a token, of the gate, and of what `out_proj` takes."""
        return self.num_value_heads * self.value_dim

    @property
    def state_values(self) -> int:
        """Values of the state of one sequence in one layer, in float32."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def tail_values(self) -> int:
        """Inputs of the convolution that one sequence keeps in one layer, in the model's dtype."""
        return self.num_channels * (self.kernel_size - 1)

    def state_bytes(self, bytes_per_value: int) -> int:
        """Bytes that one sequence keeps in all its layers: float32 states, and the last inputs of
        the convolution with `bytes_per_value` each."""
        of_layer = 4 * self.state_values + bytes_per_value * self.tail_values
        return len(self.indices) * of_layer

    @property
    def work_values(self) -> int:
        """Values of one token at the widest moment of a layer's forward pass, with the kernels of
        `fla-core`: channels before and after the convolution and once more for these kernels,
        normalised queries and keys, what a chunk adds to the state (keys, values and new values),
        outputs, and the states at the beginnings of chunks."""
        keys = self.num_value_heads * self.key_dim
        queries_and_keys = 2 * self.num_key_heads * self.key_dim
        of_chunks = keys + 3 * self.value_width + self.state_values // CHUNK
        return 3 * self.num_channels + queries_and_keys + of_chunks

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the recurrence for one token over all its layers, in chunks of C tokens.

        A head of a chunk multiplies the state [K, V] three times (6 C K V: what the state knows of
        the keys, what it gives to the queries, and its update) and takes the pairs of its tokens:
        products of keys with keys and of queries with keys (C^2 K each), the triangular system for
        keys and values (C^2 (K + V)), and the weighted changes (C^2 V). As in causal attention only
        pairs of a token with earlier ones count.
        """
        k, v = self.key_dim, self.value_dim
        of_head = 6 * k * v + CHUNK * (3 * k + 2 * v)
        return len(self.indices) * self.num_value_heads * of_head


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One family of decoders."""

    model_type: str
    """Name in `config.json`."""
    norms_per_layer: int = 2
    """Number of norms of hidden size in a layer."""
    qkv_bias: bool = False
    """Whether query, key and value always have biases, without a key in the config."""
    o_bias: bool = True
    """Whether `attention_bias` gives the output projection one too."""
    head_norms: bool = False
    """Whether queries and keys have a norm over head_dim each."""
    head_norms_switch: str | None = None
    """The field of the config that switches the head norms on."""
    joint_head_norms: bool = False
    """Whether these norms are over all heads of a token at once."""
    tied: bool = False
    """Whether the head is the embedding if the config does not say."""
    head_dim: int | None = None
    """Head size if the config does not say. None: hidden size / heads."""
    slides: Callable[[Json, int], bool] | None = None
    """Whether the layer with this index is windowed, if the config has a window. None: no layer of
    the family ever is."""
    experts: ExpertLayout | None = None
    """None: every layer has an MLP."""
    is_hybrid: bool = False
    """Whether some layers have gated linear attention (`recurrent_layers`)."""
    gated_attention: bool = False
    """Whether `q_proj` also has a gate for each output of the attention, behind each head's
    query."""
    decode: DecodeLayout | None = None
    """None: generation runs transformers' modules. Exact mode needs it, and neither experts nor
    gated linear attention."""
    tensor_plan: Mapping[str, Split] | None = None
    """Split of a layer's modules, by name in the layer. None: cannot be divided among devices.
    Embedding, head and final norm are treated alike in all families."""
    lora_targets: tuple[str, ...] = PROJECTIONS
    """Modules of a layer that have adapters where the recipe names none."""
    gives_values: bool = True
    """Whether transformers has the backbone with a head for scores, as critics and reward models
    need."""
    unserved_fields: tuple[str, ...] = (*UNSERVED_FIELDS, "final_logit_softcapping")
    """Fields of `config.json` that must be unset."""
    public: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """`config.json` of public models, with the fields that matter here, by name in lower case."""

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Matrices of a layer that can have adapters: the modules of `lora_targets`, and those of
        experts, which only a recipe that names them adapts."""
        return (*self.lora_targets, *(EXPERT_MATRICES if self.experts else ()))

    @property
    def divided_fields(self) -> tuple[str, ...]:
        """Sizes in `config.json` that ranks of tensor parallelism divide."""
        return (*DIVIDED_FIELDS, *(RECURRENT_DIVIDED_FIELDS if self.is_hybrid else ()))

    def has_head_norms(self, config: Json) -> bool:
        """Whether a model of the family with this config has head norms."""
        switch = self.head_norms_switch
        return self.head_norms and (switch is None or bool(config.get(switch)))

    def layer_windows(self, config: Json) -> tuple[int | None, ...]:
        """Number of keys that a query of each layer sees, itself included. None: all before it.
        Reads configurations of any age. Raises KeyError if the number of layers is missing."""
        indices = range(config["num_hidden_layers"])
        window: int | None = config.get("sliding_window")
        if self.slides is None or not window or config.get("use_sliding_window") is False:
            return tuple(None for _ in indices)
        return tuple(window if self.slides(config, i) else None for i in indices)

    def recurrent_layers(self, config: Json) -> RecurrentLayers | None:
        """The layers with gated linear attention; None for a family without. Raises KeyError where
        the config lacks a size of theirs."""
        return RecurrentLayers.of(config) if self.is_hybrid else None

    def expert_layers(self, config: Json) -> dict[int, int]:
        """Position among the layers with experts, by layer index."""
        if self.experts is None:
            return {}
        having = (
            i for i in range(config["num_hidden_layers"]) if self.experts.has_experts(config, i)
        )
        return {index: place for place, index in enumerate(having)}


def sizes(
    model_type: str,
    numbers: tuple[int, int, int, int, int],
    vocab_size: int,
    *,
    context: int,
    tied: bool,
    head_dim: int | None = None,
) -> Json:
    """The `config.json` of a public model, with the fields that matter here. `numbers` are layers,
    hidden size, heads, key heads and intermediate size."""
    num_layers, hidden_size, num_heads, num_kv_heads, intermediate_size = numbers
    return {
        "model_type": model_type,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "head_dim": head_dim or hidden_size // num_heads,
    }
