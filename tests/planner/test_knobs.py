"""The one list of settings that trade memory for time, and what its readers take from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Literal

import pytest

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, known_models, resolve
from hone.config.tree import RLConfig, SFTConfig
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.hardware import known_gpu
from hone.observe.advice import faster_training, less_memory, more_room
from hone.planner.fitting import changed, memory_changes, remedies
from hone.planner.knobs import (
    KNOBS,
    RECOMPUTE,
    SEARCHED,
    Change,
    Effect,
    Knob,
    cache_sizes,
    host_changes,
    setting,
)
from hone.planner.run_memory import peak_bytes
from hone.tools.plan.tuning import variants
from hone.trainer.settings import cap_key

DATA = "--data.train=[{path: public/data}]"
KINDS: tuple[Literal["cpu", "cuda"], ...] = ("cuda", "cuda", "cuda", "cpu")
DRAWN = (
    (
        "--trainer.offload=optimizer",
        "--trainer.offload=gradients",
        "--trainer.offload=parameters",
    ),
    (
        "--trainer.recompute=selective",
        "--trainer.recompute=full",
        "--trainer.recompute=block:4",
    ),
    ("--trainer.offload_activations=true",),
    ("--trainer.parallel.zero_stage=1", "--trainer.parallel.zero_stage=3"),
    ("--trainer.max_tokens_per_microbatch=65536", "--trainer.micro_batch_size=4"),
    ("--trainer.logits_chunk_tokens=16384",),
    ("--trainer.optimizer.state_dtype=bfloat16", "--trainer.optimizer.name=muon"),
    ("--engine.enable_sleep=true",),
    ("--trainer.enable_sleep=true",),
    ("--engine.tensor_parallel_size=2", "--engine.kv_cache_gib=20", "--engine.backend=vllm"),
    ("--rollout.max_completion_tokens=30000",),
    (
        "--teacher.path=Qwen/Qwen3-4B --cluster.num_teachers=1",
        "--reward.model.path=Qwen/Qwen3-0.6B --cluster.num_reward_models=1",
        "--algorithm.kl.coef=0.1 --cluster.num_references=1",
    ),
    ("--cluster.num_engines=2",),
    ("--algorithm.advantage=gae --critic.max_tokens_per_microbatch=65536",),
    ("--model.lora.rank=16",),
    (
        "--checkpoint.every_n_steps=10",
        "--checkpoint.keep_best=true --eval.every_n_steps=10",
    ),
)
"""Alternatives, of each of which a plan may have one."""


def drawn(seed: int) -> RunPlan:
    """A plan with settings, sizes, GPUs and a host that are drawn."""
    rng = random.Random(seed)
    while True:
        tree: type[RLConfig | SFTConfig] = SFTConfig if rng.random() < 0.2 else RLConfig
        chosen = [rng.choice(flags) for flags in DRAWN if rng.random() < 0.3]
        flags = " ".join(chosen).split()
        kind = rng.choice(KINDS)
        flags = [DATA, "--model.path=public/model", f"--run.device={kind}", *flags]
        shape = public_shape(rng.choice(["qwen3-0.6b", "qwen3-8b", "llama-3.1-70b"]))
        gpu = known_gpu(rng.choice(["a10", "a100-80g", "h200"]))
        world, host = rng.choice([1, 2, 8, 16]), rng.choice([32, 256, 2048])
        try:
            cfg = load_config(tree, None, flags)
        except UserError:  # a setting that the tree does not have
            continue
        assert shape is not None
        devices = Devices(kind=kind, gpu=gpu, per_node=8, host_bytes=host << 30)
        facts, others = ModelFacts.of_shape(shape), known_models(cfg)
        return resolve(cfg, facts, devices, world_size=world, others=others)


def listed(plan: RunPlan) -> Iterator[tuple[str, object]]:
    """Each setting with each value that the list has for a plan."""
    columns = [(x.gpu, x.host, x.time, x.choices) for x in KNOBS]
    for changes in (*chain(*columns), cache_sizes):
        for change in changes(plan):
            yield from change.items()


def read(plan: RunPlan) -> Iterator[Change]:
    """What the readers of the list say about a plan."""
    yield from memory_changes(plan, moves=True)
    yield from host_changes(plan)
    if isinstance(cfg := plan.config, RLConfig):
        yield from variants(plan)
        yield from more_room(plan, cfg, {})
        yield from less_memory(plan, cfg, {})
        yield from faster_training(plan, cfg, {"perf/R_gen": 0.1})


ELSEWHERE = {"engine.enforce_eager", "engine.enable_prefix_caching"}
"""Settings that the advice on generation names, which take no memory worth a row."""


@pytest.mark.parametrize("seed", range(3))
def test_what_readers_change_stands_in_the_list(seed: int) -> None:
    num_read = 0
    for plan in (drawn(100 * seed + index) for index in range(12)):
        values = {*listed(plan)}
        for change in read(plan):
            num_read += 1
            assert {x for x in change.items() if x[0] not in ELSEWHERE} <= values, change
    assert num_read > 100


def test_remedies_of_several_steps_stand_in_the_list() -> None:
    """A step is one of the plan with the steps before it, so that its keys alone are compared."""
    keys = {key for knob in KNOBS for key in knob.keys}
    (change,) = remedies(drawn(59))
    assert len(change) > 2
    assert change.keys() <= keys


def test_rows_name_all_keys_that_they_change_and_no_others() -> None:
    changed_by: dict[Knob, set[str]] = {}
    for plan in (drawn(seed) for seed in range(100)):
        for knob in KNOBS:
            columns = (knob.gpu(plan), knob.host(plan), knob.time(plan), knob.choices(plan))
            changed_by.setdefault(knob, set()).update(*chain(*columns))
    for knob, keys in changed_by.items():
        assert keys == {*knob.keys}


def test_every_change_differs_from_the_plan_and_the_cheap_ones_save_memory() -> None:
    """Of the settings that a trainer alone has, in a run that takes its memory in training."""
    num_saving = 0
    for plan in (drawn(seed) for seed in range(60)):
        for change in memory_changes(plan, moves=True):
            assert any(setting(plan.config, key) != value for key, value in change.items()), change
        if plan.is_on_cpu or plan.problem is not None or plan.engine is not None:
            continue
        for change in memory_changes(plan):
            assert peak_bytes(changed(plan, change)) <= peak_bytes(plan), change
            num_saving += peak_bytes(changed(plan, change)) < peak_bytes(plan)
    assert num_saving >= 10


def test_the_last_choices_of_a_search_take_least_memory() -> None:
    """The search leaves out what does not fit with them. Where gradients are few, buffers for their
    offload take more than it saves: a thousandth of what the run holds."""
    plans = [x for x in map(drawn, range(40)) if not x.is_on_cpu and x.problem is None]
    for knob in SEARCHED:
        num_compared = 0
        for plan in plans:
            held = [peak_bytes(changed(plan, change)) for change in knob.choices(plan)]
            if held:
                assert min(held[-knob.num_smallest :]) <= 1.01 * min(held), (knob.keys, held)
                num_compared += max(held) > min(held)
        assert num_compared > 1, knob.keys


def test_a_host_gets_back_first_what_costs_gpus_most_time_and_last_what_changes_the_method() -> (
    None
):
    flags = (
        "--trainer.offload=optimizer",
        "--trainer.offload_activations=true",
        "--trainer.recompute=full",
        "--trainer.enable_sleep=true",
        "--engine.enable_sleep=true",
        "--engine.backend=vllm",
        "--checkpoint.every_n_steps=10",
    )
    cfg = load_config(RLConfig, None, [DATA, "--model.path=public/model", *flags])
    shape = public_shape("qwen3-8b")
    assert shape is not None
    plan = resolve(cfg, ModelFacts.of_shape(shape), Devices(gpu=known_gpu("h200")), world_size=1)
    assert [" ".join(change) for change in host_changes(plan)] == [
        "checkpoint.every_n_steps",
        "trainer.offload_activations",
        "trainer.offload",
        "trainer.enable_sleep",
        "engine.enable_sleep",
        "trainer.optimizer.state_dtype",
        "model.lora.rank",
    ]


def test_a_step_lowers_the_settings_that_the_list_says_it_does() -> None:
    lowered = {key for knob in KNOBS if knob.is_lowered_in_a_step for key in knob.keys}
    caps = {
        cap_key(role, "backward", in_rows=in_rows)
        for role in ("policy", "critic")
        for in_rows in (False, True)
    }
    assert lowered == caps | {*RECOMPUTE.keys}


def test_only_rows_that_are_read_by_name_change_what_is_sampled_or_learnt_for_gpu_memory() -> None:
    """But for moments, whose rounding was measured."""
    changing = [knob for knob in KNOBS if knob.effect and not knob.is_read_by_name]
    assert [(x.keys, x.effect) for x in changing if [*x.gpu(drawn(1))] or x.host is not x.gpu] == [
        (("trainer.optimizer.state_dtype",), Effect.ROUNDING),
        (("model.lora.rank",), Effect.METHOD),
    ]
