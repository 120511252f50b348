#!/usr/bin/env bash
# bash scripts/install.sh: the CPU environment in .venv, from requirements/cpu.lock. Run it again at any time:
# it does nothing while requirements/, setup.py and each pyproject.toml are unchanged. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/cpu.lock
MEGATRON_LOCK=requirements/megatron.txt
TE_LOCK=requirements/te-python.txt
TE_FOLDER=.venv/te-python
STAMP=.venv/vcpo-install.sha256
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-install.XXXXXX")

source scripts/install_steps.sh

# The folder counts too: an editable install, and a virtual environment, hold absolute paths.
digest() { { pwd -P; cat "$LOCK" "$MEGATRON_LOCK" "$TE_LOCK" setup.py pyproject.toml verl/pyproject.toml sandbox/pyproject.toml; } | sha256sum | cut -d' ' -f1; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  echo "install: a CUDA GPU is visible; this is the CPU environment. GPU runs use that of scripts/install_gpu.sh: docs/guide/cluster.md"
fi

if [[ -f "$STAMP" ]] && fits .venv/bin/python && [[ "$(cat "$STAMP")" == "$(digest)" ]]; then
  echo "install: .venv is up to date"
  rm -f "$LOG"
  exit 0
fi

environment .venv
rm -f "$STAMP"
phase "packages of $LOCK" .venv/bin/python -m pip install --disable-pip-version-check --no-deps -r "$LOCK"
phase "packages of $MEGATRON_LOCK" .venv/bin/python -m pip install --disable-pip-version-check --no-deps \
  --require-hashes --ignore-requires-python --python-version 3.12 --only-binary :all: --upgrade \
  --target "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" -r "$MEGATRON_LOCK"
project .venv/bin/python
phase "packages of $TE_LOCK, in $TE_FOLDER" .venv/bin/python -m pip install --disable-pip-version-check --no-deps \
  --require-hashes --upgrade --target "$TE_FOLDER" -r "$TE_LOCK"
digest >"$STAMP"
rm -f "$LOG"
