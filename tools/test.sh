#!/usr/bin/env bash
# Sets up, then lints, type-checks and tests: tools/test.sh [--slow | --slurm] [pytest arguments ...]
#   --slow    also the tests marked slow, and those marked gpu
#   --slurm   only the tests marked slurm, under a Slurm of their own (root; installed by apt)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/bootstrap.sh
python=${MEGATRON_LOGRA_VENV:-$PWD/.venv}/bin/python

marks="not slow and not gpu and not slurm"
if [ "${1:-}" = --slow ]; then
  marks="not slurm"
  shift
elif [ "${1:-}" = --slurm ]; then
  shift
  # In one process: its jobs are what runs side by side.
  exec "$python" -m pytest -m slurm tests/test_slurm.py "$@"
fi

# Waiting OpenMP threads that spin make two cores look like none.
export OMP_WAIT_POLICY=passive

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
# Two files at a time: much of a test of several ranks is waiting.
exec "$python" -m pytest -n 2 --dist loadfile -m "$marks" "$@"
