#!/usr/bin/env bash
# A job on eight GPUs of Hugging Face, whose model is uploaded at its end (docs/launching.md):
#   hf_job.sh registry.example.com/hone:0.1.0 ORG/MODEL gsm8k --nproc 8
# IMAGE is built from the Dockerfile and public. The disk ends with the job: give it enough time.
# Arguments: IMAGE, the repository of the model, then a recipe and flags, as for `hone rl`.
set -euo pipefail
(($# >= 3)) || { echo "usage: $0 IMAGE REPOSITORY RECIPE [flags]" >&2; exit 2; }
image=$1 repository=$2
shift 2
printf -v arguments ' %q' "$@"
exec hf jobs run --flavor "${FLAVOR:-h200x8}" --timeout "${TIMEOUT:-24h}" --secrets HF_TOKEN \
  "$image" bash -c "hone rl$arguments --run.dir run && hf upload $repository run/model"
