"""Which layers each stage of a pipeline holds: so many that no stage is slower than it has to be.

    stage_layers(shape, 2)        # qwen3-0.6b: [[range(0, 17)], [range(17, 28)]]

The slowest stage sets the pace of all, and the last one computes the head as well: logits over
152,000 words cost as much as six layers of a model of 0.6B. So layers are divided by what they
cost, in an order that `shape` alone decides: all processes and the plan find the same, on whatever
device. Costs are FLOPs a token of a forward pass, of which backward takes twice as many everywhere;
the embedding looks up rows and counts nothing. What takes longer than its FLOPs say counts so many
more (`hone.planner.compute_time`): attention, and products of experts. All tokens count as if they
went through the head. Those of prompts do not, but the others' logits are computed again in
backward, but for a chunk of them (`trainer.logits_chunk_tokens`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from hone.families.shape import ModelShape

__all__ = ["EXPERTS_RATE", "cut_evenly", "head_cost", "layer_costs", "stage_layers"]

_ROW = 2048
"""Tokens of the rows whose attention counts: how long they are, no model says."""
_ATTENTION = 2.5
"""FLOPs of products that take as long as one of attention in such rows: 2.1 of models as wide as
0.6B, 3.1 of those as wide as 8B."""
EXPERTS_RATE = 0.63
"""Of the rate of dense products, what those of layers with experts reach, with the sorting of their
tokens."""


def stage_layers(
    shape: ModelShape, num_stages: int, virtual_stages: int = 1, *, has_head: bool = True
) -> list[list[range]]:
    """The groups of layers of each stage, [stage][group]; in the last is the head too, where the
    model `has_head` and gives no values in its place.

    Groups are dealt out in turn: all stages get their first, then their second. With one of them in
    each no other cut makes the slowest stage quicker. With several the same holds of layers that
    cost the same; those of models in which some have experts count as their mean, since which of
    them a stage gets follows from the groups of all others. Within a stage its slowest group is as
    quick as can be. Of cuts that are alike in that the most even one is taken, and of these the one
    with fewest layers in front, where most micro-batches are in flight. Each group has a layer at
    least, if there are so many.
    """
    if num_stages == virtual_stages == 1:
        return [[range(shape.num_layers)]]
    costs, head = layer_costs(shape), head_cost(shape) if has_head else 0
    if virtual_stages == 1:
        sizes = [[size] for size in _cut(costs, num_stages, head)]
    else:
        mean = (sum(costs) // len(costs),)
        of_stages = _cut(mean * len(costs), num_stages, head, least=virtual_stages)
        ends = [0] * (num_stages - 1) + [head]
        sizes = [
            _cut(mean * size, virtual_stages, end)
            for size, end in zip(of_stages, ends, strict=True)
        ]
    in_turn = [own[number] for number in range(virtual_stages) for own in sizes]
    groups = [range(*borders) for borders in pairwise((0, *accumulate(in_turn)))]
    return [groups[stage::num_stages] for stage in range(num_stages)]


@lru_cache
def layer_costs(shape: ModelShape) -> tuple[int, ...]:
    """Of each layer, as the module says: FLOPs a token, of products with dense matrices."""
    keys = shape.visible_keys([_ROW]) / _ROW
    attention = _ATTENTION * shape.attention_flops_per_key * keys / shape.num_layers
    dense = round(2 * _params(shape, ()) + attention)
    if not shape.expert_layers:
        return (dense,) * shape.num_layers
    sparse = round(2 * _params(shape, (0,)) / EXPERTS_RATE + attention)
    return tuple(
        sparse if index in shape.expert_layers else dense for index in range(shape.num_layers)
    )


def _params(shape: ModelShape, expert_layers: tuple[int, ...]) -> int:
    """Of one layer, dense or the first of those with experts: what a token passes."""
    one = replace(shape, num_layers=1, expert_layers=expert_layers)
    return one.active_body_params - shape.hidden_size


def head_cost(shape: ModelShape) -> int:
    """Of the logits, in the same unit."""
    return 2 * shape.head_params


def cut_evenly(number: int, num_parts: int) -> list[range]:
    """Parts of `range(number)`, the first of which have one more each where they do not come out
    even."""
    each, left = divmod(number, num_parts)
    starts = [part * each + min(part, left) for part in range(num_parts + 1)]
    return [range(*borders) for borders in pairwise(starts)]


@lru_cache(maxsize=1024)
def _cut(costs: tuple[int, ...], num_parts: int, end: int, *, least: int = 1) -> tuple[int, ...]:
    """How many neighbours each part has, of which the last costs `end` besides: the cut whose
    dearest part is cheapest; of these the one whose squares have the least sum, and then the one
    with fewest in front. Each part has `least` at least, if there are so many. Costs are whole
    numbers, so that no rounding decides."""
    number, least = len(costs), min(least, len(costs) // num_parts)
    sums = [0, *accumulate(costs)]

    def stops(start: int, behind: int) -> range:
        """Where a part may stop, with so many parts behind it."""
        return range(start + least, number - least * behind + 1)

    dearest = {start: sums[-1] - sums[start] + end for start in range(number - least + 1)}
    for behind in range(1, num_parts):
        dearest = {
            start: min(max(sums[stop] - sums[start], dearest[stop]) for stop in own)
            for start in range(number + 1)
            if (own := stops(start, behind))
        }
    # What is left from each start on: the sum of its squares, and the sizes of its parts.
    found = {
        start: ((sums[-1] - sums[start] + end) ** 2, (number - start,))
        for start in range(number - least + 1)
        if sums[-1] - sums[start] + end <= dearest[0]
    }
    for behind in range(1, num_parts):
        found = {
            start: min(
                (own**2 + found[stop][0], (stop - start, *found[stop][1])) for stop, own in fitting
            )
            for start in range(number + 1)
            if (
                fitting := [
                    (stop, own)
                    for stop in stops(start, behind)
                    if stop in found and (own := sums[stop] - sums[start]) <= dearest[0]
                ]
            )
        }
    return found[0][1]
