"""The cut of a pipeline's layers: against all cuts that there are, and what is fixed of it."""

from __future__ import annotations

from itertools import chain, combinations, pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from hone.families import stages
from hone.families.registry import public_configs
from hone.families.shape import ModelShape, public_shape
from hone.families.stages import head_cost, layer_costs, rounds, stage_layers
from tests.tables import table

COSTS = st.integers(1, 12)


def shape_of(name: str, **fields: Any) -> ModelShape:
    return ModelShape.from_config({**public_configs()[name], **fields})


def all_cuts(number: int, num_groups: int) -> list[tuple[int, ...]]:
    """Sizes of groups that have one layer at least."""
    borders = combinations(range(1, number), num_groups - 1)
    return [tuple(b - a for a, b in pairwise((0, *between, number))) for between in borders]


def of_stages(costs: list[int], head: int, sizes: tuple[int, ...], num_stages: int) -> list[int]:
    """What each stage costs whose groups, dealt out in turn, have so many layers."""
    found, start = [0] * num_stages, 0
    for group, size in enumerate(sizes):
        found[group % num_stages] += sum(costs[start : start + size])
        start += size
    found[-1] += head
    return found


def cut(costs: list[int], head: int, num_stages: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Sizes of the groups in the order of their layers, of a model of these costs."""
    shape = shape_of("qwen3-0.6b", num_hidden_layers=len(costs))
    with (
        patch.object(stages, "layer_costs", lambda _: tuple(costs)),
        patch.object(stages, "head_cost", lambda _: head),
    ):
        found = stage_layers(shape, num_stages, virtual_stages)
    groups = [own[number] for number in range(virtual_stages) for own in found]
    assert [*chain(*groups)] == [*range(len(costs))], "neighbours, each of them once"
    return tuple(map(len, groups))


@given(st.lists(COSTS, min_size=2, max_size=9), st.integers(0, 40), st.data())
def test_no_cut_makes_the_slowest_stage_quicker(costs: list[int], head: int, data: Any) -> None:
    num_stages = data.draw(st.integers(2, len(costs)))
    found = cut(costs, head, num_stages)

    def order(sizes: tuple[int, ...]) -> Any:
        each = of_stages(costs, head, sizes, num_stages)
        return max(each), sum(cost**2 for cost in each), sizes

    assert found == min(all_cuts(len(costs), num_stages), key=order)


@given(COSTS, st.integers(0, 40), st.integers(2, 4), st.integers(2, 4), st.data())
def test_no_deal_of_groups_makes_the_slowest_stage_quicker(
    cost: int, head: int, num_stages: int, virtual_stages: int, data: Any
) -> None:
    num_groups = num_stages * virtual_stages
    costs = [cost] * data.draw(st.integers(num_groups, max(num_groups, 10)))
    found = cut(costs, head, num_stages, virtual_stages)

    def slowest(sizes: tuple[int, ...]) -> int:
        return max(of_stages(costs, head, sizes, num_stages))

    def of_groups(sizes: tuple[int, ...]) -> list[int]:
        """The slowest group of each stage."""
        each = [*(cost * size for size in sizes[:-1]), cost * sizes[-1] + head]
        return [max(each[stage::num_stages]) for stage in range(num_stages)]

    cuts = all_cuts(len(costs), num_groups)
    assert slowest(found) == min(map(slowest, cuts))
    totals = of_stages(costs, head, found, num_stages)
    alike = [x for x in cuts if of_stages(costs, head, x, num_stages) == totals]
    assert of_groups(found) == [min(each) for each in zip(*map(of_groups, alike), strict=True)]


def test_of_public_models() -> None:
    """By hand: 0.6B has 16 million weights a layer, which with attention over 2,048 tokens cost 52
    million FLOPs, and its head 311."""
    small = public_shape("qwen3-0.6b")
    assert small is not None
    assert layer_costs(small)[0] == pytest.approx(2 * 15.73e6 + 2.5 * 4 * 2048 * 1024, rel=1e-3)
    assert head_cost(small) == 2 * 151_936 * 1024
    sizes = {
        "qwen3-0.6b": [17, 11],
        "qwen3-8b": [19, 17],
        "llama-3.1-70b": [41, 39],
        "qwen3-30b-a3b": [25, 23],
    }
    for name, expected in sizes.items():
        assert [len(own) for (own,) in stage_layers(shape_of(name), 2)] == expected, name
    groups = stage_layers(small, 2, 2)
    assert groups == [[range(8), range(16, 25)], [range(8, 16), range(25, 28)]]


def test_a_model_without_a_head_is_cut_evenly() -> None:
    """What is left over goes to the last stages, which have fewer micro-batches in flight."""
    shape = shape_of("qwen3-0.6b", num_hidden_layers=30)
    for num_stages, sizes in ((2, [15, 15]), (4, [7, 7, 8, 8])):
        found = stage_layers(shape, num_stages, has_head=False)
        assert [len(own) for (own,) in found] == sizes


def test_layers_with_experts_cost_what_a_token_passes() -> None:
    """Three dense layers in front, by hand: their MLP is 1,536 x 8,192, of each other layer a token
    passes 9 of 129 experts of 1,536 x 1,024 at 0.63 of the rate."""
    config = {
        **public_configs()["glm-4.5-air"],
        "num_hidden_layers": 12,
        "hidden_size": 1536,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 3,
    }
    shape = ModelShape.from_config(config)
    assert shape.expert_layers == tuple(range(3, 12))
    dense, sparse = layer_costs(shape)[2:4]
    head_dim, heads, keys = shape.head_dim, shape.num_heads, shape.num_kv_heads
    attention = 2 * 1536 * head_dim * (heads + keys)
    scores = 2.5 * 4 * heads * head_dim * 1024
    assert dense == pytest.approx(2 * (attention + 3 * 1536 * 8192) + scores, rel=1e-3)
    experts = (config["num_experts_per_tok"] + 1) * 3 * 1536 * 1024 + 128 * 1536
    assert sparse == pytest.approx(2 * (attention + experts) / 0.63 + scores, rel=2e-3)


@table("name", sorted(public_configs()))
def test_trainer_and_plan_read_the_same_cut(name: str) -> None:
    """One has the file, or its public numbers, the other the object that transformers makes of
    it."""
    config = public_configs()[name]
    loaded = AutoConfig.for_model(**config).to_dict()
    plan, trainer = (ModelShape.from_config(x) for x in (config, loaded))
    for sizes in ((2,), (3,), (2, 2)):
        assert stage_layers(plan, *sizes) == stage_layers(trainer, *sizes)


def test_more_stages_than_layers_leave_some_empty() -> None:
    """Rules refuse them; plans of what they refuse are made all the same."""
    shape = shape_of("qwen3-0.6b", num_hidden_layers=3)
    for num_stages, virtual_stages in ((2, 4), (5, 1), (5, 2)):
        found = stage_layers(shape, num_stages, virtual_stages)
        assert sorted(chain(*chain(*found))) == [0, 1, 2]


def test_rounds_are_even() -> None:
    assert [len(together) for together in rounds(11, 4)] == [6, 5]
    assert [len(together) for together in rounds(3, 4)] == [3]
