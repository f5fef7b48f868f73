#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on the mixture of train.yaml, exports it to a Hugging Face directory, and
# evaluates that directory with transformers on the same held-out problems, with the same noise.
#   examples/smollm2_135m/run.sh [--kind adam] [--seed N] [--run-dir DIR] [KEY=VALUE ...]
# Leaves in DIR (runs/smollm2_135m): the run, eval.json of the trained model, hf/ and eval_hf.json. A run
# that was stopped goes on when the command is given again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

kind=logra seed=0 run_dir=""
while [[ ${1:-} == --* ]]; do
  [ $# -ge 2 ] || { echo "$1: expected a value" >&2; exit 2; }
  case $1 in
    --kind) kind=$2 ;;
    --seed) seed=$2 ;;
    --run-dir) run_dir=$2 ;;
    *) echo "$1: expected --kind, --seed or --run-dir" >&2; exit 2 ;;
  esac
  shift 2
done
if [ -z "$run_dir" ]; then
  run_dir=runs/smollm2_135m
  if [ "$kind" != logra ]; then run_dir=$run_dir-$kind; fi
fi

tools/bootstrap.sh
python=${MEGATRON_LOGRA_VENV:-$PWD/.venv}/bin/python
# Waiting threads sleep: spinning (active) is a quarter faster on idle cores, and three times slower
# beside other work.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

model=${SMOLLM2_DIR:-$("$python" -m megatron_logra.model.smollm2)}
config=(
  examples/smollm2_135m/train.yaml "model.hf=\"$model\"" "optimizer.kind=$kind" "train.seed=$seed"
  "sketch.seed=$seed" "logging.run_dir=\"$run_dir\"" "$@"
)
resume=()
if [ -e "$run_dir/checkpoints/latest" ]; then resume=(--resume); fi
"$python" -m megatron_logra train "${config[@]}" "${resume[@]}"
# In fp32, where rounding tips no token over, both evaluations are of the same responses.
config+=(train.precision=fp32)
"$python" -m megatron_logra eval "${config[@]}"
rm -rf "$run_dir/hf"
"$python" -m megatron_logra convert to-hf "$run_dir" "$run_dir/hf"
"$python" tools/eval_hf.py "${config[@]}" --model "$run_dir/hf" --json "$run_dir/eval_hf.json"
