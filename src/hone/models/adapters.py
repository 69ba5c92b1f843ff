"""LoRA, over whole or 4-bit base weights: a frozen model that learns by small matrices beside it.

An adapted projection computes `W x + (alpha / rank) B (A x)`; W is frozen, A and B are trained
(Hu et al., arXiv:2106.09685). With `load_in_4bit` W is kept as 4-bit NormalFloat in blocks of 64
values with one scale each (Dettmers et al., arXiv:2305.14314), and is what the four bits say in
training, in sampling and in what is exported alike.

What samples and what is exported knows nothing of adapters: `merged_weights` gives it
`W + (alpha / rank) B A` under the model's usual names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.config.model import LoraConfig
from hone.families.model_facts import NF4_BLOCK
from hone.families.registry import SPECS
from hone.models.decoder import decoder_layers
from hone.models.deferred import Weight, WeightSource, defer, take_source
from hone.models.heads import has_value_head, value_head

__all__ = [
    "LoraLinear",
    "adapt",
    "adapters_off",
    "is_adapted",
    "merged_weights",
    "peft_adapter",
]

_ADAPTER = frozenset(("lora_A", "lora_B"))
"""What is stored of an adapter, by its name in the projection."""


# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as 4-bit NormalFloat: codes [numel / 2] uint8, two in a byte, the first in the upper
    half, and the largest magnitude of each block, [numel / NF4_BLOCK] float32.

    Raises ValueError where the number of values is no multiple of a block.
    """
    if weight.numel() % NF4_BLOCK:
        raise ValueError(f"{tuple(weight.shape)} is no whole number of blocks of {NF4_BLOCK}")
    blocks = weight.detach().float().reshape(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(_NF4, device=weight.device)
    borders = (levels[1:] + levels[:-1]) / 2
    shares = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(shares, borders, out_int32=True).to(torch.uint8).reshape(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantise(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight that `quantise` stored."""
    levels = torch.tensor(_NF4, device=codes.device)
    halves = torch.stack([codes >> 4, codes & 15], dim=-1).reshape(-1, NF4_BLOCK)
    return (levels[halves.int()] * scales[:, None]).to(dtype).reshape(shape)


class _FrozenLinear(torch.autograd.Function):
    """`x W^T` with a 4-bit W that exists in full only while a product reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LoraLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.base_weight(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layer: LoraLinear = ctx.layer
        return grads[0] @ layer.base_weight(grads[0].dtype), None


class LoraLinear(nn.Module):
    """A frozen linear layer and its adapter; in place of an `nn.Linear`."""

    def __init__(self, base: nn.Linear, cfg: LoraConfig) -> None:
        """Takes over the parameters of `base`. A and B are zero: `adapt` draws A, and B stays, so
        that the adapted layer begins as the base."""
        super().__init__()
        weight = base.weight.detach()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scaling = cfg.alpha / cfg.rank
        self.is_on = True
        self.is_4bit = cfg.load_in_4bit
        if self.is_4bit:
            codes, scales = quantise(weight)
            self.register_buffer("codes", codes)
            self.register_buffer("scales", scales)
        else:
            self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = cast("nn.Parameter | None", base.bias)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.lora_A = nn.Parameter(weight.new_zeros(cfg.rank, self.in_features))
        self.lora_B = nn.Parameter(weight.new_zeros(self.out_features, cfg.rank))

    def base_weight(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight [out, in]."""
        if not self.is_4bit:
            return self.weight
        codes, scales = cast(Tensor, self.codes), cast(Tensor, self.scales)
        return dequantise(codes, scales, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_4bit:
            y = _FrozenLinear.apply(x, self)
            y = y if self.bias is None else y + self.bias
        else:
            y = F.linear(x, self.weight, self.bias)
        if not self.is_on:
            return y
        return y + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling

    @property
    def stored(self) -> frozenset[str]:
        """Names of the tensors that its merged weight is made of."""
        return frozenset(("codes", "scales") if self.is_4bit else ("weight",)) | _ADAPTER

    def merge(self, stored: Mapping[str, Tensor]) -> Tensor:
        """`W + (alpha / rank) B A` in A's format, of tensors by their names in this layer."""
        a, b = stored["lora_A"], stored["lora_B"]
        if self.is_4bit:
            shape = self.out_features, self.in_features
            base = dequantise(stored["codes"], stored["scales"], shape, torch.float32)
        else:
            base = stored["weight"]
        product = torch.mm(b.float() * self.scaling, a.float())
        return product.add_(base).to(a.dtype)


def adapt(model: PreTrainedModel, cfg: LoraConfig, *, seed: int) -> None:
    """Freeze a model and give the projections of its decoder layers adapters, in place. A head that
    gives values stays trained as a whole.

    `seed` draws them, on the CPU: they are equal wherever the model lies. Those of a model whose
    weights are deferred come with these. Raises UserError where `cfg.target_modules` names none of
    the model's, and with `load_in_4bit` for widths that are no multiple of a block.
    """
    targets = _targets(model, cfg)
    model.requires_grad_(False)
    if has_value_head(model):
        value_head(model).requires_grad_(True)
    source, dtype = take_source(model), model.dtype
    layers = {path: LoraLinear(base, cfg) for path, base in targets.items()}
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    if source is not None:
        defer(model, _AdaptedWeights(source, layers, dtype, seed))
        return
    for path, drawn in _draw(layers, dtype, seed):
        layers[path].lora_A.data.copy_(drawn)


@dataclass(frozen=True, slots=True)
class _AdaptedWeights:
    """A source of weights: that of the base model, and the adapters that `adapt` draws."""

    base: WeightSource
    layers: Mapping[str, LoraLinear]
    """By path, in the order in which they are drawn."""
    dtype: torch.dtype
    """Of the base model, in which weights are before they become four bits."""
    seed: int

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        def take_base(weight: Weight) -> None:
            path, _, leaf = weight.name.rpartition(".")
            layer = self.layers.get(path)
            if layer is None or not layer.is_4bit or leaf != "weight":
                take(weight)
                return
            codes, scales = quantise(weight.whole().to(device, self.dtype))
            take(Weight.of(f"{path}.codes", codes))
            take(Weight.of(f"{path}.scales", scales))

        self.base.give(take_base, device=device)
        for path, drawn in _draw(self.layers, self.dtype, self.seed):
            take(Weight.of(f"{path}.lora_A", drawn))
            zeros = torch.zeros(self.layers[path].lora_B.shape, dtype=self.dtype)
            take(Weight.of(f"{path}.lora_B", zeros))


def _draw(
    layers: Mapping[str, LoraLinear], dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """A fresh A [rank, in] for each layer, by path, as PEFT draws it; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    for path, layer in layers.items():
        empty = torch.empty(layer.lora_A.shape, dtype=dtype)
        yield path, nn.init.kaiming_uniform_(empty, a=math.sqrt(5), generator=generator)


def _targets(model: PreTrainedModel, cfg: LoraConfig) -> dict[str, nn.Linear]:
    """The projections to adapt, by path."""
    wanted = cfg.target_modules or SPECS[model.config.model_type].lora_targets
    inside = set(decoder_layers(model).modules())
    return {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer in inside and path.rpartition(".")[2] in wanted
    }


def is_adapted(model: nn.Module) -> bool:
    """Whether some layer has an adapter."""
    return any(isinstance(module, LoraLinear) for module in model.modules())


@contextmanager
def adapters_off(model: nn.Module) -> Generator[None]:
    """Inside, the model is the frozen base: a reference that needs no memory of its own."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_on = True


@torch.no_grad()
def merged_weights(
    model: nn.Module, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model without adapters that computes the same, under its names.

    `named` are the adapted model's own tensors, whole, one after the other; no more than those of
    one layer are held at a time. Without adapters they pass through. Raises RuntimeError where
    parts of a projection are missing.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(m, LoraLinear)}
    incomplete: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        path, _, leaf = name.rpartition(".")
        layer = layers.get(path)
        if layer is None or leaf not in layer.stored:
            yield name, tensor
            continue
        held = incomplete.setdefault(path, {})
        held[leaf] = tensor
        if held.keys() == layer.stored:
            del incomplete[path]
            yield f"{path}.weight", layer.merge(held)
    if incomplete:
        missing = [
            f"{path}.{leaf}"
            for path, held in incomplete.items()
            for leaf in sorted(layers[path].stored - held.keys())
        ]
        raise RuntimeError(f"parts of adapted projections are missing: {', '.join(missing)}")


def peft_adapter(
    model: PreTrainedModel, cfg: LoraConfig, named: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Adapters in PEFT's format, for tools that add them to the base model themselves: tensors, on
    the host, and configuration.

    `named` are the adapters' tensors, or all of the model's. A head that gives values is among
    the tensors.
    """
    is_scorer = has_value_head(model)
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    for name, tensor in named:
        path, _, leaf = name.rpartition(".")
        if leaf in ("lora_A", "lora_B"):
            tensors[f"base_model.model.{path}.{leaf}.weight"] = tensor.detach().cpu().contiguous()
            targets.add(path.rpartition(".")[2])
        elif is_scorer and path == "score":
            tensors[f"base_model.model.{name}"] = tensor.detach().cpu().contiguous()
    return tensors, {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scorer else "CAUSAL_LM",
        "modules_to_save": ["score"] if is_scorer else None,
        "base_model_name_or_path": model.config.name_or_path,
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
    }
