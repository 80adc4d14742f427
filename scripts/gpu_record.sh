#!/usr/bin/env bash
# Measures klamp on a GPU: one command, at most nine minutes, no network, no installation.
#
#   scripts/gpu_record.sh [--cpu] [FOLDER]    the record, in FOLDER (default: build/gpu-record)
#   scripts/gpu_record.sh --wheels            beforehand, with a network: what the comparisons need, in build/gpu-wheels
#
# The machine needs Python 3.12, torch, triton, transformers and accelerate (tried: 2.11 for CUDA 13, 3.6, 5.17). What it
# has besides stays; of the wheels only those are used whose package it lacks. A comparison whose package is missing is
# named in the record as skipped. TRL needs pyarrow and pandas, which are too large to travel.
# --cpu: a trial at the smallest sizes, on any machine.
# PYTHON names the interpreter (python3), WHEELS the folder of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

USAGE="usage: scripts/gpu_record.sh [--cpu] [FOLDER] | --wheels"
PYTHON="${PYTHON:-python3}" WHEELS="${WHEELS:-build/gpu-wheels}"
# Pure Python all of them: the hosts with what they need and the machine may lack, then what klamp needs.
PACKAGES=(trl liger_kernel datasets dill multiprocess jaxtyping wadler_lindig rich markdown-it-py mdurl Pygments)
CUT_CROSS_ENTROPY=cut-cross-entropy==25.1.1
MEBIBYTES=40

make_wheels() {
  local pins=("$CUT_CROSS_ENTROPY") package size
  for package in "${PACKAGES[@]}"; do
    pins+=("$(grep -i "^$package==" constraints.txt)")
  done
  rm -rf "$WHEELS"
  "$PYTHON" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
    --python-version 3.12 --dest "$WHEELS" "${pins[@]}"
  size="$(du --summarize --block-size=1M "$WHEELS" | cut -f 1)"
  echo "$WHEELS: $size MiB"
  if ((size > MEBIBYTES)); then
    echo "The wheels may have $MEBIBYTES MiB together." >&2
    exit 1
  fi
}

# Unpack into folder $1 the wheels whose package this Python does not have.
add_missing() {
  local wheel name missing=()
  for wheel in "$WHEELS"/*.whl; do
    name="${wheel##*/}"
    "$PYTHON" -c 'import sys; from importlib.metadata import version; version(sys.argv[1])' "${name%%-*}" 2> /dev/null \
      || missing+=("$wheel")
  done
  if [[ ${#missing[@]} -gt 0 ]]; then
    "$PYTHON" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile \
      --target "$1" "${missing[@]}"
  fi
}

options=(--command "scripts/gpu_record.sh${*:+ $*}") folder=build/gpu-record
while [[ $# -gt 0 ]]; do
  case "$1" in
    --wheels) make_wheels; exit ;;
    --cpu) options+=(--small); export CUDA_VISIBLE_DEVICES= ;;
    -*) echo "$USAGE" >&2; exit 2 ;;
    *) folder="$1" ;;
  esac
  shift
done

site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
[[ ! -d "$WHEELS" ]] || add_missing "$site" || echo "The wheels could not be unpacked; their comparisons are skipped." >&2
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1
export PYTHONPATH="$site:$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
"$PYTHON" -m benchmarks.gpu "$folder" "${options[@]}"
