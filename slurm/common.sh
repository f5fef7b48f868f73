# The common part of the batch scripts; sourced by each of them, and not a program of its own.
#
# Outside a batch job a script submits itself:
#
#     slurm/train_1node.sbatch [--dry-run] [--OPTION=VALUE …] CONFIG [KEY=VALUE …]
#
# where OPTIONs are sbatch's. Within one (also when it was given to sbatch by hand) it runs. What
# differs from site to site comes from the environment, or from the file $LOGRA_SITE (default
# slurm/site.env; slurm/site.env.example lists the settings).

readonly EXIT_USER_ERROR=2 EXIT_STOPPED=75
readonly LOGRA_KNOWN="LOGRA_ACCOUNT LOGRA_PARTITION LOGRA_QOS MEGATRON_LOGRA_VENV LOGRA_CONTAINER \
LOGRA_IMAGE LOGRA_MOUNTS LOGRA_CONTAINER_PYTHON LOGRA_LOGS LOGRA_LAUNCHER LOGRA_INTERFACE \
LOGRA_REQUEUE LOGRA_RETRIES"

say() { printf '%s: %s\n' "${LOGRA_SCRIPT:-slurm}" "$*" >&2; }
die() { say "error: $*"; exit "$EXIT_USER_ERROR"; }
quoted() { printf '%q ' "$@"; printf '\n'; }
in_batch_job() { [ "${0##*/}" = slurm_script ]; } # the name that Slurm gives to what it runs

# --- settings ------------------------------------------------------------------------------------

# Read KEY=VALUE lines; what the environment has already set stays.
read_site_file() {
  local file=${LOGRA_SITE:-$LOGRA_REPO/slurm/site.env} line key value number=0
  if [ ! -e "$file" ]; then
    [ -z "${LOGRA_SITE:-}" ] || die "LOGRA_SITE: $file does not exist"
    return 0
  fi
  [ -r "$file" ] || die "$file cannot be read"
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    case $line in '' | '#'*) continue ;; esac
    key=${line%%=*} value=${line#*=}
    case " $LOGRA_KNOWN " in
      *" $key "*) ;;
      *) die "$file:$number: $key is no setting; expected KEY=VALUE with one of: $LOGRA_KNOWN" ;;
    esac
    [ "$key" != "$line" ] || die "$file:$number: expected KEY=VALUE"
    value=${value#[\"\']} value=${value%[\"\']}
    [ -n "${!key+set}" ] || export "$key=$value"
  done <"$file"
}

set_defaults() {
  export LOGRA_CONTAINER=${LOGRA_CONTAINER:-none} LOGRA_LAUNCHER=${LOGRA_LAUNCHER:-srun}
  export LOGRA_LOGS=${LOGRA_LOGS:-$LOGRA_REPO/runs/slurm} LOGRA_MOUNTS=${LOGRA_MOUNTS:-}
  export LOGRA_REQUEUE=${LOGRA_REQUEUE:-1} LOGRA_RETRIES=${LOGRA_RETRIES:-3}
  case $LOGRA_LOGS in /*) ;; *) LOGRA_LOGS=$LOGRA_REPO/$LOGRA_LOGS ;; esac
}

# Say everything that is missing or wrong, each in one line, then end.
check_settings() {
  local where="in the environment or ${LOGRA_SITE:-$LOGRA_REPO/slurm/site.env}" problems=()
  if ! in_batch_job; then
    [ -n "${LOGRA_ACCOUNT:-}" ] || problems+=("LOGRA_ACCOUNT is missing: the account that is \
charged, or 'default' for Slurm's own choice; set it $where")
    [ -n "${LOGRA_PARTITION:-}" ] || problems+=("LOGRA_PARTITION is missing: the partition with \
the GPUs, or 'default' for Slurm's own choice; set it $where")
  fi
  case $LOGRA_CONTAINER in
    none)
      if [ -z "${MEGATRON_LOGRA_VENV:-}" ]; then
        problems+=("MEGATRON_LOGRA_VENV is missing: the virtual environment that \
tools/bootstrap.sh makes, on a file system that all nodes see; set it $where")
      elif [ ! -x "$MEGATRON_LOGRA_VENV/bin/python" ]; then
        problems+=("MEGATRON_LOGRA_VENV: $MEGATRON_LOGRA_VENV/bin/python is no program")
      fi
      ;;
    pyxis | apptainer)
      [ -n "${LOGRA_IMAGE:-}" ] || problems+=("LOGRA_IMAGE is missing: the container's image for \
LOGRA_CONTAINER=$LOGRA_CONTAINER; set it $where")
      if in_batch_job && [ "$LOGRA_CONTAINER" = apptainer ] && ! command -v apptainer >/dev/null
      then problems+=("LOGRA_CONTAINER=apptainer: there is no apptainer on PATH of $HOSTNAME"); fi
      ;;
    *) problems+=("LOGRA_CONTAINER=$LOGRA_CONTAINER: expected none, pyxis or apptainer") ;;
  esac
  case $LOGRA_LAUNCHER in
    srun | torchrun) ;;
    *) problems+=("LOGRA_LAUNCHER=$LOGRA_LAUNCHER: expected srun or torchrun") ;;
  esac
  case $LOGRA_REQUEUE in
    0 | 1) ;;
    *) problems+=("LOGRA_REQUEUE=$LOGRA_REQUEUE: expected 0 or 1") ;;
  esac
  case $LOGRA_RETRIES in
    '' | *[!0-9]*) problems+=("LOGRA_RETRIES=$LOGRA_RETRIES: expected a number of restarts") ;;
  esac
  [ ${#problems[@]} -eq 0 ] && return 0
  local problem
  for problem in "${problems[@]}"; do say "error: $problem"; done
  exit "$EXIT_USER_ERROR"
}

# --- the program's environment -------------------------------------------------------------------

# Settings of NCCL, torch and Megatron, the same for all ranks; those already set stay.
set_environment() {
  # Megatron overlaps tensor-parallel communication with computation by the order of one queue.
  export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
  # A rank that waits for one that died ends with an error instead of waiting for ever.
  export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
  # Blocks of the allocator may grow: sequences of many lengths leave fewer gaps.
  export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
  # NCCL says what goes wrong, and nothing else.
  export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
  # NVLink SHARP's buffers take gigabytes that the reductions here do not earn.
  export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
  # The network by which ranks find each other; data takes InfiniBand wherever NCCL finds it.
  if [ -n "${LOGRA_INTERFACE:-}" ]; then
    export NCCL_SOCKET_IFNAME=$LOGRA_INTERFACE GLOO_SOCKET_IFNAME=$LOGRA_INTERFACE
  fi
  # Threads of a rank; each of them otherwise takes all cores of the node.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
  # Since Slurm 22.05 a step no longer takes over the job's --cpus-per-task by itself.
  if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
  export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
}
readonly SHOWN_ENVIRONMENT="CUDA_DEVICE_MAX_CONNECTIONS TORCH_NCCL_ASYNC_ERROR_HANDLING \
PYTORCH_CUDA_ALLOC_CONF NCCL_DEBUG NCCL_NVLS_ENABLE NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME \
OMP_NUM_THREADS SRUN_CPUS_PER_TASK"

# Where all ranks meet: a port of the first node, below those given to outgoing connections.
set_master() {
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  [ -n "$MASTER_ADDR" ] || die "scontrol does not name the nodes of $SLURM_JOB_NODELIST"
  MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
  export MASTER_ADDR MASTER_PORT
}

# --- commands ------------------------------------------------------------------------------------

# Set the arrays `program`, what each rank runs before the command's own arguments, and `go_on`, the
# arguments that make it go on where it was.
set_program() {
  local python=${LOGRA_CONTAINER_PYTHON:-python3}
  [ "$LOGRA_CONTAINER" != none ] || python=$MEGATRON_LOGRA_VENV/bin/python
  program=("$LOGRA_REPO/slurm/rank.sh" "$python" -m megatron_logra "$1") go_on=()
  case $1 in
    study) program=("$python" tools/scaling_study.py run) ;; # which always goes on
    train) program+=(--workers-among-ranks) go_on=(--resume) ;; # only where rollouts are separate
  esac
}

# Set the array `launch`: srun with its container, up to the program.
set_launch() {
  local mounts="$LOGRA_REPO:$LOGRA_REPO,$LOGRA_LOGS:$LOGRA_LOGS${LOGRA_MOUNTS:+,$LOGRA_MOUNTS}"
  # Ranks that are left when one has ended have a minute to end by themselves.
  launch=(srun "--chdir=$LOGRA_REPO" --kill-on-bad-exit=0 --wait=60)
  # %t: the task, which is the rank; under torchrun, the node.
  launch+=("--output=$LOGRA_JOB_LOGS/$LOGRA_LIFE.%t.log")
  export LOGRA_TASKS=${SLURM_NTASKS:-1}
  if [ "$LOGRA_LAUNCHER" = torchrun ] && [ "$LOGRA_TASKS" -gt 1 ]; then
    local nodes=$SLURM_JOB_NUM_NODES
    launch+=("--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1)
    unset SRUN_CPUS_PER_TASK SLURM_CPUS_PER_TASK # the one task has all of a node's
  fi
  case $LOGRA_CONTAINER in
    none) ;;
    pyxis)
      launch+=("--container-image=$LOGRA_IMAGE" "--container-mounts=$mounts")
      launch+=("--container-workdir=$LOGRA_REPO")
      ;;
    apptainer)
      launch+=(apptainer exec --nv --bind "$mounts" --pwd "$LOGRA_REPO" "$LOGRA_IMAGE")
      ;;
  esac
}

# --- submission ----------------------------------------------------------------------------------

# sbatch's options: the site's, then the user's, which come later and so win.
submit() {
  local options=(--export=ALL "--job-name=logra-$LOGRA_NAME" --parsable)
  [ "$LOGRA_ACCOUNT" = default ] || options+=("--account=$LOGRA_ACCOUNT")
  [ "$LOGRA_PARTITION" = default ] || options+=("--partition=$LOGRA_PARTITION")
  [ -z "${LOGRA_QOS:-}" ] || options+=("--qos=$LOGRA_QOS")
  if [ "$command" = study ]; then
    set_array "$@"
    options+=("--array=$array" "--output=$LOGRA_LOGS/%x-%A_%a.out")
  else
    options+=("--output=$LOGRA_LOGS/%x-%j.out")
  fi
  options+=("${sbatch_options[@]}")
  if [ "$dry_run" = 1 ]; then
    echo "# The job's own options; those of the command below win."
    grep '^#SBATCH' "$script"
    echo "# Its settings:"
    show_settings
    echo "# Submitted by:"
    quoted sbatch "${options[@]}" "$script" "$@"
    echo "# On each rank, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (see"
    echo "# slurm/rank.sh; sbatch $script --dry-run … shows their values in a job):"
    LOGRA_JOB_LOGS=$LOGRA_LOGS/JOB LOGRA_LIFE=0
    set_launch
    quoted "${launch[@]}" "${program[@]}" "$@"
    return
  fi
  command -v sbatch >/dev/null || die "there is no sbatch on PATH: this is no Slurm login node"
  mkdir -p "$LOGRA_LOGS" || die "LOGRA_LOGS: $LOGRA_LOGS cannot be made"
  local job
  job=$(sbatch "${options[@]}" "$script" "$@") || exit 1
  say "submitted job ${job%%;*}; its output: $LOGRA_LOGS"
  echo "${job%%;*}"
}

# Set `array`: a task for each run of a study, unless the user has chosen.
set_array() {
  local option count
  for option in "${sbatch_options[@]}"; do
    case $option in --array=*) array=${option#--array=}; return ;; esac
  done
  [ "$LOGRA_CONTAINER" = none ] ||
    die "--array=0-N is missing: the runs of a study can only be counted without a container"
  count=$("$MEGATRON_LOGRA_VENV/bin/python" tools/scaling_study.py count "$@") || exit $?
  array=0-$((count - 1))
}

show_settings() {
  local key
  for key in LOGRA_REPO $LOGRA_KNOWN $SHOWN_ENVIRONMENT; do
    [ -z "${!key+set}" ] || printf '%s=%q\n' "$key" "${!key}"
  done
}

# --- within the job ------------------------------------------------------------------------------

show_job() {
  local first rank task per_node nodes
  per_node=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
  echo "# Settings:"
  show_settings
  echo "# Ranks, as srun places them by default:"
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    task=$((rank % per_node)) first=${nodes[$((rank / per_node))]}
    echo "RANK=$rank WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$task on $first," \
      "MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT"
  done
  echo "# Launched by:"
  quoted "${launch[@]}" "${program[@]}" "$@"
}

# Start the ranks and wait for them; requests to stop go on to them. Sets `code`.
run_ranks() {
  set_launch
  rm -f "$LOGRA_JOB_LOGS"/exit.* # see rank.sh
  "${launch[@]}" "${program[@]}" "$@" &
  srun_pid=$!
  code=0
  wait "$srun_pid" || code=$?
  while kill -0 "$srun_pid" 2>/dev/null; do # a trap has interrupted the wait
    code=0
    wait "$srun_pid" || code=$?
  done
  if [ "$LOGRA_LAUNCHER" = torchrun ]; then code=$(torchrun_code "$code"); fi
}

# torchrun ends with 1 whatever its ranks end with; rank.sh has kept what they said. The first to end
# decides: torchrun then ends the others.
torchrun_code() {
  local code
  for code in "$EXIT_USER_ERROR" "$EXIT_STOPPED"; do
    if cat "$LOGRA_JOB_LOGS"/exit.* 2>/dev/null | grep -qx "$code"; then
      echo "$code"
      return
    fi
  done
  echo "$1"
}

stop_ranks() {
  stopping=1
  say "asked to stop by SIG$1: the ranks end their step and save"
  if [ -n "${srun_pid:-}" ]; then kill -s USR1 "$srun_pid" 2>/dev/null || true; fi
}

requeue() {
  local job=$SLURM_JOB_ID
  # An array's last task has the number of the whole array.
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  if [ "$LOGRA_REQUEUE" = 0 ]; then
    say "stopped; LOGRA_REQUEUE=0: go on with --resume"
    return
  fi
  say "stopped; back into the queue"
  scontrol requeue "$job" || say "it cannot be requeued; submit again with --resume"
}

# Back into the queue, but not for ever: a time limit below --signal's time stops each life at once.
stopped_early() {
  echo "$LOGRA_LIFE" >>"$LOGRA_JOB_LOGS/stopped_early"
  if [ "$resumes" = 0 ]; then return; fi
  if [ "$(wc -l <"$LOGRA_JOB_LOGS/stopped_early")" -ge 3 ]; then
    say "error: stopped three times before anything could be saved; expected a --time that leaves" \
      "more than a start, a step and a save before --signal's time"
    return
  fi
  requeue
}

last_words() {
  local log
  for log in "$LOGRA_JOB_LOGS/$LOGRA_LIFE".*.log; do
    [ -s "$log" ] || continue
    say "the end of $log:"
    tail -n 5 "$log" >&2
  done
}

run_job() {
  local attempt=0 resume=() restarts=${SLURM_RESTART_COUNT:-0}
  export LOGRA_JOB_LOGS=$LOGRA_LOGS/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || LOGRA_JOB_LOGS=$LOGRA_JOB_LOGS/$SLURM_ARRAY_TASK_ID
  export LOGRA_LIFE=$restarts
  set_master
  set_launch
  if [ "$dry_run" = 1 ]; then show_job "$@"; return; fi
  mkdir -p "$LOGRA_JOB_LOGS" || die "LOGRA_LOGS: $LOGRA_JOB_LOGS cannot be made"
  trap 'stop_ranks USR1' USR1
  trap 'stop_ranks TERM' TERM
  stopping=0
  [ "$restarts" = 0 ] || resume=("${go_on[@]}")
  while :; do
    LOGRA_LIFE=$restarts.$attempt
    say "job $SLURM_JOB_ID, life $LOGRA_LIFE: $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST," \
      "logs $LOGRA_JOB_LOGS/$LOGRA_LIFE.*.log"
    run_ranks "$@" "${resume[@]}"
    case $code in
      0) say "done"; return 0 ;;
      "$EXIT_STOPPED")
        if grep -qs "nothing to save" "$LOGRA_JOB_LOGS/$LOGRA_LIFE".*.log; then stopped_early
        else requeue; fi
        return "$EXIT_STOPPED"
        ;;
      "$EXIT_USER_ERROR") last_words; return "$EXIT_USER_ERROR" ;;
    esac
    last_words
    if [ "$stopping" = 1 ]; then # ended before it could save
      stopped_early
      return "$code"
    fi
    if [ "$resumes" = 0 ] || [ "$attempt" -ge "$LOGRA_RETRIES" ]; then
      say "failed with exit code $code"
      return "$code"
    fi
    attempt=$((attempt + 1))
    say "failed with exit code $code; starting again, $attempt of $LOGRA_RETRIES times"
    resume=("${go_on[@]}")
  done
}

# --- main ----------------------------------------------------------------------------------------

# logra_main NAME COMMAND RESUMES ARGUMENTS…: submit this script, or run what it is for.
#   NAME     of the job
#   COMMAND  of megatron-logra (or `study`)
#   RESUMES  1 if the command goes on where it was, and so may be started again after it failed
logra_main() {
  LOGRA_NAME=$1 LOGRA_SCRIPT=$1 command=$2 resumes=$3
  shift 3
  set -u
  dry_run=0 sbatch_options=()
  while [ $# -gt 0 ]; do
    case $1 in
      --dry-run) dry_run=1 ;;
      --resume) break ;;
      --*=*) sbatch_options+=("${1%=}") ;; # --hold= stands for an option without a value
      --) shift; break ;;
      --*) die "$1: expected --dry-run, sbatch's options as --OPTION=VALUE, then the arguments" ;;
      *) break ;;
    esac
    shift
  done
  [ $# -gt 0 ] || die "$usage"
  read_site_file
  set_defaults
  check_settings
  # What depends on the job is only known in it, and must not be handed to it.
  if in_batch_job; then set_environment; fi
  set_program "$command"
  cd "$LOGRA_REPO" || die "LOGRA_REPO: $LOGRA_REPO cannot be entered"
  if in_batch_job; then
    [ ${#sbatch_options[@]} -eq 0 ] || die "${sbatch_options[0]}: belongs before the script's name"
    run_job "$@"
  else
    script=$LOGRA_REPO/slurm/${0##*/}
    submit "$@"
  fi
}
