"""What `hone tune` computes: planted constants come out of the fit, budgets grow to the limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.config.plan import Devices, RunPlan, resolve
from hone.config.planning import PlanningConfig
from hone.config.tree import PlanConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.hardware import known_gpu
from hone.planner.fitting import changed, errors
from hone.tools.plan.calibration import Measured, simulated
from hone.tools.plan.tuning import fit, modes, search_budget, variants
from tests.tables import table

LENGTHS, PROMPT_TOKENS = [[40 + 20 * n, 200] for n in range(12)], 64
"""Long enough for products of matrices to decide about a step."""


def planned(*, on_cpu: bool = True, **sections: dict[str, Any]) -> RunPlan:
    tree: dict[str, Any] = {
        "model": {"path": "Qwen/Qwen3-0.6B"},
        "data": {"train": [{"path": "train.jsonl"}]},
        "rollout": {
            "prompts_per_step": 8,
            "n_samples_per_prompt": 4,
            "max_completion_tokens": 512,
        },
        "reward": {"functions": [{"fn": "exact_match"}]},
    }
    cfg = PlanConfig.model_validate({**tree, **sections})
    shape = public_shape("qwen3-0.6b")
    assert shape is not None
    devices = Devices(kind="cpu") if on_cpu else Devices(gpu=known_gpu("h200"))
    return resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=1)


def measured(constants: PlanningConfig, plan: RunPlan) -> Measured:
    """What a run measures on a machine of these constants."""
    run = simulated(constants, plan, LENGTHS, PROMPT_TOKENS)
    busy_s = sum(end - start for engine in run.engine_busy for start, end in engine)
    steps, number = run.steps, len(run.steps)
    return Measured(
        step_s=sum(step.end_s - step.start_s for step in steps) / number,
        engine_busy_s=busy_s / len(run.engine_busy) / number,
        train_s=sum(step.train_s for step in steps) / number - constants.overhead_s,
        sync_s=sum(step.sync_s for step in steps) / number,
        wait_s=sum(step.wait_s for step in steps) / number,
        cache_bytes=0,
        num_prompt_tokens=PROMPT_TOKENS,
        lengths=LENGTHS,
    )


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_fit_recovers_planted_constants_and_a_wild_run_moves_none(on_cpu: bool) -> None:
    usual = PlanningConfig()
    planted = PlanningConfig(
        decode_share=usual.decode_share / 3,  # an engine is scaled as a whole
        prefill_share=usual.prefill_share / 3,
        decode_overhead_s=3 * usual.decode_overhead_s,
        training_share=0.35,
        overhead_s=0.6,
        switch_s=0.4,
    )
    settings = ({}, {"trainer.recompute": "full"}, {"engine.max_num_seqs": 8})
    plans = [changed(planned(on_cpu=on_cpu), setting) for setting in settings]
    found = [(plan, measured(planted, plan)) for plan in plans]
    wild = PlanningConfig(training_share=0.01, overhead_s=5, switch_s=9)
    fitted = fit(usual, [*found, (plans[0], measured(wild, plans[0]))])
    for name in planted.model_fields_set:
        assert getattr(fitted, name) == pytest.approx(getattr(planted, name), rel=0.05), name


def test_of_engines_apart_the_fit_gives_the_rate_of_weights() -> None:
    planted = PlanningConfig(sync_bytes_per_s=1.25e9)
    plan = planned(on_cpu=False, cluster={"num_engines": 1}, pipeline={"max_staleness": 1})
    fitted = fit(PlanningConfig(), [(plan, measured(planted, plan))])
    assert fitted.sync_bytes_per_s == pytest.approx(1.25e9)
    assert fitted.switch_s == PlanningConfig().switch_s, "nothing was measured of it"


def test_nothing_measured_changes_nothing() -> None:
    assert fit(PlanningConfig(), []) == PlanningConfig()


@given(
    start=st.integers(64, 4096),
    limit=st.integers(1, 200_000),
    most=st.integers(64, 400_000),
)
def test_budgets_grow_to_a_planted_limit(start: int, limit: int, most: int) -> None:
    """Each step is faster with more tokens, until memory ends above `limit`."""
    asked: list[int] = []

    def seconds(budget: int) -> float | None:
        asked.append(budget)
        return None if budget > limit else 1000.0 / budget

    found = search_budget(seconds, start=start, start_s=1000.0 / start, most=most)
    assert found >= start
    assert all(start < budget <= max(most, start) for budget in asked)
    assert len(asked) == len(set(asked)) <= math.log2(max(most / start, 1)) + 6
    if found > start:
        assert found <= limit
    # The largest that fits, but for what is no telling gain.
    assert found >= min(limit, most) / 1.2 or limit < start


@table("knee, expected", [(1000, 1000), (4000, 4000), (100, 500)])
def test_budgets_grow_while_a_step_gets_faster(knee: int, expected: int) -> None:
    found = search_budget(
        lambda budget: 1000.0 / min(budget, knee),
        start=500,
        start_s=1000 / min(500, knee),
        most=64000,
    )
    assert found == expected


@pytest.mark.parametrize("on_cpu", [True, False])
def test_variants_change_time_or_memory_only(on_cpu: bool) -> None:
    plan = planned(on_cpu=on_cpu, engine={"max_num_seqs": 16}, trainer={"recompute": "full"})
    found = [*variants(plan)]
    assert {"engine.max_num_seqs": 32} in found, "all samples of a step"
    assert {"trainer.recompute": "off"} in found
    assert {"trainer.recompute": "full"} not in found, "it is"
    assert ({"trainer.offload": "optimizer"} in found) is not on_cpu
    whole = {"trainer.logits_chunk_tokens": 16384}
    assert whole in found, "what a micro-batch has"
    assert whole not in [*variants(changed(plan, whole))]
    keys = {key for change in found for key in change}
    assert all(key.startswith(("engine.", "trainer.")) for key in keys)


@pytest.mark.parametrize("kind", ["none", "icepop"])
def test_modes_start_and_are_corrected(kind: Any) -> None:
    plan = planned(algorithm={"correction": {"kind": kind}})
    assert isinstance(plan.config, PlanConfig)
    for mode in modes(plan.config):
        after = changed(plan, mode)
        assert errors(after) <= errors(plan)
        assert isinstance(after.config, PlanConfig)
        assert after.config.algorithm.correction.kind == ("tis" if kind == "none" else kind)
