"""The ways in which a number of trainers can share layers, rows and matrices.

    for layout in layouts(plan): ...     # {}, {"trainer.parallel.tensor_parallel_size": 2}, ...

A layout is a change of a plan: the axes of training (tensor, Ulysses, ring, expert and pipeline
parallelism), and a budget of tokens that holds a device's share of the longest row. This module
says which there are. Which of them fit, and what they cost, is for `best_settings.py`. The
devices are given: who has which is for `search.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from hone.config.plan import RunPlan
from hone.distributed.settings import ulysses_problem
from hone.planner.knobs import Change, gpus_of_a_node

__all__ = ["AXES", "layouts", "numbers_of_stages"]

AXES = tuple(
    f"trainer.parallel.{axis}_size"
    for axis in ("tensor_parallel", "ulysses", "ring", "expert_parallel", "pipeline_parallel")
)
_MAX_STAGES = 16


def layouts(plan: RunPlan, num_stages: int | None = None) -> Iterator[Change]:
    """Ways in which trainers can share matrices, the tokens of a row and experts, in the recipe's
    number of pipeline stages or another one, the recipe's way first, each with token budgets that
    hold a device's share of the longest row."""
    trainer, shape, world = plan.trainer, plan.shape, plan.world_size or 1
    assert trainer is not None
    assert shape is not None
    parallel, budget = trainer.parallel, trainer.max_tokens_per_microbatch
    stages = num_stages or parallel.pipeline_parallel_size
    sharers = world // stages
    sizes = [(parallel.tensor_parallel_size, parallel.ulysses_size, parallel.ring_size)]
    if parallel.replica_size == 1:  # a recipe's own axes stay
        most = min(sharers, gpus_of_a_node(plan))
        powers = [1 << n for n in range(most.bit_length())]
        every = (x for x in product(powers, repeat=3) if math.prod(x) <= most)
        sizes = sorted((x for x in every if sharers % math.prod(x) == 0), key=math.prod)
    shared = ((*size, expert) for size in sizes for expert in _expert_sizes(plan, sharers, size[0]))
    for tensor, ulysses, ring, expert in shared:
        if ulysses_problem(ulysses, shape.num_heads // tensor, shape.num_kv_heads // tensor):
            continue
        layout: dict[str, Any] = {}
        for key, size in zip(AXES, (tensor, ulysses, ring, expert, stages), strict=True):
            if size != getattr(parallel, key.rpartition(".")[2]):
                layout[key] = size
        longest = plan.max_sequence_tokens
        if longest is None or trainer.micro_batch_size is not None:
            yield layout
            continue
        share = -(-longest // (ulysses * ring))
        for tokens in dict.fromkeys(max(each, share) for each in (budget, budget // 4, 0)):
            if tokens == budget:
                yield layout
            elif ulysses * ring == 1 or tokens < longest:  # otherwise sharing rows saves nothing
                yield {**layout, "trainer.max_tokens_per_microbatch": tokens}


def numbers_of_stages(plan: RunPlan) -> list[int]:
    """Numbers of pipeline stages that are tried where the recipe has no axes of its own: powers of
    two, and as many as there are hosts, so that each stage is within one."""
    assert plan.trainer is not None
    assert plan.shape is not None
    if plan.trainer.parallel.replica_size > 1:
        return []
    world = plan.world_size or 1
    most = min(world, plan.shape.num_layers, _MAX_STAGES)
    hosts = world // gpus_of_a_node(plan)
    numbers = {*(1 << n for n in range(1, most.bit_length())), hosts}
    return sorted(n for n in numbers if 1 < n <= most and world % n == 0)


def _expert_sizes(plan: RunPlan, num_sharing: int, tensor: int) -> list[int]:
    """Candidate numbers of processes that share a layer's experts: the recipe's own, or the largest
    possible within a node. Those that share matrices share experts too."""
    assert plan.trainer is not None
    assert plan.shape is not None
    own = plan.trainer.parallel.expert_parallel_size
    if plan.shape.num_experts == 0:
        return [own]
    most = math.gcd(plan.shape.num_experts, num_sharing, gpus_of_a_node(plan))
    sizes = [own] if own > 1 else [*dict.fromkeys((1, most))]
    return [size for size in sizes if size % tensor == 0]
