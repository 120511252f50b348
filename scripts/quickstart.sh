#!/usr/bin/env bash
# From a clean clone to what VCPO is for: installs, makes the data and a small model, trains it twice with RL on rollouts
# that are 16 updates old, without a correction and with VCPO, and shows both. No GPU, no download of models or data.
#   bash scripts/quickstart.sh [setting=value ...]     for both runs, e.g. async.lag=32 trainer.total_training_steps=50
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh
source .venv/bin/activate

data=data/countdown model=models/countdown-tiny out=outputs/quickstart
if [ ! -f "$data/meta.json" ]; then
    python -m scripts.prepare_data countdown --out "$data"
fi
# A policy that reads its problem: one that guesses learns to add all numbers (lab/stability/preset.py).
python -m recipe.warm_start.train --data "$data" --out "$model" \
    --layers 2 --heads 2 --steps 900 --correct-fraction 0.4 --samples 4
for method in none vcpo_capped; do
    python -m recipe.fully_async_policy.main +task=countdown_lag method="$method" async.lag=16 data.train_batch_size=16 \
        actor_rollout_ref.actor.optim.lr=2e-4 actor_rollout_ref.model.path="$model" trainer.total_training_steps=80 \
        run_dir="$out/$method" "$@"
done
python -m scripts.report "$out/none" "$out/vcpo_capped" --out "$out"
