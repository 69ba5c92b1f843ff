"""Axes of the search besides splits: pipeline stages, and devices for a critic and frozen models.

What is found is compared with enumerations of everything, for few devices, and passes `hone check`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hone.cli.main import main
from hone.config.load import load_config
from hone.config.plan import RunPlan
from hone.config.tree import PlanConfig
from hone.distributed.settings import RoleName
from hone.errors import UserError
from hone.families.shape import ModelShape, public_shape
from hone.families.stages import stage_layers
from hone.hardware import Peaks, known_gpu
from hone.planner.fitting import changed, does_fit, does_fit_host, errors, keeping_margin
from hone.planner.knobs import SEARCHED, choices_that_differ
from hone.planner.run_memory import peak_bytes
from hone.tools.plan import best_settings
from hone.tools.plan import search as searching
from hone.tools.plan.best_settings import (
    _Trial,  # pyright: ignore[reportPrivateUsage]
    cost_of,
)
from hone.tools.plan.comparison import compare
from hone.tools.plan.divisions import divisions
from hone.tools.plan.layouts import layouts
from hone.tools.plan.search import Notes, plan_of, plans_that_fit, search
from hone.tools.plan.simulator import Placement
from hone.tools.plan.training_time import TrainingTime
from tests.tables import table
from tests.tools.plan.test_search import ways_to_recompute

PARALLEL = "trainer.parallel"
AXES = ("tensor_parallel_size", "ulysses_size", "ring_size", "pipeline_parallel_size")


def planned(*flags: str) -> PlanConfig:
    return load_config(PlanConfig, None, [*flags, "--plan.steps=4"])


# -- stages ----------------------------------------------------------------------------------------


def every_plan(base: RunPlan, shape: ModelShape) -> Iterator[RunPlan]:
    """Plans with all ways to share rows, matrices and layers, to recompute, offload and shard."""
    world = base.world_size or 1
    powers = [1 << n for n in range(world.bit_length())]
    levels = ("none", "optimizer", "gradients", "parameters")
    for sizes in product(powers, repeat=4):
        if world % math.prod(sizes):
            continue
        axes = {f"{PARALLEL}.{axis}": n for axis, n in zip(AXES, sizes, strict=True)}
        num_layers = max(len(group) for (group,) in stage_layers(shape, sizes[-1]))
        for way in product(ways_to_recompute(num_layers), levels, (0, 1, 2, 3)):
            (mode, every, away), level, stage = way
            yield changed(
                base,
                {
                    **axes,
                    "trainer.recompute": mode,
                    "trainer.recompute_every_n_layers": every,
                    "trainer.offload_activations": away,
                    "trainer.offload": level,
                    f"{PARALLEL}.zero_stage": stage,
                },
            )


SLOW = {"link_bytes_per_s": 1.5e9}


@table(
    "name, model, link, goal, wins",
    [
        ("a100", "qwen3-4b", {}, "throughput", False),
        ("a100", "qwen3-4b", SLOW, "throughput", True),
        ("4090", "qwen3-1.7b", {}, "memory", False),
    ],
)
def test_no_way_to_share_layers_is_better_than_the_one_found(
    name: str, model: str, link: dict[str, float], goal: str, wins: bool
) -> None:
    """Of four trainers beside engines: all axes, also where others are faster than stages."""
    tree: dict[str, Any] = {
        "model": {"shape": model},
        "trainer": {"micro_batch_size": 4, "max_tokens_per_microbatch": 8192},
        "plan": {"gpus": 5, "gpu": name, "goal": goal, "steps": 4},
        "cluster": {"num_trainers": 4, "num_engines": 1},
        "checkpoint": {"every_n_steps": 0},
    }
    cfg, shape = PlanConfig.model_validate(tree), public_shape(model)
    assert shape is not None
    gpu: Peaks = replace(known_gpu(name), **link)
    placement = Placement(num_trainers=4, num_engines=1)
    found = search(cfg, shape, gpu, 5, Notes())[placement]
    rows, num_trained = [256 + 800] * 512, 800 * 512

    def cost(plan: RunPlan) -> float:
        if goal == "memory":
            value = float(peak_bytes(plan))
        else:
            value = TrainingTime(plan, cfg.plan).step_s(rows, num_trained)
        axes = plan.policy.axes
        is_shared = axes.tensor * axes.context * axes.pipeline > 1
        return value * (1.05 if is_shared else 1.0)

    base = keeping_margin(plan_of(cfg, shape, gpu, placement))
    base = changed(base, {"engine": found.engine})
    known = errors(base)
    plans = sorted(((cost(x), n, x) for n, x in enumerate(every_plan(base, shape))))
    least = next(c for c, _, plan in plans if does_fit(plan) and errors(plan) <= known)
    # None of these plans has logits in one chunk.
    chunk = {"trainer.logits_chunk_tokens": cfg.trainer.logits_chunk_tokens}
    assert cost(changed(found, chunk)) == pytest.approx(least, rel=1e-9)
    assert (found.policy.axes.pipeline > 1) == wins


@table("goal, host_gib", [("throughput", None), ("throughput", 40), ("memory", None)])
def test_the_plan_found_by_bounds_costs_least_of_all(goal: str, host_gib: int | None) -> None:
    """Of two trainers beside an engine: all layouts with all combinations of choices. No layout
    that costs as much as the best is looked at, so that another may be nearer to the recipe."""
    tree: dict[str, Any] = {
        "model": {"shape": "qwen3-4b"},
        "trainer": {"max_tokens_per_microbatch": 8192},
        "plan": {"gpus": 3, "gpu": "4090", "goal": goal, "host_gib": host_gib},
        "cluster": {"num_trainers": 2, "num_engines": 1},
        "checkpoint": {"every_n_steps": 0},
    }
    cfg, shape = PlanConfig.model_validate(tree), public_shape("qwen3-4b")
    assert shape is not None
    base = plan_of(cfg, shape, known_gpu("4090"), Placement(num_trainers=2, num_engines=1))
    allowed, cost = errors(base), cost_of(cfg)
    plans: list[tuple[float, RunPlan]] = []
    laid_out = [changed(base, layout) for layout in layouts(base)]
    for plan in laid_out:
        axes = plan.policy.axes
        factor = 1.05 if axes.tensor * axes.context > 1 else 1.0
        for changes in product(*(choices_that_differ(knob, plan) for knob in SEARCHED)):
            change = {key: value for each in changes for key, value in each.items()}
            after = changed(plan, change)
            plans.append((factor * cost(after), after))
    plans.sort(key=lambda each: each[0])
    least = next(
        each
        for each, plan in plans
        if does_fit_host(plan) and does_fit(plan) and errors(plan) <= allowed
    )
    trial = _Trial(base.policy.axes, allowed, cost)
    rank, found = trial.best_of(laid_out, SEARCHED, (math.inf, 0))
    assert found is not None
    assert rank[0] == least
    assert does_fit_host(found)
    assert does_fit(found)
    assert trial.best_of(laid_out, SEARCHED, (least, 0)) == ((least, 0), None)


def test_engines_without_room_for_a_sample_end_a_search_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8B on four GPUs of 24 GB: engines of one GPU have no cache with half of its memory. What is
    found is what a search through all layouts finds."""
    cfg = planned("--model.shape=qwen3-8b", "--plan.gpu=4090", "--plan.gpus=4")
    shape, gpu = public_shape("qwen3-8b"), known_gpu("4090")
    assert shape is not None
    lacks_cache, found = best_settings._lacks_cache, list[bool]()  # pyright: ignore[reportPrivateUsage]

    def recorded(plan: RunPlan) -> bool:
        found.append(lacks_cache(plan))
        return found[-1]

    monkeypatch.setattr(best_settings, "_lacks_cache", recorded)
    early = search(cfg, shape, gpu, 4, Notes())
    monkeypatch.setattr(best_settings, "_lacks_cache", lambda plan: False)
    assert any(found)
    assert not all(found)
    assert search(cfg, shape, gpu, 4, Notes()) == early


def without_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_settings, "numbers_of_stages", lambda plan: [])


def test_stages_are_taken_where_they_are_faster_over_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """70B on two hosts of A100: whole gradients of all layers go over the links between hosts, or
    those of a stage within one."""
    cfg = planned("--model.shape=llama-3.1-70b", "--engine.tensor_parallel_size=8")
    shape, gpu = public_shape("llama-3.1-70b"), known_gpu("a100")
    assert shape is not None
    wanted = Placement(num_trainers=16, num_engines=2, tensor_parallel_size=8, colocated=True)

    def trained() -> tuple[int, float]:
        plans = plans_that_fit(cfg, shape, gpu, 16, Notes())
        plan = next(plan for placement, plan in plans if placement == wanted)
        seconds = TrainingTime(plan, cfg.plan).step_s([256 + 800] * 512, 800 * 512)
        return plan.policy.axes.pipeline, seconds

    stages, with_s = trained()
    without_stages(monkeypatch)
    one, without_s = trained()
    assert stages > 1
    assert one == 1
    assert with_s < without_s / 1.02


QLORA_70B = (
    "--model.shape=llama-3.1-70b",
    "--plan.gpu=a10",
    "--plan.gpus=16",
    "--model.lora.rank=16",
    "--model.lora.load_in_4bit=true",
)


def test_stages_are_found_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base of 70B in four bits, which is divided by layers alone, takes 40 GB."""
    outcomes = compare(planned(*QLORA_70B)).outcomes
    assert outcomes
    for outcome in outcomes:
        stages = outcome.plan.policy.axes.pipeline
        assert 40e9 / stages < 22 * 2**30
        assert does_fit(outcome.plan)
    without_stages(monkeypatch)
    with pytest.raises(UserError, match="cannot be split"):
        compare(planned(*QLORA_70B))


def test_stages_of_a_recipe_stay() -> None:
    cfg = planned(
        "--model.shape=qwen3-1.7b", "--plan.gpus=4", f"--{PARALLEL}.pipeline_parallel_size=2"
    )
    assert {x.plan.policy.axes.pipeline for x in compare(cfg).outcomes} == {2}


# -- devices of others -----------------------------------------------------------------------------

PPO = ("--algorithm.advantage=gae", "--trainer.num_epochs=2")
SMALL = (
    "--model.shape=qwen3-1.7b",
    "--rollout.prompts_per_step=8",
    "--rollout.n_samples_per_prompt=8",
    "--plan.lengths.median=400",
)
HOLD_UP = "--plan.training_scaling=0.8"
"""Trainers that hold each other up, so that roles which train apart gain."""


@pytest.mark.parametrize(
    ("flags", "num_gpus", "roles"),
    [
        ((*PPO, "--plan.gpu=h200", HOLD_UP), 4, ("critic",)),
        ((*PPO, "--plan.gpu=h200", "--algorithm.kl.coef=0.1"), 4, ("critic", "reference")),
        (("--plan.gpu=a100", "--reward.model.path=Qwen/Qwen3-4B"), 4, ("reward_model",)),
        (("--plan.gpu=h200", "--teacher.path=Qwen/Qwen3-4B", HOLD_UP), 4, ("teacher",)),
    ],
)
def test_no_division_is_faster_than_the_one_found(
    flags: tuple[str, ...], num_gpus: int, roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside all runs whose recipes say which roles have how many devices."""
    cfg = planned(*SMALL, *flags, f"--plan.gpus={num_gpus}")
    for module in (searching, best_settings):
        monkeypatch.setattr(module, "MIN_SIGNIFICANT_RATIO", 1.0)
    found = max(x.run.tokens_per_s for x in compare(cfg).outcomes)
    monkeypatch.setattr(searching, "movable_roles", lambda cfg, plan: {})
    best, num_divisions = 0.0, 0
    for numbers in product(range(num_gpus - 1), repeat=len(roles)):
        if sum(numbers) >= num_gpus:
            continue
        words = [f"--cluster.num_{role}s={n}" for role, n in zip(roles, numbers, strict=True) if n]
        asked = planned(*SMALL, *flags, f"--plan.gpus={num_gpus}", *words)
        with suppress(UserError):  # where trainers and engines fit nowhere
            outcomes = compare(asked).outcomes
            best = max(best, *(x.run.tokens_per_s for x in outcomes))
            num_divisions += 1
    assert num_divisions > 1
    assert found == pytest.approx(best, rel=1e-9)


@table("scaling, wins", [(0.96, False), (0.8, True)])
def test_a_critic_gets_devices_where_that_pays(scaling: float, wins: bool) -> None:
    """PPO of 4B on three H200 whose trainers reach 0.96 of their own speed together, or 0.8."""
    flags = ("--model.shape=qwen3-4b", "--plan.gpus=3", f"--plan.training_scaling={scaling}")
    outcomes = compare(planned(*flags, *PPO, "--rollout.prompts_per_step=8")).outcomes
    beside = [x for x in outcomes if x.run.placement.num_engines == 1]
    apart = [x for x in beside if not x.run.placement.colocated]
    assert apart
    assert any(x.run.placement.others for x in apart) == wins


def test_a_reward_model_gets_devices_where_it_holds_up_the_trainers() -> None:
    """Beside remote engines it is on the first trainer alone, where all others wait for it."""
    flags = (*SMALL, "--plan.gpus=4", "--plan.gpu=a100", "--reward.model.path=Qwen/Qwen3-8B")
    best = compare(planned(*flags)).outcomes[0]
    ((role, number),) = best.run.placement.others
    assert role == "reward_model"
    assert f" + {number} reward model" in best.name
    assert best.split.endswith(f" + {number}m")


@pytest.mark.parametrize(
    "flags",
    [
        (*SMALL, *PPO, "--plan.gpus=4", "--plan.gpu=h200", HOLD_UP),
        (*SMALL, "--plan.gpus=4", "--plan.gpu=a100", "--reward.model.path=Qwen/Qwen3-8B"),
        (*SMALL, *PPO, "--plan.gpus=16", "--plan.gpu=h200", "--algorithm.kl.coef=0.1", HOLD_UP),
        QLORA_70B,
    ],
)
def test_hone_check_has_nothing_to_say_of_a_plan(
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    at_end = ("--checkpoint.every_n_steps=0", "--plan.steps=4")
    assert main(["plan", *flags, *at_end, "--output=plan.yaml"]) == 0
    capsys.readouterr()
    cfg = planned(*flags)
    shape = cfg.model.shape
    assert shape is not None
    path = {"llama-3.1-70b": "meta-llama/Llama-3.1-70B"}.get(shape, f"Qwen/Q{shape[1:]}")
    words = ["check", "rl", "plan.yaml", "--gpu", cfg.plan.gpu, "--json"]
    launch = compare(cfg).recommended
    if not launch.plan.cluster.is_used:
        words += ["--nproc", f"{launch.run.placement.num_trainers}"]
    assert main([*words, f"--model.path={path}", "--data.train.0.path=a/b"]) == 0
    found = [x["message"] for x in json.loads(capsys.readouterr().out)["findings"]]
    is_tight = ["hardly fits into" in message for message in found]
    assert is_tight == [True] * (not launch.leaves_margin), found


# -- divisions -------------------------------------------------------------------------------------


def test_every_division_of_a_host_is_a_candidate() -> None:
    work: dict[RoleName, float] = {"critic": 1.0, "reference": 1.0}
    found = [*divisions(work, 4, per_node=8)]
    expected = {
        tuple((role, n) for role, n in (("critic", c), ("reference", r)) if n)
        for c, r in product(range(4), repeat=2)
        if c + r < 4
    }
    assert set(found) == expected
    assert len(found) == len(expected)


def test_over_hosts_trainers_take_whole_ones_and_the_rest_is_shared_by_work() -> None:
    work: dict[RoleName, float] = {"critic": 3.0, "reference": 1.0}
    found = [*divisions(work, 32, per_node=8)]
    trainers = {32 - sum(n for _, n in others) for others in found}
    assert trainers == {1, 2, 4, 8, 16, 24, 32}
    assert (("critic", 6), ("reference", 2)) in found
    assert (("critic", 18), ("reference", 6)) in found
