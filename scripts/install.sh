#!/usr/bin/env bash
# bash scripts/install.sh: the CPU environment in .venv, from requirements/, by uv where PyPI has it. Run it again at any
# time: it does nothing while requirements/, setup.py and each pyproject.toml are unchanged. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/cpu.lock
TORCH_CPU=requirements/torch-cpu.txt
TORCH_PYPI=requirements/torch-pypi.lock
MEGATRON_LOCK=requirements/megatron.txt
TE_LOCK=requirements/te-python.txt
TE_FOLDER=.venv/te-python
STAMP=.venv/vcpo-install.sha256
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-install.XXXXXX")

source scripts/install_steps.sh

# The folder counts too: an editable install, and a virtual environment, hold absolute paths.
digest() { { pwd -P; cat requirements/*.lock requirements/*.txt setup.py pyproject.toml verl/pyproject.toml sandbox/pyproject.toml; } | sha256sum | cut -d' ' -f1; }

gpu=0
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  gpu=1
  echo "install: a CUDA GPU is visible; this is the CPU environment. GPU runs use that of scripts/install_gpu.sh: docs/guide/cluster.md"
fi

if [[ -f "$STAMP" ]] && fits .venv/bin/python && [[ "$(cat "$STAMP")" == "$(digest)" ]]; then
  echo "install: .venv is up to date"
  rm -f "$LOG"
  exit 0
fi

refuse() {
  echo "install: $1" >&2
  rm -f "$LOG" "$LOG.pip"
  exit 2
}

if compgen -G '.venv/lib/python3.*/site-packages/vllm-[0-9]*.dist-info' >/dev/null; then
  refuse ".venv has the GPU environment of scripts/install_gpu.sh, which CPU packages would break: move it away, or take another checkout"
fi
environment .venv
rm -f "$STAMP"
python=.venv/bin/python
get_uv $python
if ! PIP_LOG=$LOG.pip locked $python $TORCH_CPU; then
  # Why an index gave nothing is in pip's own log alone; pip then says that no index has the version. 404 is an answer.
  if grep -s 'Could not fetch URL\|Skipping page\|is not a trusted or secure host' "$LOG.pip" | grep -v ': 404 Client Error' >>"$LOG"; then
    failed "packages of $TORCH_CPU"
  fi
  # pip's words for a version that no index has; the second where pip has a constraint for torch.
  grep -q 'No matching distribution found for torch==\|ResolutionImpossible' "$LOG" || failed "packages of $TORCH_CPU"
  if ((gpu)); then
    refuse "a CPU run on a machine with a GPU needs torch's CPU build, which none of pip's indexes has: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index (pytorch.org)"
  fi
  echo "install: none of pip's indexes has torch's CPU build for this Python: PyPI's is taken, which needs no GPU (2.5 GB to download instead of 0.2)"
  locked $python $TORCH_PYPI || failed "packages of $TORCH_PYPI"
fi
packages $python $LOCK
# Both wheels ask for Python 3.12.
locked $python $MEGATRON_LOCK --ignore-requires-python --python-version 3.12 --only-binary :all: --upgrade \
  --target "$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || failed "packages of $MEGATRON_LOCK"
project $python
locked $python $TE_LOCK --upgrade --target $TE_FOLDER || failed "packages of $TE_LOCK"
digest >"$STAMP"
rm -f "$LOG" "$LOG.pip"
