#!/usr/bin/env bash
# The run as a job of a Ray cluster: its driver trains on the GPUs of the head node, engines go where
# Ray has room. On the head:   ray start --head
# on every other node:         ray start --address HEAD:6379
# A Ray without a token runs the programs of whoever reaches it: see docs/security.md before.
# Arguments: a recipe and flags, as for `hone rl`; it names `cluster.address: auto`.
set -euo pipefail
# `ray job stop` kills a job three seconds after SIGTERM, unless the job says otherwise.
exec ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" \
  --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "900"}}' \
  --working-dir "$PWD" -- hone rl "$@"
