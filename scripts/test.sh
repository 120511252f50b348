#!/usr/bin/env bash
# Installs into .venv and runs every check: ruff, mypy, and the tests, those of the whole stack included.
#   bash scripts/test.sh [pytest arguments]     e.g. -m "not e2e"
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh
bash scripts/install_bubblewrap.sh # the sandbox's tests are not skipped
source .venv/bin/activate

ruff check .
ruff format --check .
mypy vcpo
python -m pytest "$@"
