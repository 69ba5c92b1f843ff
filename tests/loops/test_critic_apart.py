"""A critic on devices of its own, in processes beside the policy's: the run is the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.loops.conftest import MakeConfig, start_hone, wait_for_row
from tests.loops.test_critic import GAE, SHARED, assert_equal, weights
from tests.loops.test_processes import assert_same_run, run_hone
from tests.tiny_runs import lines, tiny_config, write_inputs

from hone.config.tree import RLConfig
from hone.loops import reinforce

APART = {"num_critics": 1}
SECTIONS: dict[str, Any] = {
    "algorithm": GAE,
    "trainer": SHARED | {"num_epochs": 2},
    "critic": {"lr": 1e-3, "warmup_steps": 1, "max_tokens_per_microbatch": 40},
}


def rows_of(cfg: RLConfig) -> list[dict[str, Any]]:
    """Of a run, what does not follow from time."""
    found = lines(cfg.run.dir / "metrics.jsonl")
    of_time = ("time/", "perf/", "mem/", "timestamp_s")
    return [{k: v for k, v in row.items() if not k.startswith(of_time)} for row in found]


@pytest.mark.slow
def test_R17_R19_a_critic_apart_is_the_run_beside_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """While it learns alone, in several updates a batch, and over a resume: from a checkpoint that
    it has written itself, and from one of a run with the critic beside the policy."""

    def cfg(name: str, steps: int = 4, **cluster: int) -> RLConfig:
        run = {"dir": tmp_path / name, "steps": steps, "device": "cpu"}
        held_out = {"every_n_steps": 2, "max_completion_tokens": 8}
        return make_config(run=run, cluster=cluster, eval=held_out, **SECTIONS)

    beside, apart, moved = cfg("beside"), cfg("apart", **APART), cfg("moved", **APART)
    reinforce.run(beside)
    run_hone("rl", cfg("apart", 2, **APART), tmp_path)
    told = run_hone("rl", apart, tmp_path)
    assert "going on after step 2" in told
    reinforce.run(cfg("moved", 2))
    run_hone("rl", moved, tmp_path)
    for other in (apart, moved):
        for model in ("model", "critic"):
            assert_equal(beside.run.dir / model, other.run.dir / model)
        for expected, row in zip(rows_of(beside), rows_of(other), strict=True):
            ours = {k: v for k, v in row.items() if not k.startswith("off_policy/parity/")}
            assert ours == {k: expected.get(k) for k in ours}
    assert [row.get("train/loss") is None for row in rows_of(apart)] == [True, False, False, False]
    assert "mem/critic_gib" in lines(apart.run.dir / "metrics.jsonl")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_R24_two_processes_of_a_critic_are_one(
    make_config: MakeConfig, tmp_path: Path, num_trainers: int
) -> None:
    """With shards of every weight; two trainers have an engine each besides."""
    sections = SECTIONS | {"critic": {"lr": 1e-3}}
    one = make_config(run={"dir": tmp_path / "one"}, **sections)
    reinforce.run(one)
    cluster = {"num_critics": 2, "num_trainers": num_trainers}
    two = make_config(run={"dir": tmp_path / "two"}, cluster=cluster, **sections)
    number = f"--nproc-per-node={num_trainers + 2}"  # hone's launcher wants a core for each
    launcher = ["-m", "torch.distributed.run", "--standalone", number]
    run_hone("rl", two, tmp_path, "--trainer.parallel.zero_stage=3", launcher=launcher)
    assert_same_run(one.run.dir, two.run.dir)
    assert_same_critic(one.run.dir, two.run.dir)


def assert_same_critic(one: Path, other: Path) -> None:
    """Weights to float32's last bits."""
    critics = [weights(folder / "critic") for folder in (one, other)]
    assert critics[0].keys() == critics[1].keys()
    for name, tensor in critics[0].items():
        assert float((tensor - critics[1][name]).abs().max()) < 1e-5, name


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs with a model whose key heads two ranks can share."""
    folder = tmp_path_factory.mktemp("divisible")
    write_inputs(folder, num_kv_heads=2)
    return folder


def divided(inputs: Path, run_dir: Path, *, steps: int = 2, **sections: Any) -> RLConfig:
    """A run whose critic learns in every step, more than once."""
    # Of values that hardly move the last bit decides which count as clipped.
    own = {"algorithm": GAE, "trainer": SHARED, "critic": {"lr": 1e-3, "value_clip": None}}
    run = {"dir": run_dir, "steps": steps, "device": "cpu"}
    for name, overrides in sections.items():
        own[name] = own.get(name, {}) | overrides
    return tiny_config(inputs, run_dir, run=run, log={"samples_per_step": 99}, **own)


def run_apart(cfg: RLConfig, folder: Path) -> str:
    number = f"--nproc-per-node={cfg.cluster.num_processes}"  # more than `--nproc` grants two cores
    launcher = ["-m", "torch.distributed.run", "--standalone", number]
    return run_hone("rl", cfg, folder, launcher=launcher)


TENSOR = {"tensor_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, int], int, dict[str, int]]] = {
    "one process beside tensor 2": (2, TENSOR, 1, {"tensor_parallel_size": 1}),
    "shards beside tensor 2": (2, TENSOR, 2, {"tensor_parallel_size": 1, "zero_stage": 3}),
    "ring beside tensor 2": (2, TENSOR, 2, {"tensor_parallel_size": 1, "ring_size": 2}),
    "tensor beside ring 2": (2, {"ring_size": 2}, 2, TENSOR | {"ring_size": 1}),
    "ulysses": (1, {}, 2, {"ulysses_size": 2}),
    "copies": (1, {"zero_stage": 2}, 2, {"zero_stage": 1, "fsdp_size": 1}),
    "stages": (1, {}, 2, {"pipeline_parallel_size": 2}),
    "one process beside groups of stages": (
        2,
        {"pipeline_parallel_size": 2, "virtual_stages": 2},
        1,
        {"pipeline_parallel_size": 1},
    ),
    "experts beside experts that are not divided": (1, {}, 2, {"expert_parallel_size": 2}),
    "one process beside experts": (
        2,
        {"expert_parallel_size": 2},
        1,
        {"expert_parallel_size": 1},
    ),
}
"""Processes of the policy and how they divide it, and the same of the critic."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_R24_a_critic_apart_with_sizes_of_its_own_learns_what_one_process_does(
    tmp_path_factory: pytest.TempPathFactory, divisible: Path, tmp_path: Path, layout: str
) -> None:
    num_trainers, of_policy, num_critics, own = LAYOUTS[layout]
    inputs = divisible
    if "virtual_stages" in of_policy:
        inputs = tmp_path_factory.mktemp("deep")
        write_inputs(inputs, num_kv_heads=2, num_layers=4)
    if "expert_parallel_size" in own:
        inputs = tmp_path_factory.mktemp("experts")
        write_inputs(inputs, family="qwen3_moe", **EXPERTS)
    one = divided(inputs, tmp_path / "one")
    reinforce.run(one)
    several = divided(
        inputs,
        tmp_path / "several",
        cluster={"num_trainers": num_trainers, "num_critics": num_critics},
        trainer={"parallel": of_policy},
        critic={"parallel": own},
    )
    run_apart(several, tmp_path)
    assert_same_run(one.run.dir, several.run.dir)
    assert_same_critic(one.run.dir, several.run.dir)


@pytest.mark.slow
def test_R17_a_checkpoint_does_not_know_how_the_critic_was_divided(
    divisible: Path, tmp_path: Path
) -> None:
    """Written with tensor 2, it goes on with ring 2 and beside the policy, as if nothing had
    happened."""
    straight = divided(divisible, tmp_path / "straight", steps=3)
    reinforce.run(straight)
    apart = {"num_trainers": 1, "num_critics": 2}
    ring, beside = tmp_path / "ring", tmp_path / "beside"
    critic = {"parallel": TENSOR}
    run_apart(divided(divisible, ring, cluster=apart, critic=critic), tmp_path)
    shutil.copytree(ring, beside)
    critic = {"parallel": {"ring_size": 2}}
    resumed = divided(divisible, ring, steps=3, cluster=apart, critic=critic)
    assert "going on after step 2" in run_apart(resumed, tmp_path)
    reinforce.run(divided(divisible, beside, steps=3))
    for folder in (ring, beside):
        assert_same_run(straight.run.dir, folder)
        assert_same_critic(straight.run.dir, folder)


def process_of(launcher: int, rank: int) -> psutil.Process:
    (found,) = (
        child
        for child in psutil.Process(launcher).children()
        if child.environ().get("RANK") == f"{rank}"
    )
    return found


@pytest.mark.slow
def test_a_critic_that_is_killed_is_named_and_the_run_goes_on_from_its_checkpoint(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Of a run that samples ahead."""
    cfg = make_config(
        run={"steps": 400, "dir": tmp_path / "run", "device": "cpu"},
        cluster=APART,
        pipeline={"max_staleness": 1},
        checkpoint={"every_n_steps": 1},
        **SECTIONS | {"algorithm": GAE | {"correction": {"kind": "tis"}}},
    )
    process = start_hone(cfg, tmp_path)
    wait_for_row(process, cfg, 3)
    process_of(process.pid, 1).kill()
    told = process.communicate(timeout=600)[0].decode()
    assert process.returncode == 1, told
    assert "error: rank 1 (of the critic) (pid " in told, told
    assert "go on from their last checkpoint" in told
    (error,) = (e for e in lines(cfg.run.dir / "events.jsonl") if e["kind"] == "error")
    assert "(of the critic)" in error["message"]
    step = lines(cfg.run.dir / "metrics.jsonl")[-1]["step"]
    told = run_hone("rl", cfg, tmp_path, f"--run.steps={step + 1}")
    assert "going on after step" in told
    assert lines(cfg.run.dir / "metrics.jsonl")[-1]["step"] == step + 1
    assert (cfg.run.dir / "critic" / "model.safetensors").is_file()
