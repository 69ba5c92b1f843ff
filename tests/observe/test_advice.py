"""Advice on speed and memory: what is changed, to which value, and what the planner says it brings.

Metrics are made up here. `tests/loops/test_symptoms.py` produces the symptoms that a CPU can have.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from hone.planner.gain import Measured, Pricing

Scalars = dict[str, float]
EVEN = [[100, 200, 300, 400, 500, 600, 700, 800]] * 32
TAILED = [*EVEN[:7], [300] * 7 + [3000]] * 4
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


def raised_in(
    plan: RunPlan,
    metrics: Scalars,
    *,
    max_staleness: int = 0,
    lengths: Sequence[Sequence[int]] = TAILED,
) -> dict[str, Alarm]:
    """Alarms of equal steps, but for their versions, by name."""
    alarms, raised = Alarms(max_staleness=max_staleness, plan=plan), list[Alarm]()
    for step in range(1, 7):
        version = {"rollout/weight_version/max": float(step)}
        raised += alarms.check(step, HEALTHY | metrics | version, lengths=lengths)
    return {alarm.name: alarm for alarm in raised}


GAINS: dict[str, tuple[dict[str, Any], Scalars, dict[str, Any]]] = {
    # alarm: sections, metrics, the change it must name
    "engine_queue": (
        {"engine": {"max_num_seqs": 32}},
        {"engine/waiting/mean": 40.0},
        {"engine.max_num_seqs": 256},
    ),
    "preemptions": (
        {"engine": {"kv_cache_gib": 2.0}},
        {"engine/preemptions": 60.0, "mem/engine_cache_gib": 2.0},
        {"engine.kv_cache_gib": 8.0},
    ),
    "slow_rewards": (
        {"reward": {"num_workers": 2, "functions": [{"fn": "a_package.scores:score"}]}},
        {"perf/wait_for_rewards_share": 0.4, "time/reward/p99_s": 0.06},
        {"reward.num_workers": 8},
    ),
    "long_tail": (
        {},
        {"time/generate_s": 14.0, "perf/engine_busy_s": 14.0},
        {"rollout.oversample_prompts": 16, "algorithm.correction.kind": "tis"},
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
    ("fn", "tried"),
    [
        ("exact_match", [4, 6]),
        ("code_tests", [4, 6]),
        ("a_package.scores:score", [4, 8]),
        ("http://scores:8000", [4, 8]),
    ],
)
def test_functions_that_compute_get_no_more_workers_than_cores(
    fn: str, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the user's own and services may wait for something else."""
    plan = plan_of(reward={"num_workers": 2, "functions": [{"fn": fn}]})
    assert isinstance(plan.config, RLConfig)
    for cores, expected in ((6, tried), (2, tried if tried[-1] == 8 else [])):
        monkeypatch.setattr("hone.observe.advice.num_usable_cores", lambda cores=cores: cores)
        found = more_reward_workers(plan, plan.config, {})
        assert [change["reward.num_workers"] for change in found] == expected


def test_memory_to_spare_goes_to_logits_where_nothing_else_is_computed_again() -> None:
    idle = {"perf/gpu_utilization": 0.5}
    small = "qwen3-0.6b"
    found = raised_in(plan_of(shape=small), idle)["low_gpu_utilization"]
    assert found.change == {"trainer.logits_chunk_tokens": 16384}
    found = raised_in(plan_of(shape=small, trainer={"logits_chunk_tokens": 16384}), idle)
    assert "trainer.logits_chunk_tokens" not in found["low_gpu_utilization"].change


@pytest.mark.parametrize(
    ("sections", "tried"),
    [
        ({}, [64, 128, 256]),  # all of 32 prompts x 8 samples
        ({"rollout": {"oversample_prompts": 4}}, [64, 128, 256, 288]),
        ({"cluster": APART}, [64, 128]),  # by two engines
        ({"cluster": APART, "pipeline": {"max_staleness": 2}}, [64, 128, 256, 384]),
        ({"cluster": APART, "pipeline": {"max_staleness": 9}}, [64, 128, 256, 512]),
    ],
)
def test_more_sequences_go_up_to_all_that_may_be_under_way(
    sections: dict[str, Any], tried: list[int]
) -> None:
    """The batches that are sampled ahead are."""
    plan = plan_of(engine={"max_num_seqs": 32}, **sections)
    assert isinstance(plan.config, RLConfig)
    found = more_sequences(plan, plan.config, {})
    key = "engine.max_num_seqs"
    assert [change[key] for change in found if key in change] == tried


@pytest.mark.parametrize("name", GAINS)
def test_advice_names_a_setting_a_value_and_what_it_brings(name: str) -> None:
    sections, metrics, change = GAINS[name]
    plan = plan_of(**sections)
    assert raised_in(plan, {}) == {}
    found = raised_in(plan, metrics)[name]
    assert found.change == change
    assert found.is_tuning
    assert found.gain_s is not None
    assert 0.02 * 20 <= found.gain_s < 20
    for key, value in change.items():
        assert f"{key} to {str(value).lower().removesuffix('.0')}" in found.advice
    assert f"{found.gain_s:.2g} s ({found.gain_s / 20:.0%} of now) less" in str(found)


def test_trainers_and_engines_that_wait_get_each_others_devices() -> None:
    plan = plan_of(cluster=APART, pipeline={"max_staleness": 2})
    waits = {"time/generate_s": 12.0, "time/train_s": 4.0, "perf/engine_busy_s": 36.0}
    found = raised_in(plan, waits, max_staleness=2, lengths=EVEN)["training_waits"]
    assert found.change == {"cluster.num_engines": 3, "cluster.num_trainers": 3}
    tail = waits | {"time/train_s": 8.0, "perf/engine_busy_s": 20.0}
    found = raised_in(plan, tail, max_staleness=2, lengths=TAILED)["training_waits"]
    assert found.change == {"pipeline.max_staleness": 3}
    idle = {"time/generate_s": 0.1, "perf/engine_busy_s": 8.0, "perf/engine_busy_share": 0.2}
    found = raised_in(plan, idle | {"time/train_s": 19.0}, max_staleness=2)["engines_wait"]
    assert found.change == {"cluster.num_engines": 1, "cluster.num_trainers": 5}


def test_engines_that_wait_ask_for_less_staleness_only_where_there_is_less() -> None:
    """With 1 the next is 0, by which nothing is sampled ahead."""
    idle = {"time/generate_s": 0.1, "perf/engine_busy_s": 8.0, "perf/engine_busy_share": 0.2}
    for staleness in (1, 2):
        plan = plan_of(cluster=APART, pipeline={"max_staleness": staleness})
        found = raised_in(plan, idle, max_staleness=staleness)["engines_wait"]
        assert ("a smaller pipeline.max_staleness" in found.advice) == (staleness == 2)


@pytest.mark.parametrize("shape", ["qwen3-1.7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("busy_s", [0.1, 8.0, 3600.0])
def test_engines_of_any_speed_are_priced(shape: str, busy_s: float) -> None:
    """Half as many samples at once take longer, however far the planner is off what is measured."""
    plan = plan_of(shape=shape, engine={"max_num_seqs": 64}, cluster=APART | {"num_trainers": 16})
    measured = Measured(
        step_s=busy_s + 10,
        engine_busy_s=busy_s,
        train_s=9.0,
        sync_s=0.1,
        wait_s=busy_s,
        cache_bytes=0,
        num_prompt_tokens=256,
        lengths=EVEN,
    )
    pricing = Pricing(plan, measured)
    halved_s, doubled_s = (pricing.gain_s({"engine.max_num_seqs": n}) for n in (32, 128))
    assert -busy_s < halved_s < 0 < doubled_s < busy_s / 2


def test_the_least_costly_way_out_of_a_full_device_says_what_it_costs() -> None:
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


def test_what_the_planner_cannot_price_is_said_to_be_unknown() -> None:
    slow_sync = {"time/sync_s": 3.0}
    found = raised_in(plan_of(cluster=APART), slow_sync)["slow_sync"]
    assert found.change == {"cluster.update_weight_buffer_size": 1 << 30}
    assert found.gain_s is None
    assert "how much time that brings is not known" in found.advice
    unknown = replace(plan_of(engine={"max_num_seqs": 32}), model=None)
    found = raised_in(unknown, {"engine/waiting/mean": 40.0})["engine_queue"]
    assert found.change == {"engine.max_num_seqs": 64}
    assert "the sizes of its model are not known" in found.advice


def test_metrics_that_are_missing_cost_the_estimate_alone() -> None:
    alarms = Alarms(plan=plan_of(engine={"max_num_seqs": 32}))
    raised = [
        alarm for step in range(1, 5) for alarm in alarms.check(step, {"engine/waiting/mean": 9.0})
    ]
    assert [(alarm.name, alarm.gain_s) for alarm in raised] == [("engine_queue", None)]


def test_advice_waits_until_numbers_are_healthy() -> None:
    alarms = Alarms(plan=plan_of(engine={"max_num_seqs": 32}))
    raised = list[Alarm]()
    for step in range(1, QUIET_STEPS + 20):
        scalars = HEALTHY | {"engine/waiting/mean": 40.0}
        if step <= 10:
            scalars["train/loss"] = float("nan")
        raised += alarms.check(step, scalars, lengths=EVEN)
    assert [(alarm.name, alarm.step) for alarm in raised] == [
        ("not_finite", 1),
        ("engine_queue", 10 + QUIET_STEPS),
    ]


def test_the_planner_takes_phases_as_long_as_they_were_measured() -> None:
    """Twice as many decode steps of the same length, bound by weights that are read: half of the
    engine's time, whatever it was."""
    for busy_s in (4.0, 8.0):
        alarms = Alarms(plan=plan_of(engine={"max_num_seqs": 4, "kv_cache_gib": 60.0}))
        metrics = {"engine/waiting/mean": 4.0, "perf/engine_busy_s": busy_s}
        metrics |= {"rollout/prompt_tokens/mean": 1.0}
        raised = list[Alarm]()
        for step in range(1, 4):
            raised += alarms.check(step, HEALTHY | metrics, lengths=[[10] * 8] * 32)
        (found,) = raised
        assert found.gain_s == pytest.approx(busy_s * (1 - 4 / 64), rel=0.1)
