"""Values for settings that are `auto`, the same in all processes of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hone.config.plan import RunPlan
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.hardware import GIB, Peaks, gpu_peaks
from hone.planner.recompute import KEY, chosen_values, is_open, settled

__all__ = ["settle"]

_log = logging.getLogger(__name__)


def settle(plan: RunPlan, everyone: Mesh, kept: Mapping[str, str]) -> RunPlan:
    """The plan of a training run with a value in place of `trainer.recompute auto`, by the memory
    of the smallest GPU of all processes. What the first process has in `kept`, by key, stays. The
    first process logs the value. Collective.

    Raises UserError where the sizes of the model are not known.
    """
    if not is_open(plan):
        return plan
    gpu = _smallest(everyone.gather(_gpu_of(everyone.device)))
    there = replace(plan, devices=replace(plan.devices, gpu=gpu))
    found = settled(there, kept=everyone.broadcast(kept))
    values = chosen_values(found)
    everyone.agree(f"the values for {KEY}", values)
    if not values:
        raise UserError(
            f"{KEY} is auto, which is chosen by predicted memory, and the sizes of model.path "
            f"'{plan.policy.model.path}' are not known. Set {KEY} to off, selective or full."
        )
    if everyone.is_first:
        for key, value in values.items():
            _log.info("%s auto is %s: %s", key, value, found.chosen[key])
    return replace(found, devices=plan.devices)


def _gpu_of(device: torch.device) -> Peaks | None:
    """The GPU of this process with its memory, of a part of a GPU the memory of that part; None on
    a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    total = round(properties.total_memory / GIB)
    known = gpu_peaks(properties.name)
    if known is None:  # its rates have no part in what fits
        return Peaks(properties.name, math.nan, math.nan, "measured", memory_gib=total)
    return replace(known, memory_gib=min(known.memory_gib or total, total))


def _smallest(gpus: Sequence[Peaks | None]) -> Peaks | None:
    """The one with the least memory."""
    there = [gpu for gpu in gpus if gpu is not None]
    return min(there, key=lambda gpu: gpu.memory_gib or 0, default=None)
