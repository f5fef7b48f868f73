#!/usr/bin/env bash
# Installs Slurm and munge from Debian's or Ubuntu's packages, for the tests marked slurm. Their
# daemons are not started here: the tests start their own, on loopback and with files of their own.
set -euo pipefail
say() { printf 'install_slurm: %s\n' "$*" >&2; }

missing=0
for program in slurmctld slurmd sbatch srun scontrol munged; do
  command -v "$program" >/dev/null || missing=1
done
if [ "$missing" = 0 ]; then exit 0; fi
if [ "$(id -u)" != 0 ]; then say "error: Slurm is missing, and only root can install it"; exit 2; fi
if ! command -v apt-get >/dev/null; then say "error: Slurm is missing, and so is apt-get"; exit 2; fi
export DEBIAN_FRONTEND=noninteractive
# Where an init system is, the packages would start daemons of the machine's own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
{
  apt-get update
  apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
} >&2 </dev/null
