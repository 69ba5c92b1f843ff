"""Plans of models with recurrent layers: states in the engine, what training keeps, and times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.planning import PlanningConfig
from hone.config.tree import PlanConfig, RLConfig
from hone.distributed.settings import AxisSizes
from hone.engine import kv_cache
from hone.engine.cost import CONTEXT_BYTES
from hone.engine.settings import BLOCK_SIZE, num_snapshots, num_state_rows
from hone.families.model_facts import ModelFacts
from hone.families.qwen3_5_text import SPEC
from hone.families.shape import ModelShape
from hone.hardware import GPUS, gpu_peaks
from hone.models.settings import LoraConfig
from hone.planner.fitting import check_gpu_memory
from hone.planner.roofline import training_flops
from hone.planner.run_memory import RunMemory
from hone.tools.plan.calibration import Measured, calibrated
from hone.tools.plan.comparison import placement_rates, plan_rates
from hone.tools.plan.compute_time import Compute
from hone.tools.plan.lines import plan_lines
from hone.tools.plan.simulator import Placement
from hone.trainer.cost import adapter_params, training_memory
from hone.trainer.settings import TrainerConfig
from tests.tables import table

GIB = 1 << 30


def shape_of(name: str) -> ModelShape:
    """The decoder alone."""
    return ModelShape.from_config(SPEC.public[f"qwen3.5-{name}"])


def plan_of(name: str, *flags: str) -> RunPlan:
    """On one H200."""
    base = ("--model.path=some/model", "--data.train=[{path: some/data}]", "--run.device=cuda")
    cfg = load_config(RLConfig, None, [*base, *flags])
    facts, gpu = ModelFacts.of_shape(shape_of(name)), gpu_peaks("NVIDIA H200")
    return resolve(cfg, facts, Devices(gpu=gpu), world_size=1)


def cache_of(name: str, max_num_seqs: int) -> kv_cache.KVCache:
    """As the engine makes it, without memory."""
    cache = kv_cache.KVCache(
        AutoConfig.for_model(**SPEC.public[f"qwen3.5-{name}"]),
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        num_state_rows=num_state_rows(max_num_seqs, enable_prefix_caching=True),
    )
    cache.device = torch.device("cuda")
    return cache


@table("number, snapshots, rows", [(1, 8, 10), (32, 8, 41), (64, 16, 81), (256, 64, 321)])
def test_every_sequence_has_a_state_and_four_share_one_of_a_prompt(
    number: int, snapshots: int, rows: int
) -> None:
    found = [f(number, enable_prefix_caching=True) for f in (num_snapshots, num_state_rows)]
    assert found == [snapshots, rows]
    found = [f(number, enable_prefix_caching=False) for f in (num_snapshots, num_state_rows)]
    assert found == [0, number + 1]


@table("name, max_num_seqs", [("0.8b", 256), ("9b", 64), ("27b", 16)])
def test_states_are_planned_as_the_engine_stores_them(name: str, max_num_seqs: int) -> None:
    run = RunMemory(plan_of(name, f"--engine.max_num_seqs={max_num_seqs}"))
    cache = cache_of(name, max_num_seqs)
    assert run.engine.states == cache.state_bytes
    assert run.engine.kv_bytes_per_token == cache.block_bytes // BLOCK_SIZE
    of_phases = {phase.name: phase.parts["recurrent states"] for phase in run.phases()}
    assert of_phases == dict.fromkeys(("generate", "train", "sync"), cache.state_bytes)


def test_a_step_moves_the_states_of_a_layer_of_all_sequences() -> None:
    """2 MiB of 32 heads and three inputs of 8,192 channels, four times, of 9B: half for half as
    many sequences."""
    of_sequence = 4 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    found = [
        RunMemory(plan_of("9b", f"--engine.max_num_seqs={number}")).engine.step
        for number in (256, 128)
    ]
    of_logits = 248_320 * (4 + 2)
    assert found[0] - found[1] == 128 * (of_sequence + of_logits)


def test_a_sleeping_engine_has_given_its_states_up() -> None:
    run = RunMemory(plan_of("0.8b", "--engine.enable_sleep=true"))
    states = {phase.name: phase.parts["recurrent states"] for phase in run.phases()}
    assert states["train"] == 0
    assert states["generate"] == run.engine.states > 5 * GIB


@table(
    "name, flags",
    [
        ("0.8b", []),
        (  # limited by what is free
            "2b",
            ["--engine.gpu_memory_utilization=0.95", "--rollout.max_completion_tokens=65536"],
        ),
        ("9b", ["--engine.max_num_seqs=64", "--engine.gpu_memory_utilization=0.8"]),
        ("9b", ["--engine.max_num_seqs=256", "--rollout.max_completion_tokens=32768"]),
    ],
)
def test_the_planned_cache_is_what_states_leave_to_the_engine(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunMemory(plan_of(name, *flags))
    cfg = run.plan.engine
    assert cfg is not None
    cache = cache_of(name, cfg.max_num_seqs)
    held = sum(run.trainer_at_rest(has_moments=False).values()) + run.engine.weights
    memory = 140 * GIB, 140 * GIB - CONTEXT_BYTES - held
    monkeypatch.setattr(kv_cache, "_cuda_memory", lambda device: memory)
    num_blocks = kv_cache.choose_num_blocks(
        cache,
        cfg,
        max_model_len=run.engine.max_length or 0,
        reserved_bytes=run.engine.step,
        resident_bytes=run.engine.weights + cache.state_bytes,
    )
    assert run.cache is not None
    assert num_blocks == run.cache // cache.block_bytes > 0


def test_other_engines_have_states_in_their_cache() -> None:
    run = RunMemory(plan_of("0.8b", "--engine.backend=vllm"))
    assert run.engine.states == 0
    assert {phase.parts["recurrent states"] for phase in run.phases()} == {0}


def test_a_gpu_that_states_fill_is_told_so() -> None:
    plan = plan_of("27b", "--engine.max_num_seqs=512", "--trainer.offload=parameters")
    (finding,) = check_gpu_memory(plan)
    size = 641 * shape_of("27b").state_bytes() / GIB
    assert f"States of recurrent layers take {size:.2f} GiB beside it" in finding.message


def test_the_check_shows_keys_of_attention_and_states() -> None:
    lines = {line.name: line for line in plan_lines(plan_of("0.8b", "--engine.max_num_seqs=64"))}
    assert lines["kv_bytes_per_token"].value == 12_288
    assert lines["kv_bytes_per_token"].how.startswith("keys and values of the 6 layers with atten")
    assert lines["state_bytes_per_sequence"].value == 19_537_920
    assert lines["state_gib"].value == round(81 * 19_537_920 / GIB, 3)
    assert "81 states: engine.max_num_seqs 64, 16 of prompts" in lines["state_gib"].how
    assert not any(name.startswith("state_") for name in _names_of_a_dense_model())


def _names_of_a_dense_model() -> list[str]:
    base = ("--model.path=Qwen/Qwen3-0.6B", "--data.train=[{path: x}]", "--run.device=cuda")
    cfg = load_config(RLConfig, None, [*base])
    facts = ModelFacts.known("Qwen/Qwen3-0.6B")
    plan = resolve(cfg, facts, Devices(gpu=gpu_peaks("NVIDIA H200")), world_size=1)
    return [line.name for line in plan_lines(plan)]


# -- training -------------------------------------------------------------------------------------

HIDDEN, INNER, CHANNELS, WIDTH, HEADS = 2048, 6144, 6144, 2048, 16
"""Of 2B: values of the stream, of the MLP, before the convolution, of values and gate."""


@table(
    "code, mode, recurrent, attention",
    [
        # Two residuals, two norms, gate, up and their product. Channels, what the rule takes of
        # them, 64 x 64 systems of chunks, gate, result, its norm and what is projected. Queries,
        # their gate, what is rotated of them, attention's result before and behind the gate.
        (
            "compiled",
            "off",
            4 * HIDDEN + 3 * INNER + 2 * CHANNELS + 64 * HEADS + 4 * WIDTH,
            4 * HIDDEN + 3 * INNER + 5 * WIDTH + 3 * 512,
        ),
        ("compiled", "selective", HIDDEN, HIDDEN + WIDTH),
        ("compiled", "full", HIDDEN, HIDDEN),
        ("eager", "full", HIDDEN, HIDDEN),
    ],
)
def test_activations_of_both_kinds_of_layers_by_hand(
    code: Any, mode: str, recurrent: int, attention: int
) -> None:
    shape, tokens = shape_of("2b"), 1000
    found = training_memory(
        shape, TrainerConfig(recompute=mode), dtype="bfloat16", num_tokens=tokens, layers=code
    )
    ends = 3 * tokens * HIDDEN * 2
    statistics = 0 if mode == "full" else 6 * 4 * 8 + (mode == "off") * 18 * 16 * HEADS
    expected = tokens * (2 * (18 * recurrent + 6 * attention) + statistics) + ends
    assert found.activations == expected


def test_only_the_recomputed_layers_keep_less() -> None:
    """`block:4` recomputes three recurrent layers and one with attention."""
    shape = shape_of("2b")

    def kept(mode: str) -> int:
        cfg = TrainerConfig(recompute=mode)
        return training_memory(shape, cfg, dtype="bfloat16", num_tokens=1000).activations

    quad = shape.part(range(4))
    ends = 3 * 1000 * HIDDEN * 2

    def of_quad(mode: str) -> int:
        cfg = TrainerConfig(recompute=mode)
        found = training_memory(quad, cfg, dtype="bfloat16", num_tokens=1000)
        return found.activations - ends

    assert kept("block:4") == kept("off") - of_quad("off") + of_quad("full")
    assert kept("off") == 6 * of_quad("off") + ends


def test_stages_of_a_pipeline_hold_layers_of_their_kinds() -> None:
    """Of two stages of four layers the first is the fullest, with recurrent layers alone."""
    config = {**SPEC.public["qwen3.5-2b"], "num_hidden_layers": 8, "vocab_size": 64}
    types = ["linear_attention"] * 6 + ["full_attention"] * 2
    shape = ModelShape.from_config({**config, "layer_types": types})
    cfg = TrainerConfig.model_validate({"parallel": {"pipeline_parallel_size": 2}})
    sizes = AxisSizes(pipeline=2)
    found = training_memory(shape, cfg, dtype="bfloat16", num_tokens=64, sizes=sizes)
    first = shape.part(range(4))
    assert len(first.recurrent_indices) == 4
    assert found.masters == 4 * (first.num_params - HIDDEN), "without the final norm"


# -- times ----------------------------------------------------------------------------------------


def test_adapters_leave_three_passes_of_the_recurrence() -> None:
    shape, lengths = shape_of("0.8b"), [300, 5000]
    tokens = sum(lengths)
    full = training_flops(shape, lengths, num_head_tokens=0)
    lora = LoraConfig(rank=1)
    frozen = training_flops(shape, lengths, num_head_tokens=0, lora=lora)
    own = 6.0 * adapter_params(shape, lora) * tokens
    assert full - frozen == pytest.approx(2.0 * shape.body_params * tokens - own, rel=0.02)


def test_a_pass_takes_the_time_of_its_products_attention_and_recurrence() -> None:
    compute, shape = Compute(GPUS[0], PlanningConfig()), shape_of("0.8b")
    lengths = [1000, 3000]
    products = 2.0 * shape.body_params * 4000
    expected = compute.products_s(shape, products) + compute.attention_s(shape, lengths)
    expected += compute.recurrence_s(shape, lengths)
    found = compute.forward_s(shape, lengths, num_head_tokens=0)
    assert found == pytest.approx(expected)
    assert compute.recurrence_s(shape, [4000]) == compute.recurrence_s(shape, lengths)
    flops = shape.recurrence_flops_per_token * 4000
    assert compute.recurrence_s(shape, lengths) > flops / GPUS[0].flops_per_s


def test_simulated_engines_move_states_in_every_step() -> None:
    cfg = PlanConfig.model_validate({"model": {"shape": "qwen3-0.6b"}, "run": {"device": "cuda"}})
    shape, gpu = shape_of("0.8b"), GPUS[0]
    placement = Placement(num_trainers=1, num_engines=1, colocated=True)
    rates = placement_rates(cfg, shape, gpu, placement).engine
    read = gpu.bytes_per_s * cfg.plan.decode_share
    assert rates.state_s == pytest.approx(2 * 19_537_920 / (0.85 * read))
    assert rates.key_s == pytest.approx(12_288 / read)


def test_calibration_takes_states_for_no_keys() -> None:
    """Of a cache of 10,000 keys beside its states, an engine preempts as with these keys."""
    plan = plan_of(
        "0.8b",
        "--engine.max_num_seqs=64",
        "--rollout.max_completion_tokens=1024",
        "--rollout.prompts_per_step=8",
        "--rollout.n_samples_per_prompt=8",
    )
    engine = RunMemory(plan).engine
    keys = 10_000 * engine.kv_bytes_per_token

    def scale(cache_bytes: float) -> float:
        measured = Measured(
            step_s=10.0,
            engine_busy_s=5.0,
            train_s=3.0,
            sync_s=1.0,
            wait_s=5.0,
            cache_bytes=cache_bytes,
            num_prompt_tokens=100,
            lengths=[[1000] * 8] * 8,
        )
        return calibrated(plan, measured).engine_scale

    assert scale(engine.states + keys) < scale(engine.states + 100 * keys)
    assert plan_rates(PlanningConfig(), Placement(num_trainers=1, num_engines=1), plan)
