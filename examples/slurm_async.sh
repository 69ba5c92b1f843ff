#!/usr/bin/env bash
#SBATCH --job-name=hone
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# The first node trains on its eight GPUs, the others sample:
#   sbatch slurm_async.sh RECIPE --cluster.num_trainers 8 --cluster.num_engines 16 --pipeline.enabled true
set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} port=6379
# Ray gets no GPU of the first node: the trainers take them.
srun --nodes 1 --ntasks 1 -w "$head" --overlap \
  ray start --head --port "$port" --num-gpus 0 --block &
until ray status --address "$head:$port" > /dev/null 2>&1; do sleep 1; done
if ((${#nodes[@]} > 1)); then
  srun --nodes $((${#nodes[@]} - 1)) --ntasks $((${#nodes[@]} - 1)) -x "$head" --overlap \
    ray start --address "$head:$port" --block &
fi
expected=$(((${#nodes[@]} - 1) * 8))
until ray status --address "$head:$port" | grep -q "/$expected.0 GPU"; do sleep 1; done
srun --nodes 1 --ntasks 1 -w "$head" --overlap --gpus-per-node 8 \
  hone rl "$@" --cluster.address "$head:$port"
