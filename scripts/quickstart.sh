#!/usr/bin/env bash
# From a clean clone to a trained model: installs, makes the data and a small model, trains it with RL at lag 8
# stabilized by VCPO, and shows the result. No GPU, no download of models or data.
#   bash scripts/quickstart.sh [setting=value ...]     e.g. async.lag=32 trainer.total_training_steps=50
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh
source .venv/bin/activate

data=data/countdown model=models/countdown-tiny run=outputs/quickstart
if [ ! -f "$data/meta.json" ]; then
    python -m scripts.prepare_data countdown --out "$data"
fi
python -m recipe.warm_start.train --data "$data" --out "$model"
python -m recipe.fully_async_policy.main +task=countdown run_dir="$run" async.lag=8 "$@"
python -m scripts.report "$run"
