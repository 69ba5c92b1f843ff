#!/bin/bash
set -ex
now=$(date "+%Y-%m-%d")
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${MODEL_CONFIG_DIR}/qwen3-4B.sh"
NUM_ROLLOUT="${NUM_ROLLOUT:=200}"

ROLLOUT_ARGS=(
   --prompt-data prompts.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle

   # its built-in reward
   --rm-type dapo
   --num-rollout ${NUM_ROLLOUT}
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 2048
   --global-batch-size 128
)
ROLLOUT_ARGS+=(--eval-interval 20 --eval-prompt-data aime eval.jsonl --n-samples-per-eval-prompt 8)

ray job submit ${NO_WAIT:+--no-wait} -- python3 ${SCRIPT_DIR}/relax/entrypoints/train.py \
   --resource '{"actor": [1, 4], "rollout": [1, 4], "reference": [1, 1]}' \
   --fully-async --max-staleness 2 --num-data-storage-units 1 \
   --hf-checkpoint Qwen/Qwen3-0.6B \
   --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 \
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
   --optimizer-cpu-offload \
   --use-dynamic-batch-size --max-tokens-per-gpu 9216 --log-probs-max-tokens-per-gpu 12288 \
   --advantage-estimator gspo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl \
   --eps-clip 3e-4 --eps-clip-high 4e-4 --use-tis \
   --lr 1e-6 --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.98 \
   --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.8 \
   --use-pytorch-profiler --profile-step-start 2 \
   --tb-experiment-name qwen3-${now} \
   "${MODEL_ARGS[@]}" \
   ${ROLLOUT_ARGS[@]} 2>&1 | tee train-${now}.log
