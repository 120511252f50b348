#!/usr/bin/env bash
# The environment of a GPU run, in .venv or the folder VENV=...; `--help` says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
bash scripts/install_gpu.sh [--te [--flash-attn]]

  (default)     requirements/gpu.lock: wheels only. The trainer has Megatron's own layers and torch's attention
  --te          Transformer Engine too, for every model of Megatron-Bridge, with cuDNN's attention. Its torch bindings are 28
                C++ files and no CUDA file: they take g++, and CUDA's headers from CUDA_HOME, CPATH or the wheels
  --flash-attn  with --te: flash-attn too, whose kernels are compiled by nvcc 13.0 (CUDA_HOME) in an hour or more

VENV=FOLDER chooses the environment (.venv), PYTHON=... the interpreter that makes it, MAX_JOBS=8 how many files are
compiled at a time, each with several GB. Some 11 GB of disk. Runs need a C compiler and Python's headers on every node.
TEXT
}

te=0 flash=0
while (($#)); do
  case "$1" in
    --te) te=1 ;;
    --flash-attn) flash=1 ;;
    -h | --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done

VENV=${VENV:-.venv}
PYTHONS=3.12
LOCK=requirements/gpu.lock
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-install-gpu.XXXXXX")
source scripts/install_steps.sh

refuse() {
  echo "install_gpu: $1" >&2
  rm -f "$LOG"
  exit 2
}

# in_folders FILE FOLDERS: the first of the folders, separated by colons, that has the file.
in_folders() {
  local folder folders
  IFS=: read -ra folders <<<"$2"
  for folder in "${folders[@]}"; do
    if [[ -n $folder && -f $folder/$1 ]]; then echo "$folder" && return 0; fi
  done
  return 1
}

# What the user's CUDA has: CUDA_HOME, or the toolkit of the nvcc on PATH.
toolkit=${CUDA_HOME:-$(dirname "$(dirname "$(command -v nvcc || echo /none/bin/nvcc)")")}
HEADER=cuda_runtime_api.h

[[ $(uname -sm) == "Linux x86_64" ]] || refuse "this is $(uname -sm); the packages of $LOCK exist for Linux x86_64"
[[ ! -f "$VENV/vcpo-install.sha256" ]] || refuse "$VENV has the CPU environment of scripts/install.sh: set VENV to another folder"
if ((flash && !te)); then refuse "--flash-attn is for the attention of Transformer Engine's layers: give --te too"; fi
python=$VENV/bin/python
compiles=$python
fits "$compiles" || compiles=$(find_python)
missing=$("$compiles" -m recipe.fully_async_policy.launch.compiler 2>&1) || refuse "$missing"
if ((te)); then
  command -v "${CXX:-g++}" >/dev/null || refuse "--te compiles C++, and there is no ${CXX:-g++}: apt install g++"
fi
if ((flash)); then
  "$toolkit/bin/nvcc" --version 2>/dev/null | grep -q "release 13\.0" ||
    refuse "--flash-attn compiles with CUDA 13.0, and $toolkit/bin/nvcc is not there or another version: install the toolkit and set CUDA_HOME, or leave it out"
  in_folders "$HEADER" "$toolkit/include:${CPATH:-}" >/dev/null ||
    refuse "--flash-attn needs CUDA's headers, and $toolkit/include has no $HEADER: set CUDA_HOME to the toolkit's folder, or leave it out"
fi

environment "$VENV"
get_uv "$python"
packages "$python" "$LOCK"
project "$python"
if ((te)); then
  wheels=$(echo "$VENV"/lib/python3.*/site-packages/nvidia)
  [[ $wheels == /* ]] || wheels=$PWD/$wheels
  if ! in_folders "$HEADER" "$toolkit/include:${CPATH:-}" >/dev/null; then
    export CUDA_HOME=$wheels/cu13
    in_folders "$HEADER" "$CUDA_HOME/include" >/dev/null || refuse "--te needs CUDA's headers, and neither CUDA_HOME, CPATH nor $CUDA_HOME/include has $HEADER"
  fi
  export CPATH=${CPATH:+$CPATH:}$wheels/cudnn/include:$wheels/nccl/include
  locks=(-r requirements/te.lock)
  if ((flash)); then locks+=(-r requirements/flash-attn.lock); fi
  export FLASH_ATTENTION_FORCE_BUILD=TRUE NVTE_PYTORCH_FORCE_BUILD=TRUE # else both setups first ask GitHub for a wheel
  # Both compile against the installed torch. By pip alone: compiling takes long, and is not tried twice.
  MAX_JOBS=${MAX_JOBS:-8} by_pip "${locks[*]}, compiled" "$python" --require-hashes "${locks[@]}" || failed "${locks[*]}, compiled"
fi
# Megatron-Bridge asks for packages that its conversions do without, and pins versions that vLLM does not take. The wheel
# of Transformer Engine's kernels is for all Pythons, and its own file WHEEL names 3.10.
# shellcheck disable=SC2016 # $0 is of that bash
phase "the versions agree" bash -c '! "$0" -m pip check | grep -v "^megatron-bridge \|^transformer_engine_cu13 .* is not supported on this platform\|^No broken"' "$python"
modules="torch vllm verl megatron.core verl_vcpo.actor.model.megatron_bridge ray transfer_queue cupy verl_vcpo.plugin"
if ((te)); then modules+=" transformer_engine.pytorch"; fi
if ((flash)); then modules+=" flash_attn"; fi
# shellcheck disable=SC2086 # a list of names
phase "every package can be imported" "$python" -c 'import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]' $modules
rm -f "$LOG"
echo "install: source $VENV/bin/activate"
