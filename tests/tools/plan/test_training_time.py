"""Seconds of an update: against benchmarks/memory.md, and by hand where nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hone.algorithms.configured import algorithm_of
from hone.config.plan import Devices, RunPlan, known_models, resolve
from hone.config.planning import PlanningConfig
from hone.config.tree import PlanConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.families.spec import EXPERT_MATRICES
from hone.hardware import GPUS, Peaks, known_gpu
from hone.tools.plan import training_time
from hone.tools.plan.compute_time import Compute
from hone.tools.plan.training_time import TrainingTime
from tests.tables import table

ROWS = [2048] * 128
"""Sixteen micro-batches of 16,384 tokens."""


def plan_of(
    shape: str,
    *,
    world_size: int = 1,
    gpu: Peaks = GPUS[0],
    sections: Mapping[str, Any] = {},
    **trainer: Any,
) -> RunPlan:
    found = public_shape(shape)
    assert found is not None
    # What is measured is from before the last chunk's logits stayed.
    trainer = {"logits_chunk_tokens": 1, **trainer}
    cfg = PlanConfig.model_validate({"model": {"shape": shape}, "trainer": trainer, **sections})
    devices = Devices(kind="cuda", gpu=gpu, per_node=8)
    facts, others = ModelFacts.of_shape(found), known_models(cfg)
    return resolve(cfg, facts, devices, world_size=world_size, others=others)


def seconds(plan: RunPlan) -> float:
    return TrainingTime(plan, PlanningConfig(overhead_s=0)).step_s(ROWS, sum(ROWS))


@table(
    "shape, knobs, measured",
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


@table(
    "shape, rows, num_scored, measured_s, passes, recomputed",
    [
        # hone bench train and benchmarks.gpu.train_speed, rows of 2,048
        ("qwen3-0.6b", [2048] * 16, 16 * 2048, 0.395, 3, 0),
        ("qwen3-1.7b", [2048] * 16, 16 * 2048, 0.764, 3, 0),
        ("qwen3-4b", [2048] * 16, 16 * 2048, 2.110, 3, 1),
        ("qwen3-8b", [2048] * 16, 16 * 2048, 3.574, 3, 1),
        ("qwen3-0.6b", [2048] * 8, 8 * 2048, 0.1987, 3, 0),
        ("qwen3-1.7b", [2048] * 8, 8 * 2048, 0.3909, 3, 0),
        ("qwen3-8b", [2048] * 8, 8 * 2048, 1.838, 3, 1),
        # updates of RL
        ("qwen3-0.6b", [1280] * 256, 256 * 1024, 3.55, 3, 0),
        ("qwen3-1.7b", [1280] * 256, 256 * 1024, 7.18, 3, 0),
        # pairs, scored by a reference as well
        ("qwen3-1.7b", [694] * 64, 64 * 444, 1.24, 4, 0),
        ("qwen3-8b", [694] * 64, 64 * 444, 5.71, 4, 1),
        # one row over two devices
        ("qwen3-8b", [131_072], 131_072, 2 * 42.9, 3, 1),
    ],
)
def test_passes_take_what_was_measured_on_an_H200(
    *,
    shape: str,
    rows: list[int],
    num_scored: int,
    measured_s: float,
    passes: int,
    recomputed: int,
) -> None:
    """Figures of benchmarks/README.md, 0.6B to 8B, rows of 694 to 131,072 tokens."""
    compute, found = Compute(GPUS[0], PlanningConfig()), public_shape(shape)
    assert found is not None
    seconds = passes * compute.forward_s(found, rows, num_head_tokens=num_scored)
    seconds += recomputed * compute.forward_s(found, rows, num_head_tokens=0)
    assert seconds == pytest.approx(measured_s, rel=0.09)


@pytest.mark.parametrize(("recomputed", "tokens_per_s"), [(0, 15_000), (1, 11_300)])
def test_experts_take_what_was_measured_on_an_H100(recomputed: int, tokens_per_s: int) -> None:
    """Layers of Qwen3-30B-A3B alone, samples of 2,048 tokens."""
    gpu, shape = known_gpu("h100"), public_shape("qwen3-30b-a3b")
    assert shape is not None
    rows = [2048] * 8
    compute = Compute(gpu, PlanningConfig())
    seconds = (3 + recomputed) * compute.forward_s(shape, rows, num_head_tokens=0)
    assert seconds == pytest.approx(sum(rows) / tokens_per_s, rel=0.09)


KL_IN_LOSS = {"algorithm": {"kl": {"coef": 0.1}}}
KL_IN_REWARD = {"algorithm": {"kl": {"coef": 0.1, "placement": "reward"}}}
CRITIC = {"algorithm": {"advantage": "gae"}}
HALVES = {"prompts_per_minibatch": 16}


@table(
    "sections, trainer, num_forward, num_headless",
    [
        ({}, {}, 0, 0),
        (KL_IN_LOSS, {}, 1, 0),  # the reference's
        (KL_IN_REWARD, {}, 2, 0),  # and the policy's
        (KL_IN_REWARD, HALVES, 2, 0),
        ({"teacher": {"path": "t"}}, {}, 2, 0),
        ({"teacher": {"path": "t", "loss": "js"}}, {}, 1, 0),
        ({"teacher": {"path": "t", "loss": "js"}}, HALVES, 2, 0),
        ({}, HALVES, 1, 0),
        ({}, {"num_epochs": 2}, 1, 0),
        (CRITIC, {}, 0, 4),  # values, and as many as three to learn
        (CRITIC, {"num_epochs": 2}, 1, 7),
        (CRITIC, {"num_epochs": 3}, 1, 10),
        ({"algorithm": KL_IN_REWARD["algorithm"] | CRITIC["algorithm"]}, {}, 2, 4),
    ],
)
def test_every_pass_of_an_update_is_planned(
    sections: dict[str, Any], trainer: dict[str, Any], num_forward: int, num_headless: int
) -> None:
    """Passes over all rows besides those that train the policy, with its head and without."""
    shape, compute = public_shape("qwen3-0.6b"), Compute(GPUS[0], PlanningConfig())
    assert shape is not None
    rollout = {"prompts_per_step": 32, "n_samples_per_prompt": 4}
    plan = plan_of("qwen3-0.6b", sections={"rollout": rollout, **sections}, **trainer)
    one_s = seconds(plan_of("qwen3-0.6b", sections={"rollout": rollout}))
    expected = trainer.get("num_epochs", 1) * one_s
    expected += num_forward * compute.forward_s(shape, ROWS)
    expected += num_headless * compute.forward_s(shape, ROWS, num_head_tokens=0)
    assert seconds(plan) == pytest.approx(expected, rel=5e-3), "a critic also adds gradients up"
    assert isinstance(plan.config, PlanConfig)
    wanted = "policy" in algorithm_of(plan.config).needs.scores
    several = plan.batch is not None and plan.batch.optimizer_steps_per_rollout > 1
    assert plan.policy.num_scorings == (wanted or several), "what a run does"


def test_a_frozen_base_has_no_gradients_of_its_own() -> None:
    """Two products of its matrices in place of three; of adapters and attention three."""
    compute, shape = Compute(GPUS[0], PlanningConfig()), public_shape("qwen3-4b")
    assert shape is not None
    flops = shape.forward_flops(ROWS)
    flops -= shape.attention_flops_per_key * shape.visible_keys(ROWS)
    widths = 2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728)
    adapters = 2.0 * sum(ROWS) * 36 * 8 * widths
    expected = compute.products_s(shape, 2 * flops + 3 * adapters)
    expected += 3 * compute.attention_s(shape, ROWS)
    model = {"shape": "qwen3-4b", "lora": {"rank": 8}}
    cfg = PlanConfig.model_validate({"model": model})
    devices = Devices(kind="cuda", gpu=GPUS[0])
    found = seconds(resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=1))
    assert found == pytest.approx(expected, rel=0.01)


@table("rank", [16, 32])
def test_adapters_of_experts_take_what_was_measured(rank: int) -> None:
    """Forward and backward of the experts of a layer of 30B-A3B, of 16,384 tokens on an H200: 9.1
    ms, and 12.6 with adapters of either rank."""
    compute, shape = Compute(GPUS[0], PlanningConfig()), public_shape("qwen3-30b-a3b")
    assert shape is not None
    rows = training_time._Rows.of(np.array([2048] * 8), 0)
    attention, both = (
        training_time._training_s(rows, compute, shape, training_time._Adapters(rank, names))
        for names in (("q_proj",), ("q_proj", *EXPERT_MATRICES))
    )
    assert (both - attention) / shape.num_expert_layers == pytest.approx(3.5e-3, rel=0.15)


def test_short_passes_of_recurrent_layers_wait_for_the_host() -> None:
    """0.8B has 18 of them. Its 16 passes of 16,384 tokens took 0.31 s each on an H200."""
    short, long = (
        seconds(plan_of("qwen3.5-0.8b", max_tokens_per_microbatch=n)) for n in (16384, 65536)
    )
    adding = seconds(plan_of("qwen3.5-0.8b", max_tokens_per_microbatch=32768)) - long
    assert short == pytest.approx(16 * 0.31, rel=0.03)
    assert 0 < adding < 0.01 * long < 0.3 * (short - long)
    others = (seconds(plan_of("qwen3-0.6b", max_tokens_per_microbatch=n)) for n in (16384, 65536))
    assert next(others) < 1.02 * next(others)


def test_layers_computed_again_cost_what_they_are_of_all() -> None:
    """Of 36: `uniform` computes each once more, `block` those that it names."""
    off, full = (seconds(plan_of("qwen3-4b", recompute=mode)) for mode in ("off", "full"))
    assert seconds(plan_of("qwen3-4b", recompute="uniform:5")) == pytest.approx(full)
    nine = seconds(plan_of("qwen3-4b", recompute="block:9"))
    assert nine - off == pytest.approx((full - off) / 4)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b"])
def test_logits_that_stay_are_not_computed_again(shape: str) -> None:
    """Up to all of a micro-batch's 16,384 tokens."""
    found = public_shape(shape)
    assert found is not None
    compute = Compute(GPUS[0], PlanningConfig())
    head_s = compute.forward_s(found, ROWS) - compute.forward_s(found, ROWS, num_head_tokens=0)
    none_s = seconds(plan_of(shape))
    for chunk, share in ((4096, 0.25), (16384, 1), (99999, 1)):
        saved_s = none_s - seconds(plan_of(shape, logits_chunk_tokens=chunk))
        assert saved_s == pytest.approx(share * head_s, rel=0.01)


def test_stages_go_at_the_pace_of_the_slowest() -> None:
    """Which waits for a micro-batch of each other, whose number is that of tokens; each stage sends
    the sums of its own layers, the last has the head, and each pass takes time by itself."""
    parallel = {"tensor_parallel_size": 2, "zero_stage": 1}
    slow_link = 1e9
    gpu = replace(GPUS[0], bytes_per_s=1e18, link_bytes_per_s=slow_link, node_bytes_per_s=slow_link)
    shape, tokens, assumed = public_shape("qwen3-4b"), sum(ROWS), PlanningConfig()
    assert shape is not None
    compute = Compute(gpu, assumed)
    body_s = compute.forward_s(shape, ROWS, num_head_tokens=0)
    head_s = compute.forward_s(shape, ROWS) - body_s
    # Of 8 processes of two tensor parallel ones each.
    for stages, layers in ((2, (20, 16)), (4, (10, 10, 10, 6))):
        stages_s = [n / 36 * body_s for n in layers]
        stages_s[-1] += head_s
        own_speed = 8 * assumed.training_scaling / stages / 3
        compute_s = max(stages_s) / own_speed
        own = parallel | {"pipeline_parallel_size": stages}
        plan = plan_of(
            "qwen3-4b", world_size=8, gpu=gpu, parallel=own, max_tokens_per_microbatch=2048
        )
        data = 4 // stages
        passes = tokens // data // 2048
        waited = (sum(stages_s) / own_speed - compute_s) / passes
        # Two gathers and two sums of half the values, forward and twice backward.
        sums = 8 * 2 * max(layers) * 2560 * (tokens / data) / 2
        shards = (data - 1) / data * shape.num_params / 2 / stages * (2 + 4)
        hidden = min(0.8 * compute_s / passes, shards / (0.7 * slow_link))
        sent = (sums + shards) / (0.7 * slow_link) - hidden
        by_itself = 0.017 * passes
        computed = compute_s + waited  # the most is sent, and a percent of that is too coarse
        assert seconds(plan) - sent - by_itself == pytest.approx(computed, rel=0.01)
        groups = plan_of(
            "qwen3-4b",
            world_size=8,
            gpu=gpu,
            parallel=own | {"virtual_stages": 2},
            max_tokens_per_microbatch=2048,
        )
        gained = seconds(plan) - seconds(groups)
        assert gained == pytest.approx(waited / 2 - by_itself, rel=0.01, abs=1e-3)


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
    """Reduction and gathering are short on NVLink, where nothing hides them, and long over PCIe."""

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
    a_byte = 7 / 8 * 8.19e9 / (0.7 * 450e9)
    assert third - second == pytest.approx((8 - 2) * a_byte, rel=0.01)
    assert second - first == pytest.approx(4 * a_byte - added, rel=0.01)
    assert zeroth - first == pytest.approx((8 - 6) * a_byte, rel=0.01)
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


def test_a_critic_apart_pays_for_what_its_processes_exchange() -> None:
    """Over a link so slow that the critic is what a step waits for. 8B without its head has 7.57e9
    parameters. Two devices have four micro-batches of one row each, and send half of everything.
    Stage 0 reduces four bytes of each parameter once a step and sends the sums on, stage 1 gathers
    two of weights in their place, and stage 3 reduces and gathers twice in every micro-batch."""

    def step_s(num_critics: int, stage: int, link: float) -> float:
        plan = plan_of(
            "qwen3-8b",
            gpu=replace(GPUS[0], link_bytes_per_s=link),
            sections={
                "rollout": {"n_samples_per_prompt": 1},
                "algorithm": {"advantage": "gae"},
                "cluster": {"num_trainers": 1, "num_engines": 1, "num_critics": num_critics},
                "critic": {"parallel": {"zero_stage": stage}},
            },
            max_tokens_per_microbatch=2048,
        )
        return TrainingTime(plan, PlanningConfig()).update_s([2048] * 8, 8 * 2048)

    for stage, num_bytes in ((0, 4 * 2), (1, 4 + 2), (3, 4 * (4 + 2 * 2))):
        sent_s = step_s(2, stage, 1e7) - step_s(2, stage, 1e18)
        assert sent_s == pytest.approx(7.57e9 * num_bytes / 2 / 0.7e7, rel=0.01), stage
        assert step_s(1, stage, 1e7) == step_s(1, stage, 1e18), "one device has nobody to send to"


def test_a_critic_beside_the_policy_pays_as_much_as_the_policy() -> None:
    """Two devices reduce 7.57e9 gradients of it, of four bytes, and send the sums on."""

    def sent_s(advantage: str) -> float:
        fast, slow = (
            plan_of(
                "qwen3-8b",
                gpu=replace(GPUS[0], link_bytes_per_s=link),
                world_size=2,
                sections={
                    "rollout": {"n_samples_per_prompt": 1},
                    "algorithm": {"advantage": advantage},
                },
                parallel={"zero_stage": 0},
                max_tokens_per_microbatch=2048,
            )
            for link in (1e18, 1e7)
        )
        rows = [2048] * 8
        times = (
            TrainingTime(plan, PlanningConfig()).update_s(rows, sum(rows)) for plan in (slow, fast)
        )
        return next(times) - next(times)

    of_critic = sent_s("gae") - sent_s("grpo")
    assert of_critic == pytest.approx(7.57e9 * 4 * 2 / 2 / 0.7e7, rel=0.01)


def test_processes_that_share_a_row_pay_for_what_they_exchange() -> None:
    plain = seconds(plan_of("qwen3-8b", world_size=4))
    for axis in ("tensor_parallel_size", "ulysses_size"):
        assert seconds(plan_of("qwen3-8b", world_size=4, parallel={axis: 2})) > plain
