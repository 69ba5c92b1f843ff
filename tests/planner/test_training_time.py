"""Seconds of an update: against benchmarks/memory.md, and by hand where nothing is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hone.config.hardware import GPUS, Peaks, known_gpu
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.planning import PlanningConfig
from hone.config.tree import PlanConfig
from hone.families.shape import public_shape
from hone.planner.training_time import TrainingTime

ROWS = [2048] * 128
"""Sixteen micro-batches of 16,384 tokens."""


def plan_of(shape: str, *, world_size: int = 1, gpu: Peaks = GPUS[0], **trainer: Any) -> RunPlan:
    found = public_shape(shape)
    assert found is not None
    cfg = PlanConfig.model_validate({"model": {"shape": shape}, "trainer": trainer})
    devices = Devices(kind="cuda", gpu=gpu, per_node=8)
    return resolve(cfg, ModelFacts.of_shape(found), devices, world_size=world_size)


def seconds(plan: RunPlan) -> float:
    return TrainingTime(plan, PlanningConfig(overhead_s=0)).step_s(ROWS, sum(ROWS))


@pytest.mark.parametrize(
    ("shape", "knobs", "measured"),
    [
        ("qwen3-4b", {"recompute": "full"}, 1.267),
        ("qwen3-4b", {"recompute": "selective"}, 1.220),
        ("qwen3-4b", {"recompute": "full", "recompute_every_n_layers": 2}, 1.135),
        ("qwen3-4b", {"offload": "optimizer"}, 1.075),
        ("qwen3-4b", {"offload": "gradients"}, 1.131),
        ("qwen3-1.7b", {"recompute": "full"}, 1.220),
        ("qwen3-1.7b", {"recompute": "selective"}, 1.178),
        ("qwen3-1.7b", {"offload": "optimizer"}, 1.080),
    ],
)
def test_what_saves_memory_costs_what_was_measured(
    shape: str, knobs: dict[str, Any], measured: float
) -> None:
    ratio = seconds(plan_of(shape, **knobs)) / seconds(plan_of(shape))
    assert ratio == pytest.approx(measured, abs=0.06)


def test_states_in_fewer_bits_travel_faster() -> None:
    plain = seconds(plan_of("qwen3-1.7b"))
    full = seconds(plan_of("qwen3-1.7b", offload="optimizer")) - plain
    optimizer = {"state_dtype": "bfloat16"}
    rounded = seconds(plan_of("qwen3-1.7b", offload="optimizer", optimizer=optimizer)) - plain
    assert rounded == pytest.approx(full * 8 / 12)


def test_offloaded_gradients_travel_in_every_micro_batch() -> None:
    """A bus so slow that backward hides next to nothing: sixteen times four bytes a parameter, both
    ways at once, and once more for the step."""
    gpu = replace(GPUS[0], host_bytes_per_s=1e7)
    before = seconds(plan_of("qwen3-1.7b", gpu=gpu, offload="optimizer"))
    found = seconds(plan_of("qwen3-1.7b", gpu=gpu, offload="gradients")) - before
    assert found == pytest.approx(17 * 4 * 1.72e9 / 1e7, rel=0.01)


def test_backward_hides_all_gradients_but_those_of_the_embedding() -> None:
    before = seconds(plan_of("qwen3-4b", offload="optimizer"))
    found = seconds(plan_of("qwen3-4b", offload="gradients")) - before
    embedding = 151_936 * 2560
    assert found == pytest.approx(4 * (16 * embedding + 4.02e9) / 50e9, rel=0.01)


def test_collectives_take_time_where_the_link_is_slow() -> None:
    """Reduction, and gathering with stage 3, hide beside products on NVLink, not over PCIe."""

    def stages(gpu: Peaks) -> list[float]:
        return [
            seconds(plan_of("qwen3-8b", world_size=8, gpu=gpu, parallel={"zero_stage": stage}))
            for stage in (2, 3)
        ]

    second, third = stages(GPUS[0])
    assert second == third
    slow = replace(known_gpu("4090"), link_bytes_per_s=1e9)
    second, third = stages(slow)
    # 7/8 of two times two bytes a parameter, in each of two micro-batches, at 0.7 GB/s
    gathered = 2 * 7 / 8 * 4 * 8.19e9 / 0.7e9
    assert third - second == pytest.approx(gathered, rel=0.01)


def test_processes_that_share_a_row_pay_for_what_they_exchange() -> None:
    plain = seconds(plan_of("qwen3-8b", world_size=4))
    for axis in ("tensor_parallel_size", "ulysses_size"):
        assert seconds(plan_of("qwen3-8b", world_size=4, parallel={axis: 2})) > plain
