#!/usr/bin/env bash
# Is the GPU environment whole? On a machine that need not have a GPU; `--help` says more. No part of CI: 11 GB.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

usage() {
  cat <<'TEXT'
bash scripts/check_gpu_stack.sh

Installs the extra gpu (scripts/install_gpu.sh) into .venv-gpu, or the folder VENV=..., and then, with its versions:

  imports       every module of vcpo, verl_vcpo and recipe
  upstream      what we rely on in veRL, Megatron, vLLM, Ray (tests/upstream)
  unit tests    those that need no kernel: algorithm, trainer's parts, recipes, packed norms on Megatron's layers
  dry runs      the 12 launch scripts

Prints a line for each; exit code 0: all passed.
TEXT
}

case "${1:-}" in
  "") ;;
  -h | --help) usage && exit 0 ;;
  *) usage >&2 && exit 2 ;;
esac

export VENV=${VENV:-.venv-gpu}
bash scripts/install_gpu.sh || exit 1
source "$VENV/bin/activate"
source scripts/install_steps.sh
tools=$(entries requirements/cpu.lock pytest iniconfig pluggy pytest-xdist execnet hypothesis sortedcontainers websockets)
python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r <(echo "$tools") || exit 1

failed=0 log=$(mktemp "${TMPDIR:-/tmp}/vcpo-check-gpu.XXXXXX")

# check NAME COMMAND...: a line; the end of the output where the command fails.
check() {
  local start=$SECONDS
  if "${@:2}" >"$log" 2>&1; then
    echo "passed: $1 ($((SECONDS - start)) s)"
  else
    tail -n 30 "$log"
    echo "FAILED: $1 ($((SECONDS - start)) s)"
    failed=1
  fi
}

check "imports" python - <<'PYTHON'
import importlib
import pkgutil
import sys

import recipe
import vcpo
import verl_vcpo

only_on_cpus = ("verl_vcpo.cpu.vllm_server", "verl_vcpo.cpu.vllm_worker")  # of vLLM's version for CPUs
names = [
    module.name
    for package in (vcpo, verl_vcpo, recipe)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.startswith(only_on_cpus)
]
for name in names:
    importlib.import_module(name)
print(len(names), "modules", file=sys.stderr)
PYTHON
check "upstream" python -m pytest -q -p no:cacheprovider tests/upstream
check "unit tests" python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile -m "not e2e" \
  tests/vcpo tests/loop tests/dataset tests/recipe tests/common tests/actor/test_packed.py tests/actor/test_local_layers.py
for script in recipe/fully_async_policy/shell/vcpo/*/*.sh; do
  check "dry run of $script" env DRY_RUN=1 bash "$script"
done
rm -f "$log"
exit "$failed"
