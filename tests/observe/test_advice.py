"""Advice on speed and memory: what is changed, to which value, and where nothing is said.

Metrics are made up here. `tests/loops/test_symptoms.py` produces the symptoms that a CPU can have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import RLConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.hardware import GPUS
from hone.observe.advice import lowered_caps, more_reward_workers, more_sequences
from hone.observe.alarms import QUIET_STEPS, Alarm, Alarms

Scalars = dict[str, float]
HEALTHY: Scalars = {
    "time/step_s": 20.0,
    "time/generate_s": 8.0,
    "time/train_s": 11.0,
    "time/sync_s": 0.1,
    "perf/engine_busy_s": 8.0,
    "perf/gpu_utilization": 0.95,
    "perf/R_gen": 0.6,
    "rollout/samples": 256.0,
    "rollout/group_size/min": 8.0,
    "rollout/prompt_tokens/mean": 256.0,
    "rollout/cached_token_share": 0.8,
    "rollout/completion_tokens/mean": 540.0,
    "rollout/completion_tokens/max": 3000.0,
    "mem/gpu_peak_gib": 80.0,
    "mem/engine_cache_gib": 40.0,
}
APART = {"num_engines": 2, "num_trainers": 4}


def plan_of(*, shape: str = "qwen3-1.7b", **sections: Any) -> RunPlan:
    cfg = RLConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": [{"path": "t"}], "max_prompt_tokens": 4096},
            **sections,
            "rollout": {"prompts_per_step": 32, "max_completion_tokens": 3072}
            | sections.get("rollout", {}),
        }
    )
    facts = ModelFacts.of_shape(found) if (found := public_shape(shape)) is not None else None
    world = cfg.cluster.num_trainers if cfg.cluster.is_used else 1
    return resolve(cfg, facts, Devices(kind="cuda", gpu=GPUS[0]), world_size=world)


def raised_in(plan: RunPlan, metrics: Scalars, *, max_staleness: int = 0) -> dict[str, Alarm]:
    """Alarms of equal steps, but for their versions, by name."""
    alarms, raised = Alarms(max_staleness=max_staleness, plan=plan), list[Alarm]()
    for step in range(1, 7):
        version = {"rollout/weight_version/max": float(step)}
        raised += alarms.check(step, HEALTHY | metrics | version)
    return {alarm.name: alarm for alarm in raised}


NAMED: dict[str, tuple[dict[str, Any], Scalars, dict[str, Any]]] = {
    # alarm: sections, metrics, the change it must name
    "engine_queue": (
        {"engine": {"max_num_seqs": 32}},
        {"engine/waiting/mean": 40.0, "engine/kv_cache_usage/max": 0.2},
        {"engine.max_num_seqs": 128},
    ),
    "preemptions": (
        {"engine": {"kv_cache_gib": 2.0}},
        {"engine/preemptions": 60.0, "mem/engine_cache_gib": 2.0},
        {"engine.kv_cache_gib": 4.0},
    ),
    "slow_rewards": (
        {"reward": {"num_workers": 2, "functions": [{"fn": "a_package.scores:score"}]}},
        {"perf/wait_for_rewards_share": 0.4, "time/reward/p99_s": 0.06},
        {"reward.num_workers": 8},
    ),
    "long_tail": (
        {},
        {"time/generate_s": 14.0, "perf/engine_busy_s": 14.0},
        {"rollout.oversample_prompts": 8, "algorithm.correction.kind": "tis"},
    ),
    "slow_generation": (
        {"engine": {"enable_prefix_caching": False}},
        {"rollout/cached_token_share": 0.0, "rollout/prompt_tokens/mean": 3500.0},
        {"engine.enable_prefix_caching": True},
    ),
    "low_gpu_utilization": (  # the metric is a probe's, faked
        {"trainer": {"recompute": "full"}},
        {"perf/gpu_utilization": 0.5},
        {"trainer.recompute": "off"},
    ),
}


@pytest.mark.parametrize(
    ("fn", "on_six_cores"),
    [("exact_match", 6), ("code_tests", 6), ("a_package.scores:score", 8), ("http://s:8000", 8)],
)
def test_functions_that_compute_get_no_more_workers_than_cores(
    fn: str, on_six_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the user's own and services may wait for something else. Where the wait is that for a
    single call, or for samples on their way to calls that take no time, more workers shorten
    nothing."""
    plan = plan_of(reward={"num_workers": 2, "functions": [{"fn": fn}]})
    assert isinstance(plan.config, RLConfig)
    waits = {"perf/wait_for_rewards_share": 0.4, "time/step_s": 20.0, "time/reward/p99_s": 0.06}
    waits["rollout/samples"] = 256.0
    useless = (waits | {"time/reward/p99_s": 8.0}, waits | {"time/reward/p99_s": 0.0001})
    for cores, number in ((6, on_six_cores), (2, 8 if on_six_cores == 8 else None)):
        monkeypatch.setattr("hone.observe.advice.num_usable_cores", lambda cores=cores: cores)
        found = [x["reward.num_workers"] for x in more_reward_workers(plan, plan.config, waits)]
        assert found == ([] if number is None else [number])
        for others in useless:
            assert [*more_reward_workers(plan, plan.config, others)] == []


def test_memory_to_spare_goes_to_logits_where_nothing_else_is_computed_again() -> None:
    idle = {"perf/gpu_utilization": 0.5}
    small = "qwen3-0.6b"
    found = raised_in(plan_of(shape=small), idle)["low_gpu_utilization"]
    assert found.change == {"trainer.logits_chunk_tokens": 16384}
    found = raised_in(plan_of(shape=small, trainer={"logits_chunk_tokens": 16384}), idle)
    assert "trainer.logits_chunk_tokens" not in found["low_gpu_utilization"].change


@pytest.mark.parametrize(
    ("sections", "usage", "tried"),
    [
        ({}, 0.01, [256, 128, 64, 40]),  # all of 32 prompts x 8 samples
        ({"cluster": APART}, 0.01, [128, 64, 40]),  # by two engines
        ({"cluster": APART, "pipeline": {"max_staleness": 1}}, 0.01, [256, 128, 64, 40]),
        ({}, 0.2, [128, 64, 40]),
        ({}, 0.6, [40]),
        ({}, 0.95, []),
        ({}, None, [64, 40]),
    ],
)
def test_more_sequences_go_up_to_all_that_may_be_under_way_and_find_room(
    sections: dict[str, Any], usage: float | None, tried: list[int]
) -> None:
    """The batches that are sampled ahead are under way. Only where it is full is the cache what is
    too small."""
    plan = plan_of(engine={"max_num_seqs": 32, "kv_cache_gib": 2.0}, **sections)
    assert isinstance(plan.config, RLConfig)
    now = {} if usage is None else {"engine/kv_cache_usage/max": usage}
    found = [*more_sequences(plan, plan.config, now)]
    if tried:
        assert found == [{"engine.max_num_seqs": number} for number in tried]
    else:
        assert found == [{"engine.kv_cache_gib": size} for size in (4.0, 3.0)]


@pytest.mark.parametrize(("oversample", "most"), [(0, 256), (4, 288)])
def test_samples_that_are_carried_over_are_under_way_too(oversample: int, most: int) -> None:
    plan = plan_of(engine={"max_num_seqs": 64}, rollout={"oversample_prompts": oversample})
    assert isinstance(plan.config, RLConfig)
    change = next(more_sequences(plan, plan.config, {"engine/kv_cache_usage/max": 0.01}))
    assert change == {"engine.max_num_seqs": most}


def test_a_setting_that_breaks_a_rule_or_does_not_fit_is_not_named() -> None:
    """Where all are, alarms that give nothing else to go by are silent."""
    waits = {"engine/waiting/mean": 40.0, "engine/kv_cache_usage/max": 0.99}
    full: dict[str, Any] = {"max_num_seqs": 32, "kv_cache_gib": 50.0}
    assert raised_in(plan_of(engine=full), waits)["engine_queue"].change == {
        "engine.kv_cache_gib": 75.0  # 100 do not fit an H200 with its trainer
    }
    assert raised_in(plan_of(engine=full | {"kv_cache_gib": 70.0}), waits) == {}
    eager = {"enforce_eager": True}
    assert raised_in(plan_of(engine=eager), {"perf/R_gen": 0.1})["slow_generation"].change == {
        "engine.enforce_eager": False
    }
    assert raised_in(plan_of(), {"perf/R_gen": 0.1}) == {}
    idle = {"time/generate_s": 0.1, "perf/engine_busy_share": 0.2}
    split = {"parallel": {"tensor_parallel_size": 2}}  # which five trainers cannot be
    plan = plan_of(cluster=APART, pipeline={"max_staleness": 2}, trainer=split)
    assert raised_in(plan, idle, max_staleness=2)["engines_wait"].change == {}


def test_a_queue_is_named_before_a_long_tail() -> None:
    """With samples that wait for a place it is not the longest one that a step waits for."""
    tail = {"time/generate_s": 14.0, "perf/engine_busy_s": 14.0}
    queue = tail | {"engine/waiting/mean": 40.0}
    assert raised_in(plan_of(), tail).keys() == {"long_tail"}
    assert raised_in(plan_of(engine={"max_num_seqs": 32}), queue).keys() == {"engine_queue"}


@pytest.mark.parametrize("name", NAMED)
def test_advice_names_a_setting_and_a_value(name: str) -> None:
    sections, metrics, change = NAMED[name]
    plan = plan_of(**sections)
    assert raised_in(plan, {}) == {}
    found = raised_in(plan, metrics)[name]
    assert found.change == change
    assert found.is_tuning
    for key, value in change.items():
        assert f"{key} to {str(value).lower().removesuffix('.0')} in place of" in str(found)


def test_advice_says_what_was_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.rewards.settings.num_usable_cores", lambda: 2)
    sections, metrics, _ = NAMED["slow_rewards"]
    plan = plan_of(reward=sections["reward"] | {"num_workers": None})
    found = raised_in(plan, metrics)["slow_rewards"]
    assert "Set reward.num_workers to 8 (it is unset)." in str(found)


def test_trainers_and_engines_that_wait_get_each_others_devices() -> None:
    plan = plan_of(cluster=APART, pipeline={"max_staleness": 2})
    waits = {"time/generate_s": 12.0, "time/train_s": 8.0, "perf/engine_busy_share": 0.95}
    found = raised_in(plan, waits, max_staleness=2)["training_waits"]
    assert found.change == {"cluster.num_engines": 3, "cluster.num_trainers": 3}
    tail = waits | {"perf/engine_busy_share": 0.5}
    found = raised_in(plan, tail, max_staleness=2)["training_waits"]
    assert found.change == {"pipeline.max_staleness": 3}
    idle = {"time/generate_s": 0.1, "perf/engine_busy_share": 0.2, "time/train_s": 19.0}
    found = raised_in(plan, idle, max_staleness=2)["engines_wait"]
    assert found.change == {"cluster.num_engines": 1, "cluster.num_trainers": 5}


def test_engines_that_wait_ask_for_less_staleness_only_where_there_is_less() -> None:
    """With 1 the next is 0, by which nothing is sampled ahead."""
    idle = {"time/generate_s": 0.1, "perf/engine_busy_s": 8.0, "perf/engine_busy_share": 0.2}
    for staleness in (1, 2):
        plan = plan_of(cluster=APART, pipeline={"max_staleness": staleness})
        found = raised_in(plan, idle, max_staleness=staleness)["engines_wait"]
        assert ("a smaller pipeline.max_staleness" in found.advice) == (staleness == 2)


def test_the_least_costly_way_out_of_a_full_device_is_named() -> None:
    found = raised_in(plan_of(), {"mem/gpu_peak_gib": 137.0})["little_memory"]
    assert found.change == {"engine.enable_sleep": True}
    asleep = plan_of(engine={"enable_sleep": True, "kv_cache_gib": 2.0})
    found = raised_in(asleep, {"mem/gpu_peak_gib": 137.0})["little_memory"]
    assert set(found.change) == {"trainer.optimizer.state_dtype"}


def test_passes_that_were_cut_down_name_the_keys_that_cut_them_from_the_start() -> None:
    """Of each role its own; of those that share one the smallest."""
    plan = plan_of(teacher={"path": "t"}, trainer={"max_tokens_per_microbatch": 32768})
    metrics = {
        "mem/policy_replays": 1.0,
        "mem/policy_backward_cap": 9000.0,
        "mem/policy_forward_cap": 20000.0,
        "mem/reference_forward_cap": 18000.0,
        "mem/teacher_forward_cap": 12000.0,
    }
    assert raised_in(plan, metrics)["out_of_memory"].change == {
        "trainer.max_tokens_per_microbatch": 9000,
        "trainer.max_tokens_per_forward": 18000,
        "teacher.max_tokens_per_forward": 12000,
    }


@pytest.mark.parametrize("caps", [(18000.0, 20000.0), (20000.0, 18000.0)])
def test_of_caps_that_roles_share_the_smallest_is_advised(caps: tuple[float, ...]) -> None:
    """Whichever role has it."""
    plan = plan_of(algorithm={"kl": {"coef": 0.1}})
    assert isinstance(plan.config, RLConfig)
    roles = ("policy", "reference")
    now = {f"mem/{role}_forward_cap": cap for role, cap in zip(roles, caps, strict=True)}
    assert [*lowered_caps(plan, plan.config, now)] == [{"trainer.max_tokens_per_forward": 18000}]
    assert [*lowered_caps(plan, plan.config, {})] == []


def test_samples_too_stale_for_the_learning_rate_halve_one_of_both() -> None:
    stale = {"off_policy/kl": 0.03}
    for staleness, change in (
        (4, {"pipeline.max_staleness": 2}),
        (1, {"trainer.optimizer.lr": 5e-7}),
    ):
        plan = plan_of(
            cluster=APART,
            pipeline={"max_staleness": staleness},
            trainer={"optimizer": {"lr": 1e-6}},
        )
        found = raised_in(plan, stale, max_staleness=staleness)["stale_samples"]
        assert found.change == change
        assert not found.is_tuning


def test_a_slow_delivery_gets_larger_buffers() -> None:
    found = raised_in(plan_of(cluster=APART), {"time/sync_s": 3.0})["slow_sync"]
    assert found.change == {"cluster.update_weight_buffer_size": 1 << 30}


def test_a_setting_is_named_for_a_model_of_unknown_sizes_and_without_other_metrics() -> None:
    unknown = replace(plan_of(engine={"max_num_seqs": 32}), model=None)
    found = raised_in(unknown, {"engine/waiting/mean": 40.0})["engine_queue"]
    assert found.change == {"engine.max_num_seqs": 64}
    full = raised_in(unknown, {"mem/gpu_peak_gib": 137.0})["little_memory"]
    assert (full.change, full.advice[-1]) == ({}, "."), "what a change saves is not known"
    alarms = Alarms(plan=plan_of(engine={"max_num_seqs": 32}))
    raised = [
        alarm for step in range(1, 5) for alarm in alarms.check(step, {"engine/waiting/mean": 9.0})
    ]
    assert [alarm.change for alarm in raised] == [{"engine.max_num_seqs": 64}]


def test_advice_waits_until_numbers_are_healthy() -> None:
    alarms = Alarms(plan=plan_of(engine={"max_num_seqs": 32}))
    raised = list[Alarm]()
    for step in range(1, QUIET_STEPS + 20):
        scalars = HEALTHY | {"engine/waiting/mean": 40.0}
        if step <= 10:
            scalars["train/loss"] = float("nan")
        raised += alarms.check(step, scalars)
    assert [(alarm.name, alarm.step) for alarm in raised] == [
        ("not_finite", 1),
        ("engine_queue", 10 + QUIET_STEPS),
    ]
