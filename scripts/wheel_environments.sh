#!/usr/bin/env bash
# Makes the environments that the wheel is tried in: .venv-NAME for every NAME given, with what a user's pip brings.
#
#   wheel                    what `pip install klamp` brings
#   wheel-trl, wheel-tinker  what the extra brings beside; they see the packages of .venv-wheel
#   python3.12, python3.13   what `pip install klamp` brings on another Python
#
# Made once; again when this file, the pins or the declared dependencies change. The tests put the newest wheel in.
# PYTHON names the interpreters to try for the first three. Other Pythons are looked for under their name, then among
# pyenv's; one that is not here is said so and passed over.
set -euo pipefail
cd "$(dirname "$0")/.."

# What torch's build for CUDA loads at import: two thirds of what it asks for. Kept once for all Pythons.
CUDA=(
  'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusparse,nvjitlink,nvrtc]==13.0.3' nvidia-cudnn-cu13==9.20.0.48
  nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.29.7 nvidia-nvshmem-cu13==3.4.5
)
# What torch needs of Python, and what klamp does.
WITH_TORCH=(filelock fsspec jinja2 networkx setuptools sympy typing-extensions)
WITH_KLAMP=(jaxtyping numpy packaging pyyaml rich tyro)

# The path of the first of the given interpreters that runs and is not too old.
find_python() {
  local candidate
  for candidate in "$@"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
}

# Compiled when they are imported, which most of torch never is.
install() { "$folder/bin/python" -m pip --disable-pip-version-check install -qq --no-compile "$@"; }

packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

for name in "$@"; do
  folder="$PWD/.venv-$name"
  ready="$folder/.installed-for-klamp"
  if [[ "$ready" -nt "$0" && "$ready" -nt constraints.txt && "$ready" -nt pyproject.toml ]]; then
    continue
  fi
  case "$name" in
    wheel*) candidates="${PYTHON:-python3.11 python3}" ;;
    python*) candidates="$name $(echo "$HOME/.pyenv/versions/${name#python}".*/bin/python)" ;;
  esac
  # shellcheck disable=SC2086
  python="$(find_python $candidates)"
  if [[ -z "$python" ]]; then
    echo "$name is not on this machine and is passed over; tried: $candidates"
    continue
  fi
  echo "Making .venv-$name: once, about a minute."
  "$python" -m venv --clear "$folder"
  case "$name" in
    wheel)
      if [[ -e .venv/.installed-for-klamp ]]; then .venv/bin/python scripts/link_packages.py "$folder" constraints.txt torch; fi
      install --constraint constraints.txt torch # first and alone, so that a CPU build at hand is taken as it is
      install --constraint constraints.txt .
      ;;
    wheel-*)
      packages_of "$PWD/.venv-wheel" > "$(packages_of "$folder")/wheel.pth"
      install --constraint constraints.txt ".[${name#wheel-}]"
      ;;
    python*)
      install --constraint constraints.txt "${WITH_TORCH[@]}" "${WITH_KLAMP[@]}"
      install --constraint constraints.txt --no-deps torch
      if ! "$folder/bin/python" -c 'import torch' 2> /dev/null; then # no build for the CPU was at hand
        if [[ ! -e .venv-cuda/.installed-for-klamp ]]; then
          install --target .venv-cuda "${CUDA[@]}"
          touch .venv-cuda/.installed-for-klamp
        fi
        ln -s "$PWD/.venv-cuda/nvidia" "$(packages_of "$folder")/nvidia"
        "$folder/bin/python" -c 'import torch'
      fi
      ;;
  esac
  touch "$ready"
done
