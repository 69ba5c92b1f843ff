"""Golden configurations: the batch words mean what the table says, on any number of devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.config.load import load_config
from hone.config.plan import BatchArithmetic, Command, Devices, RunPlan, known_models, resolve
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.tools.plan.lines import plan_lines
from tests.config.workspace import BASE, CONTEXT
from tests.tables import table

# Columns: prompts, n, prompts a mini-batch, epochs, run steps, prompt tokens, completion tokens ->
# samples a step, optimizer steps a rollout, samples an optimizer step, optimizer steps, tokens.
GLOBAL = [
    ((64, 8, None, 1, 100, 1024, 1024), (512, 1, 512, 100, 1048576)),
    ((64, 8, 64, 1, 100, 1024, 1024), (512, 1, 512, 100, 1048576)),
    ((64, 8, 32, 1, 100, 1024, 1024), (512, 2, 256, 200, 1048576)),
    ((64, 8, 16, 1, 100, 1024, 1024), (512, 4, 128, 400, 1048576)),
    ((64, 8, 1, 1, 100, 1024, 1024), (512, 64, 8, 6400, 1048576)),
    ((64, 8, None, 2, 100, 1024, 1024), (512, 2, 512, 200, 1048576)),
    ((64, 8, 16, 3, 10, 1024, 1024), (512, 12, 128, 120, 1048576)),
    ((1, 1, None, 1, 1, 1, 1), (1, 1, 1, 1, 2)),
    ((1, 16, None, 1, 1, 10, 22), (16, 1, 16, 1, 512)),
    ((8, 1, 4, 1, 5, 100, 28), (8, 2, 4, 10, 1024)),
    ((16, 4, 8, 1, 20, 256, 256), (64, 2, 32, 40, 32768)),
    ((16, 4, 8, 4, 20, 256, 256), (64, 8, 32, 160, 32768)),
    ((32, 16, 8, 1, 500, 512, 3584), (512, 4, 128, 2000, 2097152)),
    ((128, 8, 32, 1, 1000, 1024, 7168), (1024, 4, 256, 4000, 8388608)),
    ((128, 16, 128, 1, 200, 2048, 14336), (2048, 1, 2048, 200, 33554432)),
    ((256, 8, 64, 1, 50, 1024, 3072), (2048, 4, 512, 200, 8388608)),
    ((512, 16, 32, 1, 10, 2048, 20480), (8192, 16, 512, 160, 184549376)),
    ((1024, 5, 256, 1, 15, 512, 512), (5120, 4, 1280, 60, 5242880)),
    ((24, 5, 6, 1, 7, 50, 50), (120, 4, 30, 28, 12000)),
    ((24, 5, 12, 2, 7, 50, 50), (120, 4, 60, 28, 12000)),
    ((10, 3, 5, 1, 3, 7, 13), (30, 2, 15, 6, 600)),
]

# Columns: prompts, n, mini-batch, prompt, completion, budget, micro-batch size, devices ->
# sequences of a micro-batch (at least), accumulation (at most).
LOCAL = [
    ((64, 8, None, 1024, 1024, 16384, None, 1), (8, 64)),
    ((64, 8, None, 1024, 1024, 16384, None, 2), (8, 32)),
    ((64, 8, None, 1024, 1024, 16384, None, 8), (8, 8)),
    ((64, 8, 16, 1024, 1024, 16384, None, 1), (8, 16)),
    ((64, 8, 16, 1024, 1024, 2048, None, 1), (1, 128)),
    ((64, 8, 16, 1024, 1024, 5000, None, 1), (2, 64)),
    ((64, 8, 1, 1024, 1024, 65536, None, 1), (8, 1)),
    ((64, 8, None, 1024, 1024, 16384, 4, 1), (4, 128)),
    ((64, 8, None, 1024, 1024, 16384, 4, 8), (4, 16)),
    ((64, 8, 16, 1024, 1024, 16384, 3, 1), (3, 43)),
    ((64, 8, 1, 1024, 1024, 16384, 100, 1), (8, 1)),
    ((10, 3, 5, 7, 13, 100, None, 2), (5, 2)),
]


GIB = 2**30
MODEL = ModelShape(
    family="llama",
    num_layers=4,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=4096,
    vocab_size=32_000,
    tied=True,
)


def planned(cfg: Command, shape: ModelShape | None = None, world_size: int | None = None):
    device = "cpu" if cfg.run.device == "cpu" else "cuda"
    facts = ModelFacts.of_shape(shape) if shape else ModelFacts.read(cfg.model.path or "")
    if shape is None and facts is not None:  # the workspace's model, of which memory is not asked
        facts = ModelFacts(
            context_length=facts.context_length, kv_values_per_token=facts.kv_values_per_token
        )
    devices, others = Devices(kind=device), known_models(cfg)
    return resolve(cfg, facts, devices, world_size=world_size, others=others)


def rows(cfg: Command, **options: Any) -> dict[str, Any]:
    return {line.name: line.value for line in plan_lines(planned(cfg, **options))}


def configured(**values: Any) -> RLConfig:
    names = {
        "prompts": "rollout.prompts_per_step",
        "n": "rollout.n_samples_per_prompt",
        "mini": "trainer.prompts_per_minibatch",
        "epochs": "trainer.num_epochs",
        "steps": "run.steps",
        "prompt": "data.max_prompt_tokens",
        "completion": "rollout.max_completion_tokens",
        "budget": "trainer.max_tokens_per_microbatch",
        "micro": "trainer.micro_batch_size",
    }
    flags = [f"--{names[k]}={'null' if v is None else v}" for k, v in values.items()]
    return load_config(RLConfig, None, [*BASE["rl"], *flags])


def check_global(case: tuple[Any, Any]) -> None:
    keys = ("prompts", "n", "mini", "epochs", "steps", "prompt", "completion")
    cfg = configured(**dict(zip(keys, case[0], strict=True)))
    for world_size in (1, 2, 8):
        found = rows(cfg, world_size=world_size)
        assert (
            found["samples_per_step"],
            found["optimizer_steps_per_rollout"],
            found["samples_per_optimizer_step"],
            found["optimizer_steps"],
            found["max_tokens_per_step"],
        ) == case[1], f"{case=}"


def check_local(case: tuple[Any, Any]) -> None:
    *numbers, world_size = case[0]
    keys = ("prompts", "n", "mini", "prompt", "completion", "budget", "micro")
    cfg = configured(**dict(zip(keys, numbers, strict=True)))
    found = rows(cfg, world_size=world_size)
    micro = found.get("micro_batch_size", found.get("min_micro_batch_size"))
    accumulation = found.get("accumulation", found.get("max_accumulation"))
    assert (micro, accumulation) == case[1], f"{case=}"
    assert micro * accumulation * world_size >= found["samples_per_optimizer_step"]


def check_golden() -> None:
    for case in GLOBAL:
        check_global(case)
    for case in LOCAL:
        check_local(case)


@table("case", GLOBAL)
def test_R22_golden_global_counts(case: tuple[Any, Any]) -> None:
    check_global(case)


@table("case", LOCAL)
def test_R22_golden_micro_batches(case: tuple[Any, Any]) -> None:
    check_local(case)


def test_there_are_thirty_golden_configurations() -> None:
    assert len(GLOBAL) + len(LOCAL) >= 30


def _epochs_forgotten(batch: BatchArithmetic) -> int:
    return batch.num_minibatches


def _mini_batch_in_samples(batch: BatchArithmetic) -> int:
    return batch.samples_per_step // batch.prompts_per_minibatch * batch.num_epochs


def _rounded_down(plan: RunPlan) -> int:
    return plan.rows_per_data_rank // plan.min_micro_batch


@table(
    "owner, name, bug",
    [
        (BatchArithmetic, "optimizer_steps_per_rollout", _epochs_forgotten),
        (BatchArithmetic, "optimizer_steps_per_rollout", _mini_batch_in_samples),
        (RunPlan, "max_accumulation", _rounded_down),
    ],
)
def test_R22_planted_batch_words(
    owner: type, name: str, bug: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, property(bug))
    with pytest.raises(AssertionError):
        check_golden()


NAMES = ("weights_gib", "masters_gib", "gradients_gib", "optimizer_gib", "total_gib", "host_gib")


@table(
    "flags, num_bytes",
    [
        (("--run.device=cuda",), (2, 4, 4, 8, 18, 0)),
        (("--run.device=cpu",), (4, 0, 4, 8, 16, 0)),
        (("--run.device=cpu", "--algorithm.kl.coef=1"), (4, 0, 4, 8, 20, 0)),
        (("--trainer.optimizer.state_dtype=bfloat16",), (2, 4, 4, 4, 14, 0)),
        (("--trainer.offload=optimizer",), (2, 0, 4, 0, 6, 12)),
        (
            (
                "--trainer.offload=optimizer",
                "--trainer.offload=gradients",
                "--trainer.optimizer.state_dtype=bfloat16",
            ),
            (2, 0, 0, 0, 2, 12),
        ),
    ],
)
def test_memory_of_a_model(flags: tuple[str, ...], num_bytes: Any, workspace: Path) -> None:
    """Bytes a parameter, by kind, wherever settings put them."""
    found = rows(load_config(RLConfig, None, [*BASE["rl"], *flags]), shape=MODEL)
    for name, number in zip(NAMES, num_bytes, strict=True):
        assert found[name] == pytest.approx(number * MODEL.num_params / GIB, abs=1e-3), name


def test_memory_of_engines_and_references(workspace: Path) -> None:
    """Who has weights of its own: not an engine that samples with the trainer's, nor one apart."""

    def found(*flags: str, world_size: int = 1) -> dict[str, Any]:
        cfg = load_config(RLConfig, None, [*BASE["rl"], "--run.device=cuda", *flags])
        return rows(cfg, world_size=world_size, shape=MODEL)

    whole = pytest.approx(2 * MODEL.num_params / GIB, abs=1e-3)
    quarter = pytest.approx(2 * MODEL.num_params / GIB / 4, abs=1e-3)
    kl, apart = "--algorithm.kl.coef=1", ("--cluster.num_trainers=4", "--cluster.num_engines=2")
    assert "engine_gib" not in found()
    assert found(world_size=4)["engine_gib"] == whole
    assert "engine_gib" not in found(*apart, world_size=4)
    assert found("--engine.backend=vllm")["engine_gib"] == whole
    for stage in ("0", "1", "3"):
        flags = (kl, f"--trainer.parallel.zero_stage={stage}")
        assert found(*flags, world_size=4)["reference_gib"] == quarter
    assert "reference_gib" not in found(kl, "--cluster.num_references=1")
    adapted = found(kl, "--model.lora.rank=8")
    assert adapted["engine_gib"] == whole
    assert "reference_gib" not in adapted
    assert adapted["optimizer_gib"] < 0.1


@table(
    "flags, num_bytes",
    [
        (("--trainer.enable_sleep=true",), 4 + 8),
        (("--trainer.enable_sleep=true", "--algorithm.advantage=gae"), 2 * (4 + 8)),
        (("--trainer.offload=optimizer", "--trainer.enable_sleep=true"), 12),
        (("--engine.backend=vllm", "--engine.enable_sleep=true"), 4 * 2),  # whole in each process
        (("--engine.enable_sleep=true",), 0),
    ],
)
def test_what_sleeps_is_in_host_memory(
    flags: tuple[str, ...], num_bytes: int, workspace: Path
) -> None:
    """Bytes a parameter that four processes have one quarter of each."""
    cfg = load_config(RLConfig, None, [*BASE["rl"], "--run.device=cuda", *flags])
    found = rows(cfg, world_size=4, shape=MODEL)["host_gib"]
    assert found == pytest.approx(num_bytes * MODEL.num_params / 4 / GIB, rel=0.02, abs=1e-3)


def test_what_divides_a_model_is_said_of_that_model(workspace: Path) -> None:
    """A reward model is in shards where the policy is, and a reference whatever the stage."""
    flags = ("--run.device=cuda", "--algorithm.kl.coef=1", f"--reward.model.path={CONTEXT}")
    for stage, own in ((0, "of one process"), (3, "4 shards")):
        cfg = load_config(
            RLConfig, None, [*BASE["rl"], *flags, f"--trainer.parallel.zero_stage={stage}"]
        )
        told = {line.name: line.how for line in plan_lines(planned(cfg, MODEL, 4))}
        for name in ("weights", "gradients", "optimizer"):
            assert told[f"{name}_gib"].endswith(own)
        of_judge = "frozen, whole" if stage == 0 else "frozen, 4 shards"
        assert told["reward_model_gib"].endswith(of_judge)
        assert ("weights that it gathers" in told["reward_model_pass_gib"]) == (stage == 3)
        assert told["reference_gib"].endswith("4 shards")


@pytest.mark.parametrize("staleness", [1, 4])
def test_a_cluster_is_added_up_and_its_lead_bounded(staleness: int, workspace: Path) -> None:
    flags = (
        "--cluster.num_trainers=8",
        "--cluster.num_engines=4",
        "--engine.tensor_parallel_size=2",
        "--cluster.num_nodes=2",
        "--cluster.devices_per_node=8",
    )
    ahead = f"--pipeline.max_staleness={staleness}"
    cfg = load_config(RLConfig, None, [*BASE["rl"], *flags, ahead])
    found = rows(cfg, world_size=8)
    assert [found[f"{role}devices"] for role in ("trainer_", "engine_", "")] == [8, 8, 16]
    names = ("groups_ahead", "max_open_groups", "max_staleness")
    assert [found[name] for name in names] == [64 * staleness, 64 * (1 + staleness), staleness]
    synchronous = rows(load_config(RLConfig, None, [*BASE["rl"], *flags]), world_size=8)
    assert synchronous["devices"] == 16
    assert synchronous.keys().isdisjoint(names)
    assert "devices" not in rows(load_config(RLConfig, None, BASE["rl"]))
    unknown = load_config(RLConfig, None, [*BASE["rl"], *flags[:3]])
    (devices,) = (x for x in plan_lines(planned(unknown, world_size=8)) if x.name == "devices")
    assert "cluster.devices_per_node is unset" in devices.how
    scoring = ("--cluster.num_references=3", "--algorithm.kl.coef=0.1")
    found = rows(load_config(RLConfig, None, [*BASE["rl"], *flags, *scoring]), world_size=8)
    assert [found["reference_devices"], found["devices"]] == [3, 19]


def test_the_kv_cache_of_a_model(workspace: Path) -> None:
    cfg = load_config(RLConfig, None, [*BASE["rl"], "--run.device=cpu"])
    found = rows(cfg)
    assert found["model_context_tokens"] == CONTEXT
    assert found["kv_blocks_per_sequence"] == 128
    assert found["kv_blocks_at_full_load"] == 128 * 256
    assert found["kv_bytes_per_token"] == 512
    assert found["kv_gib_at_full_load"] == round(128 * 256 * 16 * 512 / 2**30, 3)


def test_the_other_commands(workspace: Path) -> None:
    sft = load_config(SFTConfig, None, [*BASE["sft"], "--data.examples_per_step=10"])
    found = rows(sft)
    assert (found["samples_per_optimizer_step"], found["optimizer_steps"]) == (10, 100)
    assert (found["min_micro_batch_size"], found["max_accumulation"]) == (8, 2)
    evaluate = load_config(EvaluateConfig, None, BASE["eval"])
    assert "weights_gib" in rows(evaluate, shape=MODEL)
    generate = load_config(GenerateConfig, None, [*BASE["generate"], "--n_samples_per_prompt=4"])
    assert rows(generate)["samples_per_prompt"] == 4
    assert "weights_gib" not in rows(configured())


def test_processes_that_make_no_mesh_have_a_plan_and_no_numbers(workspace: Path) -> None:
    cfg = load_config(RLConfig, None, [*BASE["rl"], "--trainer.parallel.ring_size=3"])
    plan = planned(cfg, world_size=4)
    assert "which does not divide" in (plan.problem or "")
    assert plan_lines(plan) == []
    assert plan.policy.axes.world == 3
