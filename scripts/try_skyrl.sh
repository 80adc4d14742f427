#!/usr/bin/env bash
# Tries klamp.tinker against skyrl, a server of the Tinker protocol that others wrote, and prints what holds there.
#
#   scripts/try_skyrl.sh
#
# Optional: nothing of klamp needs it, no test and no target runs it. It makes .venv-skyrl (2.2 GB; Python 3.11, which
# PYTHON may name) once, then runs scripts/try_skyrl.py there for at most ten minutes; a run needs no network.
# torch goes first and alone, so that a CPU build that is at hand is taken as it is; the last step makes sure that
# nothing brought CUDA libraries. skyrl 0.3.0 reads JSON, which the Tinker SDK spoke up to 0.24.1: older than what klamp
# supports.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=".venv-skyrl"
python="$folder/bin/python"
ready="$folder/.installed-for-klamp"
install() { "$python" -m pip --disable-pip-version-check install -qq "$@"; }

if [[ ! "$ready" -nt "$0" ]]; then
  echo "Making $folder: once, about two minutes."
  for candidate in ${PYTHON:-python3.11 python3} missing; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1 && break
  done
  if [[ "$candidate" == missing ]]; then
    echo "skyrl needs Python 3.11 or newer; name yours: PYTHON=/path/to/python3.11 $0" >&2
    exit 1
  fi
  "$candidate" -m venv "$folder"
  install torch==2.13.0
  before="$("$python" -m pip freeze | grep -E '^(torch==|nvidia-)')"
  install torch==2.13.0 'skyrl[tinker,jax]==0.3.0' tinker==0.24.1 jax==0.10.2 flax==0.12.8 optax==0.2.8 \
    transformers==5.8.0 peft==0.18.1 accelerate jaxtyping
  install --no-deps --editable .
  after="$("$python" -m pip freeze | grep -E '^(torch==|nvidia-)')"
  if [[ "$before" != "$after" ]]; then
    printf 'The packages changed torch or brought CUDA libraries.\nbefore:\n%s\nafter:\n%s\n' "$before" "$after" >&2
    exit 1
  fi
  touch "$ready"
fi

export OMP_NUM_THREADS=1
exec timeout --kill-after=20 600 nice -n 10 "$python" scripts/try_skyrl.py
