#!/usr/bin/env bash
# What srun starts as each task: turns Slurm's variables into those by which ranks find each other,
# then becomes the program given as its arguments.
#
#     RANK         place among all ranks          SLURM_PROCID
#     WORLD_SIZE   number of ranks                SLURM_NTASKS
#     LOCAL_RANK   place on the node, its GPU     SLURM_LOCALID
#     MASTER_ADDR, MASTER_PORT                    set for the whole job by common.sh
#
# With LOGRA_LAUNCHER=torchrun there is one task a node, and torchrun starts as many ranks as the
# job has tasks a node.
set -u

case ${LOGRA_LAUNCHER:-srun}${LOGRA_UNDER_TORCHRUN:-} in
  srun)
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
    export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
    # Where Slurm shows each task one GPU alone, that one is its first.
    case ${CUDA_VISIBLE_DEVICES:-none} in
      none | *,*) ;;
      *) LOCAL_RANK=0 ;;
    esac
    exec "$@"
    ;;
  torchrun)
    # torchrun would die of SIGUSR1, which reaches every process of the step.
    trap '' USR1
    export LOGRA_UNDER_TORCHRUN=.worker
    case $1 in */*) torchrun=$(dirname "$1")/torchrun ;; *) torchrun=torchrun ;; esac
    exec "$torchrun" --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --max-restarts=0 \
      --nproc-per-node=$((LOGRA_TASKS / SLURM_NNODES)) --no-python \
      --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
      --log-dir="$LOGRA_JOB_LOGS/$LOGRA_LIFE.torchrun.$SLURM_NODEID" --redirects=3 --tee=3 \
      "$0" "$@"
    ;;
  torchrun.worker)
    # torchrun ends with 1 whatever its ranks end with: keep it for common.sh.
    "$@" &
    child=$!
    trap 'kill -s TERM "$child"' TERM
    trap : USR1 # the program has got it as well
    code=0
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do
      code=0
      wait "$child" || code=$?
    done
    echo "$code" >"$LOGRA_JOB_LOGS/exit.$RANK"
    exit "$code"
    ;;
esac
