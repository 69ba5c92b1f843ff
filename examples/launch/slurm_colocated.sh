#!/usr/bin/env bash
#SBATCH --job-name=hone
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@900
# Every GPU trains and samples: sbatch slurm_colocated.sh RECIPE [flags]
# Where nodes do not find each other, name their network interface before: `ip -br address` lists them.
#   export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
set -euo pipefail
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=840 # else torchrun kills its processes 30 seconds after SIGTERM
export HONE_KEY="${HONE_KEY:-$(openssl rand -hex 32)}" # what processes sign messages with (docs/security.md)
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m hone rl "$@"
