"""Rows of `hone rl`."""

from __future__ import annotations

from tests.config.row import Row
from tests.config.walk_rows.shared import (
    CHAT,
    FIRST_HELD_OUT,
    KL,
    MINI,
    WHOLE_GROUPS,
    course_rows,
    eval_rows,
    filter_rows,
    image_rows,
    mix_rows,
    model_rows,
    not_used,
    run_rows,
    source_rows,
    trainer_rows,
)

COLUMNS = ("--data.train=[{path: columns.jsonl, max_rows: 8}]",)
TOLD = ("--reward.functions=[{fn: 'rewards.py:told'}]",)
EVAL_COLUMNS = ("--data.eval=[{path: columns.jsonl, max_rows: 4}]",)
LIVE = ("--env.path=envs.py:Live", "--reward.max_failure_rate=1")
ECHO = ("--env.path=envs.py:Echo", "--rollout.stop=['1', '2', '3', '4']")
EXACT_MATCH = ("--reward.functions=[{fn: exact_match}]",)
GAE = ("--algorithm.advantage=gae", "--critic.lr=1e-3")
CRITIC_APART = (*GAE, "--cluster.num_critics=4")
JUDGE = ("--reward.model.path=judge",)
TEACHER = ("--teacher.path=other",)
APART = ("--cluster.num_engines=2", "--algorithm.correction.kind=tis")
AHEAD = (*APART, "--pipeline.max_staleness=1")
PARTIAL = ("--rollout.oversample_prompts=2",)
TRACED_ENGINE = ("--profile.rollout.steps=[0]",)
RESTING = (
    "--data.curriculum.pass_rate=[0.4, 0.6]",
    "--data.train=[{path: train.jsonl, max_rows: 3}]",
    "--run.steps=4",
)
RL: dict[str, Row] = {
    **run_rows(trains=True),
    **model_rows("metrics", lora=True),
    **source_rows(
        "train",
        "samples",
        {
            "columns.prompt": Row("q", "samples", COLUMNS),
            "columns.answer": Row("a", "samples", COLUMNS),
            "columns.task": Row("kind", "samples", COLUMNS),
            "columns.difficulty": Row("level", "samples", COLUMNS),
            "columns.pass_rate": Row(
                "rate", "samples", (*COLUMNS, "--data.curriculum.pass_rate=[0, 1]")
            ),
            "answer_pattern": Row("^.", "samples", ("--data.train=[{path: train.jsonl}]",)),
            "task": Row("sums", "samples"),
        },
    ),
    **mix_rows("samples", "path: train.jsonl", "path: columns.jsonl"),
    **source_rows(
        "eval",
        "metrics",
        {
            "columns.prompt": Row("q", "metrics", (*EVAL_COLUMNS, *TOLD)),
            "columns.answer": Row("a", "metrics", (*EVAL_COLUMNS, *TOLD)),
            "columns.task": Row("kind", "metrics", (*EVAL_COLUMNS, *TOLD)),
            "answer_pattern": Row("^nothing", "log:answer_pattern"),
            "task": Row("sums", "metrics", TOLD),
        },
    ),
    **image_rows(),
    **filter_rows("samples"),
    "data.eval_fraction": Row("0.5", "metrics", ("--data.eval=[]", "--eval.every_n_steps=0")),
    "data.shuffle": Row("false", "samples"),
    "data.shuffle_window": Row("2", "metrics"),
    "data.max_eval_rows": Row("1", "metrics", FIRST_HELD_OUT),
    "data.curriculum.pass_rate": Row("[0.4, 0.6]", "metrics"),
    "data.curriculum.rest_epochs": Row("3", "metrics", RESTING),
    "data.chat": Row("always", "samples", ("--data.max_prompt_tokens=24",)),
    "data.system_prompt": Row("1", "samples", CHAT),
    "data.prompt_template": Row("1{prompt}", "samples"),
    "data.max_prompt_tokens": Row("3", "log:too long"),
    "data.overlong_prompts": Row("error", "log:raise the limit", ("--data.max_prompt_tokens=3",)),
    "rollout.max_completion_tokens": Row("4", "samples"),
    "rollout.temperature": Row("0.5", "samples"),
    "rollout.stop": Row("['1', 5, 6]", "samples"),
    "rollout.prompts_per_step": Row("3", "metrics"),
    "rollout.n_samples_per_prompt": Row("3", "metrics"),
    "rollout.dynamic_sampling": Row("true", "metrics", EXACT_MATCH),
    "rollout.reward_range": Row("[0.5, 1]", "metrics", ("--rollout.dynamic_sampling=true",)),
    "rollout.oversample_prompts": Row("2", "metrics"),
    "rollout.max_aborted_count": Row("0", "metrics", (*PARTIAL, "--run.steps=4")),
    "rollout.mask_off_policy_tokens": Row("true", "metrics", (*PARTIAL, "--run.steps=4")),
    "rollout.truncated_samples": Row("mask", "metrics"),
    "engine.backend": Row("vllm", "log:vllm"),
    "engine.gpu_memory_utilization": Row("0.3", "EmbeddedEngine"),  # a share of a GPU's memory
    "engine.kv_cache_gib": Row("0.001", "metrics"),
    "engine.kv_cache_dtype": Row("fp8", "metrics", ("--trainer.parity=1",)),
    "engine.weight_dtype": Row("int8", "metrics"),
    "engine.tensor_parallel_size": Row("2", "log:tensor_parallel_size"),
    "engine.max_num_seqs": Row("4", "metrics", ("--engine.kv_cache_gib=0.01",)),
    "engine.max_num_batched_tokens": Row("8", "metrics"),
    "engine.enable_sleep": Row("true", "EmbeddedEngine.sleep"),
    "engine.enable_prefix_caching": Row("false", "EmbeddedEngine"),
    "engine.enforce_eager": Row("true", "EmbeddedEngine"),  # of a GPU alone
    "env.path": Row("envs.py:Echo", "metrics"),
    "env.args": Row("{says: '-+'}", "samples", ECHO),
    "env.max_turns": Row("2", "metrics", ECHO),
    "env.tools": Row("['nowhere.py:add']", "log:there is no file 'nowhere.py'"),
    "env.tool_format": not_used("env.tool_format", "hermes"),
    "env.max_tool_calls": not_used("env.max_tool_calls", "3"),
    "env.max_parallel_calls": not_used("env.max_parallel_calls", "3"),
    "env.max_observation_tokens": Row("1", "samples", (*ECHO, "--env.args={says: '-+'}")),
    "env.max_turn_tokens": Row("1", "metrics", ECHO),
    "env.turn_timeout_s": Row("0.1", "metrics", LIVE),
    "env.episode_timeout_s": Row("0.001", "metrics", LIVE),
    "env.retries": Row("2", "metrics", LIVE),
    "env.concurrency": Row("3", "Scorer", LIVE),
    "env.harness.command": Row("no-such-program", "log:there is no program 'no-such-program'"),
    "env.history": not_used("env.history", "tree"),
    "reward.functions": Row("[{fn: 'rewards.py:nine'}]", "metrics"),
    "reward.functions.0.fn": Row("rewards.py:nine", "metrics"),
    "reward.functions.0.weight": Row("2", "metrics"),
    "reward.functions.0.args": Row(
        "{mark: '1'}", "metrics", ("--reward.functions=[{fn: 'rewards.py:nine'}]",)
    ),
    "reward.functions.0.whole_groups": WHOLE_GROUPS,
    "reward.clip": Row("[0.2, 0.6]", "metrics"),
    "reward.model.path": Row("judge", "metrics"),
    "reward.model.weight": Row("2", "metrics", JUDGE),
    "reward.model.max_tokens_per_forward": Row("16", "passes", JUDGE),
    "reward.timeout_s": Row(
        "0.1",
        "metrics",
        (
            "--reward.functions=[{fn: 'rewards.py:slow'}]",
            "--run.steps=1",
            "--rollout.prompts_per_step=1",
            "--rollout.n_samples_per_prompt=2",
            "--reward.max_failure_rate=1",
            "--eval.every_n_steps=0",
        ),
    ),
    "reward.memory_limit_gib": Row(
        "0.2",
        "metrics",
        (
            "--reward.functions=[{fn: 'rewards.py:big'}]",
            "--run.steps=1",
            "--reward.max_failure_rate=1",
            "--eval.every_n_steps=0",
        ),
    ),
    "reward.num_workers": Row("2", "Scorer"),
    "reward.max_failure_rate": Row(
        "1",
        "exit",
        ("--reward.functions=[{fn: 'rewards.py:fails'}]", "--reward.max_failure_rate=0"),
    ),
    "algorithm.advantage": Row("rloo", "metrics"),
    "algorithm.gamma": Row("0.5", "metrics", GAE),
    "algorithm.lam": Row("0.5", "metrics", (*GAE, "--run.steps=3")),
    "teacher.path": Row("other", "metrics"),
    "teacher.reward_coef": Row("0.5", "metrics", TEACHER),
    "teacher.loss": Row("js", "metrics", TEACHER),
    "teacher.max_tokens_per_forward": Row("24", "passes", TEACHER),
    "teacher.top_k": Row("3", "metrics", (*TEACHER, "--teacher.loss=forward_kl")),
    "critic.path": Row("other", "metrics", GAE),
    "critic.lr": Row("1e-2", "metrics", GAE),
    "critic.optimizer": Row("muon", "metrics", GAE),
    "critic.value_clip": Row("1e-6", "metrics", (*GAE, *MINI)),
    "critic.warmup_steps": Row("1", "weights", GAE),
    "critic.max_tokens_per_microbatch": Row("24", "metrics", GAE),
    "critic.max_tokens_per_forward": Row("24", "passes", GAE),
    "critic.recompute": Row("full", "Trainer", GAE),
    "critic.offload": Row("optimizer", "Trainer", GAE),
    **{
        f"critic.parallel.{name}": Row(value, "derived", CRITIC_APART, command="check rl")
        for name, value in (
            ("zero_stage", "0"),
            ("fsdp_size", "2"),
            ("tensor_parallel_size", "2"),
            ("pipeline_parallel_size", "2"),
            ("expert_parallel_size", "2"),
            ("ulysses_size", "2"),
            ("ring_size", "2"),
        )
    },
    "algorithm.loss": Row("cispo", "metrics", MINI),
    "algorithm.aggregation": Row("sequence_mean", "metrics"),
    "algorithm.clip_low": Row("0.0001", "metrics", MINI),
    "algorithm.clip_high": Row("0.0001", "metrics", MINI),
    "algorithm.dual_clip": Row("1.0001", "metrics", MINI),
    "algorithm.entropy_coef": Row("0.1", "metrics"),
    "algorithm.kl.coef": Row("0.1", "metrics"),
    "algorithm.kl.placement": Row("reward", "metrics", KL),
    "algorithm.kl.estimator": Row("k2", "metrics", KL),
    "algorithm.correction.kind": Row("tis", "metrics", (*PARTIAL, "--run.steps=3")),
    "algorithm.correction.low": Row(
        "0.999", "metrics", (*PARTIAL, "--run.steps=4", "--algorithm.correction.kind=icepop")
    ),
    "algorithm.correction.high": Row(
        "1.001", "metrics", (*PARTIAL, "--run.steps=4", "--algorithm.correction.kind=tis")
    ),
    "algorithm.routing_replay": Row("true", "findings", command="check rl"),
    "pipeline.max_staleness": Row("2", "derived", APART, command="check rl"),
    "pipeline.in_flight": Row("abort", "Collector", AHEAD),
}


def cluster_rows() -> dict[str, Row]:
    return {
        "cluster.address": Row("localhost:9", "log:no Ray cluster", APART),
        "cluster.num_trainers": Row("2", "derived", APART, command="check rl"),
        "cluster.num_engines": Row("2", "derived", command="check rl"),
        "cluster.num_critics": Row("2", "derived", GAE, command="check rl"),
        "cluster.num_references": Row("2", "derived", KL, command="check rl"),
        "cluster.num_teachers": Row("2", "derived", TEACHER, command="check rl"),
        "cluster.num_reward_models": Row("2", "derived", JUDGE, command="check rl"),
        "cluster.num_nodes": Row("2", "findings", APART, command="check rl"),
        "cluster.devices_per_node": Row("1", "findings", APART, command="check rl"),
        "cluster.update_weight_buffer_size": Row("1024", "BroadcastSync", APART),
        "cluster.engine_timeout_s": Row("7", "BroadcastSync", APART),
    }


RL |= trainer_rows("metrics", rl=True) | cluster_rows() | eval_rows("metrics") | course_rows()
RL |= {
    "profile.rollout.steps": Row("[0]", "traces"),
    "profile.rollout.num_forwards": Row("1", "traces", TRACED_ENGINE),
    "profile.rollout.activities": Row("[gpu]", "log:no GPU to record", TRACED_ENGINE),
    "profile.rollout.by_stage": Row("true", "traces", TRACED_ENGINE),
    "profile.rollout.with_stack": Row("true", "profile", TRACED_ENGINE),
    "profile.rollout.record_shapes": Row("true", "profile", TRACED_ENGINE),
}
RL["checkpoint.keep_best"] = Row(
    "false",
    "files",
    (
        "--checkpoint.every_n_steps=1",
        "--checkpoint.keep_last=1",
        "--eval.every_n_steps=1",
        "--trainer.optimizer.lr=0.1",
        "--reward.functions=[{fn: 'rewards.py:even', weight: -1}]",
        "--eval.metric=eval/reward/even/mean",  # falls, so that the first step is the best
    ),
)
RL["eval.metric"] = Row(
    "eval/length/mean",
    "files",
    (
        "--checkpoint.every_n_steps=1",
        "--checkpoint.keep_last=1",
        "--eval.every_n_steps=1",
        "--run.steps=3",
    ),
)
