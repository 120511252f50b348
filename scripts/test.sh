#!/usr/bin/env bash
# Installs into .venv and runs every check: ruff, mypy, the import contract (pyproject.toml), and the tests, those of
# the whole stack included.
#   bash scripts/test.sh [pytest arguments]     e.g. -m "not e2e"
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh
bash scripts/install_bubblewrap.sh # the sandbox's tests are not skipped
source .venv/bin/activate

ruff check .
ruff format --check .
mypy
lint-imports --no-logo
python -m pytest "$@"
