"""Planned memory of whole runs: against measured ones, by hand, and what is advised."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import ceil
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from hone import rules
from hone.config.load import load_config
from hone.config.plan import Command, Devices, RunPlan, known_models, resolve
from hone.config.tree import TREES, EvaluateConfig, GenerateConfig, RLConfig
from hone.distributed.settings import AxisSizes
from hone.engine import kv_cache
from hone.engine.cost import CACHE_MARGIN_BYTES, CONTEXT_BYTES, GROUP_BYTES, EngineMemory
from hone.engine.settings import BLOCK_SIZE
from hone.families.model_facts import ModelFacts
from hone.families.registry import public_configs
from hone.families.shape import ModelShape, public_shape
from hone.hardware import Peaks, gpu_peaks, known_gpu
from hone.models.tensor_parallel import TensorParallel, shard_of
from hone.planner import run_memory
from hone.planner.fitting import changed, check_gpu_memory, check_margin, memory_changes
from hone.planner.host_memory import host_roles
from hone.planner.knobs import LOGITS
from hone.planner.run_memory import Phase, RunMemory
from hone.tools.plan.lines import plan_lines
from hone.trainer import gathering
from hone.trainer.cost import training_memory
from hone.trainer.settings import TrainerConfig
from hone.weights import sync
from tests.tables import table

GIB = 1 << 30
TOLERANCE = 0.025
"""Of a whole run's peak; micro-batches are planned full and the measured were 94 % full."""
RUN = (
    "--model.path=public/model",
    "--data.train=[{path: public/data}]",
    "--run.device=cuda",
    "--rollout.prompts_per_step=32",
    "--data.max_prompt_tokens=264",
    "--rollout.max_completion_tokens=1024",
)
"""benchmarks/rl_step.py with default settings."""
APART = ("--cluster.num_trainers=2", "--cluster.num_engines=2")


def h200() -> Peaks:
    found = gpu_peaks("NVIDIA H200")
    assert found is not None
    return found


def shape_of(name: str) -> ModelShape:
    found = public_shape(name)
    assert found is not None
    return found


def configured(*flags: str) -> RLConfig:
    return load_config(RLConfig, None, [*RUN, *flags])


def planned(
    cfg: Command, shape: ModelShape, *, world_size: int = 1, gpu: Peaks | None = None
) -> RunPlan:
    devices = Devices(kind="cpu" if cfg.run.device == "cpu" else "cuda", gpu=gpu or h200())
    facts, others = ModelFacts.of_shape(shape), known_models(cfg)
    return resolve(cfg, facts, devices, world_size=world_size, others=others)


def phases(*flags: str, name: str = "qwen3-0.6b", world_size: int = 1) -> dict[str, Phase]:
    run = RunMemory(planned(configured(*flags), shape_of(name), world_size=world_size))
    return {phase.title: phase for phase in run.phases()}


def findings(*flags: str, name: str, world_size: int = 1) -> list[str]:
    plan = planned(configured(*flags), shape_of(name), world_size=world_size)
    found = [*check_gpu_memory(plan)]
    assert all(key in finding.message for finding in found for key in finding.keys)
    return [finding.message for finding in found]


@pytest.mark.parametrize(("name", "gib"), [("qwen3-0.6b", 66.04), ("qwen3-1.7b", 96.28)])
def test_R15_whole_runs_are_planned_as_measured(name: str, gib: float) -> None:
    """benchmarks/README.md, whole steps on one H200."""
    found = phases(name=name)
    assert found["train"].parts["KV cache"] / GIB == pytest.approx(35.44, abs=0.01)
    assert max(phase.num_bytes for phase in found.values()) == found["train"].num_bytes
    assert found["train"].num_bytes / GIB == pytest.approx(gib, rel=TOLERANCE)


def test_R15_a_sleeping_cache_leaves_generation_as_the_peak() -> None:
    """benchmarks/README.md, what each setting is worth: 43.7 GiB with `engine.enable_sleep`."""
    found = phases("--engine.enable_sleep=true")
    assert max(phase.num_bytes for phase in found.values()) == found["generate"].num_bytes
    assert found["generate"].num_bytes / GIB == pytest.approx(43.7, rel=TOLERANCE)


@table("num_layers, stage, gib", [(36, 3, 76.22), (36, 2, 88.21), (12, 3, 38.72), (12, 2, 42.28)])
def test_steps_of_two_processes_are_planned_as_measured(
    num_layers: int, stage: Any, gib: float
) -> None:
    """Measured by benchmarks/gpu/parallel_check.py: 8B or some of its layers, two passes of 16,384
    tokens a GPU."""
    plan = training_memory(
        replace(shape_of("qwen3-8b"), num_layers=num_layers),
        TrainerConfig.model_validate({"recompute": "full", "parallel": {"zero_stage": stage}}),
        dtype="bfloat16",
        num_tokens=16_384,
        layers="compiled",
        sizes=AxisSizes(data=2, fsdp=2),
    )
    assert plan.peak / GIB == pytest.approx(gib, rel=0.05)


@table(
    "name, unpacked, largest",
    [
        ("qwen3-8b", 2 * 12288 * 4096, 12288 * 4096),
        ("qwen3-30b-a3b", 128 * 3 * 768 * 2048, 128 * 2 * 768 * 2048),
    ],
)
@table("apart", [False, True])
def test_what_8_bit_weights_take_for_a_moment_is_planned(
    name: str, unpacked: int, largest: int, *, apart: bool
) -> None:
    """Prefill multiplies with weights of 16 bits, and a sync packs a group before it is there."""
    flags = APART if apart else ("--engine.kv_cache_gib=1",)
    world = {"world_size": 2} if apart else {}
    plain, codes = (
        phases(*flags, *own, name=name, **world) for own in ((), ("--engine.weight_dtype=int8",))
    )
    generate, sync_of = ("engine generate", "engine sync") if apart else ("generate", "sync")

    def more(phase: str, part: str) -> int:
        return codes[phase].parts[part] - plain[phase].parts[part]

    assert more(generate, "engine's step") == 2 * unpacked
    group = 1 << 28
    # Beside one trainer an engine of its own format has nothing on its way.
    whole = 0 if apart else group + 2 * max(t.numel for t in shape_of(name).tensors())
    assert more(sync_of, "weights on their way") == whole + group // 2 + largest


def test_constants_are_those_of_the_code_that_is_planned() -> None:
    assert CACHE_MARGIN_BYTES == kv_cache._MARGIN_BYTES
    assert GROUP_BYTES == sync.GROUP_BYTES
    assert run_memory.GATHER_BYTES == gathering.GATHER_BYTES


def test_who_sleeps_leaves_the_device() -> None:
    both = phases("--engine.enable_sleep=true", "--trainer.enable_sleep=true")
    none = phases()
    asleep = {"KV cache": "train", "masters": "generate", "moments": "sync"}
    for part, phase in asleep.items():
        assert both[phase].parts[part] == 0 < none[phase].parts[part]
    for phase in both:
        gone = {part for part in none[phase].parts if both[phase].parts[part] == 0}
        gone -= {part for part, num_bytes in none[phase].parts.items() if num_bytes == 0}
        assert gone == ({"KV cache"} if phase == "train" else {"masters", "moments"})


def test_weights_lie_there_as_often_as_somebody_needs_them() -> None:
    """bfloat16 weights of 0.6B: one module; a copy of the engine's; a reference in shards."""
    whole = 2 * shape_of("qwen3-0.6b").num_params

    def held(*flags: str, world_size: int = 1) -> tuple[int, int, int]:
        parts = phases(*flags, world_size=world_size)["generate"].parts
        return parts["weights"], parts["engine's weights"], parts.get("reference", 0)

    kl = "--algorithm.kl.coef=0.1"
    assert held() == (whole, 0, 0)
    assert held(kl) == (whole, 0, whole)
    assert held(kl, world_size=4) == (0, whole, whole // 4)
    assert held(kl, "--trainer.parallel.zero_stage=0", world_size=4) == (0, whole, whole // 4)
    of_adapters = held(kl, "--model.lora.rank=8")
    assert whole < of_adapters[0] < 1.1 * whole
    assert of_adapters[1:] == (whole, 0)
    assert held("--engine.backend=vllm")[1] == whole


def test_the_cache_is_the_smallest_of_three() -> None:
    def cache(*flags: str, name: str = "qwen3-0.6b") -> float:
        return phases(*flags, name=name)["generate"].parts["KV cache"] / GIB

    longer = "--data.max_prompt_tokens=15360"
    step = phases()["generate"].parts["engine's step"] / GIB
    assert cache() == pytest.approx(256 * 81 * 16 * 112 * 1024 / GIB)  # what sequences can use
    assert cache("--engine.kv_cache_dtype=fp8") == pytest.approx(cache() / 2)
    assert cache(longer) == pytest.approx(70 - step)  # half of the GPU
    # What is free beside weights and masters; moments come later, which is what is predicted.
    held = 6 * shape_of("qwen3-0.6b").num_params / GIB
    assert cache(longer, "--engine.gpu_memory_utilization=1") == pytest.approx(
        140 - 1.5 - held - step
    )
    assert cache(longer, "--engine.kv_cache_gib=3") == 3
    vllm = cache("--engine.backend=vllm")  # takes its share whatever sequences can use
    assert vllm == pytest.approx(70 - step - 2 * shape_of("qwen3-0.6b").num_params / GIB)


@table("seed", range(12))
def test_R15_the_planned_cache_is_the_one_that_the_engine_takes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    name = draw.choice(["qwen3-0.6b", "qwen3-4b"])
    shape, world_size = shape_of(name), draw.choice([1, 4])
    cfg = configured(
        f"--engine.gpu_memory_utilization={draw.choice([0.3, 0.6, 0.95, 1.0])}",
        f"--data.max_prompt_tokens={draw.choice([264, 2976, 39_936])}",
        f"--engine.max_num_seqs={draw.choice([8, 64, 512])}",
        f"--engine.kv_cache_dtype={draw.choice(['auto', 'fp8'])}",
        f"--trainer.enable_sleep={str(draw.random() < 0.5).lower()}",
        f"--algorithm.kl.coef={draw.choice([0, 1])}",
    )
    run = RunMemory(planned(cfg, shape, world_size=world_size))
    config = Qwen3Config(
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    cache = kv_cache.KVCache(
        config,
        block_size=BLOCK_SIZE,
        dtype=kv_cache.cache_dtype(cfg.engine, torch.bfloat16),
        device=torch.device("cpu"),
    )
    cache.device = torch.device("cuda")  # nothing is allocated there
    held = sum(run.trainer_at_rest(has_moments=False).values()) + run.engine.weights
    memory = 140 * GIB, 140 * GIB - CONTEXT_BYTES - held
    monkeypatch.setattr(kv_cache, "_cuda_memory", lambda device: memory)
    num_blocks = kv_cache.choose_num_blocks(
        cache,
        cfg.engine,
        max_model_len=run.engine.max_length or 0,
        reserved_bytes=run.engine.step,
        resident_bytes=run.engine.weights,
    )
    assert run.cache is not None
    assert num_blocks == run.cache // cache.block_bytes


def of_a_rank(name: str, size: int) -> int:
    """Bytes of what the first of `size` ranks of an engine holds: what `shard_of` cuts from the
    parameters of the model itself, on the meta device."""
    config = AutoConfig.for_model(**public_configs()[name])
    tp = TensorParallel(rank=0, size=size, device=torch.device("meta"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parts = (shard_of(key, value, config, tp) for key, value in model.named_parameters())
    return 2 * sum(part.numel() for part in parts)


@table("name", ["qwen3-8b", "qwen3-30b-a3b", "glm-4.5-air", "qwen3-0.6b"])
def test_a_rank_of_an_engine_holds_its_part_of_each_tensor(name: str) -> None:
    shape = shape_of(name)
    for size in (1, 2, 4):
        assert shape.rank_bytes(size) == of_a_rank(name, size)


def test_engines_apart_have_devices_of_their_own() -> None:
    found = phases(*APART, "--engine.tensor_parallel_size=2", world_size=2)
    assert [*found] == ["trainer train", "trainer sync", "engine generate", "engine sync"]
    assert found["engine generate"].parts["engine's weights"] == of_a_rank("qwen3-0.6b", 2)
    assert "masters" not in found["engine generate"].parts
    assert "KV cache" not in found["trainer train"].parts
    buffers = 3 * (512 << 20)
    assert found["engine sync"].parts["weights on their way"] == buffers
    adapted = phases(*APART, "--model.lora.rank=8", world_size=2)["engine sync"]
    assert adapted.parts["weights on their way"] == buffers


def test_an_engine_over_two_trainers_has_half_on_each_and_none_while_they_work() -> None:
    pairs = phases("--engine.tensor_parallel_size=2", "--engine.enable_sleep=true", world_size=4)
    assert [*pairs] == ["generate", "train", "sync"]
    whole = phases("--engine.enable_sleep=true", world_size=4)
    half, all_of_it = of_a_rank("qwen3-0.6b", 2), of_a_rank("qwen3-0.6b", 1)
    weights = [phase.parts["engine's weights"] for phase in pairs.values()]
    assert weights == [half, 0, half]
    assert whole["generate"].parts["engine's weights"] == all_of_it
    assert phases(world_size=4)["train"].parts["engine's weights"] == all_of_it, "no sleep"
    beside = phases("--engine.tensor_parallel_size=2", world_size=4)
    assert beside["train"].parts["engine's weights"] == half


def test_a_reference_apart_has_a_device_of_its_own() -> None:
    kl, scores = "--algorithm.kl.coef=0.1", "--cluster.num_references=1"
    found = phases(kl, scores)
    assert [*found] == ["generate", "train", "sync", "reference score"]
    assert found["train"].parts["reference"] == 0
    whole = 2 * shape_of("qwen3-0.6b").num_params
    assert found["reference score"].parts["weights"] == whole
    # Hidden states twice, and three values of the MLP, which are more than a chunk's logits.
    tokens, hidden, inner = 8192, 1024, 3072
    few = "--trainer.logits_chunk_tokens=64"
    found = phases(kl, scores, few, f"--trainer.max_tokens_per_forward={tokens}")
    work = found["reference score"].parts["activations and work"]
    assert work == 2 * tokens * (2 * hidden + 3 * inner)
    assert [*phases(kl, scores, *APART, world_size=2)][-1] == "reference score"


@pytest.mark.parametrize(
    ("role", "model", "number"),
    [
        ("teacher", "--teacher.path", "--cluster.num_teachers=2"),
        ("reward model", "--reward.model.path", "--cluster.num_reward_models=2"),
    ],
)
def test_a_teacher_and_a_reward_model_apart_have_devices_of_their_own(
    role: str, model: str, number: str
) -> None:
    """Weights and a pass of the budget that is theirs; nothing of them is left on the others."""
    section = "teacher" if role == "teacher" else "reward.model"
    flags = (f"{model}=Qwen/Qwen3-1.7B", f"--{section}.max_tokens_per_forward=8192")
    flags += ("--trainer.logits_chunk_tokens=64",)
    one = shape_of("qwen3-1.7b")
    beside = phases(*flags)["train"].parts[role]
    found = phases(*flags, number)
    assert [*found] == ["generate", "train", "sync", f"{role} score"]
    assert not any(
        phase.parts.get(role) or phase.parts.get(f"{role}'s pass")
        for phase in (found["generate"], found["train"], found["sync"])
    )
    alone = found[f"{role} score"].parts
    head = 2048 if role == "reward model" else 0  # of a value, in place of logits
    assert alone["weights"] == beside == 2 * (one.num_params + head)
    assert alone["activations and work"] == 2 * 8192 * (2 * 2048 + 3 * 6144)
    assert [*phases(*flags, number, *APART, world_size=2)][-1] == f"{role} score"
    plan = planned(configured(*flags, number), shape_of("qwen3-0.6b"))
    assert plan.devices_of_roles() == 1 + 2
    lines = {line.name for line in plan_lines(plan)}
    assert {f"{role.replace(' ', '_')}_{what}" for what in ("devices", "score_peak_gib")} <= lines


def test_a_critic_apart_has_devices_of_its_own() -> None:
    """With the step that it has beside the policy; nothing of it is left there."""
    gae = ("--algorithm.advantage=gae", "--critic.path=Qwen/Qwen3-1.7B")
    beside = RunMemory(planned(configured(*gae), shape_of("qwen3-0.6b")))
    assert beside.critic is not None
    assert phases(*gae)["generate"].parts["critic"] == beside.critic_at_rest
    found = phases(*gae, "--cluster.num_critics=1")
    assert [*found] == ["generate", "train", "sync", "critic train"]
    parts = dict(found["critic train"].parts)
    parts.pop("CUDA")
    assert parts == beside.critic.parts
    alone = phases()
    for name in ("generate", "train", "sync"):
        assert found[name].parts == {**alone[name].parts, "critic": 0}
    halves = phases(*gae, "--cluster.num_critics=2")["critic train"].parts
    assert halves["masters"] == parts["masters"] // 2
    plan = planned(configured(*gae, "--cluster.num_critics=2"), shape_of("qwen3-0.6b"))
    assert plan.devices_of_roles() == 1 + 2
    assert {"critic_devices", "critic_train_peak_gib"} <= {line.name for line in plan_lines(plan)}
    assert [*phases(*gae, "--cluster.num_critics=2", *APART, world_size=2)][-1] == "critic train"


def test_a_critic_apart_is_planned_with_sizes_of_its_own() -> None:
    """Whatever those of the policy are; where none are set it has these."""
    gae = ("--algorithm.advantage=gae", "--cluster.num_critics=2", "--cluster.num_trainers=2")
    shape = shape_of("qwen3-0.6b")

    def seen(*flags: str) -> tuple[dict[str, int], dict[str, Any]]:
        plan = planned(configured(*gae, *flags), shape, world_size=2)
        told = {x.name: x.value for x in plan_lines(plan) if x.name.startswith("critic_")}
        (phase,) = (x for x in RunMemory(plan).phases() if x.role == "critic")
        return dict(phase.parts), told

    tensor, own = "--trainer.parallel.tensor_parallel_size=2", "--critic.parallel"
    one, told = seen(f"{own}.tensor_parallel_size=2")
    assert (one, told) == seen(tensor)
    assert told["critic_layout"] == "1 x 1 x 1 x 2"
    assert (told["critic_processes"], told["critic_shards"]) == (2, 2)
    plain, told = seen(tensor, f"{own}.tensor_parallel_size=1")
    assert (plain, told) == seen()
    assert told["critic_layout"] == "2 x 1 x 1 x 1"
    work = "gradients, activations and work"
    assert plain[work] > 1.5 * one[work]
    copies, told = seen(f"{own}.zero_stage=0")
    assert copies["masters"] == 2 * plain["masters"]
    assert told["critic_shards"] == 1
    halves, told = seen(f"{own}.pipeline_parallel_size=2")
    assert (told["critic_stages"], told["critic_layout"]) == (2, "1 x 1 x 1 x 1")
    assert halves["masters"] < copies["masters"]
    groups = ("--trainer.parallel.pipeline_parallel_size=2", "--trainer.parallel.virtual_stages=2")
    assert seen(*groups, f"{own}.pipeline_parallel_size=2") == (halves, told)  # of one group each
    assert seen(*groups)[0] != halves
    layers, _ = seen(f"{own}.zero_stage=3")
    assert layers[work] < plain[work]
    policy = RunMemory(planned(configured(*gae, tensor), shape, world_size=2)).step
    zero = configured(*gae, tensor, f"{own}.zero_stage=0")
    assert RunMemory(planned(zero, shape, world_size=2)).step == policy


def test_a_pass_of_a_large_teacher_beside_the_policy_is_planned() -> None:
    """With more tokens than the policy's own passes it is what needs most."""
    flags = ("--teacher.path=Qwen/Qwen3-8B", "--trainer.max_tokens_per_microbatch=2048")
    small = phases(*flags)["train"].num_bytes
    large = phases(*flags, "--teacher.max_tokens_per_forward=262144")["train"]
    assert large.num_bytes > small + 10 * GIB
    assert large.parts["teacher's pass"] > 20 * GIB


def test_a_reference_that_one_device_cannot_hold_goes_back_to_the_trainers() -> None:
    """78B in bfloat16, of which 16 trainers hold a share each."""
    shape = replace(shape_of("qwen3-8b"), num_layers=400)
    cfg = configured(
        "--algorithm.kl.coef=0.1",
        "--cluster.num_references=1",
        "--cluster.num_trainers=16",
        "--cluster.num_engines=1",
        "--engine.tensor_parallel_size=2",
        "--engine.gpu_memory_utilization=0.9",
        "--trainer.max_tokens_per_microbatch=4096",
        "--trainer.parallel.zero_stage=3",
        "--trainer.recompute=full",
    )
    (found,) = check_gpu_memory(planned(cfg, shape, world_size=16))
    assert "reference score takes 14" in found.message
    assert "Set cluster.num_references to 0." in found.message


def test_small_steps_do_not_fill_a_micro_batch() -> None:
    few = phases("--rollout.prompts_per_step=1", "--rollout.n_samples_per_prompt=2")
    many = phases("--trainer.micro_batch_size=2")
    part = "gradients, activations and work"
    assert few["train"].parts[part] < 0.5 * phases()["train"].parts[part]
    gradients = 4 * shape_of("qwen3-0.6b").num_params  # of the micro-batch before
    assert many["train"].parts[part] - few["train"].parts[part] == gradients


def test_nothing_is_said_where_nothing_is_known() -> None:
    facts = ModelFacts.of_shape(shape_of("qwen3-0.6b"))
    nothing = resolve(configured(), facts, Devices(), world_size=1)
    assert not RunMemory(nothing).is_known
    assert not any(line.name == "train_peak_gib" for line in plan_lines(nothing))
    with_size = resolve(configured("--engine.kv_cache_gib=3"), facts, Devices(), world_size=1)
    assert RunMemory(with_size).is_known
    assert [*check_gpu_memory(nothing)] == []
    on_cpu = load_config(RLConfig, None, [*RUN, "--run.device=cpu"])
    huge = planned(on_cpu, shape_of("qwen3-8b"))
    assert [*check_gpu_memory(huge)] == []
    assert not any(line.name == "train_peak_gib" for line in plan_lines(huge))


def test_hone_check_has_a_line_for_each_phase() -> None:
    names = ["generate_peak_gib", "train_peak_gib", "sync_peak_gib"]
    every = plan_lines(planned(configured(), shape_of("qwen3-0.6b")))
    lines = [line for line in every if line.name in names]
    assert [line.name for line in lines] == names
    parts = [float(n) for n in re.findall(r"[a-zA-Z] (\d+\.\d)", lines[1].how)]
    assert sum(parts) == pytest.approx(float(lines[1].value), abs=0.3)
    assert lines[1].how.endswith("H200 has 140")


# -- what does not fit ---------------------------------------------------------------------------


def advised(message: str) -> list[list[str]]:
    """Flags of each alternative that a message gives."""
    _, _, told = message.rpartition("Set ")
    changes = told.removeprefix("one of these: ").rstrip(".").split("; ")
    return [
        [f"--{key}={value}" for key, value in re.findall(r"([a-z_.4]+) to ([\w.]*\w)", change)]
        for change in changes
    ]


@table(
    "name, flags, world_size",
    [
        ("qwen3-4b", ("--data.max_prompt_tokens=3072",), 1),
        ("qwen3-8b", ("--data.max_prompt_tokens=3072",), 1),
        ("qwen3-8b", ("--data.max_prompt_tokens=3072", "--algorithm.kl.coef=0.1"), 8),
        (
            "qwen3-1.7b",
            ("--engine.gpu_memory_utilization=0.9", "--data.max_prompt_tokens=15360"),
            1,
        ),
        (
            "qwen3-1.7b",
            (
                "--engine.gpu_memory_utilization=0.9",
                "--data.max_prompt_tokens=15360",
                "--engine.enable_sleep=true",
            ),
            1,
        ),
        ("qwen3-4b", ("--engine.kv_cache_gib=60",), 1),
        ("qwen3-8b", ("--engine.gpu_memory_utilization=0.1",), 8),
        ("qwen3-8b", (*APART, "--engine.kv_cache_gib=130"), 2),
    ],
)
def test_R22_a_run_that_cannot_fit_is_refused_and_every_advice_holds(
    name: str, flags: tuple[str, ...], world_size: int
) -> None:
    (message,) = findings(*flags, name=name, world_size=world_size)
    assert "140 GiB" in message or "KV cache has 0.00 GiB" in message
    alternatives = advised(message)
    assert alternatives
    for change in alternatives:
        assert findings(*flags, *change, name=name, world_size=world_size) == []
        trainers = configured(*flags, *change).cluster
        number = trainers.num_trainers if trainers.is_used else world_size
        told = rules.findings(
            planned(configured(*flags, *change), shape_of(name), world_size=number)
        )
        assert [finding.message for finding in told if finding.level == "error"] == []


@pytest.mark.parametrize("exact", [False, True])
def test_8_bit_weights_are_named_where_nothing_else_makes_a_run_fit(exact: bool) -> None:
    """A base of four bits, 18 GiB, and beside it 61 GiB of weights that sample, in half of that;
    exact mode rules them out."""
    flags = ("--model.lora.rank=16", "--model.lora.load_in_4bit=true")
    flags += (f"--model.exact={str(exact).lower()}", "--trainer.max_tokens_per_microbatch=2576")
    plan = planned(configured(*flags), shape_of("qwen3-32b"), gpu=known_gpu("h100"))
    (found,) = check_gpu_memory(plan)
    if exact:
        assert "No setting that was tried makes it fit" in found.message
        return
    assert "engine.weight_dtype to int8" in found.message
    assert found.message.endswith("and saves 29.0 GiB of them.")
    (change,) = advised(found.message.partition(" It rounds")[0])
    assert "--algorithm.correction.kind=tis" in change
    better = planned(configured(*flags, *change), shape_of("qwen3-32b"), gpu=known_gpu("h100"))
    assert [*check_gpu_memory(better)] == []
    assert rules.findings(better) == []


@table("world_size, share, above", [(1, 0.03, "1%"), (2, 0.07, "5%")])
def test_a_run_that_fits_by_less_than_predictions_were_off_is_warned_of(
    world_size: int, share: float, above: str
) -> None:
    """The advice leaves what the warning asks for; a GPU that is full or has more room than that
    is not warned of."""
    flags = ("--engine.kv_cache_gib=4", "--trainer.max_tokens_per_microbatch=32768")
    peak = phases(*flags, world_size=world_size)["train"].num_bytes / (1 << 30)
    shape = shape_of("qwen3-0.6b")
    sizes = {ceil(peak) - 1: False, ceil(peak): True, ceil(peak / (1 - share)): False}
    for gib, is_warned_of in sizes.items():
        gpu = replace(known_gpu("h200"), memory_gib=gib)
        plan = planned(configured(*flags), shape, world_size=world_size, gpu=gpu)
        assert bool([*check_gpu_memory(plan)]) == (gib < peak)
        told = [*check_margin(plan)]
        assert bool(told) == is_warned_of, gib
        for finding in told:
            assert finding.level == "warning"
            assert (
                f"train takes {peak:.1f} GiB, and more than {(1 - share) * gib:.1f} may be too"
                in (finding.message)
            )
            assert f"measured up to {above} above their prediction" in finding.message
            (change,) = advised(finding.message)
            assert {flag[2:].partition("=")[0] for flag in change} == {*finding.keys}
            better = planned(configured(*flags, *change), shape, world_size=world_size, gpu=gpu)
            assert [*check_gpu_memory(better), *check_margin(better)] == []


def test_a_refusal_names_phases_and_numbers() -> None:
    (message,) = findings("--data.max_prompt_tokens=3072", name="qwen3-4b")
    assert "train takes 200.6 GiB (weights 7.5 + masters 15.0 + moments 30.0" in message
    assert "generate 123.4 GiB (" in message
    assert "engine.gpu_memory_utilization to 0.06; engine.enable_sleep to true" in message


def test_the_largest_share_that_fits_is_named() -> None:
    flags = ("--data.max_prompt_tokens=3072",)
    assert findings(*flags, "--engine.gpu_memory_utilization=0.06", name="qwen3-4b") == []
    assert findings(*flags, "--engine.gpu_memory_utilization=0.07", name="qwen3-4b") != []


LLAMA_70B = ModelShape(
    family="llama",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128_256,
    tied=False,
)


def test_logits_of_a_micro_batch_are_the_longest_rows_that_it_has() -> None:
    for flags, tokens in (
        ((), 16384),
        (("--trainer.micro_batch_size=4",), 4 * 1288),
        (("--rollout.prompts_per_step=1", "--rollout.n_samples_per_prompt=2"), 2 * 1288),
    ):
        plan = planned(configured(*flags), shape_of("qwen3-0.6b"))
        (change,) = LOGITS.time(plan)
        assert change == {"trainer.logits_chunk_tokens": tokens}
        assert [*LOGITS.time(changed(plan, change))] == []


def test_a_large_chunk_of_logits_is_given_up_after_half_a_budget() -> None:
    """And no smaller one than the default."""
    plan = planned(configured("--trainer.logits_chunk_tokens=4096"), shape_of("qwen3-0.6b"))
    found = [*memory_changes(plan)]
    chunks = [x for x in found if "trainer.logits_chunk_tokens" in x]
    assert [*chain(*(x.values() for x in chunks))] == [2048, 1024]
    budget, offload = "trainer.max_tokens_per_microbatch", {"trainer.offload": "optimizer"}
    first = next(index for index, change in enumerate(found) if budget in change)
    assert first < found.index(chunks[0]) < found.index(offload)


def test_a_teacher_has_no_more_logits_than_tokens() -> None:
    flags = ("--teacher.path=Qwen/Qwen3-8B", "--teacher.max_tokens_per_forward=32768")
    parts = [
        phases(*flags, f"--trainer.logits_chunk_tokens={chunk}")["train"].parts["teacher's pass"]
        for chunk in (32768, 10**6)
    ]
    assert parts[0] == parts[1]


def test_what_no_setting_can_fit_needs_more_devices() -> None:
    (found,) = check_gpu_memory(planned(configured(), LLAMA_70B))
    assert "No setting that was tried makes it fit: take more devices" in found.message


LONG = (
    "--rollout.max_completion_tokens=130808",
    "--trainer.max_tokens_per_microbatch=131072",
)


@pytest.mark.parametrize(
    ("shape", "gpu", "flags", "world_size", "said"),
    [
        (shape_of("qwen3-8b"), "l40s", LONG, 8, "trainer.parallel.ulysses_size to "),
        (
            shape_of("qwen3-8b"),
            "a10",
            ("--cluster.num_trainers=4", "--cluster.num_engines=4"),
            4,
            "trainer.offload to parameters",
        ),
        (shape_of("qwen3-8b"), "a10", (), 8, "engine.tensor_parallel_size to "),
        (
            replace(shape_of("qwen3-8b"), num_kv_heads=1, num_layers=38),
            "a10",
            (),
            8,
            "trainer.enable_sleep to true",
        ),
        (
            replace(shape_of("qwen3-8b"), num_kv_heads=1, num_layers=38),
            "a10",
            ("--trainer.offload=gradients",),  # with which a trainer does not sleep
            8,
            "cluster.num_engines to 4",
        ),
        (LLAMA_70B, "a100-80g", (), 16, "engine.tensor_parallel_size to "),
    ],
    ids=["128k tokens", "8B apart", "8B", "8B, one key head", "8B, offloaded", "70B"],
)
def test_remedies_share_tokens_offload_divide_engines_and_set_them_apart(
    shape: ModelShape, gpu: str, flags: tuple[str, ...], world_size: int, said: str
) -> None:
    """The advice is followed, and then it fits, and no check of the settings is against it."""
    plan = planned(configured(*flags), shape, world_size=world_size, gpu=known_gpu(gpu))
    (found,) = check_gpu_memory(plan)
    assert said in found.message
    (change,) = advised(found.message)
    cfg = configured(*flags, *change)
    number = cfg.cluster.num_trainers if cfg.cluster.is_used else world_size
    better = planned(cfg, shape, world_size=number, gpu=known_gpu(gpu))
    assert better.devices_of_roles() <= plan.devices_of_roles()
    assert [*check_gpu_memory(better)] == []
    assert [x.message for x in rules.findings(better) if x.level == "error"] == []


@table(
    "owner, part, bug, seen_by",
    [
        (
            EngineMemory,
            "weights",
            lambda memory: 0,
            test_weights_lie_there_as_often_as_somebody_needs_them,
        ),
        (
            RunMemory,
            "frozen",
            lambda run: {"reference": 0},
            test_weights_lie_there_as_often_as_somebody_needs_them,
        ),
        (RunMemory, "cache", lambda run: 70 * GIB, test_the_cache_is_the_smallest_of_three),
        (
            EngineMemory,
            "step",
            lambda memory: 10 * GIB,
            test_R15_a_sleeping_cache_leaves_generation_as_the_peak,
        ),
    ],
)
def test_planted_bugs_are_seen(
    owner: type,
    part: str,
    bug: Callable[[Any], Any],
    seen_by: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, part, property(bug))
    with pytest.raises(AssertionError):
        seen_by()


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b"])
def test_a_critic_has_weights_masters_and_moments_of_its_own_and_no_head(name: str):
    shape = shape_of(name)
    flags = ("--engine.kv_cache_gib=1", "--trainer.max_tokens_per_microbatch=2048")
    with_critic = RunMemory(planned(configured(*flags, "--algorithm.advantage=gae"), shape))
    without = phases(*flags, name=name)
    params = replace(shape, tied=True).weight_bytes(2) // 2
    assert with_critic.critic_at_rest == params * (2 + 4 + 8)
    for phase in with_critic.phases():
        added = phase.num_bytes - without[phase.title].num_bytes
        assert added >= with_critic.critic_at_rest, phase.title
    assert with_critic.critic is not None
    assert with_critic.critic.activations == pytest.approx(with_critic.step.activations, rel=0.01)


@pytest.mark.parametrize("stage", [1, 3])
def test_processes_share_a_critic_as_they_share_the_policy(stage: int) -> None:
    shape = shape_of("qwen3-1.7b")
    cfg = configured("--algorithm.advantage=gae", f"--trainer.parallel.zero_stage={stage}")
    run = RunMemory(planned(cfg, shape, world_size=4))
    params = replace(shape, tied=True).weight_bytes(2) // 2
    assert run.critic_at_rest == pytest.approx(params * (4 + 8) / 4, rel=1e-3), "masters, moments"
    assert run.critic is not None
    assert run.critic.gathered == run.step.gathered


def test_a_critic_of_the_policys_size_fits_an_h200_by_default() -> None:
    assert findings("--algorithm.advantage=gae", name="qwen3-1.7b") == []
    twice = "--critic.max_tokens_per_microbatch=32768"
    (told,) = findings("--algorithm.advantage=gae", twice, name="qwen3-1.7b")
    assert "critic 92.3" in told
    assert "critic.max_tokens_per_microbatch to 16384" in told


def test_a_critic_is_planned_with_its_own_shape() -> None:
    """Policy of 0.6B, critic of 4B."""
    cfg = configured("--algorithm.advantage=gae", "--critic.path=Qwen/Qwen3-4B")
    run = RunMemory(planned(cfg, shape_of("qwen3-0.6b")))
    params = replace(shape_of("qwen3-4b"), tied=True).weight_bytes(2) // 2
    assert run.critic_at_rest == params * (2 + 4 + 8)


def test_a_critic_sleeps_with_the_policy() -> None:
    flags = ("--algorithm.advantage=gae", "--trainer.enable_sleep=true")
    plan = planned(configured(*flags), shape_of("qwen3-1.7b"))
    asleep = {phase.title: phase.parts["critic"] for phase in RunMemory(plan).phases()}
    assert asleep["generate"] == asleep["sync"] == 0 < asleep["train"]
    (host,) = host_roles(plan, num_local=1)
    run = RunMemory(plan)
    assert host.parts["asleep"] == run.step.masters + run.step.optimizer + run.critic_at_rest
    assert host.parts["copy for a checkpoint"] == run.step.state + 12 * run.critic.weights // 2


def test_a_teacher_lies_beside_the_policy_with_its_own_size() -> None:
    """Of 8B beside 0.6B, sharded over two; of the policy's shape where its own is not known."""
    cfg = configured("--engine.kv_cache_gib=1", "--teacher.path=a/b")
    small, large = shape_of("qwen3-0.6b"), shape_of("qwen3-8b")
    facts, known = ModelFacts.of_shape(small), ModelFacts.of_shape(large)
    for others, shape in (({"a/b": known}, large), ({}, small)):
        for world_size in (1, 2):
            plan = resolve(cfg, facts, Devices(), world_size=world_size, others=others)
            for phase in RunMemory(plan).phases():
                expected = shape.weight_bytes(2) // world_size
                assert phase.parts["teacher"] == expected, phase.title


@table("command", ["rl", "eval", "generate"])
def test_a_reward_model_lies_whole_beside_the_engine(command: str) -> None:
    """Of 4B beside 0.6B, not divided over processes; its passes while samples are scored."""
    flags = ("--engine.kv_cache_gib=1", "--reward.model.path=Qwen/Qwen3-4B")
    small, large = shape_of("qwen3-0.6b"), replace(shape_of("qwen3-4b"), tied=True)
    facts, tree = ModelFacts.of_shape(small), TREES[command]
    source = "data.eval.0.path" if command == "eval" else "data.train.0.path"
    assert issubclass(tree, RLConfig | EvaluateConfig | GenerateConfig)
    cfg = load_config(tree, None, [*flags, "--model.path=a/b", f"--{source}=x.jsonl"])
    for world_size in (1, 2):
        plan = resolve(cfg, facts, Devices(), world_size=world_size, others=known_models(cfg))
        phases = RunMemory(plan).phases()
        for phase in phases:
            expected = large.weight_bytes(2) + 2 * large.hidden_size  # the head of a value
            assert phase.parts["reward model"] == expected, phase.title
        (own,) = [
            phase.parts["reward model's pass"] for phase in phases if phase.name == "generate"
        ]
        widest = 32768 * (2 * large.hidden_size + 3 * large.intermediate_size) * 2
        assert own == widest
        assert all("reward model's pass" not in x.parts for x in phases if x.name != "generate")


JUDGE = "--reward.model.path=Qwen/Qwen2.5-72B"


@table(
    "flags, world_size, sharers",
    [
        ((), 8, 1),
        (("--trainer.parallel.zero_stage=3",), 1, 1),
        (("--trainer.parallel.zero_stage=3",), 8, 8),
        (("--trainer.parallel.zero_stage=3", "--trainer.parallel.fsdp_size=2"), 8, 2),
        (("--trainer.parallel.zero_stage=3", "--trainer.parallel.tensor_parallel_size=4"), 8, 8),
        (("--trainer.parallel.zero_stage=3", "--cluster.num_engines=2", "--cluster.num_trainers=2"),
         2, 1),
    ],
)  # fmt: skip
def test_a_reward_model_is_in_shards_where_the_policy_is_and_samples(
    flags: tuple[str, ...], world_size: int, sharers: int
) -> None:
    """Over all processes, whatever their axes; a pass then has two layers and what lies outside of
    them."""
    plan = planned(configured(JUDGE, *flags), shape_of("qwen3-8b"), world_size=world_size)
    shape = replace(shape_of("qwen2.5-72b"), tied=True)
    body, embedding = shape.body_params - 8192, 8192 * 152_064
    held = (body + embedding) // sharers + (8192 // sharers) + 8192  # the norm, and the head
    run = RunMemory(plan)
    assert run.frozen["reward model"] == 2 * held
    (work,) = run.judging.values()
    gathered = 2 * (embedding + 8192 + 2 * body // shape.num_layers) if sharers > 1 else 0
    assert work == 2 * 32768 * (2 * 8192 + 3 * shape.mlp_size) + gathered


@table(
    "asleep, generate, train, host",
    [
        ((), {"teacher", "reward model"}, {"teacher", "reward model"}, set()),
        (("trainer",), {"reward model"}, {"teacher", "reward model"}, {"teacher"}),
        (("engine",), {"teacher", "reward model"}, {"teacher"}, {"reward model"}),
        (("trainer", "engine"), {"reward model"}, {"teacher"}, {"teacher", "reward model"}),
    ],
)
def test_frozen_models_sleep_with_the_side_that_they_serve(
    asleep: tuple[str, ...], generate: set[str], train: set[str], host: set[str]
) -> None:
    flags = [f"--{side}.enable_sleep=true" for side in asleep]
    models = ("--teacher.path=Qwen/Qwen3-4B", "--reward.model.path=Qwen/Qwen3-1.7B")
    models += ("--trainer.parallel.zero_stage=3",)
    cfg, shape = configured(*models, *flags), shape_of("qwen3-0.6b")
    plan, without = (planned(x, shape, world_size=4) for x in (cfg, configured(*flags)))
    run, bare = RunMemory(plan), RunMemory(without)
    for phase in run.phases():
        awake = train if phase.name == "train" else generate
        for name, num_bytes in run.frozen.items():
            assert phase.parts[name] == (num_bytes if name in awake else 0), (phase.name, name)

    def on_host(run: RunMemory) -> int:
        return run.trainer_asleep + run.reward_model_asleep

    masters = bare.trainer_asleep and (  # those of stage 3 take as much as those of stage 2
        run.step.masters + run.step.optimizer + run.step.weights
    )
    assert on_host(run) == masters + sum(run.frozen[name] for name in host)


@table(
    "flags, world_size, said",
    [
        (("--cluster.num_engines=4", "--cluster.num_trainers=4"), 4,
         "set cluster.num_engines to 0 and trainer.parallel.zero_stage to 3 and start more"),
        ((), 1, "set trainer.parallel.zero_stage to 3 and start more trainers (--nproc)"),
        ((), 8, "trainer.parallel.zero_stage to 3."),
    ],
)  # fmt: skip
def test_what_serves_a_frozen_model_that_fills_a_device_is_named(
    flags: tuple[str, ...], world_size: int, said: str
) -> None:
    """More devices for the policy, or adapters, would not."""
    (told,) = findings(JUDGE, *flags, name="qwen3-8b", world_size=world_size)
    assert said in told
    assert "adapters" not in told


def test_more_trainers_serve_a_teacher_that_fills_a_device() -> None:
    (told,) = findings("--teacher.path=Qwen/Qwen2.5-72B", name="qwen3-8b")
    assert "without the teacher (teacher.path), whose weights take 135.4 GiB of a device" in told
    assert "it would: start more trainers (--nproc), which share it, or take a smaller one" in told


def test_a_reward_model_that_is_too_large_is_refused_with_what_serves() -> None:
    """Where its weights alone fit, and not its passes."""
    flags = ("--engine.kv_cache_gib=90", "--reward.model.path=Qwen/Qwen3-8B")
    assert findings(*flags, name="qwen3-0.6b") == []
    (told,) = findings(*flags, "--reward.model.max_tokens_per_forward=999999", name="qwen3-0.6b")
    assert "reward model's pass" in told
    assert "reward.model.max_tokens_per_forward" in told
