"""Planned memory: what is counted against real trainers, what is modelled by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hone import hardware
from hone.config.plan import Devices, resolve
from hone.config.tree import RLConfig
from hone.distributed.settings import AxisSizes
from hone.families import stages
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape, public_shape
from hone.models.settings import LoraConfig
from hone.planner.roofline import training_flops
from hone.planner.run_memory import RunMemory
from hone.trainer.cost import adapter_params, training_memory
from hone.trainer.settings import TrainerConfig
from tests.planner.memory_cases import (
    ALONE,
    AWAY,
    CASES,
    EXPERTS,
    KINDS,
    LORA,
    OFFLOADED,
    ON_EXPERTS,
    ON_EXPERTS_4BIT,
    held,
    held_on_host,
    model_of,
    plan,
)
from tests.ranks import run_ranks
from tests.tables import check_rows

GIB = 1 << 30
WORLD = 4


def counted(memory):
    return {kind: getattr(memory, kind) for kind in KINDS}


def test_one_process_holds_just_what_is_counted():
    def check(case):
        assert counted(plan(case)) == held(case)

    check_rows({name: (case,) for name, case in ALONE.items()}, check)


def test_what_is_offloaded_lies_on_the_host():
    on_device, away = plan({}), plan({"trainer": {"offload": "optimizer"}})
    assert (away.masters, away.optimizer) == (0, 0)
    assert away.host == on_device.masters + on_device.optimizer
    assert away.gradients == on_device.gradients
    # Masters of several processes are what passes gather from.
    shared = plan({"trainer": {"offload": "optimizer"}}, 2)
    assert shared.masters == plan({}, 2).masters
    assert shared.host == plan({}, 2).optimizer


@pytest.mark.parametrize("name", [name for name in OFFLOADED if name.startswith("gradients")])
def test_one_process_offloads_just_what_is_counted(name):
    planned = plan(OFFLOADED[name])
    assert held_on_host(OFFLOADED[name]) == {"host": planned.host, "weights": planned.weights}
    assert (planned.gradients, planned.optimizer) == (0, 0)


def test_what_travels_is_bounded_by_windows():
    shape = public_shape("qwen3-8b")
    found = training_memory(
        shape, TrainerConfig(recompute="full", **AWAY), dtype="bfloat16", num_tokens=16384
    )
    layer = (shape.num_params - 2 * shape.vocab_size * shape.hidden_size) // shape.num_layers
    assert found.reducing == pytest.approx(2 * 4 * layer, rel=0.01)
    assert found.weights == 2 * shape.num_params
    assert found.host == pytest.approx(16 * shape.num_params, rel=0.1)
    small = training_memory(
        ModelShape.from_config(model_of({}).config.to_dict()),
        TrainerConfig(**AWAY),
        dtype="bfloat16",
        num_tokens=64,
    )
    assert small.reducing == 2 * plan({}).gradients  # no more than all of them, each way


@pytest.fixture(scope="module")
def shared():
    return run_ranks("tests.planner.memory_ranks", WORLD)


@pytest.mark.parametrize(
    ("cases", "kinds"),
    [(CASES, KINDS), (OFFLOADED, ("host", "weights"))],
    ids=["on devices", "offloaded"],
)
def test_one_of_several_processes_holds_just_what_is_counted(shared, cases, kinds):
    def check(name):
        planned = shared[name]["planned"]
        assert {kind: planned[kind] for kind in kinds} == shared[name]["held"]

    check_rows(cases.keys(), check)


def test_activations_by_hand():
    """Qwen3-0.6B compiled, values of 2 bytes a token and layer, and the softmax's 4 a head."""
    shape, tokens = public_shape("qwen3-0.6b"), 1000
    # Two residuals, queries keys values, their rotated heads, attention's result, gate and up,
    # the results of two norms, and that of the activation.
    values = 2 * 1024 + 4096 + 3072 + 2048 + 2 * 3072 + 2 * 1024 + 3072
    ends = 3 * tokens * 1024 * 2
    expected = {
        "off": 28 * tokens * (2 * values + 64),
        "selective": 28 * tokens * (2 * (1024 + 2048) + 64),  # its input and attention's result
        "full": 28 * tokens * 1024 * 2,
    }
    for mode, of_layers in expected.items():
        cfg = TrainerConfig(recompute=mode)
        found = training_memory(shape, cfg, dtype="bfloat16", num_tokens=tokens)
        assert found.activations == of_layers + ends
    every = TrainerConfig(recompute="full", recompute_every_n_layers=3)
    found = training_memory(shape, every, dtype="bfloat16", num_tokens=tokens)
    assert found.activations == (18 * expected["off"] + 10 * expected["full"]) // 28 + ends
    one = training_memory(
        shape, TrainerConfig(recompute="full"), dtype="bfloat16", num_tokens=tokens
    )
    for mode, num_plain, num_inputs, num_together in (
        ("block:10", 18, 10, 1),
        ("uniform:5", 0, 6, 5),
        ("uniform:40", 0, 1, 28),
    ):
        found = training_memory(
            shape, TrainerConfig(recompute=mode), dtype="bfloat16", num_tokens=tokens
        )
        of_layers = (num_plain * expected["off"] + num_inputs * expected["full"]) // 28
        assert found.activations == of_layers + ends, mode
        more = (num_together - 1) * expected["off"] // 28  # of a span, while backward goes by
        assert found.workspace == one.workspace + more, mode
    away = TrainerConfig(recompute="full", offload_activations=True)
    found = training_memory(shape, away, dtype="bfloat16", num_tokens=tokens)
    assert found.activations == 2 * tokens * 1024 * 2 + ends
    assert found.host == expected["full"]


def test_layers_that_processes_share_keep_what_is_planned():
    """In values of a token. A router's weight is beside them in float32 where scores are
    sigmoids."""
    for name, (kept, planned) in run_ranks("tests.planner.activation_ranks", 2).items():
        assert kept == pytest.approx(planned, abs=4), name


def test_R15_the_head_is_bounded_by_its_chunk():
    """Whatever the tokens and the vocabulary, besides the gradient of the matrix."""
    for vocab in (4_096, 151_936, 250_000):
        shape = replace(public_shape("qwen3-0.6b"), vocab_size=vocab)
        cfg = TrainerConfig(logits_chunk_tokens=512)
        for tokens in (4_096, 16_384, 65_536):
            found = training_memory(shape, cfg, dtype="bfloat16", num_tokens=tokens)
            assert found.logits == 512 * vocab * 6 + vocab * 1024 * 4 + tokens * 1024 * 2


@pytest.mark.parametrize(
    ("settings", "code", "gib"),
    [
        ({"compile": False}, "eager", 36.6),
        ({"compile": False, "recompute": "full"}, "eager", 6.7),
        ({}, "compiled", 24.6),
        ({"recompute": "full"}, "compiled", 6.2),
    ],
)
def test_measured_peaks(settings, code, gib):
    """benchmarks/README.md: forward and backward of one micro-batch of Qwen3-0.6B on an H200,
    before the first optimizer step, so without moments."""
    found = training_memory(
        public_shape("qwen3-0.6b"),
        TrainerConfig(**settings),
        dtype="bfloat16",
        num_tokens=16384,
        num_trained=16 * 896,
        num_micro_batches=1,
        layers=code,
    )
    assert (found.peak - found.optimizer) / GIB == pytest.approx(gib, rel=0.15)


def test_stages_shard_more_and_more():
    sizes, shape = AxisSizes(data=8, fsdp=8), public_shape("qwen3-8b")
    found = {}
    for stage in (0, 1, 2, 3):
        cfg = TrainerConfig(recompute="full", parallel={"zero_stage": stage})
        own = replace(sizes, fsdp=1) if stage == 0 else sizes
        found[stage] = training_memory(
            shape, cfg, dtype="bfloat16", num_tokens=16384, layers="compiled", sizes=own
        )
    peaks = [found[stage].peak for stage in (0, 1, 2, 3)]
    assert peaks == sorted(peaks, reverse=True)
    assert found[1].masters * 8 == pytest.approx(found[0].masters, rel=1e-3)
    assert found[1].reducing - found[2].reducing == pytest.approx(4 * shape.num_params, rel=1e-3)
    assert found[3].gathered < found[2].gathered / 3


STEPS = [  # settings of 4B steps with compiled layers, 16,384 tokens a micro-batch: GiB
    ({}, 130.75),
    ({"recompute": "full"}, 73.48),
    ({"recompute": "selective"}, 77.96),
    ({"recompute": "full", "recompute_every_n_layers": 2}, 102.06),
    ({"recompute": "full", "offload_activations": True}, 70.83),
    ({"offload": "optimizer"}, 85.68),
    ({"offload": "gradients"}, 71.0),
    ({"optimizer": {"state_dtype": "bfloat16"}}, 115.77),
]
"""Measured on an H200, benchmarks/memory.md."""


@pytest.mark.parametrize(("settings", "peak"), STEPS)
def test_R15_knobs_of_compiled_layers_are_planned_as_measured(settings, peak):
    cfg = TrainerConfig.model_validate(settings)
    plan = training_memory(
        public_shape("qwen3-4b"), cfg, dtype="bfloat16", num_tokens=16384, layers="compiled"
    )
    assert plan.peak / GIB == pytest.approx(peak, rel=0.01)


def test_hone_check_plans_the_layers_that_train():
    shape = public_shape("qwen3-0.6b")
    facts = ModelFacts.of_shape(shape)

    def found(**settings):
        cfg = RLConfig.model_validate(
            {"model": {"path": "x"}, "data": {"train": [{"path": "x"}]}, "trainer": settings}
        )
        step = RunMemory(resolve(cfg, facts, Devices(), world_size=1)).step
        return round(step.peak / GIB, 1)

    def planned(layers, **settings):
        cfg, tokens = TrainerConfig(**settings), TrainerConfig().max_tokens_per_microbatch
        plan = training_memory(shape, cfg, dtype="bfloat16", num_tokens=tokens, layers=layers)
        return round(plan.peak / GIB, 1)

    assert found() == planned("compiled") != planned("eager")
    assert found(compile=False) == planned("eager")


# -- FLOPs ---------------------------------------------------------------------------------------


def test_training_flops_by_hand():
    shape = ModelShape.from_config(model_of({}).config.to_dict())
    matrices = shape.body_params
    linear = 2 * (matrices * 30 + 48 * 32 * 20)  # 20 of 30 tokens go through the head
    attention = 4 * 2 * 4 * 8 * (10**2 + 20**2) / 2  # layers, heads, head size; half the square
    assert training_flops(shape, [10, 20], num_head_tokens=20) == 3 * (linear + attention)


def test_experts_in_four_bits_are_unpacked_for_a_product():
    """All of a layer's gate_up_proj in bfloat16, 8 x 48 x 32 values."""
    kept = plan({"model": EXPERTS, "lora": ON_EXPERTS})
    packed = plan({"model": EXPERTS, "lora": ON_EXPERTS_4BIT})
    assert packed.workspace - kept.workspace == 2 * 8 * 48 * 32
    assert packed.weights < kept.weights


def test_frozen_matrices_pass_two_products():
    shape = ModelShape.from_config(model_of({}).config.to_dict())
    lengths, own = [10, 20], adapter_params(shape, LORA)
    named = 2 * 3 * ((32 + 32) + 2 * (16 + 32) + (32 + 32) + 3 * (64 + 32))  # layers, rank
    assert own == named
    full = training_flops(shape, lengths, num_head_tokens=20)
    adapted = training_flops(shape, lengths, num_head_tokens=20, lora=LORA)
    linear = 2 * (shape.body_params * 30 + 48 * 32 * 20)
    # Inputs of the first layer's q, k and v, and of their A, have no gradient.
    spared = 2 * 30 * (32 * (32 + 2 * 16) + 3 * 3 * 32)
    assert full - adapted == linear - 3 * 2 * own * 30 + spared
    assert adapter_params(shape, LoraConfig()) == 0


# -- devices -------------------------------------------------------------------------------------


def test_every_gpu_has_its_data_sheet_and_memory():
    for peaks in hardware.GPUS:
        assert peaks.datasheet_flops_per_s is not None
        assert peaks.memory_gib is not None
        if peaks.source == "datasheet":
            assert peaks.flops_per_s == peaks.datasheet_flops_per_s
        else:
            assert peaks.flops_per_s < peaks.datasheet_flops_per_s


@pytest.mark.parametrize("name", ["h100", "h100-pcie", "a100", "NVIDIA A100 80GB PCIe"])
def test_gpus_of_80_gb_have_no_more_than_torch_reports(name: str):
    """79.1 to 79.6 GiB."""
    assert hardware.known_gpu(name).memory_gib == 79


def test_the_driver_names_the_gpu(tmp_path: Path):
    assert hardware.installed_gpu(tmp_path) is None
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "information").write_text(
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\nGPU UUID: \t GPU-1\n"
    )
    found = hardware.installed_gpu(tmp_path)
    assert found is not None
    assert (found.name, found.memory_gib) == ("H200", 140)


def test_how_many_gpus_there_can_be_is_known_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hardware, "_SIGNS_OF_A_GPU", (str(tmp_path / "device"),))
    empty, two = tmp_path / "empty", tmp_path / "two"
    for number in range(2):
        (two / f"0000:{number}b:00.0").mkdir(parents=True)
    assert hardware.max_gpus(None, empty) == hardware.max_gpus("0,1", empty) == 0
    named = {None: 2, "": 0, "-1": 0, "1": 1, "0,1": 2, "0,-1,1": 1, "0,1,2": 2}
    assert {visible: hardware.max_gpus(visible, two) for visible in named} == named
    (tmp_path / "device").touch()  # a driver that lists nothing: WSL, or another maker's
    assert hardware.max_gpus(None, empty) is None
    assert hardware.max_gpus("0,1", empty) == 2


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages(monkeypatch):
    """Of as many layers as the others."""
    monkeypatch.setattr(stages, "head_cost", lambda shape: 0)
    shape, tokens = public_shape("qwen3-8b"), 1 << 18  # so many that it is the fullest stage
    layer = tokens * shape.hidden_size * 2

    def activations(number, groups=1, **settings):
        parallel = {"pipeline_parallel_size": number, "virtual_stages": groups}
        cfg = TrainerConfig(recompute="full", parallel=parallel)
        sizes = AxisSizes.of(cfg.parallel, 4)
        found = training_memory(
            shape, cfg, dtype="bfloat16", num_tokens=tokens, sizes=sizes, **settings
        )
        return found.activations

    assert activations(1) == (36 + 3) * layer
    assert activations(2) == (2 * 18 + 6) * layer
    assert activations(4) == (4 * 9 + 6) * layer
    assert activations(2, 3) == (6 * 9 + 9) * layer, "of 6 + 3 passes through a third each"
    assert activations(4, 3) == (3 * 21 + 9) * layer
    assert activations(4, 3, num_micro_batches=1) == (9 + 9 + 3) * layer
    assert activations(4, num_micro_batches=1) == (9 + 6 + 3) * layer, "the last has the head"


def test_each_end_of_a_pipeline_holds_its_matrix():
    shape = public_shape("qwen3-8b")
    cfg = TrainerConfig(parallel={"pipeline_parallel_size": 2, "zero_stage": 0})
    found = training_memory(
        shape, cfg, dtype="bfloat16", num_tokens=64, sizes=AxisSizes.of(cfg.parallel, 2)
    )
    of_layers = sum(t.count * t.numel for t in shape.tensors() if t.in_layer)
    assert found.masters in {
        4 * (of_layers * 19 // 36 + shape.head_params),
        4 * (of_layers * 17 // 36 + shape.head_params + shape.hidden_size),
    }
