set -x
rollout_name="sglang" # sglang or vllm
prompt_length=$((1024 * 1))
response_length=$((1024 * 2))
train_files="['$HOME/gsm8k.parquet', '$HOME/math.parquet']"

DATA=(
    data.train_files="$train_files"
    data.val_files=$HOME/test.parquet
    data.train_batch_size=256
    data.max_prompt_length=${prompt_length}
    data.max_response_length=${response_length}
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((prompt_length + response_length) * 3))
    actor_rollout_ref.actor.use_kl_loss=True      # and not in the reward
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-sum-norm"
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2
)

python3 -m verl.trainer.main_ppo --config-name='ppo_trainer' \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \
    actor_rollout_ref.rollout.name=$rollout_name \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.top_p=0.9 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    +actor_rollout_ref.model.override_config.attn_implementation=eager \
    custom_reward_function.path=scores.py \
    algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 \
    trainer.logger=['console','swanlab'] \
    trainer.experiment_name='grpo' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 \
    trainer.save_freq=20 trainer.test_freq=5 \
    trainer.total_epochs=15 $@
