"""Rows of `hone plan`."""

from __future__ import annotations

from tests.config.row import Row
from tests.config.walk_rows.shared import (
    KL,
    LORA,
)

EIGHT_B = ("--model.shape=qwen3-8b",)
LARGE = (  # where memory decides which splits there are, and with which further settings
    *EIGHT_B,
    "--rollout.prompts_per_step=64",
    "--rollout.n_samples_per_prompt=8",
    "--rollout.max_completion_tokens=1024",
)
TEACHER = ("--teacher.path=Qwen/Qwen3-1.7B",)
JUDGE = ("--reward.model.path=Qwen/Qwen3-1.7B",)
SIMULATE: dict[str, Row] = {
    "run.seed": Row("1", "numbers"),
    "model.path": Row("Qwen/Qwen3-1.7B", "numbers", ("--model.path=Qwen/Qwen3-0.6B",)),
    "model.shape": Row("qwen3-1.7b", "numbers"),
    "model.dtype": Row("float32", "numbers"),
    "model.lora.rank": Row("8", "numbers"),
    "model.lora.target_modules": Row("[q_proj]", "numbers", LORA),
    "rollout.max_completion_tokens": Row("128", "numbers"),
    "rollout.prompts_per_step": Row("4", "numbers"),
    "rollout.n_samples_per_prompt": Row("4", "numbers"),
    "rollout.oversample_prompts": Row("4", "numbers"),
    # In short samples few groups are interrupted.
    "rollout.max_aborted_count": Row("0", "numbers", ("--rollout.max_completion_tokens=1024",)),
    "engine.gpu_memory_utilization": Row("0.01", "numbers"),
    "engine.kv_cache_gib": Row("0.1", "numbers"),
    "engine.kv_cache_dtype": Row("fp8", "numbers"),
    "engine.weight_dtype": Row("int8", "numbers"),
    "engine.tensor_parallel_size": Row("2", "numbers"),
    "engine.max_num_seqs": Row("4", "numbers"),
    "engine.enable_prefix_caching": Row("false", "numbers"),
    "engine.enable_sleep": Row("true", "numbers"),
    "algorithm.kl.coef": Row("0.1", "numbers"),
    "algorithm.correction.kind": Row("tis", "numbers"),
    "trainer.num_epochs": Row("2", "numbers"),
    "trainer.prompts_per_minibatch": Row("2", "numbers"),
    "trainer.enable_sleep": Row("true", "numbers"),
    "trainer.parallel.fsdp_size": Row("2", "numbers"),
    "trainer.parallel.tensor_parallel_size": Row("2", "numbers"),
    "trainer.parallel.expert_parallel_size": Row("2", "exit"),
    "trainer.parallel.pipeline_parallel_size": Row("2", "numbers"),
    "trainer.parallel.virtual_stages": Row(
        "2", "numbers", ("--trainer.parallel.pipeline_parallel_size=2",)
    ),
    "trainer.parallel.ulysses_size": Row("2", "numbers"),
    "trainer.parallel.ring_size": Row("2", "numbers"),
    "trainer.parallel.zero_stage": Row("0", "numbers", (*LARGE, "--plan.gpus=4")),
    **{
        f"trainer.{name}": Row(value, "numbers", LARGE)
        for name, value in (
            ("max_tokens_per_microbatch", "2048"),
            ("logits_chunk_tokens", "16384"),
            ("micro_batch_size", "1"),
            ("offload", "optimizer"),
            ("optimizer.name", "muon"),
            ("optimizer.state_dtype", "bfloat16"),
        )
    },
    "trainer.recompute": Row("full", "numbers", LARGE),
    "pipeline.max_staleness": Row("2", "numbers"),
    "pipeline.in_flight": Row("abort", "numbers"),
    **{
        f"cluster.{name}": Row(value, "numbers")
        for name, value in (
            ("address", "localhost:9"),
            ("num_trainers", "2"),
            ("update_weight_buffer_size", "1024"),
            ("engine_timeout_s", "7"),
        )
    },
    "cluster.num_engines": Row("1", "numbers"),
    "cluster.num_critics": Row(
        "1", "numbers", ("--algorithm.advantage=gae", "--critic.lr=1e-5", "--plan.gpus=3")
    ),
    "cluster.num_references": Row("1", "numbers", (*KL, "--plan.gpus=3")),
    "cluster.num_teachers": Row("1", "numbers", (*TEACHER, "--plan.gpus=3")),
    "cluster.num_reward_models": Row("1", "numbers", (*JUDGE, "--plan.gpus=3")),
    "teacher.path": Row("Qwen/Qwen3-4B", "numbers"),
    "teacher.loss": Row("js", "numbers", TEACHER),
    "reward.model.path": Row("Qwen/Qwen3-4B", "numbers"),
    "cluster.num_nodes": Row("2", "log:cluster.num_nodes.* no effect"),
    "cluster.devices_per_node": Row("1", "log:cluster.devices_per_node.* no effect"),
    "plan.gpus": Row("3", "numbers"),
    "plan.gpu": Row("H100", "numbers"),
    "plan.host_gib": Row("0.001", "exit", LARGE),
    "plan.prompt_tokens": Row("64", "numbers"),
    "plan.lengths.distribution": Row("uniform", "numbers"),
    "plan.lengths.median": Row("100", "numbers"),
    "plan.lengths.sigma": Row("0.1", "numbers", ("--plan.lengths.median=100",)),
    "plan.lengths.path": Row(
        "lengths.jsonl",
        "exit",
        ("--plan.lengths.distribution=file",),
    ),
    "plan.goal": Row("memory", "numbers"),
    "plan.staleness": Row("[2]", "numbers"),
    "plan.steps": Row("5", "numbers"),
    "plan.decode_share": Row("0.5", "numbers"),
    "plan.decode_overhead_s": Row("0.01", "numbers"),
    "plan.prefill_share": Row("0.1", "numbers"),
    "plan.training_share": Row("0.1", "numbers"),
    "plan.training_scaling": Row("0.5", "numbers"),
    "plan.two_gpus_layer_s": Row(
        "1e-3", "numbers", ("--engine.tensor_parallel_size=2", "--plan.gpus=4")
    ),
    "plan.more_gpus_layer_s": Row(
        "1e-3", "numbers", ("--engine.tensor_parallel_size=4", "--plan.gpus=8")
    ),
    "plan.sync_bytes_per_s": Row("1e9", "numbers"),
    "plan.switch_s": Row("1", "numbers"),
    "plan.overhead_s": Row("1", "numbers"),
    "output": Row("other.json", "files"),
}
NOT_OF_TIME = (
    *(f"run.{name}" for name in ("device", "dir", "steps", "resume")),
    *(
        f"model.{name}"
        for name in (
            "tokenizer",
            "chat_template",
            "init",
            "exact",
            "image_cache_gib",
            "trust_remote_code",
        )
    ),
    "model.lora.alpha",
    "model.lora.load_in_4bit",  # these two change memory alone, and no split that fits or not
    *(f"{section}." for section in ("data", "env", "eval", "checkpoint", "log", "profile")),
    *(f"reward.{name}" for name in ("functions", "clip", "timeout_s", "memory_limit_gib")),
    *(f"reward.{name}" for name in ("num_workers", "max_failure_rate")),
    *(f"reward.model.{name}" for name in ("weight", "max_tokens_per_forward")),
    *(f"teacher.{name}" for name in ("reward_coef", "top_k", "max_tokens_per_forward")),
    *(f"rollout.{name}" for name in ("temperature", "stop")),
    "rollout.dynamic_sampling",
    "rollout.reward_range",
    "rollout.mask_off_policy_tokens",
    "rollout.truncated_samples",
    *(f"engine.{name}" for name in ("backend", "enforce_eager", "max_num_batched_tokens")),
    *(f"algorithm.{name}" for name in ("advantage", "loss", "aggregation", "clip_", "dual_clip")),
    *(f"algorithm.{name}" for name in ("entropy_coef", "kl.placement", "kl.estimator")),
    "algorithm.routing_replay",
    *("algorithm.gamma", "algorithm.lam", "critic."),
    *(f"algorithm.correction.{name}" for name in ("low", "high")),
    *(f"trainer.{name}" for name in ("max_tokens_per_forward", "recompute_every_n_layers")),
    *(f"trainer.{name}" for name in ("offload_activations", "compile", "matmul_precision")),
    "trainer.parity",
    *(f"trainer.optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay", "muon_")),
    *(f"trainer.optimizer.{name}" for name in ("max_grad_norm", "schedule", "warmup", "min_lr")),
    *(f"trainer.parallel.{name}" for name in ("reference_", "timeout_s")),
)
"""Beginnings of keys of a recipe of `hone rl` that `hone plan` reads past, as its help says;
the rows of `rl` show what they change."""
