#!/usr/bin/env bash
# The tests of tests/gpu_rehearsal, without a GPU: bash scripts/test.sh --gpu-rehearsal [pytest arguments] calls this.
#
# In the environment of scripts/install_gpu.sh: .venv-gpu, or VCPO_GPU_VENV=FOLDER, which is taken as it is where it has
# all packages. The project's code is this folder's, whatever is installed there. pytest comes into build/, not into it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VCPO_GPU_VENV:-.venv-gpu}
STAMP=$VENV/vcpo-rehearsal.sha256
TOOLS=build/gpu_rehearsal_tools

digest() {
  { pwd -P; cat requirements/gpu.lock setup.py pyproject.toml verl/pyproject.toml scripts/install_gpu.sh scripts/install_steps.sh; } |
    sha256sum | cut -d' ' -f1
}

complete() {
  "$VENV/bin/python" -c '
import importlib.util as find, sys
sys.exit(not all(map(find.find_spec, ("torch", "vllm", "verl", "megatron.core", "megatron.bridge", "ray", "transfer_queue"))))' \
    >/dev/null 2>&1
}

if [[ -n "${VCPO_GPU_VENV:-}" ]] && complete; then
  echo "gpu_rehearsal: VCPO_GPU_VENV=$VENV is taken as it is"
elif [[ -f "$STAMP" && "$(cat "$STAMP")" == "$(digest)" ]] && complete; then
  echo "gpu_rehearsal: $VENV is up to date"
else
  VENV=$VENV bash scripts/install_gpu.sh
  digest >"$STAMP"
fi

if "$VENV/bin/python" -c 'import importlib.util as find, sys; sys.exit(find.find_spec("transformer_engine") is None)'; then
  echo "gpu_rehearsal: $VENV has Transformer Engine, whose kernels nothing stands in for: take an environment of scripts/install_gpu.sh without --te" >&2
  exit 2
fi

source scripts/install_steps.sh
tools=$(entries requirements/cpu.lock pytest iniconfig pluggy hypothesis sortedcontainers)
if [[ "$(cat "$TOOLS/versions" 2>/dev/null)" != "$tools" ]]; then
  rm -rf "$TOOLS"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$TOOLS" -r <(echo "$tools")
  echo "$tools" >"$TOOLS/versions"
fi

# Two devices: what one process cannot show is shown by two.
PYTHONPATH=$PWD/$TOOLS setpriv --pdeathsig TERM "$VENV/bin/python" -m tests.kit.fake_cuda --devices 2 \
  -m pytest -o testpaths=tests/gpu_rehearsal "$@"
