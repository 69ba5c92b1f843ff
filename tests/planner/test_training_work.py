"""The work of a training step, against what torch counts in forward and backward of real models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hone.families.shape import ModelShape
from hone.families.spec import EXPERT_MATRICES
from hone.models import expert_adapters
from hone.models.adapters import adapt
from hone.models.settings import LoraConfig
from hone.planner.roofline import RowPasses, training_work
from hone.trainer.cost import adapter_params
from tests.planner.memory_cases import EXPERTS, HYBRID, UNTIED
from tests.tables import table
from tests.trainer.examples import tiny_model

LENGTH, ROWS = 24, 2
TOKENS = LENGTH * ROWS


def counted(model: Any) -> dict[str, int]:
    """FLOPs of forward and backward over rows that all have logits, by operator."""
    with FlopCounterMode(display=False) as counter:
        ids = torch.arange(TOKENS).view(ROWS, LENGTH) % model.config.vocab_size
        logits = model(input_ids=ids, use_cache=False).logits
        if logits.requires_grad:
            logits.square().sum().backward()
    return {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}


def model_of(fields: dict[str, Any], lora: LoraConfig) -> Any:
    """A tiny model whose products are all counted: torch counts neither a causal attention as a
    half of the square, nor products of several experts at once."""
    model: Any = tiny_model(dtype=torch.float32, **fields)
    model.config._attn_implementation = model.config._experts_implementation = "eager"
    if lora.rank:
        adapt(model, lora, seed=0)
    return model


def each_by_itself(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_product` of which torch counts each expert's product."""
    parts = zip(pairwise([0, *ends.tolist()]), weight, strict=True)
    return torch.cat([rows[start:end] @ own.T for (start, end), own in parts])


def params(shape: ModelShape, *, dims: int = 0, name: str = "") -> int:
    """Parameters inside the layers, and of the last norm, of less than `dims` dimensions, which
    torch multiplies in no matrix product, or of a name."""
    found = [t for t in shape.tensors() if t.in_layer and (len(t.size) < dims or t.name == name)]
    return sum(t.count * t.numel for t in found) + (shape.hidden_size if dims else 0)


ON_EXPERTS = [
    EXPERT_MATRICES,
    EXPERT_MATRICES[:1],
    EXPERT_MATRICES[1:],
    ("o_proj", EXPERT_MATRICES[1]),
]


def lora(*names: str) -> LoraConfig:
    return LoraConfig(rank=3, target_modules=names)


@table(
    "adapters",
    [
        LoraConfig(),
        lora(),
        lora("q_proj", "v_proj"),
        lora("k_proj"),
        lora("o_proj"),
        lora("q_proj", "down_proj"),
        lora("gate_proj", "up_proj", "down_proj"),
        lora("down_proj"),
    ],
)
@table("model", [{}, UNTIED, EXPERTS, HYBRID])
def test_the_work_is_what_torch_counts(model: dict[str, Any], adapters: LoraConfig) -> None:
    """With experts those of a token alone, and of recurrent layers all products with weights."""
    built = model_of(model, adapters)
    found, shape = counted(built), ModelShape.from_config(built.config.to_dict())
    work = training_work(shape, [LENGTH] * ROWS, num_head_tokens=TOKENS, lora=adapters)
    # Norms count as matrices here, as everywhere in the planner.
    not_products = (4 if adapters.rank else 6) * params(shape, dims=2) * TOKENS
    convolved = 2 * params(shape, name="conv1d") * TOKENS * _convolutions(found, adapters)
    assert work.products == found["aten.mm"] + not_products + convolved
    if not shape.recurrent_indices:  # half the square, where torch counts all of it
        assert 2 * work.mixing == found["aten.bmm"]


@table("names", ON_EXPERTS)
@table("dense", [[], [0], [1]])
def test_adapters_of_experts_count_where_a_token_passes_them(
    names: tuple[str, ...], dense: list[int]
) -> None:
    model, own = EXPERTS | {"mlp_only_layers": dense}, lora(*names)
    built = model_of(model, own)
    with (
        patch.object(expert_adapters, "_ALIGNED", 1),
        patch.object(expert_adapters, "grouped_product", each_by_itself),
    ):
        found, shape = counted(built), ModelShape.from_config(built.config.to_dict())
        scored = counted(built.requires_grad_(False))
    work = training_work(shape, [LENGTH] * ROWS, num_head_tokens=TOKENS, lora=own)
    norms = params(shape, dims=2) * TOKENS
    assert work.products == found["aten.mm"] + 4 * norms
    assert 2 * work.mixing == found["aten.bmm"]
    scoring = RowPasses(shape, lora=own, num_scorings=1, num_epochs=0)
    flops = scoring.flops([LENGTH] * ROWS, num_head_tokens=TOKENS)
    assert flops - shape.mixing_flops([LENGTH] * ROWS) == scored["aten.mm"] + 2 * norms
    assert adapter_params(shape, own) == sum(
        p.numel() for name, p in built.named_parameters() if "lora_" in name
    )


def _convolutions(found: dict[str, int], adapters: LoraConfig) -> float:
    """Passes of all convolutions, forward and backward. Where they are trained torch counts them as
    if they had one group."""
    forward = found.get("aten.convolution")
    if forward is None or not adapters.rank:
        return 3.0
    return 1 + found.get("aten.convolution_backward", 0) / forward


def test_layers_before_the_first_adapter_have_no_backward_pass() -> None:
    """Of a hybrid model whose attention alone is adapted: its first layers are recurrent."""
    built = model_of(HYBRID, LoraConfig())
    shape = ModelShape.from_config(built.config.to_dict())
    assert shape.recurrent_indices == (0, 1)
    found = training_work(shape, [LENGTH], num_head_tokens=0, lora=lora("q_proj", "k_proj"))
    attention = shape.attention_flops_per_key * shape.visible_keys([LENGTH])
    scores = 1 + 3 / 4 * 2  # values, of which the first ones need no gradient, are one of four
    assert found.mixing == shape.recurrence_flops_per_token * LENGTH + scores * attention


def test_passes_of_a_step_count_its_scorings_and_adapters() -> None:
    built = model_of({}, LoraConfig())
    shape, own = ModelShape.from_config(built.config.to_dict()), lora("q_proj")
    trained = training_work(shape, [10, 20], num_head_tokens=7, lora=own).flops
    forward = shape.forward_flops([10, 20], num_head_tokens=7)
    forward += 2 * adapter_params(shape, own) * 30
    several = RowPasses(shape, lora=own, num_scorings=1, num_epochs=2)
    assert several.flops([10, 20], num_head_tokens=7) == pytest.approx(forward + 2 * trained)
    values = RowPasses(shape, num_scorings=1, num_epochs=0, has_head=False)
    body = shape.forward_flops([10, 20], num_head_tokens=0)
    assert values.flops([10, 20], num_head_tokens=7) == body
    assert several.flops([], num_head_tokens=0) == 0


def test_a_scoring_with_adapters_is_what_torch_counts() -> None:
    own = lora()
    built = model_of({}, own).requires_grad_(False)
    found, shape = counted(built), ModelShape.from_config(built.config.to_dict())
    scoring = RowPasses(shape, lora=own, num_scorings=1, num_epochs=0)
    mixing = shape.mixing_flops([LENGTH] * ROWS)
    flops = scoring.flops([LENGTH] * ROWS, num_head_tokens=TOKENS)
    assert flops - mixing == found["aten.mm"] + 2 * params(shape, dims=2) * TOKENS
    assert 2 * mixing == found["aten.bmm"]
