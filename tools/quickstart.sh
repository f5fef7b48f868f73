#!/usr/bin/env bash
# Sets up, fetches SmolLM2-135M-Instruct once, and trains it by reinforcement learning with
# low-rank gradient sketches on one-digit arithmetic. Results: runs/quickstart/
#   tools/quickstart.sh [--kind adam] [--seed N] [--run-dir DIR] [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/bootstrap.sh
python=${MEGATRON_LOGRA_VENV:-$PWD/.venv}/bin/python

# Waiting threads sleep: spinning (active) is a quarter faster on idle cores, and three times slower
# beside other work.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
"$python" -m megatron_logra.model.smollm2
exec "$python" -m megatron_logra.quickstart "$@"
