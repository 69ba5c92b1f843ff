"""Divisions of devices between trainers and the models that can have devices of their own.

    for others in divisions({"critic": 1.0}, 4, per_node=8): ...     # (), (("critic", 1),), ...

A critic, a reference, a teacher or a reward model is on the trainers' devices, or has some for
itself. Within a node every division is a candidate. Of more devices trainers take one node or
several whole ones, as the rules on clusters ask, or few devices; the rest is divided among each
choice of roles in proportion to their work, since of devices that wait for each other the slowest
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from hone.config.plan import RunPlan
from hone.config.tree import PlanConfig
from hone.distributed.settings import RoleName
from hone.planner.run_memory import RunMemory
from hone.tools.plan.simulator import Others

__all__ = ["divisions", "movable_roles"]

_MAX_TRAINERS = 16
"""Numbers of trainers that are tried among more devices than those of a node."""


def movable_roles(cfg: PlanConfig, plan: RunPlan) -> dict[RoleName, float]:
    """Roles of a plan of the recipe `cfg` that a search may give devices of their own, with their
    work: FLOPs a token, up to a factor that all have. Empty where the recipe says how many engines
    there are, as all its devices then follow from its own numbers; a role that it gives devices
    keeps them."""
    if cfg.cluster.num_engines:
        return {}
    run = RunMemory(plan)
    return {
        role.name: max(role.passes, 1.0) * run.shape_of(role).active_body_params
        for role in plan.roles.values()
        if (role.is_scorer or role.name == "critic")
        and not role.has_own_devices
        and role.aliases_weights_of is None
    }


def divisions(
    work: Mapping[RoleName, float], num_devices: int, *, per_node: int
) -> Iterator[Others]:
    """Yield the devices of roles that get some of `num_devices`, the rest of which train: first
    those of no role, then as the module describes. `work` is that of each role which may get
    devices."""
    yield ()
    roles: list[RoleName] = [*work]
    chosen: list[list[RoleName]] = [
        [*x] for n in range(1, len(roles) + 1) for x in combinations(roles, n)
    ]
    if num_devices <= per_node:
        for names in chosen:
            for number in range(len(names), num_devices):
                yield from (_paired(names, sizes) for sizes in _sizes(number, len(names)))
        return
    for names in chosen:
        for num_trainers in _numbers_of_trainers(num_devices, per_node):
            number = num_devices - num_trainers
            if number >= len(names):
                yield _paired(names, _shares([work[name] for name in names], number))


def _paired(names: Sequence[RoleName], sizes: Sequence[int]) -> Others:
    return tuple(zip(names, sizes, strict=True))


def _sizes(number: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide a number into parts of one or more, in order."""
    if num_parts == 1:
        yield (number,)
        return
    for first in range(1, number - num_parts + 2):
        yield from ((first, *rest) for rest in _sizes(number - first, num_parts - 1))


def _numbers_of_trainers(num_devices: int, per_node: int) -> list[int]:
    """Fewer than a node in powers of two, and whole nodes, evenly spread."""
    few = [1 << n for n in range(per_node.bit_length()) if 1 << n < per_node]
    whole = [*range(per_node, num_devices, per_node)]
    if len(whole) > _MAX_TRAINERS:
        picked = np.linspace(0, len(whole) - 1, _MAX_TRAINERS).round().astype(int)
        whole = [whole[index] for index in picked]
    return few + whole


def _shares(work: Sequence[float], number: int) -> list[int]:
    """Divide a number in proportion to work, with one or more for each: each further one goes to
    the share that has most work for each of its devices."""
    shares = [1] * len(work)
    for _ in range(number - len(work)):
        loads = [each / share for each, share in zip(work, shares, strict=True)]
        shares[loads.index(max(loads))] += 1
    return shares
