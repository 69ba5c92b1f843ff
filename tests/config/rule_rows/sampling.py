"""Combinations that the rules on sampling find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # lengths
    ("rl", "rollout.max_completion_tokens=3073", "error",
     "rollout.max_completion_tokens data.max_prompt_tokens model.path"),
    ("rl", "rollout.max_completion_tokens=4096", "error",
     "rollout.max_completion_tokens model.path"),
    ("rl", "data.max_prompt_tokens=4096", "error", "data.max_prompt_tokens model.path"),
    ("rl", "eval.at_start=true data.eval_fraction=0.1 eval.max_completion_tokens=3500", "error",
     "eval.max_completion_tokens data.max_prompt_tokens model.path"),
    ("rl", "eval.at_start=true data.eval_fraction=0.1 eval.max_completion_tokens=512", "warning",
     "eval.max_completion_tokens rollout.max_completion_tokens"),
    ("sft", "data.max_tokens=4097", "error", "data.max_tokens model.path"),
    ("generate", "generation.max_completion_tokens=4000", "error",
     "generation.max_completion_tokens data.max_prompt_tokens model.path"),
    # sampling (R5, R20)
    ("rl", "rollout.temperature=0", "error", "rollout.temperature"),
    ("rl", "rollout.temperature=0.01", "warning", "rollout.temperature"),
    ("rl", "rollout.stop=['']", "error", "rollout.stop"),
    ("rl", "rollout.stop=[1000]", "error", "rollout.stop"),
    ("rl", "rollout.stop=[-1]", "error", "rollout.stop"),
    ("eval", "eval.temperature=0 eval.n_samples_per_prompt=4", "warning",
     "eval.temperature eval.n_samples_per_prompt"),
    ("generate", "generation.temperature=0 n_samples_per_prompt=4", "warning",
     "generation.temperature n_samples_per_prompt"),
    ("eval", "eval.temperature=0 eval.top_p=0.9", "warning", "eval.temperature eval.top_p"),
    # groups and filters (G3, G13, G15)
    ("rl", "rollout.dynamic_sampling=true rollout.n_samples_per_prompt=1", "error",
     "rollout.dynamic_sampling rollout.n_samples_per_prompt"),
    ("rl", "rollout.max_aborted_count=3", "warning",
     "rollout.max_aborted_count rollout.oversample_prompts"),
    ("rl", "rollout.mask_off_policy_tokens=true", "warning",
     "rollout.mask_off_policy_tokens rollout.oversample_prompts"),
    ("rl", "rollout.oversample_prompts=8 rollout.max_aborted_count=0", "warning",
     "rollout.max_aborted_count rollout.oversample_prompts"),
    ("rl", "rollout.oversample_prompts=65", "warning",
     "rollout.oversample_prompts rollout.prompts_per_step"),
    # what is masked is not all that is old
    *[("rl", "pipeline.max_staleness=1 cluster.num_engines=1 pipeline.in_flight=finish "
       f"rollout.{key}=1", "warning", f"rollout.{key} pipeline.in_flight")
      for key in ("mask_off_policy_tokens", "max_aborted_count")],
    ("rl", "cluster.num_engines=1 rollout.max_aborted_count=2 "
     "pipeline.max_staleness=2", "warning", "rollout.max_aborted_count pipeline.max_staleness"),
    ("rl", "rollout.reward_range=[0.1,0.9]", "warning",
     "rollout.reward_range rollout.dynamic_sampling"),
    ("rl", "data.curriculum.rest_epochs=2", "warning",
     "data.curriculum.rest_epochs data.curriculum.pass_rate"),
    ("rl", "data.curriculum.pass_rate=[0.9,0.1]", "error", "data.curriculum.pass_rate"),
    ("rl", "data.curriculum.pass_rate=[-1,1]", "warning", "data.curriculum.pass_rate"),
    ("rl", "data.curriculum.pass_rate=[0.1,1.5]", "warning", "data.curriculum.pass_rate"),
    ("rl", "data.curriculum.pass_rate=[0,1] rollout.n_samples_per_prompt=1", "warning",
     "data.curriculum.pass_rate rollout.n_samples_per_prompt"),
    ("rl", "rollout.dynamic_sampling=true rollout.reward_range=[0.9,0.1]", "error",
     "rollout.reward_range"),
]  # fmt: skip
