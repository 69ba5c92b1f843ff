"""Combinations that the rules on the cluster find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # engines apart, sampling ahead (X1, G4)
    ("rl", "cluster.num_trainers=4", "error", "cluster.num_trainers cluster.num_engines"),
    ("rl", "cluster.num_engines=2 cluster.num_trainers=12 engine.tensor_parallel_size=2 "
     "cluster.num_nodes=2 cluster.devices_per_node=7 cluster.address=auto", "error",
     "cluster.num_trainers cluster.num_engines engine.tensor_parallel_size cluster.num_nodes "
     "cluster.devices_per_node"),
    ("rl", "cluster.num_engines=1 engine.tensor_parallel_size=2 cluster.num_nodes=4 "
     "cluster.devices_per_node=1 cluster.address=auto", "error",
     "engine.tensor_parallel_size cluster.devices_per_node"),
    ("rl", "cluster.num_engines=2 cluster.devices_per_node=4", "warning",
     "cluster.num_engines cluster.num_trainers cluster.devices_per_node"),
    ("rl", "cluster.num_engines=1 cluster.address=tcp://head:6379", "error", "cluster.address"),
    ("rl", "cluster.num_engines=2 cluster.num_trainers=4 cluster.num_nodes=2 cluster.address=auto",
     "warning", "cluster.num_trainers cluster.num_nodes cluster.devices_per_node"),
    ("rl", "cluster.num_engines=2 cluster.num_nodes=2", "error",
     "cluster.num_nodes cluster.address"),
    ("rl", "--nproc=3 cluster.num_engines=1 cluster.num_trainers=2", "error",
     "cluster.num_trainers"),
    ("rl", "cluster.num_engines=1 engine.enable_sleep=true", "error",
     "engine.enable_sleep cluster.num_engines"),
    ("rl", "cluster.num_engines=1 trainer.enable_sleep=true", "error",
     "trainer.enable_sleep cluster.num_engines"),
    ("rl", "cluster.num_references=4 cluster.num_engines=2 cluster.num_trainers=8 "
     "engine.tensor_parallel_size=2 cluster.num_nodes=2 cluster.devices_per_node=7 "
     "cluster.address=auto algorithm.kl.coef=0.1", "error",
     "cluster.num_trainers cluster.num_engines engine.tensor_parallel_size cluster.num_references "
     "cluster.num_nodes cluster.devices_per_node"),
    ("rl", "cluster.num_references=1 cluster.devices_per_node=1 algorithm.kl.coef=0.1", "error",
     "cluster.num_trainers cluster.num_references cluster.devices_per_node"),
    ("rl", "cluster.num_references=1", "error", "cluster.num_references algorithm.kl.coef"),
    ("rl", "cluster.num_references=1 algorithm.kl.coef=0.1 cluster.update_weight_buffer_size=9",
     "warning", "cluster.update_weight_buffer_size cluster.num_engines"),
    ("rl", "cluster.num_references=1 algorithm.kl.coef=0.1 model.lora.rank=8", "error",
     "cluster.num_references model.lora.rank"),
    ("rl", "cluster.num_references=1 algorithm.kl.coef=0.1 cluster.num_trainers=4 "
     "trainer.parallel.ring_size=4 trainer.max_tokens_per_microbatch=1023", "error",
     "cluster.num_references trainer.max_tokens_per_microbatch"),
    ("rl", "cluster.num_critics=1", "error", "cluster.num_critics algorithm.advantage"),
    ("rl", "--nproc=2 cluster.num_critics=2 algorithm.advantage=gae", "error",
     "cluster.num_trainers cluster.num_critics"),
    ("rl", "cluster.num_critics=1 algorithm.advantage=gae cluster.engine_timeout_s=7", "warning",
     "cluster.engine_timeout_s"),
    ("rl", "cluster.num_teachers=1", "error", "cluster.num_teachers teacher.path"),
    ("rl", "cluster.num_teachers=1 teacher.path=a/b cluster.num_trainers=4 "
     "teacher.max_tokens_per_forward=1023 trainer.parallel.ring_size=4", "error",
     "cluster.num_teachers teacher.max_tokens_per_forward"),
    ("rl", "cluster.num_reward_models=1", "error",
     "cluster.num_reward_models reward.model.path"),
    ("rl", "--nproc=2 cluster.num_trainers=2 cluster.num_reward_models=1 reward.model.path=a/b",
     "error", "cluster.num_reward_models engine.tensor_parallel_size"),
    ("rl", "--nproc=3 cluster.num_references=1 algorithm.kl.coef=0.1", "error",
     "cluster.num_trainers cluster.num_references"),
    *[("rl", f"pipeline.max_staleness=1 {section}.enable_sleep=true", "error",
       f"{section}.enable_sleep pipeline.max_staleness cluster.num_engines")
      for section in ("engine", "trainer")],
    ("rl", "pipeline.max_staleness=1 run.device=cuda", "error",
     "pipeline.max_staleness cluster.num_engines run.device"),
    ("rl", "--gpu=H200 pipeline.max_staleness=1", "error",
     "pipeline.max_staleness cluster.num_engines run.device"),
    ("rl", "pipeline.max_staleness=1 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size pipeline.max_staleness cluster.num_engines"),
    ("rl", "pipeline.in_flight=abort", "warning", "pipeline.in_flight pipeline.max_staleness"),
    ("rl", "pipeline.max_staleness=1 cluster.num_engines=1 rollout.oversample_prompts=4", "error",
     "rollout.oversample_prompts pipeline.max_staleness"),
    # traces
    ("rl", "cluster.num_engines=1 cluster.num_trainers=8 cluster.num_nodes=2 "
     "cluster.devices_per_node=6 cluster.address=auto", "error",
     "cluster.num_trainers cluster.devices_per_node"),
    ("rl", "cluster.num_engines=2 cluster.num_trainers=6 engine.tensor_parallel_size=4 "
     "cluster.num_nodes=2 cluster.devices_per_node=7 cluster.address=auto", "error",
     "cluster.num_engines engine.tensor_parallel_size cluster.num_trainers "
     "cluster.devices_per_node"),
]  # fmt: skip
