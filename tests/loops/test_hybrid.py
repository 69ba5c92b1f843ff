"""Engines over the trainers' own processes: runs whose numbers are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.envs.test_episodes import ENVS
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import assert_metrics_of_samples, assert_same_run, run_hone
from tests.tiny_runs import lines, tiny_config, write_inputs

from hone.config.tree import EvaluateConfig
from hone.loops import reinforce

FOUR = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
"""More than `--nproc` grants two cores."""


@pytest.fixture
def make_config(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> MakeConfig:
    """Runs of a model whose key heads two ranks can share."""
    inputs = tmp_path_factory.mktemp("inputs")
    write_inputs(inputs, num_kv_heads=2)

    def make(**sections: Any) -> Any:
        return tiny_config(inputs, tmp_path / "one", log={"samples_per_step": 99}, **sections)

    return make


@pytest.mark.slow
def test_R2_R3_R24_an_engine_over_two_trainers_samples_what_one_process_does(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Each side sleeps while the other works; with evaluation, carried and dropped groups, the KL
    term, and a checkpoint in every step, from which one process goes on."""
    sections: dict[str, Any] = {
        "rollout": {"dynamic_sampling": True, "oversample_prompts": 2},
        "algorithm": {"kl": {"coef": 0.01}},
        "eval": {"every_n_steps": 2, "n_samples_per_prompt": 2},
        "checkpoint": {"every_n_steps": 1},
    }
    engine = {"max_num_seqs": 32, "enable_sleep": True}
    one = make_config(engine=engine, **sections)
    reinforce.run(one)
    split = engine | {"tensor_parallel_size": 2}
    two = {"dir": tmp_path / "two", "steps": 2}
    trainer = {"optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64, "enable_sleep": True}
    shared = make_config(engine=split, trainer=trainer, run=two, **sections)
    output = run_hone("rl", shared, tmp_path, "--nproc=2")
    assert output.count("done after step 2") == 1
    assert_metrics_of_samples(tmp_path / "two")
    for row in lines(tmp_path / "two" / "metrics.jsonl"):
        if "perf/sync_bytes" in row:
            assert row["perf/sync_bytes"] > 0
    reinforce.run(make_config(engine=engine, run={"dir": tmp_path / "two"}, **sections))
    assert_same_run(one.run.dir, tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"zero_stage": 3},
        {"zero_stage": 2, "tensor_parallel_size": 2},
        {"zero_stage": 1, "ring_size": 2},
    ],
    ids=["zero 3", "tensor", "ring"],
)
def test_R2_R3_R24_two_engines_of_two_trainers_each(
    make_config: MakeConfig, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    engine = {"max_num_seqs": 32, "enable_sleep": True}  # all samples at once
    # Adam turns the last bits of a gradient near zero into a part of the learning rate.
    trainer = {"optimizer": {"lr": 1e-3}, "logits_chunk_tokens": 64}
    one = make_config(engine=engine, trainer=trainer)
    reinforce.run(one)
    trainer |= {"parallel": parallel, "enable_sleep": True}
    split = engine | {"tensor_parallel_size": 2}
    four = make_config(engine=split, trainer=trainer, run={"dir": tmp_path / "four"})
    run_hone("rl", four, tmp_path, launcher=FOUR)
    assert_same_run(one.run.dir, four.run.dir)


@pytest.mark.slow
def test_an_environment_that_the_first_rank_alone_asks(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Its answers come when they come: the other rank steps with the first. In `hone eval` too."""
    (tmp_path / "envs.py").write_text(ENVS)
    sections: dict[str, Any] = {
        "env": {"path": f"{tmp_path / 'envs.py'}:Echo"},
        "reward": {"functions": [], "num_workers": 2},
        "rollout": {"prompts_per_step": 2, "n_samples_per_prompt": 4, "max_completion_tokens": 24},
        "run": {"dir": tmp_path / "one", "steps": 1, "device": "cpu"},
        "eval": {"at_start": True, "max_completion_tokens": 24},
    }
    one = make_config(**sections)
    reinforce.run(one)
    split = {"engine": {"max_num_seqs": 16, "tensor_parallel_size": 2}}
    run = {"dir": tmp_path / "two", "steps": 1, "device": "cpu"}
    run_hone("rl", make_config(**(sections | split | {"run": run})), tmp_path, "--nproc=2")
    assert any(len(s["turns"]) > 1 for s in lines(tmp_path / "two" / "samples.jsonl"))
    assert_same_run(one.run.dir, tmp_path / "two")
    tree = {
        "model": {"path": one.model.path},
        "data": one.data.model_dump(exclude={"curriculum"}) | {"train": []},
        "env": sections["env"],
        "reward": sections["reward"],
        "eval": {"max_completion_tokens": 24, "n_samples_per_prompt": 2},
    }
    found: list[list[dict[str, Any]]] = []
    for name, engine in (("alone", {}), ("shared", split["engine"])):
        own = {"run": {"dir": tmp_path / name, "device": "cpu"}, "engine": engine}
        flags = ("--nproc=2",) if engine else ()
        run_hone("eval", EvaluateConfig.model_validate(tree | own), tmp_path, *flags)
        found.append(lines(tmp_path / name / "eval_samples.jsonl"))
    assert len(found[0]) == 40
    for a, b in zip(*found, strict=True):
        assert b.pop("logprobs", []) == pytest.approx(a.pop("logprobs", []), abs=1e-5)
        assert a == b


EXPERTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": (
        {"num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0]},
        {"zero_stage": 3, "expert_parallel_size": 2},
    ),
    "glm4_moe": (
        {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
        {"zero_stage": 3},
    ),
}
"""Fields of a family, and how its trainers share the weights."""


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERTS)
def test_R2_R3_R24_an_engine_over_two_trainers_divides_the_experts(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str
) -> None:
    """Tokens are trained with the routes that both ranks have recorded alike; each side sleeps
    while the other works."""
    inputs = tmp_path_factory.mktemp("inputs")
    fields, parallel = EXPERTS[family]
    fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    write_inputs(inputs, num_kv_heads=2, family=family, **fields)

    def make(name: str, *, engine: dict[str, Any], **trainer: Any) -> Any:
        return tiny_config(
            inputs,
            tmp_path / name,
            log={"samples_per_step": 99},
            algorithm={"routing_replay": True},
            engine={"max_num_seqs": 32, "enable_sleep": True, **engine},
            trainer={"optimizer": {"lr": 1e-3}, "logits_chunk_tokens": 64, **trainer},
        )

    one = make("one", engine={})
    reinforce.run(one)
    two = make("two", engine={"tensor_parallel_size": 2}, parallel=parallel, enable_sleep=True)
    run_hone("rl", two, tmp_path, "--nproc=2")
    assert_same_run(one.run.dir, two.run.dir)
    for row in lines(two.run.dir / "metrics.jsonl"):
        if "perf/sync_bytes" in row:
            assert row["perf/sync_bytes"] > 0
