"""Host memory is planned, and what it cannot hold is refused with numbers before a run starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hone.checkpoint.tree import split_tree
from hone.cli.main import main
from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, known_models, resolve
from hone.config.tree import RLConfig, SFTConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape, public_shape
from hone.hardware import available_host_bytes
from hone.planner.fitting import check_host_memory
from hone.planner.host_memory import HostRole, host_roles
from hone.trainer import host_gradients, offload
from tests.planner.memory_cases import model_of, plan, settings
from tests.tables import table
from tests.trainer.examples import make_trainer, random_rows

GIB = 1 << 30
DATA = "--data.train=[{path: public/data}]"
AT_THE_END = ("--checkpoint.every_n_steps=0", "--checkpoint.keep_best=false")
ON_CPU = (DATA, "--run.device=cpu", *AT_THE_END)


def shape(name: str = "qwen3-8b") -> ModelShape:
    found = public_shape(name)
    assert found is not None
    return found


def configured(*flags: str, model: str = "qwen3-8b") -> RLConfig:
    return load_config(RLConfig, None, [f"--model.path=Qwen/{model}", *flags])


def planned(
    cfg: RLConfig | SFTConfig, gib: float = 0, model: str = "qwen3-8b", *, num_processes: int = 1
) -> RunPlan:
    kind = "cpu" if cfg.run.device == "cpu" else "cuda"
    devices = Devices(kind=kind, host_bytes=int(gib * GIB))
    facts, others = ModelFacts.of_shape(shape(model)), known_models(cfg)
    return resolve(cfg, facts, devices, world_size=num_processes, others=others)


def found_in(cfg: RLConfig | SFTConfig, gib: float, model: str = "qwen3-8b"):
    return [*check_host_memory(planned(cfg, gib, model), num_local=1)]


def test_a_cpu_run_is_planned_kind_by_kind() -> None:
    """Float32 weights, gradients, two moments; a micro-batch above that."""
    (role,) = host_roles(planned(configured(*ON_CPU)), num_local=1)
    weights = 4 * shape().num_params
    assert role.parts["weights"] == weights
    assert role.parts["moments"] == 2 * weights
    assert role.parts["gradients, activations and work"] > weights
    assert role.parts["KV cache"] == GIB, "the default on a CPU"
    assert role.num_bytes > 4 * weights


@table(
    "flags, numbers",
    [
        ((), {"trainer": 1}),
        (("--cluster.num_engines=2",), {"trainer": 1, "engine": 2}),
        (("--cluster.num_engines=2", "--cluster.address=head:6379"), {"trainer": 1}),
        (
            ("--cluster.num_references=3", "--algorithm.kl.coef=0.1"),
            {"trainer": 1, "reference": 3},
        ),
        (
            (
                *("--cluster.num_teachers=2", "--teacher.path=Qwen/qwen3-8b"),
                *("--cluster.num_reward_models=1", "--reward.model.path=Qwen/qwen3-8b"),
            ),
            {"trainer": 1, "teacher": 2, "reward_model": 1},
        ),
        (
            ("--cluster.num_critics=2", "--algorithm.advantage=gae"),
            {"trainer": 1, "critic": 2},
        ),
    ],
)
def test_every_process_of_this_host_counts(flags: tuple[str, ...], numbers: dict) -> None:
    cfg = configured(*ON_CPU, *flags)
    roles = host_roles(planned(cfg), num_local=1)
    assert {role.name: role.number for role in roles} == numbers
    for role in roles:
        assert sum(role.parts.values()) > shape().weight_bytes(4)


@pytest.mark.parametrize("tree", [RLConfig, SFTConfig])
def test_a_model_that_the_host_cannot_hold_is_refused_with_its_numbers(tree: type) -> None:
    cfg = load_config(tree, None, ["--model.path=Qwen/qwen3-8b", *ON_CPU])
    (found,) = found_in(cfg, 23.5)
    assert found.level == "error"
    for part in ("23.5 GiB are available", "too few", "weights 30.5", "moments 61.0"):
        assert part in found.message
    assert "smaller model (model.path)" in found.message
    assert all(key in found.message for key in found.keys)
    assert found_in(cfg, 1000) == []


def test_what_short_rows_fit_is_warned_of_and_not_refused() -> None:
    """16 rows of at most 2,048 tokens: 4,096 at an eighth, a full micro-batch at their longest."""
    few = ("--rollout.prompts_per_step=4", "--rollout.n_samples_per_prompt=4")
    cfg = configured(*ON_CPU, *few, model="qwen3-0.6b")
    roles = [
        host_roles(planned(cfg, model="qwen3-0.6b"), num_local=1, at_least=at_least)
        for at_least in (True, False)
    ]
    least, most = (sum(role.num_bytes for role in of) / GIB for of in roles)
    assert least < most / 2
    assert [x.level for x in found_in(cfg, least - 0.1, "qwen3-0.6b")] == ["error"]
    assert [x.level for x in found_in(cfg, least + 0.1, "qwen3-0.6b")] == ["warning"]
    assert [x.level for x in found_in(cfg, most - 0.1, "qwen3-0.6b")] == ["warning"]
    assert found_in(cfg, most + 0.1, "qwen3-0.6b") == []


def test_the_advice_makes_it_fit() -> None:
    cfg = configured(*ON_CPU, model="qwen3-0.6b")
    (found,) = found_in(cfg, 40, "qwen3-0.6b")
    assert "Set one of these: trainer.recompute to full" in found.message
    for flag in ("trainer.recompute=full", "trainer.max_tokens_per_microbatch=8192"):
        key, _, value = flag.partition("=")
        assert f"{key} to {value}" in found.message
        better = configured(*ON_CPU, f"--{flag}", model="qwen3-0.6b")
        assert found_in(better, 40, "qwen3-0.6b") == []


def test_what_does_not_show_is_not_listed() -> None:
    copied = {"copy for a checkpoint": 1 << 30, "offloaded": 1 << 20}
    assert HostRole("trainer", 2, copied).in_words() == (
        "2 trainers x 1.0 GiB (copy for a checkpoint 1.0)"
    )
    assert HostRole("trainer", 1, {"offloaded": 1 << 20}).in_words() == "the trainer: 0.0 GiB"


def test_offloads_of_all_processes_of_a_gpu_host_are_added_up() -> None:
    cfg = configured(DATA, "--run.device=cuda", *AT_THE_END, "--trainer.offload=optimizer")
    one = 12 * shape().num_params  # masters and two moments
    (role,) = host_roles(planned(cfg), num_local=1)
    assert role.num_bytes == one
    (found,) = found_in(cfg, one / GIB - 0.1)
    assert found.level == "error"
    assert "trainer.offload to none" in found.message
    assert found_in(cfg, one / GIB + 0.1) == []
    plain = configured(DATA, "--run.device=cuda", *AT_THE_END)
    assert host_roles(planned(plain), num_local=1) == []


def test_a_checkpoint_behind_the_training_is_a_copy_of_masters_and_moments() -> None:
    copied = configured(DATA, "--run.device=cuda", "--run.steps=51")
    (role,) = host_roles(planned(copied), num_local=1)
    assert role.num_bytes == 12 * shape().num_params
    (found,) = found_in(copied, 12 * shape().num_params / GIB - 0.1)
    assert "checkpoint.every_n_steps to 0" in found.message
    last = configured(DATA, "--run.device=cuda", "--run.steps=50")
    assert host_roles(planned(last), num_local=1) == [], "nothing is trained beside the last"
    best = (*AT_THE_END[:1], "--eval.every_n_steps=1", "--data.eval=[{path: public/data}]")
    (role,) = host_roles(planned(configured(DATA, "--run.device=cuda", *best)), num_local=1)
    assert role.num_bytes == 12 * shape().num_params
    replicas = configured(DATA, "--run.device=cuda", "--trainer.parallel.fsdp_size=2")
    (role,) = host_roles(planned(replicas, num_processes=4), num_local=4)
    assert role.num_bytes == pytest.approx(12 * shape().num_params, rel=1e-4), "of two one writes"


def test_memory_that_torch_locks_is_rounded_up() -> None:
    """With `parameters` FSDP pins each tensor's float32 shard and its gradient by itself."""
    cfg = configured(DATA, "--run.device=cuda", *AT_THE_END, "--trainer.offload=parameters")
    (role,) = host_roles(planned(cfg, num_processes=2), num_local=2)
    q, kv, width, inter = 32 * 128, 8 * 128, 4096, 12288
    layer = [q * width, kv * width, kv * width, width * q, *[inter * width] * 3]
    layer += [width, width, 128, 128]  # norms
    sizes = [4 * n // 2 for n in (*layer * 36, width, 151936 * width, 151936 * width)]
    padding = [2 ** math.ceil(math.log2(size)) - size for size in sizes]
    assert role.parts["rounded up"] == 2 * sum(padding)
    assert role.parts["offloaded"] == 16 * shape().num_params // 2


def test_a_sleeping_vllm_keeps_its_weights_on_the_host() -> None:
    flags = ("--engine.backend=vllm", "--engine.enable_sleep=true")
    cfg = configured(DATA, "--run.device=cuda", *AT_THE_END, *flags)
    (role,) = host_roles(planned(cfg, num_processes=4), num_local=4)
    assert (role.name, role.num_bytes) == ("engine", 4 * shape().weight_bytes(2))
    own = configured(DATA, "--run.device=cuda", *AT_THE_END, *flags[1:])
    assert host_roles(planned(own, num_processes=4), num_local=4) == [], "delivered anew"


@table(
    "given",
    [
        {"offload": "optimizer"},
        {"offload": "gradients"},
        {"offload": "gradients", "optimizer": {"state_dtype": "bfloat16"}},
        {"enable_sleep": True},
        {"offload": "optimizer", "enable_sleep": True},
    ],
)
def test_what_is_planned_is_what_a_trainer_allocates(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes asked of the host in two steps with a sleep between, and those of a checkpoint."""
    asked, make = list[int](), offload.host_tensors

    def host_tensors(layout: offload.Layout, *args: Any, **kwargs: Any) -> list[Tensor]:
        asked.append(sum(shape.numel() * dtype.itemsize for shape, dtype in layout))
        return make(layout, *args, **kwargs)

    for module in (offload, host_gradients):
        monkeypatch.setattr(module, "host_tensors", host_tensors)
    case = {"trainer": given}
    trainer = make_trainer(model_of(case), **settings(case).model_dump())
    for _ in range(2):
        trainer.update(random_rows(8))
        if settings(case).enable_sleep:
            trainer.sleep()
            trainer.wake()
    expected = plan(case)
    asleep = settings(case).enable_sleep * (expected.masters + expected.optimizer)
    assert sum(asked) == expected.host + asleep
    copied = split_tree(trainer.state_dict()[0], "trainer", copy=True).parts.values()
    tensors = [part.local for part in copied if part.local.ndim]  # the others count steps
    assert sum(tensor.nbytes for tensor in tensors) == expected.state


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_count(version: int, tmp_path: Path) -> None:
    """A container's limit, which its parent may lower; files that are cached count as free."""
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/a/b\n0::/\n" if version == 1 else "0::/a/b\n")
    base = tmp_path / "fs" / ("memory" if version == 1 else "")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    for group, limit in (("a/b", 8000), ("a", 5000)):
        folder = base / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text("3000\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]} 500\n")
    assert available_host_bytes(tmp_path / "fs", own) == 5000 - 3000 + 500
    if version == 2:
        (base / "a" / names[0]).write_text("max\n")
        assert available_host_bytes(tmp_path / "fs", own) == 8000 - 3000 + 500
    assert available_host_bytes(tmp_path / "none", own) > 5000


COMMANDS = [
    ("rl", "--model.path=Qwen/Qwen3-8B", DATA),
    ("sft", "--model.path=Qwen/Qwen3-8B", DATA, "--trainer.optimizer.lr=1e-5"),
    ("eval", "--model.path=Qwen/Qwen3-8B", "--data.eval=[{path: public/data}]"),
    ("generate", "--model.path=Qwen/Qwen3-8B", DATA),
    ("bench", "train", "--model.shape=qwen3-0.6b"),
    ("bench", "engine", "--model.shape=qwen3-8b"),
    ("bench", "engine", "--model.shape=qwen3-8b", "--engine.enable_sleep=true"),  # a warning
]


@table("device", ["cpu", "auto"])
@table("argv", COMMANDS)
def test_commands_refuse_before_they_start_and_hone_check_says_so(
    argv: tuple[str, ...],
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a host of 23 GiB without a GPU; that `auto` may be elsewhere makes it a warning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hone.cli.command.max_gpus", lambda visible: 0)
    monkeypatch.setattr("hone.cli.command.available_host_bytes", lambda: 23 * GIB)
    where = f"--run.device={device}"
    assert main([*argv, where]) == 2
    assert "23.0 GiB are available" in " ".join(capsys.readouterr().err.split())
    if argv[0] != "bench":
        assert main(["check", *argv, where]) == (2 if device == "cpu" else 0)
        told = " ".join(capsys.readouterr().out.split())
        assert "23.0 GiB are available" in told
        assert ("run on this host's CPU" in told) == (device == "auto")
