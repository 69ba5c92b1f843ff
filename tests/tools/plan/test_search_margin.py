"""Plans leave as much memory of a GPU free as predictions have been off, where they can."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hone.config.load import load_config
from hone.config.plan import RunPlan
from hone.config.tree import PlanConfig
from hone.families.shape import public_shape
from hone.hardware import known_gpu
from hone.planner.fitting import changed, does_fit, errors, keeping_margin, leaves_margin
from hone.planner.knobs import RECOMPUTE
from hone.tools.plan import search as searching
from hone.tools.plan.best_settings import (
    _last_resort,  # pyright: ignore[reportPrivateUsage]
    cost_of,
)
from hone.tools.plan.search import Notes, plan_of, plans_that_fit, search
from hone.tools.plan.simulator import Placement
from tests.tables import table


def planned(*flags: str) -> PlanConfig:
    return load_config(PlanConfig, None, flags)


def found_for(cfg: PlanConfig, *, gib: int | None = None) -> dict[Placement, RunPlan]:
    """The plans of the recipe's GPUs, which have `gib` of memory if that is given."""
    assert cfg.model.shape is not None
    assert cfg.plan.gpus is not None
    shape, gpu = public_shape(cfg.model.shape), known_gpu(cfg.plan.gpu)
    assert shape is not None
    gpu = gpu if gib is None else replace(gpu, memory_gib=gib)
    return search(cfg, shape, gpu, cfg.plan.gpus, Notes())


def without_mark(plan: RunPlan) -> RunPlan:
    return replace(plan, devices=replace(plan.devices, keeps_margin=False))


@table(
    "model, gpu, num_gpus",
    [
        ("qwen3-1.7b", "4090", 2),
        ("qwen3-8b", "h200", 2),
        ("qwen3-8b", "h200", 8),
        ("qwen3-32b", "h200", 8),
    ],
)
def test_every_plan_leaves_the_margin_for_little_time(
    model: str, gpu: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings that fill a GPU to the last percent are at most 6 % faster."""
    cfg = planned(f"--model.shape={model}", f"--plan.gpu={gpu}", f"--plan.gpus={num_gpus}")
    found, cost = found_for(cfg), cost_of(cfg)
    assert found
    for plan in found.values():
        assert leaves_margin(without_mark(plan))
    monkeypatch.setattr(searching, "keeping_margin", lambda plan: plan)
    filled = found_for(cfg)
    assert filled.keys() == found.keys()
    assert not all(leaves_margin(plan) for plan in filled.values())
    assert all(cost(found[x]) < 1.06 * cost(filled[x]) for x in found)


def test_what_fits_only_without_the_margin_is_found_and_says_so() -> None:
    """Of 7B on GPUs of 24 GiB, engines of one GPU beside trainers. A plan without the margin keeps
    no other from having it."""
    found = found_for(planned("--model.shape=qwen2.5-7b", "--plan.gpu=4090", "--plan.gpus=4"))
    tight = {x for x, plan in found.items() if not plan.devices.keeps_margin}
    assert tight == {Placement(num_trainers=4, num_engines=4, colocated=True)}
    for plan in found.values():
        plain = without_mark(plan)
        assert does_fit(plain)
        assert leaves_margin(plain) == plan.devices.keeps_margin


def test_caches_are_as_large_as_the_margin_allows() -> None:
    """70B on sixteen GPUs of 80 GB: whole weights take most of the room for caches, of which a
    twentieth of a GPU is half."""
    cfg, placement = (
        planned("--model.shape=llama-3.1-70b", "--plan.gpu=a100", "--plan.gpus=16"),
        Placement(num_trainers=16, num_engines=8, tensor_parallel_size=2, colocated=True),
    )
    shape = public_shape("llama-3.1-70b")
    assert shape is not None
    plans = plans_that_fit(cfg, shape, known_gpu("a100"), 16, Notes())
    plan = next(own for x, own in plans if x == placement)
    assert plan.engine is not None
    share = plan.engine.gpu_memory_utilization
    assert leaves_margin(without_mark(plan))
    more = changed(plan, {"engine.gpu_memory_utilization": round(share + 0.01, 2)})
    assert not does_fit(more)


def test_stages_are_priced_with_micro_batches_that_fit() -> None:
    """8B on sixteen A10: with the stages that would be fastest no two of the longest rows fit, and
    without them they are half as fast. Stages have to gain 5 %."""
    cfg = planned("--model.shape=qwen3-8b", "--plan.gpu=a10", "--plan.gpus=16")
    placement = Placement(num_trainers=16, num_engines=8, tensor_parallel_size=2, colocated=True)
    shape, cost = public_shape("qwen3-8b"), cost_of(cfg)
    assert shape is not None
    plans = plans_that_fit(cfg, shape, known_gpu("a10"), 16, Notes())
    plan = next(own for x, own in plans if x == placement)
    staged = {
        "trainer.parallel.pipeline_parallel_size": 4,
        "trainer.offload": "optimizer",
        "engine.gpu_memory_utilization": cfg.engine.gpu_memory_utilization,
    }
    budgets = [{"trainer.max_tokens_per_microbatch": tokens} for tokens in (2048, 4096)]
    ways = product(RECOMPUTE.choices(plan), (1, 2, 3), budgets)
    others = [
        changed(plan, {**staged, **way, "trainer.parallel.zero_stage": stage, **budget})
        for way, stage, budget in ways
    ]
    known = errors(plan)
    served = [x for x in others if does_fit(x) and errors(x) <= known]
    assert len(served) > 10
    assert cost(plan) <= 1.05 * min(map(cost, served))


def test_states_are_not_rounded_for_the_margin_alone() -> None:
    """Of 0.6B on a GPU of 14 GiB, whose host holds nothing. What has to round them keeps it."""
    cfg = planned(
        "--model.shape=qwen3-0.6b",
        "--plan.gpu=a100",
        "--plan.gpus=1",
        "--plan.host_gib=1",
        "--checkpoint.every_n_steps=0",
    )
    shape = public_shape("qwen3-0.6b")
    assert shape is not None
    placement = Placement(num_trainers=1, num_engines=1, colocated=True)
    base = plan_of(cfg, shape, replace(known_gpu("a100"), memory_gib=14), placement)
    allowed = errors(base)
    assert _last_resort(keeping_margin(base), cost_of(cfg), allowed) is None
    rounded = _last_resort(base, cost_of(cfg), allowed)
    assert rounded is not None
    (found,) = found_for(cfg, gib=14).values()
    for plan in (rounded, found):
        assert plan.trainer is not None
        assert plan.trainer.optimizer.state_dtype == "bfloat16"
        assert plan.devices.keeps_margin
        assert leaves_margin(without_mark(plan))
