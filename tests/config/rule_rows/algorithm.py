"""Combinations that the rules on the algorithm find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # engines apart, sampling ahead (X1, G4)
    ("rl", "pipeline.max_staleness=1 cluster.num_engines=1", "warning",
     "pipeline.max_staleness algorithm.correction.kind"),
    ("rl", "algorithm.routing_replay=true", "error", "algorithm.routing_replay model.path"),
    # learning rates that only a slip can mean
    *[(command, "trainer.optimizer.lr=1", "warning", "trainer.optimizer.lr")
      for command in ("rl", "sft", "dpo", "reward-model")],
    ("rl", "algorithm.advantage=gae critic.lr=0.1", "warning", "critic.lr"),
    # products in other formats
    ("rl", "trainer.matmul_precision=fp8", "warning",
     "trainer.matmul_precision algorithm.correction.kind"),
    # groups and filters (G3, G13, G15)
    *[("rl", f"rollout.n_samples_per_prompt=1 algorithm.advantage={name}", "error",
       "algorithm.advantage rollout.n_samples_per_prompt")
      for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")],
    ("rl", "rollout.oversample_prompts=8", "warning",
     "rollout.oversample_prompts algorithm.correction.kind"),
    # what is masked is not all that is old
    ("rl", "rollout.oversample_prompts=8 rollout.mask_off_policy_tokens=true", "warning",
     "rollout.oversample_prompts algorithm.correction.kind"),
    ("rl", "pipeline.max_staleness=1 cluster.num_engines=1 rollout.mask_off_policy_tokens=true",
     "warning", "pipeline.max_staleness algorithm.correction.kind"),
    # engine (G8, E3)
    ("rl", "engine.kv_cache_dtype=fp8", "warning",
     "engine.kv_cache_dtype algorithm.correction.kind"),
    ("rl", "engine.weight_dtype=int8", "warning",
     "engine.weight_dtype algorithm.correction.kind"),
    # the learning rule
    ("rl", "algorithm.kl.coef=0.01 algorithm.kl.estimator=k1", "error",
     "algorithm.kl.estimator algorithm.kl.placement"),
    ("rl", "algorithm.kl.coef=0.01 algorithm.kl.placement=reward", "warning",
     "algorithm.kl.estimator algorithm.kl.placement"),
    ("rl", "algorithm.kl.placement=reward", "warning", "algorithm.kl.placement algorithm.kl.coef"),
    ("rl", "algorithm.kl.coef=0.01 algorithm.kl.placement=reward algorithm.kl.estimator=k1 "
     "rollout.truncated_samples=mask", "error",
     "algorithm.kl.placement algorithm.advantage rollout.truncated_samples"),
    ("rl", "algorithm.kl.coef=0.01 algorithm.kl.placement=reward algorithm.kl.estimator=k1 "
     "rollout.oversample_prompts=16 rollout.mask_off_policy_tokens=true", "error",
     "algorithm.kl.placement algorithm.advantage rollout.mask_off_policy_tokens"),
    ("rl", "algorithm.kl.coef=0.01 algorithm.kl.placement=reward algorithm.kl.estimator=k1 "
     "pipeline.max_staleness=1 cluster.num_engines=1 rollout.mask_off_policy_tokens=true", "error",
     "algorithm.kl.placement algorithm.advantage rollout.mask_off_policy_tokens"),
    ("rl", "algorithm.kl.estimator=k2", "warning", "algorithm.kl.estimator algorithm.kl.coef"),
    ("rl", "algorithm.dual_clip=3 algorithm.loss=cispo", "error",
     "algorithm.dual_clip algorithm.loss"),
    ("rl", "algorithm.loss=sapo algorithm.clip_high=0.3", "warning",
     "algorithm.clip_high algorithm.loss"),
    ("rl", "algorithm.loss=gspo algorithm.aggregation=sequence_mean", "warning",
     "algorithm.loss algorithm.clip_low algorithm.clip_high"),
    *[("rl", f"algorithm.loss={name}", "warning", "algorithm.loss algorithm.aggregation")
      for name in ("gmpo", "gspo")],
    ("rl", "algorithm.advantage=dr_grpo algorithm.aggregation=sequence_mean", "warning",
     "algorithm.advantage algorithm.aggregation"),
    ("rl", "algorithm.clip_high=0.1", "warning", "algorithm.clip_high algorithm.clip_low"),
    ("rl", "algorithm.clip_low=1 algorithm.clip_high=1", "warning", "algorithm.clip_low"),
    ("rl", "algorithm.loss=gmpo algorithm.aggregation=sequence_mean algorithm.clip_low=1 "
     "algorithm.clip_high=1", "warning", "algorithm.clip_low"),
    ("rl", "trainer.num_epochs=2 algorithm.clip_high=1.5", "warning",
     "algorithm.clip_high trainer.prompts_per_minibatch trainer.num_epochs"),
    ("rl", "algorithm.entropy_coef=-0.01", "warning", "algorithm.entropy_coef"),
    # the critic
    ("rl", "critic.lr=1e-4", "warning", "critic.lr algorithm.advantage"),
    ("rl", "algorithm.gamma=0.9", "warning", "algorithm.gamma algorithm.advantage"),
    ("rl", "algorithm.advantage=gae critic.max_tokens_per_microbatch=99 trainer.micro_batch_size=4",
     "warning", "critic.max_tokens_per_microbatch trainer.micro_batch_size"),
    ("rl", "algorithm.advantage=gae critic.warmup_steps=999999", "error",
     "critic.warmup_steps run.steps"),
    ("rl", "algorithm.advantage=gae critic.lr=0", "warning", "critic.lr"),
    ("rl", "critic.recompute=full", "warning", "critic.recompute algorithm.advantage"),
    ("rl", "critic.max_tokens_per_forward=99", "warning",
     "critic.max_tokens_per_forward algorithm.advantage"),
    ("rl", "algorithm.advantage=gae critic.optimizer=muon", "warning",
     "trainer.optimizer.muon_lr critic.optimizer"),
    # the teacher
    ("rl", "teacher.reward_coef=0.5", "warning", "teacher.reward_coef teacher.path"),
    ("rl", "teacher.path=a/b algorithm.advantage=rloo", "warning",
     "algorithm.advantage teacher.path"),
    ("rl", "teacher.path=a/b algorithm.advantage=gae teacher.reward_coef=1", "error",
     "teacher.path algorithm.advantage"),
    ("rl", "teacher.path=a/b algorithm.kl.coef=0.01 algorithm.kl.placement=reward "
     "algorithm.kl.estimator=k1", "error",
     "teacher.path algorithm.kl.coef algorithm.kl.placement"),
    ("rl", "teacher.path=a/b rollout.dynamic_sampling=true", "warning",
     "teacher.path rollout.dynamic_sampling"),
    ("rl", "teacher.top_k=8", "warning", "teacher.top_k teacher.path"),
    ("rl", "teacher.path=a/b teacher.top_k=8", "warning", "teacher.top_k teacher.loss"),
    ("rl", "teacher.path=a/b teacher.loss=js algorithm.loss=cispo", "warning",
     "algorithm.loss teacher.loss"),
    ("rl", "teacher.max_tokens_per_forward=4096", "warning",
     "teacher.max_tokens_per_forward teacher.path"),
    ("rl", "teacher.path=a/b teacher.max_tokens_per_forward=4096 trainer.micro_batch_size=1",
     "warning", "teacher.max_tokens_per_forward trainer.micro_batch_size"),
    ("rl", "algorithm.correction.kind=icepop algorithm.correction.low=2", "error",
     "algorithm.correction.low algorithm.correction.high"),
    ("rl", "algorithm.correction.kind=tis algorithm.correction.high=0.9", "error",
     "algorithm.correction.low algorithm.correction.high"),
    ("rl", "algorithm.correction.kind=tis algorithm.correction.low=0.1", "warning",
     "algorithm.correction.low algorithm.correction.kind"),
    ("rl", "algorithm.correction.high=5", "warning",
     "algorithm.correction.high algorithm.correction.kind"),
    # preferences
    ("dpo", "algorithm.simpo_gamma=1", "warning", "algorithm.simpo_gamma algorithm.loss"),
    ("dpo", 'algorithm.loss={"hinge":1,"ipo":1} algorithm.label_smoothing=0.1', "warning",
     "algorithm.label_smoothing algorithm.loss"),
    ("dpo", "algorithm.desirable_weight=2", "warning",
     "algorithm.desirable_weight algorithm.loss"),
    ("dpo", "algorithm.loss={}", "error", "algorithm.loss"),
    ("dpo", "algorithm.loss=kto data.examples_per_step=1", "error",
     "algorithm.loss data.examples_per_step"),
    ("dpo", 'algorithm.loss={"exo_pair":1}', "error", "algorithm.loss algorithm.label_smoothing"),
    # the optimizer
    ("rl", "trainer.optimizer.lr=0", "warning", "trainer.optimizer.lr"),
    ("rl", "trainer.optimizer.betas=[0.9,1.0]", "error", "trainer.optimizer.betas"),
    ("sft", "trainer.optimizer.muon_lr=1e-3", "warning",
     "trainer.optimizer.muon_lr trainer.optimizer.name"),
    ("rl", "trainer.optimizer.name=muon", "warning",
     "trainer.optimizer.name trainer.optimizer.muon_lr"),
    ("rl", "trainer.optimizer.muon_lr=0.01", "warning",
     "trainer.optimizer.name trainer.optimizer.muon_lr"),
    ("rl", "trainer.optimizer.warmup_steps=101", "warning",
     "trainer.optimizer.warmup_steps run.steps"),
    ("rl", "trainer.optimizer.min_lr_ratio=0.1", "warning",
     "trainer.optimizer.min_lr_ratio trainer.optimizer.schedule"),
    ("sft", "trainer.optimizer.lr=1e-6", "warning", "trainer.optimizer.lr"),
    ("rl", "algorithm.correction.kind=icepop algorithm.correction.low=1.5", "error",
     "algorithm.correction.low algorithm.correction.high"),
]  # fmt: skip
