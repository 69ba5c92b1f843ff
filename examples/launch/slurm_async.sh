#!/usr/bin/env bash
#SBATCH --job-name=hone
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@900
# The first node trains on its eight GPUs, the others sample:
#   sbatch slurm_async.sh RECIPE --cluster.num_trainers 8 --cluster.num_engines 16 --pipeline.max_staleness 1
# Where nodes do not find each other, name their network interface before: `ip -br address` lists them.
#   export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
set -euo pipefail
# Nobody else runs programs in this Ray (docs/security.md).
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(openssl rand -hex 32)}"
((SLURM_NNODES > 1)) || { echo 'two nodes at least: one trains, the others sample' >&2; exit 1; }
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} port=6379
# Ray gets no GPU of the first node: the trainers take them.
srun --nodes 1 --ntasks 1 -w "$head" --overlap \
  ray start --head --port "$port" --num-gpus 0 --block &
await() { # COMMAND: for two minutes at most
  for _ in {1..120}; do eval "$1" && return; sleep 1; done
  echo "Ray is not up after two minutes: $1" >&2; exit 1
}
# shellcheck disable=SC2016 # expanded by `await`, anew each time
await 'ray status --address "$head:$port" > /dev/null 2>&1'
others=$((${#nodes[@]} - 1))
srun --nodes "$others" --ntasks "$others" -x "$head" --overlap \
  ray start --address "$head:$port" --block &
# shellcheck disable=SC2016
await 'ray status --address "$head:$port" | grep "/$((others * 8)).0 GPU" > /dev/null'
srun --nodes 1 --ntasks 1 -w "$head" --overlap --gpus-per-node 8 \
  hone rl "$@" --cluster.address "$head:$port" &
run=$! code=0
# SIGTERM ends the run, the third step, alone: it needs Ray until it has saved, and srun would kill it
# at once. The signal also ends a `wait`.
trap 'scancel --signal TERM "$SLURM_JOB_ID.2"' TERM
wait "$run" || code=$?
while kill -0 "$run" 2> /dev/null; do code=0; wait "$run" || code=$?; done
exit "$code"
