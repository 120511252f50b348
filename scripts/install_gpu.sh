#!/usr/bin/env bash
# The environment of a GPU run, in .venv or the folder VENV=...; `--help` says more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
bash scripts/install_gpu.sh [--te]

  (default)  the extra `gpu`: wheels only, nothing is compiled. The trainer has Megatron's own layers and torch's
             attention
  --te       the extra `te` too: Transformer Engine and flash-attn, for every dense model. Both are compiled against
             torch, which takes an hour and the CUDA 13.0 toolkit: CUDA_HOME, MAX_JOBS (8)

VENV=FOLDER chooses the environment (.venv), PYTHON=... the interpreter that makes it. Some 11 GB.
TEXT
}

te=0
case "${1:-}" in
  "") ;;
  --te) te=1 ;;
  -h | --help) usage && exit 0 ;;
  *) usage >&2 && exit 2 ;;
esac

VENV=${VENV:-.venv}
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-install-gpu.XXXXXX")
source scripts/install_steps.sh

if [[ $(uname -sm) != "Linux x86_64" ]]; then
  echo "install_gpu: this is $(uname -sm); the packages of the extra gpu exist for Linux x86_64" >&2
  exit 2
fi
if [[ -f "$VENV/vcpo-install.sha256" ]]; then
  echo "install_gpu: $VENV has the CPU environment of scripts/install.sh: set VENV to another folder" >&2
  exit 2
fi
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
if ((te)) && ! "$nvcc" --version 2>/dev/null | grep -q "release 13\.0"; then
  echo "install_gpu: --te compiles with CUDA 13.0, and $nvcc is not there or another version: install the toolkit and set CUDA_HOME, or leave --te out" >&2
  exit 2
fi

install() { phase "$1" "$VENV/bin/python" -m pip install --disable-pip-version-check "${@:2}"; }

environment "$VENV"
# The pip of Python 3.11.7 misses the extra core_cu13 of transformer-engine.
install "tools" --upgrade pip "setuptools>=77,<82" wheel
if ((te)); then
  # Both packages compile against the installed torch, so it comes first, and no isolated environment is made for them.
  install "torch, and what compiling needs" torch==2.11.0 packaging ninja psutil pybind11
  MAX_JOBS=${MAX_JOBS:-8} install "the extras gpu and te, editable" --no-build-isolation -e '.[gpu,te]'
else
  install "the extra gpu, editable" --no-build-isolation -e '.[gpu]'
fi
modules="torch vllm verl megatron.core mbridge ray transfer_queue cupy verl_vcpo.plugin"
((te)) && modules+=" flash_attn transformer_engine.pytorch"
# shellcheck disable=SC2086 # a list of names
phase "every package can be imported" "$VENV/bin/python" -c 'import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]' $modules
rm -f "$LOG"
echo "install: source $VENV/bin/activate"
