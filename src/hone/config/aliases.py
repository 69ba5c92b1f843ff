"""Names that other frameworks give to settings, for whoever brings a recipe from one of them.

    alias_hint(RLConfig, ["actor", "ppo_mini_batch_size"])

Each is the end of a dotted path in verl, OpenRLHF, TRL, slime or prime-rl, without the dashes. The
message about an unknown key looks here first, and only then for a key that is spelt alike, since
the names of two different things often are (`ppo_mini_batch_size` and `micro_batch_size`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hone.config.base import Section
from hone.config.schema import fields, locate
from hone.config.tree import TREES

__all__ = ["ALIASES", "Alias", "alias_hint", "find_alias", "of_other_command"]


class Alias(NamedTuple):
    """What serves a setting of another framework here."""

    keys: tuple[str, ...]
    """Our keys, the nearest first; none where nothing is to be set, or nothing serves it."""
    note: str = ""
    """What differs, or why there is no key."""


def _served(*keys: str, note: str = "") -> Alias:
    return Alias(keys, note)


def _not_yet(what: str) -> Alias:
    return Alias((), f"not served yet: {what}")


def _always(what: str) -> Alias:
    return Alias((), f"nothing to set: {what}")


_MODEL = "model.path"
_RECOMPUTE = _served("trainer.recompute", note="off, selective or full")
_RANK = _served("model.lora.rank")
_COLOCATED = _served(
    "cluster.num_engines",
    note="0, the default, has trainer and engine share devices; above 0 sets engines apart",
)
_ENGINE_MEMORY = _served(
    "engine.gpu_memory_utilization",
    "engine.kv_cache_gib",
    note="the first is a share of all memory of the device",
)
_LENGTHS = _always("engines are made for data.max_prompt_tokens and the longest completion")
_TRACKERS = _served("log.to", note="a list of tensorboard, wandb, mlflow, trackio")
_TENSOR = ("trainer.parallel.tensor_parallel_size", "engine.tensor_parallel_size")
_SEQUENCE = ("trainer.parallel.ulysses_size", "trainer.parallel.ring_size")
_PROMPTS = _served(
    "rollout.prompts_per_step",
    "data.examples_per_step",
    note="prompts; each has rollout.n_samples_per_prompt samples",
)
_MINIBATCH = _served(
    "trainer.prompts_per_minibatch",
    "data.examples_per_step",
    note="prompts of an optimizer step, over all devices; each has rollout.n_samples_per_prompt "
    "samples",
)
_MICROBATCH = _served(
    "trainer.micro_batch_size",
    "trainer.max_tokens_per_microbatch",
    note="sequences on one device, or a budget of tokens, which is the default",
)
_BUDGET = _served("trainer.max_tokens_per_microbatch")
_FORWARD_BUDGET = _served("trainer.max_tokens_per_forward")
_SAMPLES = _served("rollout.n_samples_per_prompt")
_COMPLETION = _served("rollout.max_completion_tokens")
_PROMPT_TOKENS = _served("data.max_prompt_tokens")
_DYNAMIC = _always(
    "micro-batches are cut by tokens unless trainer.micro_batch_size is set; the budget is "
    "trainer.max_tokens_per_microbatch"
)
_PACKED = _always("rows are always packed without padding (trainer.max_tokens_per_microbatch)")
_OVERLAP = _always("gradients are always reduced while backward goes on")
_TRAINERS = _served("cluster.num_trainers", note="where engines are apart; otherwise --nproc N")
_NODES = _served("cluster.num_nodes")
_CORRECTION = _served("algorithm.correction.kind", note="none, tis, icepop or sequence_mask")
_CORRECTION_HIGH = _served("algorithm.correction.high")
_PARTIAL = _served(
    "rollout.oversample_prompts",
    "pipeline.max_staleness",
    note="unfinished samples are carried over where more prompts are started than trained, and "
    "where sampling runs ahead of training",
)
_ASYNC = _served(
    "pipeline.max_staleness",
    "cluster.num_engines",
    note="engines apart sample while the trainer trains",
)
_OPTIMIZER_OFFLOAD = _served("trainer.offload", note="optimizer")
_WHOLE = _always(
    "training samples from the whole distribution; one that leaves tokens out is not the policy "
    "that the trainer scores, which biases every ratio"
)
_EPOCHS = _served("trainer.num_epochs", note="optimizer passes over each rollout")
_CRITIC = _served("algorithm.advantage", "critic", note="gae; the section critic has its settings")
_REWARD_MODEL = _not_yet("reward models; rewards are functions (reward.functions)")
_PIPELINE = _not_yet("pipeline stages; trainer.parallel has ZeRO, tensor and sequence parallelism")
_EXPERTS = _not_yet("mixtures of experts and expert parallelism")
_AGENT = _not_yet("several turns and tools; rollouts have one turn")
_SERVER = _served(
    "cluster.num_engines", note="engines apart are started by the run; there is no server to reach"
)
_SAMPLING = _not_yet("other ways to sample than rollout.temperature and rollout.stop")
_STRUCTURED = _not_yet("structured outputs")
_LORA_KINDS = _not_yet("other kinds of adapters than LoRA, and dropout in them; see model.lora")
_OF_ENV = _served("env.path", note="a class whose method step answers each turn")
_MOVING_REFERENCE = _not_yet("a reference that moves; it is the model that the run began with")
_BETAS = _served("trainer.optimizer.betas")
_IN_MEMORY = _always("rows are read and tokenised once, when a run starts")
_EACH_STEP = _always("every step is recorded and shown; log.samples_per_step says how many samples")
_HUB = _not_yet("uploads; run.dir/model is a folder that `huggingface-cli upload` takes")
_HALF = _served(
    "model.dtype", note="auto is bfloat16 on a GPU and float32 on a CPU; float16 is not served"
)
_COMPILED = _served("trainer.compile", note="on or off, with torch's defaults")
_PROFILED = _served("profile.train.steps", note="a list of steps, counted from 0")
_SAMPLING_PROFILED = _served("profile.rollout.steps", note="a list of rollouts, counted from 0")

ALIASES: Mapping[str, Alias] = {
    # models and roles
    "actor_rollout_ref": _served("model", "rollout", "engine", "trainer", "algorithm"),
    "actor": _served("trainer", "model", "algorithm"),
    "ds": _served("trainer", "trainer.parallel"),
    "deepspeed": _served("trainer", "trainer.parallel"),
    "fsdp_config": _served("trainer", "trainer.parallel"),
    "megatron": _served("trainer.parallel"),
    "vllm": _served("engine", note="engine.backend vllm"),
    "sglang": _not_yet("SGLang; engine.backend is embedded or vllm"),
    "algo": _served("algorithm"),
    "pretrain": _served(_MODEL),
    "model_name_or_path": _served(_MODEL),
    "hf_checkpoint": _served(_MODEL),
    "critic_pretrain": _served("critic.path"),
    "critic_learning_rate": _served("critic.lr"),
    "critic_warmup": _served("critic.warmup_steps"),
    "num_critic_warmup_steps": _served("critic.warmup_steps"),
    "cliprange_value": _served("critic.value_clip"),
    "critic.ppo_max_token_len_per_gpu": _served("critic.max_tokens_per_microbatch"),
    "lambd": _served("algorithm.lam"),
    "teacher_model": _served("teacher"),
    "distillation": _served("teacher"),
    "distillation.enabled": _served("teacher.path", note="a teacher switches it on"),
    "teacher_model_path": _served("teacher.path"),
    "teacher_model_name_or_path": _served("teacher.path"),
    "teacher_model.model_path": _served("teacher.path"),
    "use_opd": _served("teacher.path", note="a teacher switches it on"),
    "opd_teacher_load": _served("teacher.path"),
    "opd_kl_coef": _served(
        "teacher.reward_coef", note="here the rewards' advantages have the factor: its inverse"
    ),
    "use_task_rewards": _served("teacher.reward_coef"),
    "distillation_loss.loss_mode": _always(
        "the reverse KL of sampled tokens, as policy gradient (algorithm.loss)"
    ),
    "reward_model": _REWARD_MODEL,
    "reward.model": _REWARD_MODEL,
    "reward.remote_url": _REWARD_MODEL,
    "reward_pretrain": _REWARD_MODEL,
    "remote_rm_url": _served(
        "reward.functions", note="of a file of functions; a reward model is not served yet"
    ),
    "agent_func_path": _AGENT,
    "multi_turn": _AGENT,
    "reward_funcs": _served("reward.functions"),
    "custom_reward_function": _served("reward.functions"),
    "use_liger": _not_yet("Liger's kernels"),
    "use_liger_kernel": _not_yet("Liger's kernels"),
    "attn_implementation": _always("the fastest attention that the device has is chosen"),
    "flash_attn": _always("the fastest attention that the device has is chosen"),
    "bf16": _HALF,
    "fp16": _HALF,
    "bf16_full_eval": _HALF,
    "fp16_full_eval": _HALF,
    "torch_dtype": _HALF,
    "tf32": _served("trainer.matmul_precision", note="tf32"),
    "model_init_kwargs": _served("model", note="its keys, such as model.dtype"),
    "model_revision": _not_yet("revisions of the hub; download one, and name its folder"),
    "processing_class": _served("model.tokenizer"),
    "chat_template_path": _served("model.chat_template"),
    "chat_template_kwargs": _not_yet("arguments of chat templates; set model.chat_template"),
    "eos_token": _served("rollout.stop", note="beside the model's own end of sequence"),
    "pad_token": _PACKED,
    "disable_dropout": _always("nothing is dropped out"),
    "use_cpu": _served("run.device", note="cpu"),
    "no_cuda": _served("run.device", note="cpu"),
    # adapters
    "lora_rank": _RANK,
    "lora_r": _RANK,
    "lora_alpha": _served("model.lora.alpha"),
    "lora_target_modules": _served("model.lora.target_modules"),
    "use_peft": _RANK,
    "peft_config": _served("model.lora"),
    "lora_dropout": _LORA_KINDS,
    "load_in_8bit": _not_yet("8-bit weights; model.lora.load_in_4bit keeps them in 4"),
    "use_dora": _LORA_KINDS,
    "use_rslora": _LORA_KINDS,
    "modules_to_save": _LORA_KINDS,
    # data
    "train_files": _served("data.train"),
    "train_dataset": _served("data.train"),
    "eval_dataset": _served("data.eval"),
    "dataset": _served("data.train"),
    "prompts": _served("data.train", note="a file with a column prompt"),
    "prompt_file": _served("data.train", note="a file with a column prompt"),
    "shuffle_dataset": _served("data.shuffle"),
    "remove_unused_columns": _always("rewards get every column that they ask for by name"),
    "dataset_text_field": _served("data.train.0.columns.prompt"),
    "dataset_num_proc": _IN_MEMORY,
    "dataloader_num_workers": _IN_MEMORY,
    "dataloader_pin_memory": _IN_MEMORY,
    "dataloader_drop_last": _IN_MEMORY,
    "dataloader_prefetch_factor": _IN_MEMORY,
    "data_seed": _served("run.seed"),
    "val_files": _served("data.eval"),
    "prompt_data": _served("data.train"),
    "dataset_name": _served("data.train"),
    "prompt_key": _served("data.train.0.columns.prompt"),
    "input_key": _served("data.train.0.columns.prompt"),
    "label_key": _served("data.train.0.columns.label", "data.train.0.columns.answer"),
    "output_key": _served("data.train.0.columns.answer"),
    "chosen_key": _served("data.train.0.columns.chosen"),
    "rejected_key": _served("data.train.0.columns.rejected"),
    "input_template": _served("data.prompt_template"),
    "apply_chat_template": _served("data.chat"),
    "max_prompt_length": _PROMPT_TOKENS,
    "prompt_max_len": _PROMPT_TOKENS,
    "max_len": _served(
        "data.max_tokens", "data.max_prompt_tokens", "rollout.max_completion_tokens"
    ),
    "max_seq_length": _served(
        "data.max_tokens", "data.max_prompt_tokens", "rollout.max_completion_tokens"
    ),
    "max_length": _served(
        "data.max_tokens", "data.max_prompt_tokens", "rollout.max_completion_tokens"
    ),
    "completion_only_loss": _served("data.train_on_prompt"),
    "assistant_only_loss": _served("data.train_on_prompt"),
    "neftune_noise_alpha": _not_yet("noise in embeddings"),
    # batches
    "batch_size": _served("rollout.prompts_per_step", "data.examples_per_step"),
    "train_batch_size": _PROMPTS,
    "train_prompt_bsz": _PROMPTS,
    "rollout_batch_size": _PROMPTS,
    "rollout.batch_size": _PROMPTS,
    "generation_batch_size": _PROMPTS,
    "gen_batch_size": _PROMPTS,
    "global_batch_size": _MINIBATCH,
    "ppo_mini_batch_size": _MINIBATCH,
    "mini_batch_size": _MINIBATCH,
    "train.batch_size": _MINIBATCH,
    "trainer.batch_size": _MINIBATCH,
    "ppo_micro_batch_size": _MICROBATCH,
    "ppo_micro_batch_size_per_gpu": _MICROBATCH,
    "micro_batch_size_per_gpu": _MICROBATCH,
    "log_prob_micro_batch_size": _FORWARD_BUDGET,
    "log_prob_micro_batch_size_per_gpu": _FORWARD_BUDGET,
    "micro_train_batch_size": _MICROBATCH,
    "per_device_train_batch_size": _MICROBATCH,
    "micro_rollout_batch_size": _FORWARD_BUDGET,
    "gradient_accumulation_steps": _always(
        "it follows from the rows of an optimizer step (trainer.prompts_per_minibatch) and what "
        "fits a micro-batch (trainer.max_tokens_per_microbatch)"
    ),
    "steps_per_generation": _served(
        "trainer.prompts_per_minibatch",
        note="a rollout of rollout.prompts_per_step prompts makes one optimizer step for so many",
    ),
    "per_device_eval_batch_size": _FORWARD_BUDGET,
    "auto_find_batch_size": _DYNAMIC,
    "pad_to_multiple_of": _PACKED,
    "packing_strategy": _PACKED,
    "average_tokens_across_devices": _always("losses are averaged over the tokens of all devices"),
    "use_dynamic_bsz": _DYNAMIC,
    "use_dynamic_batch": _DYNAMIC,
    "use_dynamic_batch_size": _DYNAMIC,
    "dynamic_batch_enable": _DYNAMIC,
    "ppo_max_token_len_per_gpu": _BUDGET,
    "max_tokens_per_gpu": _BUDGET,
    "train.max_tokens_per_gpu": _BUDGET,
    "rollout.max_tokens_per_gpu": _FORWARD_BUDGET,
    "log_prob_max_token_len_per_gpu": _FORWARD_BUDGET,
    "log_probs_max_tokens_per_gpu": _FORWARD_BUDGET,
    "forward_max_token_len_per_gpu": _FORWARD_BUDGET,
    "infer_ppo_max_token_len": _FORWARD_BUDGET,
    "packing_samples": _PACKED,
    "packing": _PACKED,
    "use_remove_padding": _PACKED,
    "padding_free": _PACKED,
    "ppo_epochs": _EPOCHS,
    "num_iterations": _EPOCHS,
    "max_epochs": _EPOCHS,
    "max_steps": _served("run.steps"),
    "total_training_steps": _served("run.steps"),
    "num_episodes": _served("run.steps", note="rollouts of rollout.prompts_per_step prompts"),
    "total_epochs": _served("run.steps", note="rollouts of rollout.prompts_per_step prompts"),
    "num_train_epochs": _served("run.steps", note="rollouts of rollout.prompts_per_step prompts"),
    # sampling
    "num_generations": _SAMPLES,
    "num_generations_eval": _served("eval.n_samples_per_prompt"),
    "rollout.n": _SAMPLES,
    "generate_max_len": _COMPLETION,
    "max_new_tokens": _COMPLETION,
    "max_response_length": _COMPLETION,
    "max_response_len": _COMPLETION,
    "max_completion_length": _COMPLETION,
    "mask_truncated_completions": _served("rollout.truncated_samples"),
    "dynamic_filtering": _served("rollout.dynamic_sampling"),
    "dynamic_filtering_enable": _served("rollout.dynamic_sampling"),
    "filter_groups": _served("rollout.dynamic_sampling"),
    "over_sampling_batch_size": _served("rollout.oversample_prompts"),
    "partial_rollout": _PARTIAL,
    "partial_rollout_enable": _PARTIAL,
    "partial_rollout_max_aborted_count": _served("rollout.max_aborted_count"),
    "mask_offpolicy_in_partial_rollout": _served("rollout.mask_off_policy_tokens"),
    "rollout.top_p": _WHOLE,
    "rollout.top_k": _WHOLE,
    "rollout.min_p": _WHOLE,
    "stop_token_ids": _served("rollout.stop"),
    "generation_kwargs": _SAMPLING,
    "repetition_penalty": _SAMPLING,
    "vllm_structured_outputs_regex": _STRUCTURED,
    "vllm_guided_decoding_regex": _STRUCTURED,
    "tools": _OF_ENV,
    "environment_factory": _OF_ENV,
    "rollout_func": _OF_ENV,
    "max_tool_calling_iterations": _served("env.max_turns"),
    # engine
    "cuda_graphs": _served("engine.enforce_eager"),
    "vllm_gpu_memory_utilization": _ENGINE_MEMORY,
    "mem_fraction_static": _ENGINE_MEMORY,
    "sglang_mem_fraction_static": _ENGINE_MEMORY,
    "enable_sleep_mode": _served("engine.enable_sleep"),
    "vllm_enable_sleep": _served("engine.enable_sleep"),
    "vllm_enable_sleep_mode": _served("engine.enable_sleep"),
    "free_cache_engine": _served("engine.enable_sleep"),
    "offload_rollout": _served("engine.enable_sleep"),
    "deepspeed_enable_sleep": _served("trainer.enable_sleep"),
    "ds.enable_sleep": _served("trainer.enable_sleep"),
    "offload_train": _served("trainer.enable_sleep"),
    "max_model_len": _LENGTHS,
    "vllm_max_model_length": _LENGTHS,
    "block_size": _always("pages of the KV cache have 16 tokens"),
    "vllm_mode": _COLOCATED,
    "vllm_model_impl": _always("vLLM computes its own models"),
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_server_timeout": _SERVER,
    "vllm_group_port": _SERVER,
    "use_transformers_paged": _always("keys and values are always paged"),
    "cache_implementation": _always("keys and values are always paged"),
    "use_vllm": _served("engine.backend", note="vllm; embedded, the default, needs no vLLM"),
    "vllm_num_engines": _served("cluster.num_engines"),
    "vllm_tensor_parallel_size": _served("engine.tensor_parallel_size"),
    "rollout_num_gpus_per_engine": _served("engine.tensor_parallel_size"),
    "rollout_num_gpus": _served("cluster.num_engines", note="x engine.tensor_parallel_size"),
    "disable_log_stats": _always("the engine's statistics are in metrics.jsonl and the report"),
    # where roles are
    "colocate": _COLOCATED,
    "colocate_all": _COLOCATED,
    "colocate_all_models": _COLOCATED,
    "hybrid_engine": _COLOCATED,
    "colocate_actor_ref": _served(
        "cluster.num_references", note="0, the default, has the reference beside the policy"
    ),
    "colocate_critic_reward": _CRITIC,
    "nnodes": _NODES,
    "actor_num_nodes": _NODES,
    "n_gpus_per_node": _TRAINERS,
    "num_gpus_per_node": _TRAINERS,
    "actor_num_gpus_per_node": _TRAINERS,
    "ref_num_nodes": _served("cluster.num_references"),
    "ref_num_gpus_per_node": _served("cluster.num_references"),
    "async_train": _ASYNC,
    "async_enable": _ASYNC,
    "fully_async": _ASYNC,
    "max_off_policy_steps": _served("pipeline.max_staleness"),
    "openrlhf_async_queue_size": _served("pipeline.async_queue_size"),
    "vllm_sync_backend": _always("weights travel by NCCL between GPUs"),
    "sync_backend": _always("weights travel by NCCL between GPUs"),
    "num_data_storage_units": _not_yet("storage units; the process that leads holds the samples"),
    # parallelism
    "tensor_model_parallel_size": _served(
        *_TENSOR, note="the first of the trainer, the second of the engine"
    ),
    "rollout.tensor_model_parallel_size": _served("engine.tensor_parallel_size"),
    "sequence_parallel": _always(
        "with trainer.parallel.tensor_parallel_size above 1 it is always on"
    ),
    "context_parallel_size": _served("trainer.parallel.ring_size", "trainer.parallel.ulysses_size"),
    "sequence_parallel_size": _served(*_SEQUENCE),
    "ulysses_sequence_parallel_size": _served("trainer.parallel.ulysses_size"),
    "ring_attn_size": _served("trainer.parallel.ring_size"),
    "pipeline_parallel_size": _PIPELINE,
    "pipeline_model_parallel_size": _PIPELINE,
    "expert_parallel_size": _EXPERTS,
    "expert_model_parallel_size": _EXPERTS,
    "expert_tensor_parallel_size": _EXPERTS,
    "fsdp": _served("trainer.parallel.zero_stage", note="3 shards weights too"),
    "ds3_gather_for_generation": _always("engines hold whole layers or their tensor-parallel part"),
    "ddp_timeout": _served("trainer.parallel.timeout_s"),
    "overlap_comm": _OVERLAP,
    "overlap_grad_reduce": _OVERLAP,
    "deepcompile": _served("trainer.compile"),
    "use_torch_compile": _served("trainer.compile"),
    "torch_compile": _served("trainer.compile"),
    "torch_compile_backend": _COMPILED,
    "torch_compile_mode": _COMPILED,
    # memory
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_enable": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "enable_gradient_checkpointing": _RECOMPUTE,
    "recompute_granularity": _RECOMPUTE,
    "recompute_method": _served("trainer.recompute", "trainer.recompute_every_n_layers"),
    "recompute_num_layers": _served("trainer.recompute_every_n_layers"),
    "activation_offload": _served("trainer.offload_activations"),
    "enable_activation_offload": _served("trainer.offload_activations"),
    "adam_offload": _OPTIMIZER_OFFLOAD,
    "optimizer_offload": _OPTIMIZER_OFFLOAD,
    "optimizer_cpu_offload": _OPTIMIZER_OFFLOAD,
    "offload_policy": _OPTIMIZER_OFFLOAD,
    "grad_offload": _served("trainer.offload", note="gradients, and the optimizer's states"),
    "param_offload": _served(
        "trainer.offload", note="parameters, gradients and the optimizer's states"
    ),
    "entropy_checkpointing": _always(
        "logits are never kept: the head is computed in chunks (trainer.logits_chunk_tokens)"
    ),
    "entropy_from_logits_with_chunking": _served("trainer.logits_chunk_tokens"),
    # the learning rule
    "adv_estimator": _served("algorithm.advantage"),
    "advantage_estimator": _served("algorithm.advantage"),
    "scale_rewards": _served(
        "algorithm.advantage",
        note="grpo divides by the deviation of a group, reinforce_pp_baseline by that of a batch, "
        "dr_grpo by nothing",
    ),
    "reward_weights": _served("reward.functions.0.weight"),
    "multi_objective_aggregation": _not_yet(
        "rewards that are normalised one by one; their weighted sum is"
    ),
    "sapo_temperature_neg": _not_yet("other temperatures of sapo than those of its paper"),
    "sapo_temperature_pos": _not_yet("other temperatures of sapo than those of its paper"),
    "sync_ref_model": _MOVING_REFERENCE,
    "ref_model_mixup_alpha": _MOVING_REFERENCE,
    "ref_model_sync_steps": _MOVING_REFERENCE,
    "top_entropy_quantile": _not_yet("training on the tokens of highest entropy alone"),
    "off_policy_mask_threshold": _not_yet(
        "a mask by divergence and advantage; algorithm.correction.kind sequence_mask goes by ratio"
    ),
    "use_bias_correction_kl": _not_yet("a KL term weighted by the importance ratio"),
    "vllm_importance_sampling_mode": _CORRECTION,
    "label_smoothing_factor": _not_yet("smoothed labels"),
    "loss_type": _served("algorithm.loss", "algorithm.aggregation"),
    "loss_agg_mode": _served("algorithm.aggregation"),
    "importance_sampling_level": _served("algorithm.loss", note="gspo has ratios of sequences"),
    "clip_ratio": _served("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_low": _served("algorithm.clip_low"),
    "clip_ratio_high": _served("algorithm.clip_high"),
    "clip_ratio_c": _served("algorithm.dual_clip"),
    "eps_clip": _served("algorithm.clip_low", "algorithm.clip_high"),
    "eps_clip_low_high": _served("algorithm.clip_low", "algorithm.clip_high"),
    "epsilon": _served("algorithm.clip_low", "algorithm.clip_high"),
    "epsilon_high": _served("algorithm.clip_high"),
    "delta": _served("algorithm.dual_clip"),
    "beta": _served("algorithm.kl.coef"),
    "init_kl_coef": _served("algorithm.kl.coef"),
    "kl_coef": _served("algorithm.kl.coef"),
    "kl_loss_coef": _served("algorithm.kl.coef"),
    "use_kl_loss": _served("algorithm.kl.coef", "algorithm.kl.placement"),
    "use_kl_in_reward": _served("algorithm.kl.placement"),
    "precompute_ref_log_probs": _served(
        "algorithm.reference_cache", note="a folder, which switches it on"
    ),
    "kl_loss_type": _served("algorithm.kl.estimator"),
    "kl_estimator": _served("algorithm.kl.estimator"),
    "entropy_coeff": _served("algorithm.entropy_coef"),
    "is_correction_enable": _CORRECTION,
    "enable_vllm_is_correction": _CORRECTION,
    "vllm_importance_sampling_correction": _CORRECTION,
    "vllm_importance_sampling_cap": _CORRECTION_HIGH,
    "vllm_importance_sampling_clip_max": _CORRECTION_HIGH,
    "tis_imp_ratio_cap": _CORRECTION_HIGH,
    # the optimizer
    "learning_rate": _served("trainer.optimizer.lr"),
    "actor_learning_rate": _served("trainer.optimizer.lr"),
    "optim": _served("trainer.optimizer.name"),
    "adam_betas": _BETAS,
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": _served("trainer.optimizer.eps"),
    "optim_args": _served("trainer.optimizer"),
    "lr_scheduler_kwargs": _served("trainer.optimizer.schedule", "trainer.optimizer.min_lr_ratio"),
    "grad_clip": _served("trainer.optimizer.max_grad_norm"),
    "clip_grad": _served("trainer.optimizer.max_grad_norm"),
    "max_norm": _served("trainer.optimizer.max_grad_norm"),
    "lr_scheduler": _served("trainer.optimizer.schedule"),
    "lr_scheduler_type": _served("trainer.optimizer.schedule"),
    "lr_warmup_steps": _served("trainer.optimizer.warmup_steps"),
    "lr_warmup_ratio": _served("trainer.optimizer.warmup_steps"),
    "warmup_ratio": _served("trainer.optimizer.warmup_steps"),
    # records
    "save_steps": _served("checkpoint.every_n_steps"),
    "save_strategy": _served("checkpoint.every_n_steps"),
    "save_only_model": _always("the model alone is in run.dir/model at the end"),
    "load_best_model_at_end": _served("checkpoint.keep_best"),
    "metric_for_best_model": _served("eval.metric"),
    "greater_is_better": _served("eval.metric", note="of which larger is better"),
    "save_freq": _served("checkpoint.every_n_steps"),
    "save_interval": _served("checkpoint.every_n_steps"),
    "max_ckpt_num": _served("checkpoint.keep_last"),
    "save_total_limit": _served("checkpoint.keep_last"),
    "eval_steps": _served("eval.every_n_steps"),
    "eval_strategy": _served("eval.every_n_steps"),
    "eval_on_start": _served("eval.at_start"),
    "logging_steps": _EACH_STEP,
    "logging_strategy": _EACH_STEP,
    "logging_first_step": _EACH_STEP,
    "log_completions": _served("log.samples_per_step"),
    "num_completions_to_print": _served("log.samples_per_step"),
    "eval_interval": _served("eval.every_n_steps"),
    "test_freq": _served("eval.every_n_steps"),
    "val_before_train": _served("eval.at_start"),
    "output_dir": _served("run.dir"),
    "save_path": _served("run.dir"),
    "default_local_dir": _served("run.dir"),
    "resume_from_checkpoint": _served("run.resume"),
    "resume_mode": _served("run.resume"),
    "report_to": _TRACKERS,
    "use_wandb": _TRACKERS,
    "wandb": _TRACKERS,
    "use_tensorboard": _TRACKERS,
    "tensorboard": _TRACKERS,
    "project_name": _served("log.project"),
    "run_name": _served("run.dir", note="its last part is the run's name"),
    "callbacks": _not_yet("callbacks; metrics.jsonl and events.jsonl grow with the run"),
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_token": _HUB,
    "hub_strategy": _HUB,
    "use_pytorch_profiler": _PROFILED,
    "profile_step_start": _PROFILED,
    "profile_step_end": _PROFILED,
    "profile_target": _served("profile.train.target"),
    "profile_with_stack": _served("profile.train.with_stack"),
    "profile_with_memory": _served("profile.train.with_memory"),
    "profile_with_flops": _served("profile.train.with_flops"),
    "sglang_profile": _SAMPLING_PROFILED,
    "sglang_profile_step_start": _SAMPLING_PROFILED,
    "sglang_profile_step_end": _SAMPLING_PROFILED,
    "sglang_profile_steps": _SAMPLING_PROFILED,
    "sglang_profile_num_steps": _served("profile.rollout.num_forwards"),
    "sglang_profile_activities": _served("profile.rollout.activities"),
    "sglang_profile_by_stage": _served("profile.rollout.by_stage"),
    "sglang_profile_with_stack": _served("profile.rollout.with_stack"),
    "sglang_profile_record_shapes": _served("profile.rollout.record_shapes"),
    "sglang_profile_output_dir": _served("profile.dir"),
    "record_memory_history": _served("profile.memory.recorder"),
    "memory_recorder": _served("profile.memory.recorder"),
    "memory_snapshot_num_steps": _served("profile.memory.after_steps"),
    "memory_snapshot_dir": _served("profile.dir"),
    "memory_snapshot_path": _served("profile.dir"),
    "tb_experiment_name": _served("run.dir", note="traces are in its folder `traces`"),
}
"""By name, the parts of a path joined by dots."""


def find_alias(path: Sequence[str]) -> Alias | None:
    """What serves the setting at a path of another framework; None where it is not known.

    A section that nothing serves speaks for all in it. Else the longest end of the path counts.
    """
    parts = [part.lower().replace("-", "_") for part in path]
    for end in range(1, len(parts)):
        for start in range(end):
            section = ALIASES.get(".".join(parts[start:end]))
            if section is not None and not section.keys:
                return section
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((ALIASES[end] for end in ends if end in ALIASES), None)


def alias_hint(tree: type[Section], path: Sequence[str], *, dashes: str = "") -> str | None:
    """What a message about the unknown key `path` of `tree` says of it, keys with `dashes` before
    them; None where no other framework has a setting of that name."""
    alias = find_alias(path)
    if alias is None or not alias.keys:
        return alias and alias.note
    keys = list(dict.fromkeys(key for name in alias.keys if (key := _in_tree(tree, name))))
    if not keys:
        return f"it is {' or '.join(alias.keys)} in `hone rl`; this command has no such setting"
    note = f" ({alias.note})" if alias.note and keys[0] == alias.keys[0] else ""
    return f"did you mean {' or '.join(dashes + key for key in keys)}?{note}"


def of_other_command(tree: type[Section], path: Sequence[str]) -> str | None:
    """What a message about the unknown key `path` of `tree` says where other commands have it; None
    where none does, and where this one has a key of that name in another section."""
    if any(field.path[-1] == path[-1] for field in fields(tree)):
        return None
    names = [f"`hone {name}`" for name, other in TREES.items() if locate(other, path)]
    return f"it is a key of {', '.join(names)}, not of this command" if names else None


def _in_tree(tree: type[Section], key: str) -> str | None:
    """The key, or that of the same name in another section, as commands that sample have."""
    path = key.split(".")
    if locate(tree, path) is not None:
        return key
    return next((field.key for field in fields(tree) if field.path[-1] == path[-1]), None)
