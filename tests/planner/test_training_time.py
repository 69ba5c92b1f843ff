"""Seconds of an update: against benchmarks/memory.md, and by hand where nothing is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hone.config.hardware import GPUS, Peaks, known_gpu
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.planning import PlanningConfig
from hone.config.tree import PlanConfig
from hone.families.shape import public_shape
from hone.planner.roofline import training_flops
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
        ("qwen3-4b", {"recompute": "full", "offload_activations": True}, 1.350),
        ("qwen3-4b", {"offload": "optimizer"}, 1.075),
        ("qwen3-4b", {"offload": "gradients"}, 1.131),
        ("qwen3-1.7b", {"recompute": "full"}, 1.220),
        ("qwen3-1.7b", {"recompute": "selective"}, 1.178),
        ("qwen3-1.7b", {"recompute": "full", "recompute_every_n_layers": 2}, 1.108),
        ("qwen3-1.7b", {"recompute": "full", "offload_activations": True}, 1.330),
        ("qwen3-1.7b", {"offload": "optimizer"}, 1.080),
    ],
)
def test_what_saves_memory_costs_what_was_measured(
    shape: str, knobs: dict[str, Any], measured: float
) -> None:
    ratio = seconds(plan_of(shape, **knobs)) / seconds(plan_of(shape))
    assert ratio == pytest.approx(measured, abs=0.06)


def test_layers_computed_again_cost_what_they_are_of_all() -> None:
    """Of 36: `uniform` computes each once more, `block` those that it names."""
    off, full = (seconds(plan_of("qwen3-4b", recompute=mode)) for mode in ("off", "full"))
    assert seconds(plan_of("qwen3-4b", recompute="uniform:5")) == pytest.approx(full)
    nine = seconds(plan_of("qwen3-4b", recompute="block:9"))
    assert nine - off == pytest.approx((full - off) / 4)


def test_stages_wait_for_a_micro_batch_each() -> None:
    """Whose number is that of tokens; each stage sends the sums of its own layers, and no device
    has more to multiply."""
    parallel = {"tensor_parallel_size": 2, "zero_stage": 1}
    slow_link = 1e9
    gpu = replace(GPUS[0], bytes_per_s=1e18, link_bytes_per_s=slow_link, node_bytes_per_s=slow_link)
    shape, tokens, assumed = public_shape("qwen3-4b"), sum(ROWS), PlanningConfig()
    assert shape is not None
    flops = training_flops(shape, np.asarray(ROWS), num_head_tokens=tokens)
    rate = gpu.flops_per_s * assumed.training_share * assumed.training_scaling * 8
    for stages in (2, 4):  # of 8 processes of two tensor parallel ones each
        own = parallel | {"pipeline_parallel_size": stages}
        plan = plan_of(
            "qwen3-4b", world_size=8, gpu=gpu, parallel=own, max_tokens_per_microbatch=2048
        )
        data = 4 // stages
        passes = tokens // data // 2048
        waited = (stages - 1) / passes * flops / rate
        # Two gathers and two sums of half the values, forward and twice backward.
        sums = 8 * 2 * (36 // stages) * 2560 * (tokens / data) / 2
        shards = (data - 1) / data * shape.num_params / 2 / stages * (2 + 4)
        hidden = min(0.8 * flops / rate / passes, shards / (0.7 * slow_link))
        sent = (sums + shards) / (0.7 * slow_link) - hidden
        assert seconds(plan) == pytest.approx(flops / rate + waited + sent, rel=0.01)
        groups = plan_of(
            "qwen3-4b",
            world_size=8,
            gpu=gpu,
            parallel=own | {"virtual_stages": 2},
            max_tokens_per_microbatch=2048,
        )
        assert seconds(plan) - seconds(groups) == pytest.approx(waited / 2, rel=0.01)


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
    """Reduction and gathering hide beside products on NVLink, not over PCIe."""

    def stages(gpu: Peaks, **trainer: Any) -> list[float]:
        return [
            seconds(
                plan_of("qwen3-8b", world_size=8, gpu=gpu, parallel={"zero_stage": n}, **trainer)
            )
            for n in range(4)
        ]

    # Whole sums of eight are added in two micro-batches: two are read, one is written.
    added = 2 * 3 * 4 * 8.19e9 * 7 / 8 / GPUS[0].bytes_per_s
    zeroth, first, second, third = stages(GPUS[0])
    assert second == third
    assert zeroth == first == pytest.approx(second + added, rel=0.01)
    slow = replace(known_gpu("4090"), link_bytes_per_s=1e9, bytes_per_s=1e15)
    zeroth, first, second, third = stages(slow)
    # 7/8 of a byte a parameter at 0.7 GB/s. A step gathers 2 once below stage 3, which gathers
    # 2 x 2 in each of two micro-batches. Gradients of 4 are reduced there, once below stage 2,
    # where less can hide: four fifths of one micro-batch of two. Stage 0 sends them twice.
    a_byte = 7 / 8 * 8.19e9 / 0.7e9
    hidden = 0.8 * (stages(replace(slow, link_bytes_per_s=1e15))[2])
    assert third - second == pytest.approx((8 - 2) * a_byte, rel=0.01)
    assert second - first == pytest.approx(4 * a_byte - hidden / 2, rel=0.01)
    assert zeroth - first == pytest.approx((8 - 6) * a_byte, rel=0.01)
    away = stages(slow, offload="gradients")
    assert away[1] == pytest.approx(away[2]), "gradients on the host are reduced at once"


def test_processes_that_share_a_row_pay_for_what_they_exchange() -> None:
    plain = seconds(plan_of("qwen3-8b", world_size=4))
    for axis in ("tensor_parallel_size", "ulysses_size"):
        assert seconds(plan_of("qwen3-8b", world_size=4, parallel={axis: 2})) > plain
