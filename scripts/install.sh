#!/usr/bin/env bash
# bash scripts/install.sh: the CPU environment in .venv, from requirements/cpu.lock. Run it again at any time:
# it does nothing while requirements/, setup.py and pyproject.toml are unchanged. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/cpu.lock
TE_LOCK=requirements/te-python.txt
TE_FOLDER=.venv/te-python
STAMP=.venv/vcpo-install.sha256
LOG=$(mktemp "${TMPDIR:-/tmp}/vcpo-install.XXXXXX")

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    fits "$PYTHON" && { echo "$PYTHON"; return; }
    echo "install: PYTHON=$PYTHON is not Python 3.11 or 3.12: set PYTHON to such an interpreter and run again" >&2
    exit 2
  fi
  for candidate in python3.11 python3; do
    fits "$candidate" && { echo "$candidate"; return; }
  done
  echo "install: no Python 3.11 or 3.12 found: install one, or set PYTHON=/path/to/python3.11, and run again" >&2
  exit 2
}

# phase LABEL COMMAND...: the output goes to the log; it is shown only if the command fails.
phase() {
  local label=$1 start=$SECONDS
  shift
  if ! "$@" >"$LOG" 2>&1; then
    if grep -q 'No matching distribution found for torch==2\.13\.0+cpu' "$LOG"; then
      echo "torch 2.13.0+cpu is not in your package index: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index (see 'Get Started' on pytorch.org) and run again" >&2
    else
      tail -n 20 "$LOG" >&2
      echo "install: '$label' failed; the whole output is in $LOG" >&2
    fi
    exit 1
  fi
  echo "install: $label ($((SECONDS - start)) s)"
}

# The folder counts too: an editable install, and a virtual environment, hold absolute paths.
digest() { { pwd -P; cat "$LOCK" "$TE_LOCK" setup.py pyproject.toml; } | sha256sum | cut -d' ' -f1; }

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  echo "install: a CUDA GPU is visible; this is the CPU environment. Clusters use 'pip install -e .[gpu]': docs/cluster.md"
fi

if [[ -f "$STAMP" ]] && fits .venv/bin/python && [[ "$(cat "$STAMP")" == "$(digest)" ]]; then
  echo "install: .venv is up to date"
  rm -f "$LOG"
  exit 0
fi

python=$(find_python)
if ! fits .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  phase "environment .venv, $("$python" --version 2>&1)" "$python" -m venv --clear .venv
fi
rm -f "$STAMP"
phase "packages of $LOCK" .venv/bin/python -m pip install --disable-pip-version-check --no-deps -r "$LOCK"
phase "this project, editable" .venv/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
phase "packages of $TE_LOCK, in $TE_FOLDER" .venv/bin/python -m pip install --disable-pip-version-check --no-deps \
  --require-hashes --upgrade --target "$TE_FOLDER" -r "$TE_LOCK"
digest >"$STAMP"
rm -f "$LOG"
