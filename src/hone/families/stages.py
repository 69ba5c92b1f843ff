"""Which layers each stage of a pipeline holds: so many that no stage is slower than it has to be.

    stage_layers(shape, 2)        # qwen3-0.6b: [[range(0, 17)], [range(17, 28)]]

The slowest stage sets the pace of all, and the last one computes the head as well: logits over
152,000 words cost as much as six layers of a model of 0.6B. So layers are divided by what they
cost, in an order that `shape` alone decides: all processes and the plan find the same, on whatever
device. Costs are FLOPs a token of a forward pass, of which backward takes twice as many everywhere;
the embedding looks up rows and counts nothing. What takes longer than its FLOPs say counts so many
more (`hone.tools.plan.compute_time`): attention, recurrence, and products of experts. All tokens
count as if they went through the head. Those of prompts do not, but the others' logits are computed
again in backward, but for a chunk of them (`trainer.logits_chunk_tokens`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

from hone.families.shape import ModelShape

__all__ = [
    "EXPERTS_RATE",
    "RECURRENCE",
    "head_cost",
    "layer_costs",
    "most_of_a_round",
    "passes_in_flight",
    "rounds",
    "stage_layers",
]

_ROW = 2048
"""Assumed length of rows in tokens, for the cost of attention. No model says how long rows are."""
_ATTENTION = 2.5
"""FLOPs of matrix products that take as long as one FLOP of attention in such rows: 2.1 for models
as wide as 0.6B, 3.1 for those as wide as 8B."""
RECURRENCE = 16.0
"""FLOPs of matrix products that take as long as one FLOP of the recurrence, with its convolution,
norm and gate, whose kernels wait for memory. For forward and backward on an H200 it was 15.4 with
Qwen3.5 0.8B, 18.8 with 2B and 13.1 with 9B, if products are as fast as those of Qwen3 0.6B, 1.7B
and 8B in the same pass."""
EXPERTS_RATE = 0.63
"""Rate of expert products, including the sorting of their tokens, relative to dense products."""


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
    """Cost of each layer, as the module describes: equivalent FLOPs per token of dense matrix
    products."""
    keys = shape.visible_keys([_ROW]) / _ROW
    attention = _ATTENTION * shape.attention_flops_per_key * keys
    attention /= max(shape.num_attention_layers, 1)

    def cost(index: int) -> int:
        one = shape.part((index,))
        params = one.active_body_params - shape.hidden_size
        products = 2 * params / (EXPERTS_RATE if one.expert_layers else 1)
        recurrence = RECURRENCE * one.recurrence_flops_per_token
        return round(products + (recurrence if one.recurrent_indices else attention))

    return tuple(map(cost, range(shape.num_layers)))


def head_cost(shape: ModelShape) -> int:
    """Cost of the logits, in the same unit."""
    return 2 * shape.head_params


def _cut_evenly(number: int, num_parts: int) -> list[range]:
    """Split `range(number)` into parts. The first parts have one more if they are not even."""
    each, left = divmod(number, num_parts)
    starts = [part * each + min(part, left) for part in range(num_parts + 1)]
    return [range(*borders) for borders in pairwise(starts)]


def rounds(num_batches: int, num_stages: int) -> list[range]:
    """Split the micro-batches of a step into rounds. A round goes through one group of layers
    before the next: S micro-batches or a few more, since with fewer than S, stages would wait for
    the round's return."""
    return _cut_evenly(num_batches, max(num_batches // num_stages, 1))


def most_of_a_round(num_stages: int) -> int:
    """Most micro-batches of a round: one more would make two rounds of them."""
    return 2 * num_stages - 1


def passes_in_flight(
    stage: int, num_stages: int, virtual_stages: int = 1, *, num_batches: int
) -> int:
    """Most forward passes of a stage, each through one of its groups, whose backward is still to
    come.

    With one group, the number with which the stage stays busy while the first pass is on its way to
    the last stage. With several groups, also while the first pass comes back after a round through
    all groups except the last.
    """
    most = num_batches * virtual_stages
    if virtual_stages == 1:
        return min(num_stages - stage, most)
    of_round = len(rounds(num_batches, num_stages)[0])
    return min((virtual_stages - 1) * of_round + 2 * (num_stages - stage) - 1, most)


@lru_cache(maxsize=1024)
def _cut(costs: tuple[int, ...], num_parts: int, end: int, *, least: int = 1) -> tuple[int, ...]:
    """Sizes of parts of neighbouring layers, where the last part has an additional cost `end`.

    The cut whose most expensive part is cheapest; among these the one with the smallest sum of
    squares, then the one with the fewest layers in front. Each part has at least `least` layers if
    there are enough. Costs are whole numbers, so that no rounding decides.
    """
    number, least = len(costs), min(least, len(costs) // num_parts)
    sums = [0, *accumulate(costs)]

    def stops(start: int, behind: int) -> range:
        """Allowed ends of a part that is followed by `behind` parts."""
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
