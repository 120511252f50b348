#!/usr/bin/env bash
# A pretrained model on a laptop: SmolLM2-135M-Instruct learns to add and subtract two digits by RL on the real stack, on
# rollouts that are 4 updates old: without a correction and with VCPO. Shows both.
#   bash scripts/real_model.sh [setting=value ...]     for both runs, e.g. trainer.total_training_steps=10
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/smollm2.sh
source .venv/bin/activate
out=outputs/real-model
for method in none vcpo; do
    python -m recipe.fully_async_policy.main +task=sums method="$method" async.lag=4 run_dir="$out/$method" "$@"
done
python -m scripts.report "$out/none" "$out/vcpo" --out "$out"
