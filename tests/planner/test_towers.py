"""Memory of vision towers in plans."""

from __future__ import annotations

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, known_models, resolve
from hone.config.tree import RLConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.families.vision.spec import MAX_PATCHES
from hone.hardware import gpu_peaks
from hone.planner.disk import disk_use
from hone.planner.run_memory import RunMemory

GIB = 1 << 30


def plan_of(name: str, *flags: str) -> RunPlan:
    """A run of a public shape on one H200."""
    base = ("--model.path=some/model", "--data.train=[{path: some/data}]", "--run.device=cuda")
    cfg = load_config(RLConfig, None, [*base, *flags])
    shape = public_shape(name)
    assert shape is not None
    return resolve(
        cfg,
        ModelFacts.of_shape(shape),
        Devices(gpu=gpu_peaks("NVIDIA H200")),
        world_size=1,
        others=known_models(cfg),
    )


def towers(*flags: str) -> dict[str, int]:
    run = RunMemory(plan_of("qwen3-vl-4b", *flags))
    return {x.title: x.parts.get("vision tower", 0) for x in run.phases()}


def test_a_tower_is_in_every_phase_with_its_features_and_a_pass() -> None:
    tower = public_shape("qwen3-vl-4b").tower  # type: ignore[union-attr]
    assert tower is not None
    found = towers("--model.image_cache_gib=0.5")
    assert {*found} >= {"generate", "train"}
    (size,) = {*found.values()}
    work = tower.pass_bytes(1 << 30, 2)
    assert work == MAX_PATCHES * tower.values_per_patch * 2
    assert 0 <= size - 2 * tower.num_params - GIB // 2 <= work
    assert {*towers("--model.image_cache_gib=1.5").values()} == {size + GIB}


def test_each_model_on_a_device_has_a_tower() -> None:
    one, both = (
        {*towers("--model.image_cache_gib=0", f"--algorithm.kl.coef={coef}").values()}
        for coef in (0, 0.1)
    )
    tower = public_shape("qwen3-vl-4b").tower  # type: ignore[union-attr]
    assert tower is not None
    assert both == {size + 2 * tower.num_params for size in one}


def test_a_reward_model_has_a_tower_where_it_lies() -> None:
    """Beside the policy, or on a device of its own; also where the policy reads text alone."""
    judge, flag = public_shape("gemma-3-4b"), "--reward.model.path=google/gemma-3-4b-it"
    assert judge is not None
    assert judge.tower is not None
    cache, size = "--model.image_cache_gib=0.5", 2 * judge.tower.num_params + GIB // 2
    work = judge.tower.pass_bytes(1 << 30, 2)
    alone, beside = towers(cache), towers(cache, flag)
    assert all(size <= beside[name] - alone[name] <= size + work for name in alone)
    apart = towers(cache, flag, "--cluster.num_reward_models=1")
    assert apart == {**alone, "reward model score": size + work}
    # Its passes are longer than the steps of this engine.
    text = plan_of("qwen3-4b", flag, cache, "--engine.max_num_batched_tokens=1024")
    found = [phase.parts["vision tower"] for phase in RunMemory(text).phases()]
    assert found == [size + work] * len(found)


def test_what_is_exported_has_the_tower() -> None:
    plan = plan_of("gemma-3-4b")
    shape = plan.shape
    assert shape is not None
    assert shape.tower is not None
    use = disk_use(plan)
    assert use is not None
    assert use.export == 2 * (shape.num_params + shape.tower.num_params)


def test_a_text_model_has_none() -> None:
    run = RunMemory(plan_of("qwen3-4b"))
    assert all("vision tower" not in phase.parts for phase in run.phases())
