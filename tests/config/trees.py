"""The trees of commands: one entry each, with all that the tests of every tree have to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.config.row import Row
from tests.config.walk_rows.bench import BENCH_ENGINE, BENCH_TRAIN
from tests.config.walk_rows.inference import EVALUATE, GENERATE, SCORED
from tests.config.walk_rows.rl import AHEAD, GAE, JUDGE, PARTIAL, RL, TEACHER
from tests.config.walk_rows.serving import SERVE
from tests.config.walk_rows.shared import EVAL_HUB, FIRST_HELD_OUT, HUB, KL, LORA, MUON, TRACED
from tests.config.walk_rows.simulated import SIMULATE
from tests.config.walk_rows.simulated import TEACHER as PLANNED_TEACHER
from tests.config.walk_rows.training import DPO, KTO, REWARD_MODEL, SFT, SFT_EVAL_HUB, SFT_HUB


@dataclass(frozen=True)
class Unread:
    """Why no recorded run reads a key, and where it is read all the same."""

    why: str
    source: str | None
    """The file that reads it, which must name `attribute`; None where only checks look at it."""
    attribute: str = ""


@dataclass(frozen=True)
class Tree:
    """The tree of a command, by the words after `hone`."""

    rows: dict[str, Row]
    """Each key, and what it changes."""
    checked: tuple[str, ...]
    """Flags with which `hone check` has nothing to say, in the folder of `workspace.fill`."""
    smallest: tuple[str, ...]
    """Flags of the smallest run; `model.path` and `run.device` are set for those that name no model
    or device."""
    runs: tuple[tuple[str, ...], ...]
    """Flags of each run after the smallest one: together they make each key be read."""
    unread: Mapping[str, Unread]
    """Keys that no recorded run reads, and why."""
    cost_s: float
    """CPU seconds that the effect of a key takes, in about."""


SUPERVISED = (
    "--run.steps=2",
    "--data.chat=never",
    "--data.max_prompt_tokens=8",
    "--data.max_tokens=24",
    "--data.examples_per_step=4",
    "--trainer.optimizer.lr=3e-3",
    "--trainer.logits_chunk_tokens=64",
    "--eval.every_n_steps=2",
    "--log.to=[]",
)
TOO_LONG = ("--data.max_prompt_tokens=3", "--data.overlong_prompts=error")
REFUSED_RUNS = (TOO_LONG,)
"""Runs that end with an error, as they should."""
FROM_THE_HUB = (*HUB, *EVAL_HUB)
NO_EVAL = (*FIRST_HELD_OUT, "--eval.every_n_steps=0")
OTHER_STEPS = ("--trainer.optimizer.schedule=linear", "--trainer.recompute=full", *MUON)
ENV = ("--env.path=envs.py:Live", "--reward.max_failure_rate=1")
PASSES = ("--eval.pass_function=even",)
SUPERVISED_RUNS = ((*LORA, *TRACED), (*OTHER_STEPS, *NO_EVAL))
OF_A_GPU = Unread("of a GPU's memory", "src/hone/engine/kv_cache.py", "gpu_memory_utilization")
REFUSED = Unread("the checks refuse it where no engine samples, and on a CPU", None)
CARRIED = "which is simulated as it is, and goes into the recipe that is written"
NO_REFERENCE = {
    f"trainer.parallel.reference_{name}_size": Unread(
        "there is no reference, which the checks say", None
    )
    for name in ("ring", "ulysses")
}
WALKED: dict[str, Tree] = {
    "rl": Tree(
        rows=RL,
        checked=(
            "--model.path=model",
            "--data.train=[{path: train.jsonl}]",
        ),
        smallest=(
            "--run.steps=2",
            "--data.train=[{path: train.jsonl}]",
            "--data.eval=[{path: eval.jsonl, max_rows: 4}]",
            "--data.chat=never",
            "--data.max_prompt_tokens=8",
            "--rollout.prompts_per_step=4",
            "--rollout.n_samples_per_prompt=4",
            "--rollout.max_completion_tokens=6",
            "--engine.max_num_seqs=16",
            "--reward.functions=[{fn: 'rewards.py:even'}]",
            "--reward.num_workers=1",
            "--trainer.optimizer.lr=3e-3",
            "--trainer.logits_chunk_tokens=64",
            "--eval.max_completion_tokens=6",
            "--eval.every_n_steps=2",
            "--log.to=[]",
        ),
        runs=(
            (*LORA, *FROM_THE_HUB, *KL, *ENV, *TRACED, "--profile.rollout.steps=[0]"),
            (
                *(*TEACHER, "--teacher.loss=forward_kl", "--teacher.reward_coef=0.5"),
                *(*JUDGE, *PARTIAL, "--rollout.dynamic_sampling=true"),
                "--data.curriculum.pass_rate=[0, 1]",
                *(*OTHER_STEPS, *NO_EVAL),
            ),
            (*GAE, "--critic.path=other", "--run.steps=1", "--eval.every_n_steps=1", *PASSES),
            (*AHEAD, *KL),
        ),
        unread={
            "engine.gpu_memory_utilization": OF_A_GPU,
            "pipeline.in_flight": Unread(
                "after the first rollout of engines apart",
                "src/hone/rollout/collector.py",
                "in_flight",
            ),
            "cluster.num_nodes": Unread(
                "on a Ray cluster", "src/hone/distributed/ray.py", "num_nodes"
            ),
            **{
                f"critic.parallel.{name}": Unread(
                    "of a critic in processes of its own: all are taken over together",
                    "src/hone/config/roles.py",
                    "model_fields",
                )
                for name in (
                    *("zero_stage", "fsdp_size", "tensor_parallel_size", "pipeline_parallel_size"),
                    *("expert_parallel_size", "ulysses_size", "ring_size"),
                )
            },
        },
        cost_s=2.5,
    ),
    "sft": Tree(
        rows=SFT,
        checked=(
            "--model.path=model",
            "--data.train=[{path: train.jsonl}]",
            "--trainer.optimizer.lr=1e-5",
        ),
        smallest=(
            *SUPERVISED,
            "--data.train=[{path: train.jsonl, columns: {answer: answer}}]",
            "--data.eval=[{path: eval.jsonl, max_rows: 4, columns: {answer: answer}}]",
        ),
        runs=(*SUPERVISED_RUNS, (*SFT_HUB, *SFT_EVAL_HUB)),
        unread={**NO_REFERENCE, "model.exact": REFUSED},
        cost_s=1.6,
    ),
    "dpo": Tree(
        rows=DPO,
        checked=(
            "--model.path=model",
            "--data.train=[{path: pairs.jsonl}]",
            "--trainer.optimizer.lr=1e-6",
        ),
        smallest=(
            *SUPERVISED,
            "--data.train=[{path: pairs/train.jsonl}]",
            "--data.eval=[{path: pairs/test.jsonl, max_rows: 4}]",
        ),
        runs=(
            *SUPERVISED_RUNS,
            (*FROM_THE_HUB, "--algorithm.loss=simpo"),
            (*KTO, "--data.train=[{path: labelled.jsonl}]", "--data.eval=[{path: labelled.jsonl}]"),
        ),
        unread={"model.exact": REFUSED},
        cost_s=1.6,
    ),
    "reward-model": Tree(
        rows=REWARD_MODEL,
        checked=(
            "--model.path=model",
            "--data.train=[{path: pairs.jsonl}]",
            "--trainer.optimizer.lr=1e-5",
        ),
        smallest=(
            *(flag for flag in SUPERVISED if "logits" not in flag),
            "--data.train=[{path: pairs/train.jsonl}]",
            "--data.eval=[{path: pairs/test.jsonl, max_rows: 4}]",
        ),
        runs=(*SUPERVISED_RUNS, FROM_THE_HUB),
        unread={**NO_REFERENCE, "model.exact": REFUSED},
        cost_s=1.6,
    ),
    "eval": Tree(
        rows=EVALUATE,
        checked=(
            "--model.path=model",
            "--data.eval=[{path: train.jsonl}]",
        ),
        smallest=(
            "--data.eval=[{path: eval.jsonl, max_rows: 4}]",
            "--data.chat=never",
            "--data.max_prompt_tokens=8",
            "--eval.max_completion_tokens=6",
            "--engine.max_num_seqs=16",
            "--reward.functions=[{fn: 'rewards.py:even'}]",
            "--reward.num_workers=1",
        ),
        runs=(
            (*EVAL_HUB, *ENV),
            (*JUDGE, *PASSES, *FIRST_HELD_OUT, *HUB),
        ),
        unread={"engine.gpu_memory_utilization": OF_A_GPU},
        cost_s=1.8,
    ),
    "generate": Tree(
        rows=GENERATE,
        checked=(
            "--model.path=model",
            "--data.train=[{path: train.jsonl}]",
        ),
        smallest=(
            "--data.train=[{path: eval.jsonl, max_rows: 4}]",
            "--data.chat=never",
            "--data.max_prompt_tokens=8",
            "--generation.max_completion_tokens=6",
            "--engine.max_num_seqs=16",
        ),
        runs=(
            (*HUB, *ENV),
            (*SCORED, *JUDGE, "--keep=passing", "--n_samples_per_prompt=2"),
            TOO_LONG,
        ),
        unread={"engine.gpu_memory_utilization": OF_A_GPU},
        cost_s=0.6,
    ),
    "serve": Tree(
        rows=SERVE,
        checked=("--model.path=model",),
        smallest=("--generation.max_completion_tokens=6", "--engine.max_num_seqs=16"),
        runs=(),
        unread={"engine.gpu_memory_utilization": OF_A_GPU},
        cost_s=1.0,
    ),
    "bench engine": Tree(
        rows=BENCH_ENGINE,
        checked=(
            "--model.path=model",
            "--output=numbers.json",
        ),
        smallest=(
            "--workload=decode",
            "--decode.batch=2",
            "--decode.context=8",
            "--decode.steps=4",
            "--engine.max_num_seqs=2",
        ),
        runs=(),
        unread={
            "engine.gpu_memory_utilization": OF_A_GPU,
            "engine.backend": Unread("the checks refuse all but the embedded engine", None),
        },
        cost_s=0.5,
    ),
    "bench train": Tree(
        rows=BENCH_TRAIN,
        checked=(
            "--model.path=model",
            "--output=numbers.json",
        ),
        smallest=("--rows.per_step=2", "--rows.tokens=16", "--steps=1", "--warmup_steps=1"),
        runs=(LORA, OTHER_STEPS),
        unread=NO_REFERENCE,
        cost_s=1.4,
    ),
    "plan": Tree(
        rows=SIMULATE,
        checked=("--model.path=model",),
        smallest=(
            "--model.shape=qwen3-0.6b",
            "--plan.gpus=2",
            "--plan.steps=4",
            "--plan.staleness=[1]",
            "--rollout.prompts_per_step=8",
            "--rollout.max_completion_tokens=256",
            "--output=plan.json",
        ),
        runs=(
            (*LORA, *PLANNED_TEACHER, "--model.path=Qwen/Qwen3-0.6B"),
            ("--plan.lengths.distribution=file", "--plan.lengths.path=lengths.jsonl"),
        ),
        unread={
            "algorithm.correction.kind": Unread(
                f"needed by asynchronous modes, {CARRIED}",
                "src/hone/tools/plan/comparison.py",
                "kind",
            ),
            "cluster.address": Unread(CARRIED, "src/hone/tools/plan/search.py", "address"),
            "cluster.num_trainers": Unread(CARRIED, "src/hone/planner/fitting.py", "num_trainers"),
            "cluster.engine_timeout_s": Unread(CARRIED, None),
        },
        cost_s=1.5,
    ),
}
