#!/usr/bin/env bash
# Makes the virtual environment with this package (editable) and its pinned test dependencies.
#
#   $MEGATRON_LOGRA_VENV  where; default: .venv in the repository
#
# Needs any Python >= 3.12 and finds it by itself: on PATH, under pyenv, or uv's. A second call
# compares two stamps and ends at once. Concurrent calls wait for each other, and what an
# interrupted call left behind is made anew.
#
# Sourced with BOOTSTRAP_ONLY_DEFINE=1 it defines its functions and does nothing.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pins=$repo/tools/requirements-test.txt
venv=${MEGATRON_LOGRA_VENV:-$repo/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac

say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

hash_of() { # the hash of stdin
  if command -v sha256sum >/dev/null 2>&1; then sha256sum; else shasum -a 256; fi | cut -c1-16
}

# Every place where a Python of the wanted minor version may be, best first.
python_candidates() {
  local minor dir
  local pyenv=${PYENV_ROOT:-$HOME/.pyenv}
  local uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
  # 3.12 and 3.13 have wheels of every pinned package; newer ones are a last resort.
  for minor in 12 13 14 15; do
    type -ap "python3.$minor" || true
    for dir in "$pyenv/versions/3.$minor"*/bin "$uv/cpython-3.$minor"*/bin; do
      if [ -x "$dir/python3.$minor" ]; then echo "$dir/python3.$minor"; fi
    done
  done
  type -ap python3 || true
  type -ap python || true
}

# Print the first candidate that really runs (a pyenv shim may not) and can make environments.
find_python() {
  local candidate refused=""
  while IFS= read -r candidate; do
    case $("$candidate" -c '
import importlib.util as u, sys
if sys.version_info < (3, 12): print("old")
elif u.find_spec("venv") and u.find_spec("ensurepip"): print("good")
else: print("no venv")' 2>/dev/null </dev/null || true) in
      good) echo "$candidate"; return 0 ;;
      "no venv") refused=$candidate ;;
    esac
  done < <(python_candidates)
  if [ -n "$refused" ]; then
    die "$refused lacks the venv and ensurepip modules; install them (Debian: python3-venv)"
  fi
  die "no Python >= 3.12 found (looked for python3.12, python3.13, python3 on PATH, under pyenv" \
    "and uv); install one, for example: pyenv install 3.12"
}

# What the environment must have been made from: pins and its Python; and the package's place.
# pyvenv.cfg names that Python, so no interpreter has to start to compare.
deps_key() { { cat "$pins"; grep -E '^(home|version)' "$venv/pyvenv.cfg"; } 2>/dev/null | hash_of; }
package_key() { { echo "$repo"; cat "$repo/pyproject.toml"; } | hash_of; }

stamp() { cat "$venv/.megatron_logra-$1" 2>/dev/null || true; }
deps_ready() { [ -x "$venv/bin/python" ] && [ "$(stamp deps)" = "$(deps_key)" ]; }
package_ready() { [ "$(stamp package)" = "$(package_key)" ]; }

# pip, quietly; on failure its last errors, and a guess at the cause.
install() {
  local log=$venv/.megatron_logra-install.log
  if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@" \
    >"$log" 2>&1 </dev/null; then
    return 0
  fi
  grep -iE '^ *(error|fatal)|No space left' "$log" | tail -n 3 >&2 || true
  if grep -q 'No space left' "$log"; then
    die "the disk is full; about 7 GB are needed at $venv"
  fi
  if ! command -v cc >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1; then
    die "a C compiler is missing (reasoning-gym's pycosat is built from source); install gcc"
  fi
  die "pip could not install the dependencies; the whole log: $log"
}

make_environment() {
  local python ours=0 started=$SECONDS
  if [ -e "$venv/.megatron_logra" ]; then ours=1; fi
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ "$ours" = 0 ] &&
    [ -n "$(ls -A "$venv" 2>/dev/null || echo file)" ]; then
    die "$venv exists and is no virtual environment; remove it, or set MEGATRON_LOGRA_VENV"
  fi
  # Ours, without a finished install or without its Python: interrupted, so made anew. A user's own
  # environment is only added to.
  if [ "$ours" = 1 ] && { [ -z "$(stamp deps)" ] || [ ! -x "$venv/bin/python" ]; }; then
    say "an earlier set-up did not finish: starting again"
    rm -rf "$venv"
  fi
  if [ ! -e "$venv/pyvenv.cfg" ]; then
    python=$(find_python)
    say "making $venv with $("$python" --version) ($python)"
    mkdir -p "$venv"
    touch "$venv/.megatron_logra"
    "$python" -m venv "$venv" >&2 || die "$python cannot make a virtual environment at $venv"
  fi
  [ -x "$venv/bin/python" ] || die "$venv/bin/python does not run; remove $venv and try again"
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >&2 ||
    die "$venv has no pip; install it there, or set MEGATRON_LOGRA_VENV"
  rm -f "$venv/.megatron_logra-deps" "$venv/.megatron_logra-package"
  say "installing the dependencies (torch among them, about 5 GB; a minute or more) ..."
  if ! command -v cc >/dev/null 2>&1 && ! command -v gcc >/dev/null 2>&1; then
    install "$(grep -i '^pycosat==' "$pins")" # needs a compiler: fail before the long download
  fi
  install -r "$pins"
  deps_key >"$venv/.megatron_logra-deps"
  say "dependencies installed in $((SECONDS - started)) s"
}

main() {
  if deps_ready && package_ready; then return 0; fi
  mkdir -p "$(dirname "$venv")" 2>/dev/null || die "cannot write to $(dirname "$venv")"
  if command -v flock >/dev/null 2>&1; then
    { exec 9>"$venv.lock"; } 2>/dev/null || die "cannot write to $(dirname "$venv")"
    flock -n 9 || { say "waiting for another set-up of $venv"; flock 9; }
  fi
  deps_ready || make_environment
  if ! package_ready; then
    install --no-deps --no-build-isolation --editable "$repo"
    package_key >"$venv/.megatron_logra-package"
    say "megatron_logra of $repo is ready in $venv"
  fi
}

if [ "${BOOTSTRAP_ONLY_DEFINE:-0}" != 1 ]; then main; fi
