#!/usr/bin/env bash
# Installs into .venv, then runs the checks of a tier; `--help` says which. Exit code 0: all passed.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
bash scripts/test.sh [--quick | --nightly | --gpu-rehearsal] [pytest arguments]

  --quick     ruff, mypy, the import contracts, and the tests that take seconds
  (default)   and all other tests: parallel layouts, attacks on the sandbox, the whole stack. What CI runs
  --nightly   and all repetitions: 100,000 schedules, every fault, an hour of chaos, every layout with every method,
              every attack in every mode of the sandbox; and the rehearsal
  --gpu-rehearsal   instead: the classes that GPUs run, on torch's CUDA build, without a GPU (tests/kit/fake_cuda). It
              installs the GPU's packages (11 GB) into .venv-gpu; VCPO_GPU_VENV=FOLDER has an environment that has them

What follows goes to pytest, for example -m "not e2e", -k resume or tests/vcpo. Tests run in several processes (-n 0:
in one, as --pdb needs it), those of the whole stack and the attacks on the sandbox after the others. CONTRIBUTING.md
says how long that takes.
TEXT
}

tier=default
case "${1:-}" in
  --quick | --nightly) tier=${1#--} && shift ;;
  --gpu-rehearsal) shift && exec bash scripts/gpu_rehearsal.sh "$@" ;;
  -h | --help) usage && exit 0 ;;
esac

times=$(mktemp -d)
begun=$SECONDS parts=()

# took NAME: what has been done since the last call is a part of this name.
took() {
  parts+=("$1=$((SECONDS - begun))")
  begun=$SECONDS
}

# The time of each part, and the longest tests; however the script ends.
summary() {
  python3 tests/kit/times.py "$times" "${parts[@]}" || true # the exit code is that of the tests
  rm -rf "$times"
}
trap summary EXIT

bash scripts/install.sh
bash scripts/install_bubblewrap.sh # the sandbox's tests are not skipped
bash scripts/install_chromium.sh # nor are those that open a page in a browser
bash scripts/install_docs.sh # nor are those of the documentation's site
source .venv/bin/activate
pip install --quiet --no-deps --no-build-isolation --require-hashes -r requirements/tasks.txt # nor those of reasoning-gym
took installation

NO_TESTS=5 # pytest's exit code where a selection is empty
worst=$NO_TESTS

# part NAME [pytest options]: the tests of that part. Interrupted, or called wrongly: ends everything.
part() {
  local code=0
  # With this script, however it ends, pytest gets SIGTERM; what a pytest has started ends with it (tests/kit/session.py).
  setpriv --pdeathsig TERM python -m pytest --tier "$tier" --junitxml "$times/$1.xml" --part "$@" || code=$?
  took "tests: $1"
  ((code == 0 || code == 1 || code == NO_TESTS)) || exit "$code"
  if ((code == 1 || (code == 0 && worst == NO_TESTS))); then worst=$code; fi
}

ruff check .
ruff format --check .
git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck --exclude SC1091 # environments are made later
git ls-files -z | xargs -0 codespell
mypy
lint-imports --no-logo
took checks
part together --numprocesses logical --maxprocesses 4 --dist loadfile "$@"
if [[ $tier != quick ]]; then
  part stack --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@" # a start of the stack keeps one core and a half busy
fi
if [[ $tier == nightly ]]; then
  failed=()
  for repetition in "tests.reliability.schedules --n 100000" tests.exactness.layouts \
    "tests.exactness.layouts --layers te" sandbox.attacks tests.reliability.faults tests.reliability.chaos; do
    # shellcheck disable=SC2086 # a name and its arguments
    setpriv --pdeathsig TERM python -m tests.kit.session python -m $repetition || failed+=("$repetition")
  done
  setpriv --pdeathsig TERM bash scripts/gpu_rehearsal.sh || failed+=("gpu_rehearsal")
  [[ ${#failed[@]} == 0 ]] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
fi
((worst == 0)) || exit "$worst"
