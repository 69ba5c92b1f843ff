"""Names of other frameworks lead to the right key, or to the words that there is none yet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hone.config import schema
from hone.config.aliases import aliases, find_alias
from hone.config.base import Section
from hone.config.load import load_config
from hone.config.recipe import to_yaml
from hone.config.tree import (
    TREES,
    BenchTrainConfig,
    GenerateConfig,
    RewardModelingConfig,
    RLConfig,
    SFTConfig,
)
from hone.errors import UserError
from tests.tables import table

NEEDED = ["--model.path=m", "--data.train=[{path: d.jsonl}]"]
NOT_YET = "not served yet"
ALWAYS = "nothing to set"

ROWS = [
    # The name as it is typed, and what the message must contain, in this order.
    ("pipeline_parallel_size", "trainer.parallel.pipeline_parallel_size"),
    ("megatron.pipeline_model_parallel_size", "trainer.parallel.pipeline_parallel_size"),
    ("virtual_pipeline_model_parallel_size", "trainer.parallel.virtual_stages"),
    ("expert_model_parallel_size", "trainer.parallel.expert_parallel_size"),
    ("engine.expert_parallel_size", NOT_YET, "experts"),
    ("context_parallel_size", "trainer.parallel.ring_size", "trainer.parallel.ulysses_size"),
    ("actor.megatron.context_parallel_size", "trainer.parallel.ring_size"),
    ("ulysses_sequence_parallel_size", "trainer.parallel.ulysses_size"),
    ("ppo_mini_batch_size", "trainer.prompts_per_minibatch"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", "trainer.prompts_per_minibatch"),
    ("rollout.batch_size", "rollout.prompts_per_step"),
    ("rollout.partial_rollout", "rollout.oversample_prompts", "pipeline.max_staleness"),
    ("critic.optim.lr", "critic.lr"),
    ("critic.ppo_max_token_len_per_gpu", "critic.max_tokens_per_microbatch"),
    ("critic_warmup", "critic.warmup_steps"),
    ("critic.optim.betas", ALWAYS, "but for the keys of the section critic"),
    ("critic_pretrain", "critic.path"),
    (
        "critic.ulysses_sequence_parallel_size",
        "critic.parallel.ulysses_size",
        "cluster.num_critics",
    ),
    ("cliprange_value", "critic.value_clip"),
    ("distillation.teacher_model.model_path", "teacher.path"),
    ("distillation.distillation_loss.use_task_rewards", "teacher.reward_coef"),
    ("opd_teacher_load", "teacher.path"),
    ("opd_kl_coef", "teacher.reward_coef", "inverse"),
    ("colocate_critic_reward", "algorithm.advantage", "critic"),
    ("reward_model.path", "reward.model.path"),
    ("reward_pretrain", "reward.model.path"),
    ("reward_model.model.path", "reward.model.path"),
    ("reward_model.ppo_max_token_len_per_gpu", "reward.model.max_tokens_per_forward"),
    ("packing_samples", ALWAYS, "packed"),
    ("ds.packing_samples", ALWAYS, "packed"),
    ("trainer.optimizer_offload", "trainer.enable_sleep", "trainer.offload"),
    ("gradient_checkpointing", "trainer.recompute", "full"),
    ("model.enable_gradient_checkpointing", "trainer.recompute"),
    ("adam_offload", "trainer.offload"),
    ("ds.adam_offload", "trainer.offload"),
    ("param_offload", "trainer.enable_sleep", "trainer.offload"),
    ("grad_offload", "trainer.enable_sleep", "trainer.offload"),
    ("enforce_eager", "engine.enforce_eager"),
    ("use_dynamic_bsz", ALWAYS, "trainer.max_tokens_per_microbatch"),
    ("overlap_comm", ALWAYS, "reduced while backward"),
    ("mem_fraction_static", "engine.gpu_memory_utilization"),
    ("colocate_all_models", "cluster.num_engines", "0, the default"),
    ("lora_rank", "model.lora.rank"),
    ("entropy_checkpointing", ALWAYS, "trainer.logits_chunk_tokens"),
    # the usual names of verl
    ("data.train_batch_size", "rollout.prompts_per_step"),
    ("data.train_files", "data.train"),
    ("data.max_response_length", "rollout.max_completion_tokens"),
    ("actor_rollout_ref.rollout.n", "rollout.n_samples_per_prompt"),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "trainer.micro_batch_size"),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "trainer.max_tokens_per_microbatch"),
    ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "trainer.max_tokens_per_forward"),
    ("actor_rollout_ref.actor.clip_ratio_high", "algorithm.clip_high"),
    ("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl.coef"),
    ("actor_rollout_ref.actor.loss_agg_mode", "algorithm.aggregation"),
    ("actor_rollout_ref.actor.optim.lr", "trainer.optimizer.lr"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", "engine.tensor_parallel_size"),
    ("actor_rollout_ref.rollout.free_cache_engine", "engine.enable_sleep"),
    ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
    ("actor_rollout_ref.model.use_remove_padding", ALWAYS, "packed"),
    ("actor_rollout_ref.model.enable_activation_offload", "trainer.offload_activations"),
    ("algorithm.adv_estimator", "algorithm.advantage"),
    ("algorithm.filter_groups", "rollout.dynamic_sampling"),
    ("trainer.n_gpus_per_node", "cluster.num_trainers", "--nproc"),
    ("trainer.total_epochs", "run.steps"),
    ("trainer.save_freq", "checkpoint.every_n_steps"),
    ("trainer.test_freq", "eval.every_n_steps"),
    ("trainer.default_local_dir", "run.dir"),
    # of OpenRLHF
    ("pretrain", "model.path"),
    ("ds.ring_attn_size", "trainer.parallel.ring_size"),
    ("ds.zero_stage", "trainer.parallel.zero_stage"),
    ("vllm.num_engines", "cluster.num_engines"),
    ("vllm_tensor_parallel_size", "engine.tensor_parallel_size"),
    ("vllm-enable-sleep", "engine.enable_sleep"),
    ("ds.enable_sleep", "trainer.enable_sleep"),
    ("rollout_batch_size", "rollout.prompts_per_step"),
    ("train.batch_size", "trainer.prompts_per_minibatch"),
    ("micro_train_batch_size", "trainer.micro_batch_size"),
    ("train.dynamic_batch_enable", ALWAYS),
    ("train.async_enable", "pipeline.max_staleness"),
    ("train.async_queue_size", "pipeline.max_staleness"),
    ("train.partial_rollout_enable", "rollout.oversample_prompts"),
    ("algo.advantage.is_correction_enable", "algorithm.correction.kind"),
    ("init_kl_coef", "algorithm.kl.coef"),
    ("eps_clip", "algorithm.clip_low", "algorithm.clip_high"),
    ("generate_max_len", "rollout.max_completion_tokens"),
    ("actor_learning_rate", "trainer.optimizer.lr"),
    ("agent_func_path", "env.path"),
    ("remote_rm_url", "reward.functions", "the address"),
    ("reward.remote_url", "reward.functions", "the address"),
    ("reward_clip_range", "reward.clip", "the total"),
    ("reward.clip_range", "reward.clip", "the total"),
    ("ds.deepcompile", "trainer.compile"),
    # of TRL
    ("model_name_or_path", "model.path"),
    ("num_generations", "rollout.n_samples_per_prompt"),
    ("max_completion_length", "rollout.max_completion_tokens"),
    ("max_prompt_length", "data.max_prompt_tokens"),
    ("per_device_train_batch_size", "trainer.micro_batch_size"),
    ("gradient_accumulation_steps", ALWAYS, "trainer.prompts_per_minibatch"),
    ("num_iterations", "trainer.num_epochs"),
    ("beta", "algorithm.kl.coef"),
    ("epsilon_high", "algorithm.clip_high"),
    ("loss_type", "algorithm.loss", "algorithm.aggregation"),
    ("vllm_gpu_memory_utilization", "engine.gpu_memory_utilization"),
    ("vllm_mode", "cluster.num_engines"),
    ("reward_funcs", "reward.functions"),
    ("learning_rate", "trainer.optimizer.lr"),
    ("max_steps", "run.steps"),
    ("output_dir", "run.dir"),
    ("report_to", "log.to"),
    ("epsilon", "algorithm.clip_low", "algorithm.clip_high"),
    ("scale_rewards", "algorithm.advantage", "dr_grpo"),
    ("reward_weights", "reward.functions.0.weight"),
    ("steps_per_generation", "trainer.prompts_per_minibatch"),
    ("num_generations_eval", "eval.n_samples_per_prompt"),
    ("num_train_epochs", "run.steps"),
    ("bf16", "model.dtype", "auto is bfloat16 on a GPU"),
    ("fp16", "model.dtype", "float16 is not served"),
    ("use_vllm", "engine.backend", "vllm"),
    ("vllm_server_host", "cluster.num_engines"),
    ("repetition_penalty", NOT_YET),
    ("lora_dropout", NOT_YET),
    ("use_dora", NOT_YET),
    ("adam_beta1", "trainer.optimizer.betas"),
    ("adam_epsilon", "trainer.optimizer.eps"),
    ("logging_steps", ALWAYS, "every step"),
    ("log_completions", "log.samples_per_step"),
    ("eval_strategy", "eval.every_n_steps"),
    ("eval_on_start", "eval.at_start"),
    ("push_to_hub", NOT_YET, "run.dir/model"),
    ("remove_unused_columns", ALWAYS, "every column"),
    ("dataloader_num_workers", ALWAYS),
    ("sync_ref_model", NOT_YET),
    ("fsdp", "trainer.parallel.zero_stage"),
    ("tools", "env.tools"),
    ("eval_dataset", "data.eval"),
    # of slime and Relax
    ("recompute_granularity", "trainer.recompute"),
    ("over_sampling_batch_size", "rollout.oversample_prompts"),
    ("sglang_mem_fraction_static", "engine.gpu_memory_utilization"),
    ("rollout_num_gpus_per_engine", "engine.tensor_parallel_size"),
    ("use_pytorch_profiler", "profile.train.steps"),
    ("sglang_profile_num_steps", "profile.rollout.num_forwards"),
    ("record_memory_history", "profile.memory.recorder"),
]


def hint(tree: type, flags: list[str], recipe: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(tree, recipe, flags)
    return str(caught.value).partition("unknown key (")[2].partition("); ")[2]


@table("name, parts", [(name, parts) for name, *parts in ROWS])
def test_R22_names_of_other_frameworks(name: str, parts: list[str], tmp_path: Path) -> None:
    """The first key that the message names is the right one, by flag and in a recipe."""
    is_key = parts[0] not in (NOT_YET, ALWAYS)
    by_flag = hint(RLConfig, [*NEEDED, f"--{name}=1"])
    assert by_flag.startswith(f"did you mean --{parts[0]}" if is_key else parts[0]), by_flag
    positions = [by_flag.find(part) for part in parts]
    assert -1 not in positions, f"{parts=} {by_flag=}"
    assert positions == sorted(positions), f"{parts=} {by_flag=}"

    *sections, last = name.replace("-", "_").split(".")
    if sections and schema.locate(RLConfig, sections) is None:
        return  # the message is about the section then
    nested: dict[str, object] = {last: 1}
    for section in reversed(sections):
        nested = {section: nested}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(nested))
    in_recipe = hint(RLConfig, NEEDED, recipe)
    assert in_recipe.startswith(f"did you mean {parts[0]}" if is_key else parts[0]), in_recipe


@table("section", ["reward_model", "actor_rollout_ref", "vllm", "ds"])
def test_a_section_of_another_framework_in_a_recipe(section: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml({section: {"lr": 1}}))
    text = hint(RLConfig, NEEDED, recipe)
    found = find_alias("others", [section])
    assert found is not None
    assert text.startswith("did you mean " if found[1].to else NOT_YET), text


def test_other_commands_name_their_own_keys() -> None:
    for tree, name, expected in (
        (SFTConfig, "train_batch_size", "did you mean --data.examples_per_step?"),
        (SFTConfig, "gradient_checkpointing", "did you mean --trainer.recompute?"),
        (SFTConfig, "num_generations", "it is rollout.n_samples_per_prompt in `hone rl`; this"),
        (SFTConfig, "center_rewards_coefficient", "it is algorithm.center_coef in `hone reward-m"),
        (RewardModelingConfig, "center_rewards_coefficient", "did you mean --algorithm.center_c"),
        (GenerateConfig, "num_generations", "did you mean --n_samples_per_prompt?"),
        (GenerateConfig, "max_new_tokens", "did you mean --generation.max_completion_tokens?"),
        (RLConfig, "rollout.prompts", "did you mean --rollout.prompts_per_step?"),
        (RLConfig, "data.prompts", "did you mean --data.train?"),
        (BenchTrainConfig, "adam_offload", "did you mean --trainer.offload?"),
    ):
        assert hint(tree, [f"--{name}=1"]).startswith(expected), name


def test_every_alias_names_keys_that_exist() -> None:
    for row in aliases():
        assert row.to or row.always or row.missing, row
        by_value = [value for value in (row.map or {}).values() if isinstance(value, dict)]
        for key in [*row.to, *row.when, *[key for value in by_value for key in value]]:
            path = key.replace("*", "0").split(".")
            assert any(schema.locate(tree, path) for tree in TREES.values()), f"{row.names=} {key=}"


@table(
    "tree, key, told",
    [
        (RLConfig, "plan.gpus", "it is a key of `hone plan`, not of this command"),
        (RLConfig, "model.shape", "it is a key of `hone plan`, `hone bench engine`"),
        (GenerateConfig, "rollout.temperature", "did you mean --generation.temperature"),
        (RLConfig, "trainer.recomputte", "did you mean --trainer.recompute"),
    ],
)
def test_a_key_of_another_command_is_said_to_be_one(
    tree: type[Section], key: str, told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(f"(flag --{key}=4); {told}")):
        load_config(tree, None, [f"--{key}=4"])
    recipe = tmp_path / "r.yaml"
    section, name = key.split(".")
    recipe.write_text(f"{section}:\n  {name}: 4\n")
    if key == "model.shape":
        with pytest.raises(UserError, match=re.escape(told)):
            load_config(tree, recipe, [])
