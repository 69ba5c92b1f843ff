#!/bin/bash
set -x

# A hybrid run of PPO, in OpenRLHF's older, flat spelling.
HERE="$(cd "$(dirname "$0")" && pwd)"
MODEL=${MODEL:-"Qwen/Qwen3-0.6B"}
GPUS=8
export OPENRLHF_ASYNC_QUEUE_SIZE=2

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 \
   --ref_num_gpus_per_node $GPUS \
   --actor_num_nodes 1 \
   --actor_num_gpus_per_node ${GPUS} \
   --critic_num_gpus_per_node ${GPUS} \
   --vllm_num_engines 4 \
   --vllm_tensor_parallel_size 2 \
   --colocate_all_models \
   --vllm_gpu_memory_utilization 0.5 \
   --pretrain "$MODEL" \
   --remote_rm_url scores.py \
   --save_path ./checkpoint/ppo \
   --train_batch_size 256 \
   --rollout_batch_size 128 \
   --n_samples_per_prompt 4 \
   --max_epochs 1 \
   --max_samples 10000 \
   --prompt_max_len 1024 \
   --generate_max_len 1024 \
   --zero_stage 3 --param_dtype bf16 \
   --actor_learning_rate 5e-7 \
   --critic_learning_rate 9e-6 \
   --lambd 0.95 \
   --init_kl_coef 0.01 \
   --eps_clip_low_high 0.2 0.27 \
   --prompt_data prompts.jsonl \
   --input_key question \
   --label_key truth \
   --normalize_reward \
   --gradient_checkpointing \
   --packing_samples \
   --vllm_sync_backend nccl \
   --vllm_enable_sleep --deepspeed_enable_sleep \
   --use_dynamic_batch --train_max_tokens_per_gpu 8192 \
   --enable_vllm_is_correction \
   --adam_offload --no_such_flag 3   # the last is nobody's

# --ring_attn_size 4 is not in use
