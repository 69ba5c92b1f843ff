"""LoRA over 16-bit or 4-bit base weights: a frozen model with small trained matrices added.

An adapted projection computes `W x + (alpha / rank) B (A x)`; W is frozen, A and B are trained (Hu
et al., arXiv:2106.09685). With `load_in_4bit` W is stored as 4-bit NormalFloat in blocks of 64
values with one scale each (Dettmers et al., arXiv:2305.14314). The dequantised values are the
weights in training, in sampling and in exports alike. Experts that are named have an adapter each
(`hone.models.expert_adapters`).

Engines and exports know nothing of adapters: `adapted.merged_weights` gives them `W + (alpha /
rank) B A` under the model's usual names.

Sending only the adapters to engines was tried and taken out: for 8B with rank 32 a sync took 0.53 s
on one GPU that trainer and engine shared. Merged weights take 0.09 s over NVLink, and no case was
measured in which adapters alone were faster (benchmarks/README.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.families.registry import SPECS
from hone.families.spec import EXPERT_MATRICES
from hone.models.adapted import adapters_of, attach_adapters
from hone.models.contents import whole_of
from hone.models.decoder import decoder_layers
from hone.models.deferred import Weight, WeightSource, defer, take_source
from hone.models.expert_adapters import GroupedExperts
from hone.models.heads import has_value_head, value_head
from hone.models.lora_layer import LoraLayer
from hone.models.nf4 import parts, quantise, unpacked_parts
from hone.models.settings import LoraConfig

if TYPE_CHECKING:
    from hone.models.vision import WholeModel

__all__ = [
    "LoraAdapters",
    "LoraLinear",
    "adapt",
    "peft_adapter",
]

_ADAPTER = frozenset(("lora_A", "lora_B"))
"""Names of an adapter's tensors in the projection."""


class LoraLinear(LoraLayer):
    """A frozen linear layer with its adapter, which replaces an `nn.Linear`."""

    def __init__(self, base: nn.Linear, cfg: LoraConfig) -> None:
        """Take over the parameters of `base`."""
        super().__init__(base.weight, cfg)
        self.bias = cast("nn.Parameter | None", base.bias)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_4bit:
            y = self.nf4_product(x)
            y = y if self.bias is None else y + self.bias
        else:
            y = F.linear(x, self.weight, self.bias)
        return self.add_adapter(y, x, self.lora_A, self.lora_B)

    def add_adapter(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """y [..., out] with what the adapter `a` [rank, in], `b` [out, rank] adds for x [..., in],
        while it is on."""
        if not self.is_on:
            return y
        return y + F.linear(F.linear(x, a), b) * self.scaling


@dataclass(frozen=True, slots=True)
class LoraAdapters:
    """The adapters of a model (`hone.models.adapted.Adapters`)."""

    paths: frozenset[str]
    scaling: float
    is_4bit: bool
    of_experts: frozenset[str] = frozenset()
    """Those of the paths that are the matrices of a layer's experts (`ExpertLora`): a parameter of
    the model without adapters, not a layer."""

    def merged_name(self, path: str) -> str:
        return path if path in self.of_experts else f"{path}.weight"

    @property
    def stored(self) -> frozenset[str]:
        """Names of the tensors that a layer's merged weight is made of."""
        return frozenset(("codes", "scales") if self.is_4bit else ("weight",)) | _ADAPTER

    def merge(self, stored: Mapping[str, Tensor]) -> Tensor:
        """`W + (alpha / rank) B A` in A's dtype, from tensors by their names in the layer."""
        a, b = stored["lora_A"], stored["lora_B"]
        merged = a.new_empty(*b.shape[:-1], a.shape[-1])
        if self.is_4bit:
            bases = unpacked_parts(stored["codes"], stored["scales"], merged.shape, torch.float32)
        else:
            bases = parts(stored["weight"])
        for base, own, own_a, own_b in zip(bases, *map(parts, (merged, a, b)), strict=True):
            product = torch.matmul(own_b.float() * self.scaling, own_a.float())
            own.copy_(product.add_(base))
        return merged


def adapt(model: PreTrainedModel, cfg: LoraConfig, *, seed: int) -> None:
    """Freeze a model and add adapters to the projections of its decoder layers, in place, and to
    its experts if `cfg.target_modules` names them. A value head stays trained as a whole.

    `seed` initialises them on the CPU, so that they are equal on every device. Adapters of a model
    with deferred weights come with these. Raises UserError with `load_in_4bit` for widths that are
    no multiple of a block.
    """
    targets = _targets(model, cfg)
    model.requires_grad_(False)
    if has_value_head(model):
        value_head(model).requires_grad_(True)
    source, dtype = take_source(model), model.dtype
    layers: dict[str, LoraLayer] = {}
    for path, base in targets.items():
        parent, _, name = path.rpartition(".")
        if base is None:
            layers[path] = GroupedExperts.adapt(model.get_submodule(parent), name, cfg)
        else:
            layers[path] = LoraLinear(base, cfg)
            setattr(model.get_submodule(parent), name, layers[path])
    adapters = LoraAdapters(
        frozenset(layers),
        cfg.alpha / cfg.rank,
        cfg.load_in_4bit,
        of_experts=frozenset(path for path, base in targets.items() if base is None),
    )
    attach_adapters(model, adapters)
    if source is not None:
        defer(model, _AdaptedWeights(source, layers, dtype, seed))
        return
    for path, drawn in _draw(layers, dtype, seed):
        layers[path].lora_A.data.copy_(drawn)


@dataclass(frozen=True, slots=True)
class _AdaptedWeights:
    """Weight source of an adapted model: the base model's source and the initialised adapters."""

    base: WeightSource
    layers: Mapping[str, LoraLayer]
    """Layers by path, in the order of initialisation."""
    dtype: torch.dtype
    """Dtype of the base model before quantisation to four bits."""
    seed: int

    def give(self, take: Callable[[Weight], None], *, device: torch.device) -> None:
        def take_base(weight: Weight) -> None:
            path, _, leaf = weight.name.rpartition(".")
            if weight.name in self.layers:  # a parameter of an experts module
                path, leaf = weight.name, "weight"
            layer = self.layers.get(path)
            if layer is None or not layer.is_4bit or leaf != "weight":
                take(weight if layer is None else replace(weight, name=f"{path}.{leaf}"))
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
    layers: Mapping[str, LoraLayer], dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """A new A [rank, in] for each layer, or [experts, rank, in], by path, initialised on the CPU as
    PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    for path, layer in layers.items():
        shape = layer.lora_A.shape
        # All pairs of experts are one matrix here: of three dimensions the scale would be another.
        empty = torch.empty(shape[:-1].numel(), shape[-1], dtype=dtype)
        nn.init.kaiming_uniform_(empty, a=math.sqrt(5), generator=generator)
        yield path, empty.view(shape)


def _targets(model: PreTrainedModel, cfg: LoraConfig) -> dict[str, nn.Linear | None]:
    """The projections to adapt, by path; None for a parameter of an experts module."""
    wanted = cfg.target_modules or SPECS[model.config.model_type].lora_targets
    inside = set(decoder_layers(model).modules())
    targets: dict[str, nn.Linear | None] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if module not in inside:
            continue
        if isinstance(module, nn.Linear) and name in wanted:
            targets[path] = module
        for leaf, _ in module.named_parameters(recurse=False):
            if f"{name}.{leaf}" in EXPERT_MATRICES and f"{name}.{leaf}" in wanted:
                targets[f"{path}.{leaf}"] = None
    return targets


def peft_adapter(
    model: PreTrainedModel, cfg: LoraConfig, named: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Adapters in PEFT's format, for tools that add them to the base model: tensors on the host,
    and configuration.

    `named` are the adapters' tensors, or all of the model's. A value head is among the tensors.
    Adapters of a vision-language model's decoder are named as in the whole model. Those of experts
    are of `target_parameters`.
    """
    is_scorer, whole, adapters = has_value_head(model), whole_of(model), adapters_of(model)
    of_experts = adapters.of_experts if isinstance(adapters, LoraAdapters) else frozenset[str]()
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    for name, tensor in named:
        is_of_experts = name.rpartition(".")[0] in of_experts
        path, _, leaf = (name if whole is None else whole.whole_name(name)).rpartition(".")
        if leaf in _ADAPTER:
            if is_of_experts:
                path, tensor = _of_experts(path, leaf, tensor, of_experts)
            else:
                targets.add(path.rpartition(".")[2])
            tensors[f"base_model.model.{path}.{leaf}.weight"] = tensor.detach().cpu().contiguous()
        elif is_scorer and path == "score":
            tensors[f"base_model.model.{name}"] = tensor.detach().cpu().contiguous()
    document = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scorer else "CAUSAL_LM",
        "modules_to_save": ["score"] if is_scorer else None,
        "base_model_name_or_path": model.config.name_or_path,
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        # The tower has modules of the same names.
        "target_modules": sorted(targets)
        if whole is None or not targets
        else _pattern(whole, targets),
    }
    if of_experts:
        # The end of each name, below the number of the layer.
        names = {".".join(path.split(".")[-3:]) for path in of_experts}
        document["target_parameters"] = sorted(names)
    return tensors, document


def _of_experts(
    path: str, leaf: str, tensor: Tensor, of_experts: Collection[str]
) -> tuple[str, Tensor]:
    """Where PEFT has the A or B of experts, and their matrix [experts * rank, in] or
    [out, rank * experts], in which the experts of a rank are neighbours. It wraps the experts
    module once for each adapted parameter, the last one outside."""
    module, _, name = path.rpartition(".")
    adapted = {own.rpartition(".")[2] for own in of_experts}
    is_inside = name == "gate_up_proj" and "down_proj" in adapted
    matrix = tensor.flatten(0, 1) if leaf == "lora_A" else tensor.permute(1, 2, 0).flatten(1)
    return f"{module}.base_layer" if is_inside else module, matrix


def _pattern(whole: WholeModel, targets: Iterable[str]) -> str:
    """Pattern of these modules of the decoder in the whole model."""
    return rf"{re.escape(whole.spec.decoder_prefix)}.*\.({'|'.join(sorted(targets))})"
